"""Staleness 0 is the synchronous run, to the bit: a run of the recipe against a plain loop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from whole_runs import CONFIG, ROOT, launch, metrics, succeed, tune_run

pytestmark = [pytest.mark.engine, pytest.mark.recipe]

STEPS = 20
SIZES = [f"total_steps={STEPS}", "groups_per_step=8", "minibatches_per_step=2"]


@pytest.mark.inv6
def test_losses_and_weights_equal_those_of_a_plain_loop(tmp_path: Path) -> None:
    plain, synchronous = tmp_path / "plain", tmp_path / "synchronous"
    model = ROOT / "torchrl_llm_async" / "assets" / "written-sums-qwen2"
    succeed(
        launch(
            *("python", "tests/plain_loop.py", "--config", CONFIG, "--out", plain),
            *(f"model_dir={model}", *SIZES),
        )
    )
    # One rank: with two, sums of gradients are in another order.
    succeed(
        tune_run(
            synchronous,
            *("max_staleness=0", f"evaluate_every={STEPS}", "eval_problems=2", *SIZES),
            ranks=1,
        )
    )
    losses = json.loads((plain / "losses.json").read_text())
    steps = metrics(synchronous)
    assert [steps[step]["loss_objective"] for step in range(1, STEPS + 1)] == losses
    assert len(set(losses)) == STEPS
    weights = load_file(synchronous / "checkpoints" / f"step_{STEPS:05d}" / "model.safetensors")
    expected = load_file(plain / "weights.safetensors")
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name
