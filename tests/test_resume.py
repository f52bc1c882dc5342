"""Runs that are interrupted or killed, whatever they were doing, and go on with `resume=auto`.

At staleness 0 they end with the losses and weights of a plain synchronous loop, to the bit.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from whole_runs import CONFIG, ROOT, finish, launch, metrics, on_ranks, succeed, tune_run

pytestmark = [pytest.mark.engine, pytest.mark.recipe]

GROUPS_PER_STEP = 8


def ledger(output_dir: Path) -> list[dict]:
    """What the run's steps trained on, one record each."""
    path = output_dir / "ledger.jsonl"
    lines = path.read_text().splitlines(True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def wait_until(
    condition: Callable[[], object], process: subprocess.Popen, timeout: float = 180.0
) -> None:
    """Returns once ``condition`` holds; the program must not end before."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it does not come to that"
        try:
            process.wait(0.005)
        except subprocess.TimeoutExpired:
            continue
        raise AssertionError(finish(process))


class Family:
    """The processes of a run; of the trainer's ranks, the one that owns the others."""

    def __init__(self, process: subprocess.Popen):
        self.process = process
        self.all = psutil.Process(process.pid).children(recursive=True)
        (self.collector,) = (p for p in self.all if self._is_collector(p))
        self.trainer = self.collector.parent()

    @staticmethod
    def _is_collector(process: psutil.Process) -> bool:
        return "spawn_main" in " ".join(process.cmdline()) and bool(
            [p for p in process.children() if Family._is_core(p)]
        )

    @staticmethod
    def _is_core(process: psutil.Process) -> bool:
        return "resource_tracker" not in " ".join(process.cmdline())

    @property
    def engine(self) -> psutil.Process:
        """The engine core that lives now."""
        cores = (p for p in self.collector.children() if self._is_core(p))
        (core,) = (p for p in cores if p.status() != psutil.STATUS_ZOMBIE)
        return core

    def end(self, by: psutil.Process, how: signal.Signals, within: float = 30.0) -> str:
        """Signals one of them, and sees to it that this ends the whole run."""
        by.send_signal(how)
        _, alive = psutil.wait_procs(self.all, timeout=within)
        for orphan in alive:
            orphan.kill()
        output = finish(self.process, timeout=60.0)
        assert not alive, f"after {within} s {alive} are alive; {output}"
        assert self.process.returncode != 0
        return output

    def kill(self, process: psutil.Process) -> str:
        """The same, by kill -9."""
        return self.end(process, signal.SIGKILL)


class Run:
    """A run at staleness 2 that is started again and again.

    By another command than the others, from another folder and with another loss.
    """

    def __init__(self, folder: Path, steps: int):
        self.folder, self.steps = folder / "out", steps

    def go_on(self) -> subprocess.Popen:
        return launch(
            *("tune-async", "run", *on_ranks(2), "async_rl_full_finetune_distributed"),
            *("--config", "arithmetic_ppo", "output_dir=out"),
            "loss._component_=torchrl_llm_async.objectives.OnlineDPOLoss",
            *(f"total_steps={self.steps}", f"groups_per_step={GROUPS_PER_STEP}"),
            *("minibatches_per_step=2", "evaluate_every=6", "eval_problems=20"),
            *("dump_samples=true", "checkpoint_every=2", "resume=auto"),
            cwd=self.folder.parent,
        )

    def newest(self) -> int:
        names = [path.name for path in (self.folder / "resume").glob("step_*[0-9]")]
        return max((int(re.match(r"step_(\d+)", name)[1]) for name in names), default=0)

    def is_writing(self) -> bool:
        return bool(list((self.folder / "resume").glob("*.part")))

    def stop_while_it_saves(self, trainer: psutil.Process) -> bool:
        """Whether the trainer stands still now, with a checkpoint that is not whole."""
        if not self.is_writing():
            return False
        trainer.suspend()
        while trainer.status() != psutil.STATUS_STOPPED:
            pass
        is_writing = self.is_writing()
        if not is_writing:
            trainer.resume()
        return is_writing

    def forget_evaluations(self) -> None:
        """Leaves what a run does that is killed before any but the first has come in."""
        path = self.folder / "evaluations.jsonl"
        path.write_text("".join(path.read_text().splitlines(True)[:1]))
        last = self.folder / "checkpoints" / f"step_{self.steps:05d}" / "model.safetensors"
        earlier = self.folder / "checkpoints" / "step_00006"
        earlier.mkdir(exist_ok=True)  # It may have been a worse one, and deleted.
        save_file(load_file(last), earlier / "model.safetensors", metadata={"version": "6"})

    def check_the_end(self) -> None:
        """Every group was trained on once, and all accounts say so."""
        records = ledger(self.folder)
        assert [record["version"] for record in records] == list(range(1, self.steps + 1))
        trained = [group_id for record in records for group_id in record["group_ids"]]
        assert len(trained) == len(set(trained)) == self.steps * GROUPS_PER_STEP
        # Nothing is rejected in this environment, so no group is lost if all ids occur.
        assert set(trained) == set(range(len(trained)))
        last = records[-1]
        assert last["submitted"] == last["accepted"] == last["consumed"] == len(trained)
        assert last["running"] == last["rejected"] == last["dropped"] == 0
        for version, step in metrics(self.folder).items():
            assert version == 0 or step["lag_token_max"] <= 2
        lines = (self.folder / "samples.jsonl").read_text().splitlines()
        samples = [json.loads(line) for line in lines]
        assert sorted((s["group"], s["index"]) for s in samples) == [
            (group, index) for group in range(len(trained)) for index in range(8)
        ]
        for sample in samples:
            assert len(sample["versions"]) == len(sample["log_probs"]) >= 1
            assert sample["versions"] == sorted(sample["versions"])
        evaluated = [json.loads(line) for line in (self.folder / "evaluations.jsonl").open()]
        expected = {0, self.steps, *range(0, self.steps + 1, 6)}
        assert [record["version"] for record in evaluated] == sorted(expected)


@pytest.mark.inv1
@pytest.mark.inv4
@pytest.mark.inv5
def test_a_run_interrupted_then_killed_while_it_saves_loses_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, steps=10)

    # Ctrl-C reaches the whole process group of a terminal; here its leader hands it on.
    process = run.go_on()
    wait_until(lambda: run.newest() >= 2 and len(ledger(run.folder)) >= 3, process)
    family = Family(process)
    assert len(family.all) >= 4  # two ranks, collector, engine core
    output = family.end(psutil.Process(process.pid), signal.SIGINT, within=20.0)
    assert "interrupted; what was written so far" in output
    before, cut = ledger(run.folder), run.newest()
    # Policy and reference are the same at the first minibatch, so the first loss is log 2.
    assert metrics(run.folder)[1]["loss_preference"] == pytest.approx(0.693, abs=0.02)

    process = run.go_on()
    wait_until(lambda: run.newest() > cut, process)
    assert ledger(run.folder)[:cut] == before[:cut]
    family = Family(process)
    wait_until(lambda: run.stop_while_it_saves(family.trainer), process)
    cut = run.newest()
    family.kill(family.trainer)
    assert run.newest() == cut and run.is_writing()

    table = r"accuracy before .*\naccuracy after .*\ngain .*\n"
    told = re.search(table, succeed(run.go_on()))[0]
    run.check_the_end()

    # With all steps behind it, it ends once more.
    before = ledger(run.folder)
    run.forget_evaluations()
    assert re.search(table, succeed(run.go_on()))[0] == told
    assert ledger(run.folder) == before
    run.check_the_end()


