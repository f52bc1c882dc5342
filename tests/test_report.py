"""What the closing table says is computed right, and the right checkpoints are kept."""

from __future__ import annotations

import json
import math

import pytest

from torchrl_llm_async.collectors import Evaluation
from torchrl_llm_async.recipes.report import CheckpointKeeper, PairedGain, Report


def evaluation(version: int, right: int, of: int = 10) -> Evaluation:
    rewards = [1.0] * right + [0.0] * (of - right)
    return Evaluation(version, rewards, answer_tokens=5.0, truncated=0.0, seconds=1.0)


def test_paired_gain_is_the_normal_interval_of_paired_differences():
    gain = PairedGain.of([0, 0, 1, 1, 0], [1, 1, 1, 0, 0])  # differences 1, 1, 0, -1, 0
    mean, sd = 0.2, math.sqrt((0.64 + 0.64 + 0.04 + 1.44 + 0.04) / 4)
    margin = 1.96 * sd / math.sqrt(5)
    assert gain.points == pytest.approx(100 * mean)
    assert (gain.low, gain.high) == pytest.approx((100 * (mean - margin), 100 * (mean + margin)))


def test_partial_rewards_do_not_count_as_right():
    assert evaluation(0, 3).accuracy == 0.3
    assert PairedGain.of([0.9, 0.9], [0.99, 1.0]).points == pytest.approx(50)


def test_the_best_and_the_last_checkpoint_are_kept(tmp_path):
    keeper = CheckpointKeeper(tmp_path)
    for version in (10, 20, 30):
        keeper.path(version).mkdir()
    for version, right in ((0, 2), (10, 6), (20, 4), (30, 5)):
        keeper.judge(evaluation(version, right), last_version=30)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_00010", "step_00030"]
    assert json.loads((tmp_path / "best.json").read_text()) == {
        "step": 10,
        "held_out_accuracy": 0.6,
    }


def test_a_better_checkpoint_replaces_the_former_best(tmp_path):
    keeper = CheckpointKeeper(tmp_path)
    for version in (10, 20):
        keeper.path(version).mkdir()
        keeper.judge(evaluation(version, version // 5), last_version=20)
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_00020"]


def best_of(folder) -> dict:
    best = json.loads((folder / "best.json").read_text())
    assert best["step"] == 0 or (folder / f"step_{best['step']:05d}").is_dir()
    return best


def test_a_run_resumed_never_names_a_folder_that_is_gone(tmp_path):
    keeper = CheckpointKeeper(tmp_path)
    for version, right in ((0, 1), (5, 5), (15, 6)):
        if version > 0:  # The run's start has none.
            keeper.path(version).mkdir()
        keeper.judge(evaluation(version, right), last_version=40)
    assert best_of(tmp_path) == {"step": 15, "held_out_accuracy": 0.6}

    # Resumed at 10, which is behind the deletion of step 5, and before what was better.
    keeper = CheckpointKeeper(tmp_path)
    assert keeper.go_on(10) == []
    assert not keeper.path(15).exists() and not (tmp_path / "best.json").exists()
    for version, right in ((0, 1), (5, 5)):
        keeper.judge(evaluation(version, right), last_version=40)
    assert best_of(tmp_path) == {"step": 0, "held_out_accuracy": 0.1}
    keeper.path(15).mkdir()
    keeper.judge(evaluation(15, 4), last_version=40)
    assert best_of(tmp_path) == {"step": 15, "held_out_accuracy": 0.4}
    assert keeper.best == (0.4, 15)


def test_versions_that_were_not_evaluated_yet_are_told(tmp_path):
    keeper = CheckpointKeeper(tmp_path)
    for version in (6, 12, 100006, 18):
        keeper.path(version).mkdir()
    assert keeper.go_on(18) == [6, 12]
    assert keeper.path(18).exists() and not keeper.path(100006).exists()


def make_model(folder):
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors.index.json", "notes.md"):
        (folder / name).write_text(name)
    weights = folder / "weights"
    weights.write_bytes(b"weights")
    return weights, folder


def test_a_saved_model_is_a_hugging_face_folder(tmp_path):
    keeper = CheckpointKeeper(tmp_path / "checkpoints")
    weights, model_dir = make_model(tmp_path / "model")
    for _ in range(2):  # A resumed run comes by again.
        keeper.save(6, weights, model_dir)
    names = sorted(path.name for path in keeper.path(6).iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (keeper.path(6) / "model.safetensors").read_bytes() == b"weights"
    assert [path.name for path in keeper.folder.iterdir()] == ["step_00006"]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("when", ["saving", "saving again", "deleting"])
def test_a_folder_is_whole_or_not_there_whenever_the_run_is_killed(tmp_path, monkeypatch, when):
    keeper = CheckpointKeeper(tmp_path / "checkpoints")
    weights, model_dir = make_model(tmp_path / "model")
    if when != "saving":
        keeper.save(6, weights, model_dir)

    def die(path, *_):
        if when == "deleting":
            (path / "model.safetensors").unlink()
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("shutil.rmtree" if when == "deleting" else "shutil.copy", die)
        if when == "deleting":
            keeper.judge(evaluation(0, 5), last_version=40)
            keeper.judge(evaluation(6, 4), last_version=40)
        else:
            keeper.save(6, weights, model_dir)

    keeper = CheckpointKeeper(tmp_path / "checkpoints")
    there = keeper.go_on(8)
    assert there == ([6] if when == "saving again" else [])
    assert [path.name for path in keeper.folder.iterdir()] == ["step_00006"] * len(there)
    assert all((keeper.path(step) / "model.safetensors").exists() for step in there)


def test_best_json_is_told_before_the_former_best_goes(tmp_path, monkeypatch):
    keeper = CheckpointKeeper(tmp_path)
    keeper.path(5).mkdir()
    keeper.judge(evaluation(5, 5), last_version=40)
    keeper.path(10).mkdir()
    told = []
    monkeypatch.setattr("shutil.rmtree", lambda path: told.append(best_of(tmp_path)["step"]))
    keeper.judge(evaluation(10, 6), last_version=40)
    assert told == [10]


def test_a_mismatch_of_engine_and_trainer_is_told_once_until_it_doubles(caplog):
    names = "reward accuracy lag_sample_mean lag_sample_max generation_tokens_per_s"
    names += " training_tokens_per_s trainer_waited_s generation_waited_s"
    metrics = dict.fromkeys(names.split(), 1.0)
    report = Report(total_steps=6)
    for mismatch, told in ((0.01, 0), (0.06, 1), (0.11, 1), (0.13, 2), (0.2, 2), (0.3, 3)):
        report.step(metrics | {"mismatch_lag_0": mismatch})
        assert len(caplog.records) == told
    report.close()
    assert "differ by 0.060 on average" in caplog.text
