"""LoRA adapters of a torchtune decoder: their first weights, the merged ones, the policy without.

Owns what :class:`torchtune.modules.peft.LoRALinear` leaves to a recipe: which parameters are
trained, adapters that begin the same on any number of ranks, and the policy before finetuning as a
reference that takes no memory. Shards and publishes nothing.
"""

from __future__ import annotations

import math

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchtune.modules.peft import LoRALinear, disable_adapter

from torchrl_llm_async.modules.scores import EntropyMode, TokenScores
from torchrl_llm_async.modules.torchtune_actor import TorchtuneActor


def train_adapters_only(model: nn.Module) -> bool:
    """Freezes a decoder but for its adapters and a critic's ``value_head``.

    Args:
        model (nn.Module): a torchtune decoder; one without adapters is left as it is.

    Returns:
        bool: whether it has adapters.

    Examples:
        >>> layer = LoRALinear(4, 4, rank=2, alpha=4)
        >>> train_adapters_only(layer)
        True
        >>> [name for name, parameter in layer.named_parameters() if parameter.requires_grad]
        ['lora_a.weight', 'lora_b.weight']
    """
    adapters = [module for module in model.modules() if isinstance(module, LoRALinear)]
    if not adapters:
        return False
    model.requires_grad_(False)
    for module in adapters:
        module.lora_a.requires_grad_(True)
        module.lora_b.requires_grad_(True)
    if hasattr(model, "value_head"):
        model.value_head.requires_grad_(True)
    return True


def initial_adapters(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Weights that adapters begin with: A random, B zero, so that the policy is the base's.

    Args:
        model (nn.Module): a torchtune decoder, of which shapes alone are read; it may be on the
            meta device.
        seed (int): the same seed gives the same weights, whatever the number of ranks.

    Returns:
        dict[str, Tensor]: by torchtune's names, float32 on the CPU. A is drawn as in Hu et al.
        (arXiv 2106.09685) and its authors' code, uniform in ``+-1 / sqrt(in_dim)``.

    Examples:
        >>> weights = initial_adapters(LoRALinear(4, 4, rank=2, alpha=4), seed=0)
        >>> weights["lora_a.weight"].abs().max() <= 0.5, weights["lora_b.weight"].any()
        (tensor(True), tensor(False))
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            prefix = f"{name}." if name else ""
            a = torch.empty(module.lora_a.weight.shape)
            nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
            weights[f"{prefix}lora_a.weight"] = a
            weights[f"{prefix}lora_b.weight"] = torch.zeros(module.lora_b.weight.shape)
    return weights


def merged_weight(layer: LoRALinear) -> Tensor:
    """``W + alpha / rank * B A`` (arXiv 2106.09685, equation 3), summed in float32.

    Args:
        layer (LoRALinear): whole, not sharded.

    Returns:
        Tensor: (out_dim, in_dim) in the dtype of W, a new tensor.

    Examples:
        >>> layer = LoRALinear(3, 2, rank=1, alpha=2)
        >>> _ = nn.init.ones_(layer.lora_b.weight)
        >>> x = torch.ones(3)
        >>> torch.allclose(merged_weight(layer) @ x, layer(x))
        True
    """
    low_rank = layer.lora_b.weight.float() @ layer.lora_a.weight.float()
    merged = layer.weight.float() + layer.alpha / layer.rank * low_rank
    return merged.to(layer.weight.dtype)


class WithoutAdapters(TensorDictModuleBase):
    """A policy as it was before LoRA finetuning, to be the reference of a loss.

    It scores with the policy's own decoder, adapters switched off meanwhile, so it takes no memory
    of its own and needs no weights; its parameters are the policy's, and it claims none.

    Args:
        actor (TorchtuneActor): the policy, whose decoder has adapters.

    Examples:
        >>> from torchtune.models.qwen2 import lora_qwen2
        >>> actor = TorchtuneActor(
        ...     lora_qwen2(["q_proj"], vocab_size=11, num_layers=1, num_heads=2, num_kv_heads=1,
        ...                embed_dim=8, intermediate_dim=16, max_seq_len=16, lora_rank=2,
        ...                lora_alpha=4)
        ... )
        >>> list(WithoutAdapters(actor).parameters())
        []
    """

    def __init__(self, actor: TorchtuneActor) -> None:
        super().__init__()
        object.__setattr__(self, "_actor", actor)  # no submodule
        self.in_keys = actor.in_keys
        self.out_keys = actor.out_keys
        self.segment_ids_key = actor.segment_ids_key

    def score(
        self,
        rows: TensorDictBase,
        *,
        mask: Tensor | None = None,
        entropy: EntropyMode = "off",
        values: bool = False,
    ) -> TokenScores:
        """What the policy's :meth:`.TorchtuneActor.score` gives without its adapters."""
        with disable_adapter(self._actor.model):
            return self._actor.score(rows, mask=mask, entropy=entropy, values=values)
