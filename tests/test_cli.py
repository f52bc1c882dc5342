"""``tune-async`` is torchtune's ``tune`` that knows this package's recipes, from any folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from torchtune._recipe_registry import _ALL_RECIPES

from torchrl_llm_async.cli import register

ROOT = Path(__file__).resolve().parents[1]
TUNE_ASYNC = Path(sys.executable).with_name("tune-async")


def tune_async(*args: str, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [TUNE_ASYNC, *args], cwd=cwd, capture_output=True, text=True, timeout=120, check=True
    )


def test_ls_names_recipe_and_configs(tmp_path):
    listing = tune_async("ls", cwd=tmp_path).stdout
    assert "async_rl_full_finetune_distributed" in listing
    assert "arithmetic_ppo" in listing
    assert "lora_finetune_distributed" in listing  # torchtune's own are still there
    recipe = listing.index("full_finetune_single_device")
    assert recipe < listing.index("warmup_sft") < listing.index("full_finetune_distributed", recipe)


def test_cp_and_validate_a_config(tmp_path):
    tune_async("cp", "arithmetic_ppo", "mine.yaml", cwd=tmp_path)
    assert "well-formed" in tune_async("validate", "mine.yaml", cwd=tmp_path).stdout


def test_cp_gives_the_whole_recipe(tmp_path):
    tune_async("cp", "async_rl_full_finetune_distributed", "mine.py", cwd=tmp_path)
    assert "def train(self)" in (tmp_path / "mine.py").read_text()


def test_registering_twice_changes_nothing():
    register()
    before = [(recipe.name, len(recipe.configs)) for recipe in _ALL_RECIPES]
    register()
    assert [(recipe.name, len(recipe.configs)) for recipe in _ALL_RECIPES] == before


def test_the_recipes_folder_is_not_importable(tmp_path):
    """torchrun runs the recipe by its path; its neighbours must not become top-level modules."""
    (tmp_path / "users_own.py").write_text(
        "import sys\n"
        "from torchrl_llm_async.envs import WrittenSumsEnv as Sums\n"
        "if any(path.endswith('torchrl_llm_async/recipes') for path in sys.path):\n"
        "    raise ImportError('a top-level module `report` is not the user\\'s')\n"
    )
    run = subprocess.run(
        [
            *(TUNE_ASYNC, "run", "--nproc_per_node", "1", "async_rl_full_finetune_distributed"),
            *("--config", "arithmetic_ppo", "env._component_=users_own.Sums", "eval_problems=0"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    # The components are checked first, so the environment was found.
    assert "config error: eval_problems is 0" in run.stderr


def test_the_wheel_brings_configs_and_assets_but_no_top_level_recipes(tmp_path):
    source = tmp_path / "source"  # A build leaves folders behind.
    ignored = shutil.ignore_patterns(".*", "runs", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignored)
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--quiet"),
            *("--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, source),
        ],
        check=True,
        timeout=120,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {
        "torchrl_llm_async"
    }
    assert "torchrl_llm_async/recipes/configs/arithmetic_ppo.yaml" in names
    assert any(name.endswith("model.safetensors") for name in names)


@pytest.mark.parametrize("module", ["staleness", "data", "objectives"])
def test_the_core_imports_without_vllm_torchtune_and_ray(module):
    code = (
        "import sys\n"
        "for name in ('vllm', 'torchtune', 'ray'): sys.modules[name] = None\n"
        f"import torchrl_llm_async.{module}\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
