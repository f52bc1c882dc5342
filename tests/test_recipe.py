"""Whole runs as users start them: real ranks under torchrun, a real engine, real processes."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from whole_runs import (
    CONFIG,
    LORA_CONFIG,
    LORA_RECIPE,
    ROOT,
    finish,
    launch,
    metrics,
    on_ranks,
    succeed,
    tune_run,
)

pytestmark = [pytest.mark.engine, pytest.mark.recipe]

# A short run; three steps are enough for a batch to be as stale as it may be.
SHORT = [
    "total_steps=3",
    "groups_per_step=8",
    "minibatches_per_step=2",
    "evaluate_every=2",
    "eval_problems=60",
    "dump_samples=true",
]


@pytest.fixture(scope="module")
def ppo_run(tmp_path_factory) -> tuple[Path, str]:
    """``tune run`` from the root, asynchronously, with decoupled PPO."""
    output_dir = tmp_path_factory.mktemp("ppo")
    return output_dir, succeed(tune_run(output_dir, *SHORT))


@pytest.mark.inv1
def test_tune_run_from_the_root(ppo_run):
    output_dir, output = ppo_run
    steps = metrics(output_dir)
    assert sorted(steps) == [0, 1, 2, 3]
    for step in (1, 2, 3):
        assert steps[step]["lag_token_max"] <= min(step - 1, 2)
        assert steps[step]["groups_consumed"] == 8 * step
    # The first minibatch of a run is on-policy: trainer and engine agree on log-probabilities.
    assert steps[1]["behavior_weight"] == pytest.approx(1, abs=1e-4)
    assert 0 < steps[1]["mismatch_lag_0"] < 1e-4
    accuracy = re.findall(r"held-out accuracy: (\d\.\d\d) -> (\d\.\d\d)", output)
    assert [float(value) for value in accuracy[0]] == pytest.approx(
        [steps[0]["held_out_accuracy"], steps[3]["held_out_accuracy"]], abs=0.005
    )
    assert "EngineCore" not in output and "EngineCore" in (output_dir / "collector.log").read_text()


@pytest.mark.inv2
def test_every_finished_sample_is_dumped(ppo_run):
    samples = [json.loads(line) for line in (ppo_run[0] / "samples.jsonl").read_text().splitlines()]
    assert sorted((s["group"], s["index"]) for s in samples) == [
        (group, index) for group in range(24) for index in range(8)
    ]
    for sample in samples:
        assert len(sample["versions"]) == len(sample["log_probs"]) >= 1
        assert sample["start_version"] <= min(sample["versions"])
        assert sample["versions"] == sorted(sample["versions"])


def test_the_checkpoint_scores_the_same_in_a_fresh_engine(ppo_run, tmp_path):
    output_dir, _ = ppo_run
    checkpoint = output_dir / "checkpoints" / "step_00003"
    output = succeed(
        launch(
            *("tune-async", "run", "evaluate", "--config", ROOT / CONFIG, "eval_problems=60"),
            *(f"model_dir={checkpoint}", f"output_dir={tmp_path}"),
            cwd=tmp_path,
        )
    )
    expected = metrics(output_dir)[3]["held_out_accuracy"]
    assert f"held-out accuracy {expected:.3f}" in output


def test_the_checkpoint_is_an_ordinary_hugging_face_folder_that_has_learnt(ppo_run):
    checkpoint = ppo_run[0] / "checkpoints" / "step_00003"
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    start = load_file(ROOT / "assets" / "written-sums-qwen2" / "model.safetensors")
    moved = [not torch.equal(value, start[name]) for name, value in model.state_dict().items()]
    assert all(moved)


def test_lora_trains_and_the_engine_serves_the_merged_weights(tmp_path):
    output = succeed(
        tune_run(
            tmp_path / "out",
            *SHORT,
            *("max_staleness=0", "loss.kl_to_ref_coeff=0.01", "evaluate_every=3"),
            recipe=LORA_RECIPE,
            config=LORA_CONFIG,
        )
    )
    assert "held-out accuracy: 0." in output
    steps = metrics(tmp_path / "out")
    # At staleness 0 the engine samples with the weights the step starts from, adapters merged.
    assert all(0 < steps[step]["mismatch_lag_0"] < 1e-4 for step in (1, 2, 3))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "checkpoints" / "step_00003")
    start = load_file(ROOT / "assets" / "written-sums-qwen2" / "model.safetensors")
    moved = {
        name for name, value in model.state_dict().items() if not torch.equal(value, start[name])
    }
    assert moved == {name for name in start if "proj.weight" in name}


@pytest.mark.parametrize(
    ("recipe", "config", "overrides", "error"),
    [
        (LORA_RECIPE, CONFIG, (), "without a lora_rank"),
        (LORA_RECIPE, LORA_CONFIG, ("model.lora_dropout=0.1",), "it must be 0.0"),
        ("recipes/async_rl_full_finetune_distributed.py", LORA_CONFIG, (), "has LoRA adapters"),
    ],
)
def test_a_model_of_the_other_recipe_is_refused(tmp_path, recipe, config, overrides, error):
    process = tune_run(tmp_path / "out", *overrides, ranks=1, recipe=recipe, config=config)
    assert error in finish(process) and process.returncode != 0
    assert not (tmp_path / "out").exists()


def test_a_config_error_is_printed_once_and_nothing_starts(tmp_path):
    process = tune_run(tmp_path / "out", "group_size=1")
    output = finish(process)
    assert process.returncode != 0
    assert (
        output.count("config error: advantage: group_size=1") == output.count("config error") == 1
    )
    assert not (tmp_path / "out").exists()


POISONED_LOSS = """
import math, torch.distributed
from torchrl_llm_async.objectives import DecoupledPPOLoss

