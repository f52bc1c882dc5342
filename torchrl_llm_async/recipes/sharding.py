"""A decoder as recipes train it: built on no device, sharded over all ranks, then filled.

Owns the order of things: layers that are compiled, recompute their activations and are FSDP2 units
of their own, then weights. Which component the model is, and where its weights come from, is the
recipe's affair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchtune import training
from torchtune.modules import TransformerSelfAttentionLayer

from torchrl_llm_async.modules import add_value_head
from torchrl_llm_async.modules.adapters import initial_adapters, train_adapters_only


def build_sharded_model(
    make: Callable[[], nn.Module],
    weights: Mapping[str, torch.Tensor],
    *,
    device: torch.device,
    dtype: torch.dtype,
    value_head: bool = False,
    compile_layers: bool = False,
    activation_checkpointing: bool = False,
    seed: int = 0,
) -> nn.Module:
    """Builds a torchtune decoder sharded over all ranks; a collective.

    Args:
        make: makes the ``TransformerDecoder``; called where nothing is allocated.
        weights: all of its weights under torchtune's names, the same on every rank, but for those
            of LoRA adapters, which begin anew: they alone are trained then.
        device: of the rank's shards.
        dtype: forward and backward compute in it; weights that are trained, and the reduction of
            gradients, are in float32. Frozen ones are kept in ``dtype``.
        value_head: adds a critic's head, which begins at zero: no checkpoint has one.
        compile_layers: compiles each layer (``torch.compile``; ``TORCH_COMPILE_BACKEND`` names
            another backend than inductor).
        activation_checkpointing: keeps a layer's input only, and computes the rest of its
            activations again in the backward pass.
        seed: of the adapters' first weights.

    Returns:
        nn.Module: the decoder.

    Raises:
        RuntimeError: ``weights`` are not exactly those of the decoder.
    """
    with training.set_default_dtype(torch.float32), torch.device("meta"):
        model = make()
    if value_head:
        head = add_value_head(model).value_head.state_dict(prefix="value_head.")
        weights = dict(weights) | {
            name: torch.zeros_like(parameter, device="cpu") for name, parameter in head.items()
        }
    if train_adapters_only(model):
        weights = {**weights, **initial_adapters(model, seed)}
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if not parameter.requires_grad:
                    setattr(module, name, nn.Parameter(parameter.to(dtype), requires_grad=False))
    if compile_layers:
        training.compile_model(model, verbose=False)
    if activation_checkpointing:
        training.set_activation_checkpointing(model, {TransformerSelfAttentionLayer})
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    with training.set_default_dtype(torch.float32), device:
        for module in model.modules():
            if hasattr(module, "rope_init"):  # RoPE is not in the state dict.
                module.rope_init()
    training.load_from_full_model_state_dict(model, dict(weights), device, strict=True)
    training.validate_no_params_on_meta_device(model)
    return model
