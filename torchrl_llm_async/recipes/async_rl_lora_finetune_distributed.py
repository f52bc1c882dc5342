"""Asynchronous RL of a language model: LoRA finetuning, FSDP2.

Launch (two ranks, no GPU needed)::

    tune run --nproc_per_node 2 recipes/async_rl_lora_finetune_distributed.py \\
        --config recipes/configs/arithmetic_lora_ppo.yaml

The run is that of :mod:`.async_rl_full_finetune_distributed`, from set-up to closing table; read it
there. What LoRA (arXiv 2106.09685) changes stands here and in
:mod:`torchrl_llm_async.modules.adapters`: adapters alone are trained, checkpointed for resuming and
held in float32; engines are sent, and the models that are kept hold, the merged weights; and a
loss's reference is the policy with its adapters off, which takes no memory.
"""

from __future__ import annotations

import sys

import torch
from omegaconf import DictConfig
from tensordict.nn import TensorDictModuleBase
from torchtune import config

from torchrl_llm_async.modules.adapters import WithoutAdapters
from torchrl_llm_async.recipes.async_rl_full_finetune_distributed import AsyncRLFullFinetuneRecipe
from torchrl_llm_async.recipes.config import ConfigError
from torchrl_llm_async.recipes.running import run

# What torchtune's builders offer and this recipe does not: the only values it takes.
_REQUIRED = {"lora_dropout": 0.0, "use_dora": False, "quantize_base": False}
_WHY = {
    "lora_dropout": "dropout would make the trained policy another than the one that sampled",
    "use_dora": "DoRA's magnitudes are not published",
    "quantize_base": "quantised weights can't be merged for the engine",
}


class AsyncRLLoRAFinetuneRecipe(AsyncRLFullFinetuneRecipe):
    """Trains adapters of a policy on groups that a collector samples meanwhile."""

    @classmethod
    def check(cls, cfg: DictConfig) -> None:
        """Raises ConfigError unless the model has adapters that can be trained and published."""
        model = cfg.model
        if "lora_rank" not in model:
            raise ConfigError(
                f"model._component_ is {model['_component_']!r} without a lora_rank; give a model "
                "with adapters, e.g. torchtune.models.qwen2.lora_qwen2, or use the recipe "
                "async_rl_full_finetune_distributed"
            )
        for argument, right in _REQUIRED.items():
            if model.get(argument, right) != right:
                raise ConfigError(
                    f"model.{argument} is {model[argument]}; it must be {right}: {_WHY[argument]}"
                )

    def _setup_reference(self, weights: dict[str, torch.Tensor]) -> TensorDictModuleBase:
        return WithoutAdapters(self._loss.actor_network)


@config.parse
def recipe_main(cfg: DictConfig) -> int:
    """Entry point: checks the config, then builds, trains and cleans up."""
    return run(AsyncRLLoRAFinetuneRecipe, cfg)


if __name__ == "__main__":
    sys.exit(recipe_main())