@pytest.mark.slow
@pytest.mark.inv1
@pytest.mark.inv4
@pytest.mark.inv5
@pytest.mark.parametrize("who", ["trainer", "engine", "collector"])
def test_whoever_is_killed_at_whatever_point_nothing_is_lost(who: str, tmp_path: Path) -> None:
    """Between steps, in the middle of generation, right behind a checkpoint and in one."""
    run = Run(tmp_path, steps=40)  # Up to 8 for each time that it goes on.
    for point in range(4):
        process, cut = run.go_on(), run.newest()
        wait_until(lambda cut=cut: run.newest() > cut, process)
        family = Family(process)
        if point % 2:
            wait_until(run.is_writing, process)
        if who == "engine":  # which is replaced, and the run goes on
            family.engine.send_signal(signal.SIGKILL)
            reached = len(ledger(run.folder))
            wait_until(lambda reached=reached: len(ledger(run.folder)) > reached + 3, process)
            family.kill(family.trainer)
        else:
            output = family.kill(getattr(family, who))
            assert who == "trainer" or "the collector's process died" in output
    succeed(run.go_on())
    run.check_the_end()


STEPS = 20
SIZES = [f"total_steps={STEPS}", "groups_per_step=8", "minibatches_per_step=2"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """The losses and weights of a loop that does one thing after the other."""
    folder = tmp_path_factory.mktemp("plain")
    model = ROOT / "torchrl_llm_async" / "assets" / "written-sums-qwen2"
    succeed(
        launch(
            *("python", "tests/plain_loop.py", "--config", CONFIG, "--out", folder),
            *(f"model_dir={model}", *SIZES),
        )
    )
    return folder


def synchronous_run(folder: Path) -> subprocess.Popen:
    # One rank: with two, sums of gradients are in another order.
    return tune_run(
        folder,
        *("max_staleness=0", f"evaluate_every={STEPS}", "eval_problems=2", *SIZES),
        *("engine.repeatable=true", "checkpoint_every=3", "resume=auto"),
        ranks=1,
    )


def assert_equal_to_the_bit(folder: Path, plain: Path) -> None:
    losses = json.loads((plain / "losses.json").read_text())
    assert len(set(losses)) == STEPS
    logged = metrics(folder)
    assert [logged[step]["loss_objective"] for step in range(1, STEPS + 1)] == losses
    weights = load_file(folder / "checkpoints" / f"step_{STEPS:05d}" / "model.safetensors")
    expected = load_file(plain / "weights.safetensors")
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name


@pytest.mark.slow
@pytest.mark.inv6
def test_staleness_0_equals_a_plain_loop(plain: Path, tmp_path: Path) -> None:
    succeed(synchronous_run(tmp_path))
    assert_equal_to_the_bit(tmp_path, plain)


@pytest.mark.inv6
def test_staleness_0_equals_a_plain_loop_whatever_is_killed(plain: Path, tmp_path: Path) -> None:
    """An engine, whose answers are taken up, and then the collector, with which the run ends."""
    process = synchronous_run(tmp_path)
    wait_until(lambda: len(ledger(tmp_path)) >= 4, process)
    Family(process).engine.send_signal(signal.SIGKILL)
    wait_until(lambda: len(ledger(tmp_path)) >= 10, process)
    family = Family(process)
    assert "the collector's process died" in family.kill(family.collector)
    succeed(synchronous_run(tmp_path))
    assert_equal_to_the_bit(tmp_path, plain)
