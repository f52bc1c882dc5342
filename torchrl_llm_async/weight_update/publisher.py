"""Gathers the weights of a torchtune decoder, sharded or not, and publishes them.

Owns the collective: all ranks take part, rank 0 alone ever holds the whole model, and no rank
holds more than one FSDP unit of it unsharded. Where publications lie and how long is
:mod:`torchrl_llm_async.weight_update.store`'s affair.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torchtune.models.convert_weights import get_mapped_key
from torchtune.modules.peft import LoRALinear

from torchrl_llm_async.modules.adapters import merged_weight
from torchrl_llm_async.weight_update.store import WeightStore

__all__ = ["WeightPublisher", "is_writing_rank"]

# Names that wrappers insert into parameter paths.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
# A critic's head (torchrl_llm_async.modules.add_value_head): the trainer's alone.
_NOT_PUBLISHED = "value_head."


def is_writing_rank() -> bool:
    """Whether this process writes publications: rank 0, or the only process."""
    return not dist.is_initialized() or dist.get_rank() == 0


class WeightPublisher:
    """Publishes a torchtune decoder under Hugging Face names, one FSDP unit at a time.

    Parameters are published in the dtype the forward pass computes with (``param_dtype`` of the
    mixed-precision policy, else their own), so that the engine samples from the very policy that
    is being trained. Tied embeddings are published once, without ``lm_head.weight``; a
    critic's ``value_head`` is left out, and LoRA adapters are merged into the weights they adapt.

    Args:
        model: a torchtune ``TransformerDecoder``, plain or under FSDP2 ``fully_shard``.
        store: where rank 0 writes; None will do on other ranks.
        hf_key_map: Hugging Face name -> torchtune name with ``{}`` for the layer, as torchtune's
            own converters have it, e.g. ``torchtune.models.qwen2._convert_weights._FROM_HF``.
            Only renaming families: Llama's converter permutes q and k besides.

    Examples:
        >>> def after_step(model, store, step):  # on every rank  # doctest: +SKIP
        ...     return WeightPublisher(model, store, _FROM_HF).publish(step + 1)
    """

    def __init__(
        self,
        model: torch.nn.Module,
        store: WeightStore | None,
        hf_key_map: Mapping[str, str | None],
    ) -> None:
        self._model = model
        self._store = store
        self._to_hf = {ours: theirs for theirs, ours in hf_key_map.items() if ours is not None}

    def publish(self, version: int) -> Path | None:
        """Publishes the present weights; a collective, to be called on every rank.

        The collective is over on all ranks before rank 0 writes: a full disk raises there and
        leaves nobody waiting inside an all-gather.

        Args:
            version: number of training steps behind these weights.

        Returns:
            The published file on rank 0, None elsewhere.

        Raises:
            OSError: on rank 0, if the store can't be written.
        """
        writes = is_writing_rank()
        weights = {}
        with torch.no_grad():
            for name, parameter in self._stream():
                if writes:
                    weights[name] = torch.empty_like(parameter, device="cpu").copy_(parameter)
        return self._store.write(version, weights.items()) if writes else None

    def _stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields every parameter whole; each is valid until the next is asked for."""
        units = [
            (prefix, module)
            for prefix, module in self._model.named_modules()
            if isinstance(module, FSDPModule)
        ]
        for prefix, unit in units or [("", self._model)]:
            sharded = isinstance(unit, FSDPModule)
            if sharded:
                # A unit left unsharded by a forward pass without gradient is from before the
                # last optimizer step; gathering it again needs it sharded first.
                unit.reshard()
                unit.unshard()
            try:
                for name, parameter in _own_parameters(unit, prefix):
                    for wrapper in _WRAPPERS:
                        name = name.replace(wrapper, "")
                    if name.startswith(_NOT_PUBLISHED):
                        continue
                    yield get_mapped_key(name, self._to_hf), parameter.detach()
            finally:
                if sharded:
                    unit.reshard()


def _own_parameters(
    module: torch.nn.Module, prefix: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of a module, without those of FSDP units nested in it, adapters merged."""
    path = f"{prefix}." if prefix else ""
    if isinstance(module, LoRALinear):
        yield path + "weight", merged_weight(module)
        if module.bias is not None:
            yield path + "bias", module.bias
        return
    for name, parameter in module.named_parameters(recurse=False):
        yield path + name, parameter
    for name, child in module.named_children():
        if not isinstance(child, FSDPModule):
            yield from _own_parameters(child, path + name)
