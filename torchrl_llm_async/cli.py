"""``tune-async``: torchtune's ``tune`` that knows this package's recipes and configs by name.

Owns its entries in torchtune's registry; every verb (``ls``, ``cp``, ``run``, ``validate``, ...) is
torchtune's own. torchtune 0.6.1 joins a registered path to its own folder, and joining an absolute
path yields that path, which is why registering works from any folder.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from torchtune._cli import tune
from torchtune._recipe_registry import _ALL_RECIPES, Config, Recipe

_RECIPES_DIR = Path(__file__).resolve().parent / "recipes"
# Recipe name: whether torchrun starts it.
_RECIPES = {
    "async_rl_full_finetune_distributed": True,
    "async_rl_lora_finetune_distributed": True,
    "evaluate": False,
}
_WARMUP = Config(name="warmup_sft", file_path=str(_RECIPES_DIR / "configs" / "warmup_sft.yaml"))


def register() -> None:
    """Adds this package's recipes and configs to torchtune's registry, once."""
    known = {recipe.name for recipe in _ALL_RECIPES}
    configs = [
        Config(name=path.stem, file_path=str(path))
        for path in sorted((_RECIPES_DIR / "configs").glob("arithmetic_*.yaml"))
    ]
    for name, distributed in _RECIPES.items():
        if name not in known:
            path = str(_RECIPES_DIR / f"{name}.py")
            _ALL_RECIPES.append(Recipe(name, path, configs, supports_distributed=distributed))
    for recipe in _ALL_RECIPES:
        # The demo's model was warmed up with torchtune's own recipe.
        if recipe.name == "full_finetune_single_device" and _WARMUP not in recipe.configs:
            recipe.configs.append(_WARMUP)


def main() -> None:
    """The console script ``tune-async``."""
    register()
    if _RECIPES.keys() & set(sys.argv):
        # torchrun starts a registered recipe by its path, and Python then looks for modules in the
        # recipe's folder first: our config.py and report.py would be top-level `config`, `report`.
        os.environ["PYTHONSAFEPATH"] = "1"
    tune.main()