class PoisonedLoss(DecoupledPPOLoss):
    '''NaN on one of the ranks, in step 2 of the run.'''

    def forward(self, micro, *, normalizer):
        output = super().forward(micro, normalizer=normalizer)
        if torch.distributed.get_rank() == 1 and (micro["policy_version", "target"] == 2).all():
            output.loss_objective = output.loss_objective * math.nan
        return output
"""


@pytest.mark.inv7
def test_a_gradient_that_is_not_finite_is_skipped_on_all_ranks(tmp_path):
    (tmp_path / "poisoned.py").write_text(POISONED_LOSS)
    process = launch(
        *("tune-async", "run", *on_ranks(2), "async_rl_full_finetune_distributed"),
        *("--config", "arithmetic_ppo", "output_dir=out", *SHORT, "max_staleness=0"),
        *("loss._component_=poisoned.PoisonedLoss", "evaluate_every=3", "minibatches_per_step=2"),
        cwd=tmp_path,
    )
    assert succeed(process).count("the update is skipped") == 4  # two updates, two ranks
    steps = metrics(tmp_path / "out")
    assert [steps[step]["updates_skipped"] for step in (1, 2, 3)] == [0, 2, 0]
    assert "gradient_norm" not in steps[2] and steps[3]["gradient_norm"] > 0
    # The weights of step 2 are those of step 1: nothing that step 3 is trained on is off-policy.
    assert steps[3]["mismatch_lag_0"] < 1e-4
    weights = load_file(tmp_path / "out" / "checkpoints" / "step_00003" / "model.safetensors")
    assert all(weight.isfinite().all() for weight in weights.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["CriticPPOLoss", "ProximalRLOOLoss", "BestOfNLoss", "TrajectoryBalanceLoss"]
)
def test_every_loss_is_one_line(tmp_path, name):
    """Packed; online DPO, the sixth, is what tests/test_resume.py trains with, padded."""
    loss = [f"loss._component_=torchrl_llm_async.objectives.{name}", "micro_batches=packed"]
    if name == "CriticPPOLoss":  # It compares no answers.
        loss += ["advantage=null", "group_size=1"]
    succeed(tune_run(tmp_path, *SHORT[:-1], "total_steps=4", *loss))
    steps = metrics(tmp_path)
    assert all(steps[step]["padding"] < 0.3 for step in range(1, 5))  # Rows that no other fills.
    losses = [key for key in steps[1] if key.startswith("loss_")]
    assert losses and all(math.isfinite(steps[step][key]) for step in range(1, 5) for key in losses)
    assert all(steps[step]["gradient_norm"] > 0 for step in range(1, 5))
    published = load_file(tmp_path / "checkpoints" / "step_00004" / "model.safetensors")
    start = load_file(ROOT / "assets" / "written-sums-qwen2" / "model.safetensors")
    assert published.keys() == start.keys()
    assert all(not torch.equal(published[key], start[key]) for key in start)
