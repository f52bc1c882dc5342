"""``tune-async``: torchtune's ``tune`` that knows this package's recipes and configs by name.

Owns two entries in torchtune's registry; every verb (``ls``, ``cp``, ``run``, ``validate``, ...) is
torchtune's own. torchtune 0.6.1 joins a registered path to its own folder, and joining an absolute
path yields that path, which is why registering works from any folder.
"""

from __future__ import annotations

from pathlib import Path

from torchtune._cli import tune
from torchtune._recipe_registry import _ALL_RECIPES, Config, Recipe

_RECIPES_DIR = Path(__file__).resolve().parent / "recipes"
_DISTRIBUTED = "async_rl_full_finetune_distributed"


def register() -> None:
    """Adds this package's recipes and configs to torchtune's registry, once."""
    if any(recipe.name == _DISTRIBUTED for recipe in _ALL_RECIPES):
        return
    _ALL_RECIPES.append(
        Recipe(
            name=_DISTRIBUTED,
            file_path=str(_RECIPES_DIR / f"{_DISTRIBUTED}.py"),
            configs=[
                Config(name=path.stem, file_path=str(path))
                for path in sorted((_RECIPES_DIR / "configs").glob("arithmetic_*.yaml"))
            ],
            supports_distributed=True,
        )
    )


def main() -> None:
    """The console script ``tune-async``."""
    register()
    tune.main()
