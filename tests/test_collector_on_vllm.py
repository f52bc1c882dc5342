"""The collector on a real engine that is killed and stopped, and one whose trainer is killed."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from conftest import heed_interrupts
from safetensors.torch import load_file
from tensordict import TensorDictBase

from torchrl_llm_async.collectors import AsyncLLMCollector
from torchrl_llm_async.engines import SamplingConfig, VLLMEngine
from torchrl_llm_async.envs import WrittenSumsEnv
from torchrl_llm_async.weight_update import WeightStore

pytestmark = pytest.mark.engine

MODEL = Path(__file__).parents[1] / "assets" / "written-sums-qwen2"
GROUP_SIZE = 8


def make_collector(log_path: Path, **options) -> AsyncLLMCollector:
    return AsyncLLMCollector(
        WrittenSumsEnv,
        VLLMEngine(MODEL, max_model_len=128, heartbeat_s=8.0),
        tokenizer=str(MODEL),
        sampling=SamplingConfig(max_new_tokens=64, stop_token_ids=(1,)),
        group_size=GROUP_SIZE,
        groups_per_step=4,
        max_staleness=1000,  # so that it generates all the time
        log_path=log_path,
        **options,
    )


def descendants() -> list[psutil.Process]:
    """All but this process's own resource tracker, which ends with it."""
    family = psutil.Process().children(recursive=True)
    return [
        process
        for process in family
        if process.ppid() != os.getpid() or "resource_tracker" not in " ".join(process.cmdline())
    ]


def engine_core() -> psutil.Process:
    """The process that holds the model: the collector's only child that computes."""
    (collector,) = (p for p in psutil.Process().children() if "spawn_main" in " ".join(p.cmdline()))
    cores = [p for p in collector.children() if "resource_tracker" not in " ".join(p.cmdline())]
    (core,) = (p for p in cores if p.status() != psutil.STATUS_ZOMBIE)
    return core


class Policies:
    """Log-probabilities by transformers, under the weights of each version."""

    def __init__(self, weights_by_version: dict[int, dict[str, torch.Tensor]]):
        from transformers import Qwen2ForCausalLM

        self.models = {}
        for version, weights in weights_by_version.items():
            model = Qwen2ForCausalLM.from_pretrained(MODEL)
            model.load_state_dict(weights, strict=False)
            self.models[version] = model

    def check(self, row: TensorDictBase) -> None:
        """Every sampled token has the log-probability that the policy of its version gives it."""
        tokens = row["tokens", "full"]
        for version, model in self.models.items():
            with torch.no_grad():
                log_probs = model(tokens[None]).logits[0, :-1].log_softmax(-1)
            wanted = log_probs.gather(-1, tokens[1:, None])[:, 0]
            mine = row["policy_version", "full"][1:] == version
            torch.testing.assert_close(
                row["log_probs", "full"][1:][mine], wanted[mine], atol=1e-4, rtol=0
            )


def collect(groups: Iterator[TensorDictBase], until) -> list[TensorDictBase]:
    """Groups up to the first for which ``until`` holds, which should not take so many."""
    collected = []
    for group in itertools.islice(groups, 3000):
        collected.append(group)
        if until():
            return collected
    raise AssertionError(f"it does not hold after {len(collected)} groups")


@pytest.mark.inv2
@pytest.mark.inv4
@pytest.mark.inv5
def test_an_engine_killed_or_stopped_is_replaced_and_nothing_is_lost(tmp_path: Path) -> None:
    start = load_file(MODEL / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    changed = {
        name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in start.items()
    }
    store = WeightStore(tmp_path / "weights")
    collector = make_collector(tmp_path / "collector.log")
    try:
        groups = iter(collector)
        rows = [next(groups)]
        collector.serve_weights(store.write(1, changed.items()), version=1)
        rows += collect(groups, lambda: collector.policy_version == 1)
        for number, blow in enumerate((signal.SIGKILL, signal.SIGSTOP)):
            core = engine_core()
            core.send_signal(blow)
            rows += collect(groups, lambda n=number: collector.stats()["engine_restarts"] > n)
            # Those that were under way when it died come in, and others of the replacement.
            rows += itertools.islice(groups, 40)
            assert not core.is_running() or core.status() == psutil.STATUS_ZOMBIE
            assert collector.stats()["resubmitted"] > number
        family = descendants()
    finally:
        collector.shutdown()
    assert not psutil.wait_procs(family, timeout=10)[1], "processes outlived the collector"
    with pytest.raises(RuntimeError, match="was shut down"):
        rows.extend(groups)
    stats = collector.stats()
    assert stats["accepted"] == len(rows) and stats["rejected"] == stats["dropped"] == 0
    assert stats["submitted"] == stats["running"] + len(rows)
    assert stats["kept_tokens"] > 0 and stats["discarded_tokens"] == stats["given_up"] == 0
    ids = [int(group[0]["group", "id"]) for group in rows]
    assert len(set(ids)) == len(ids)
    assert set(range(min(40, max(ids)))) <= set(ids), "an early group never came"
    policies = Policies({0: start, 1: changed})
    for group in rows:
        assert group["group", "index"].tolist() == list(range(GROUP_SIZE))
        for row in group:
            versions = row["policy_version", "full"][row["masks", "all_assistant_mask"]]
            assert versions.tolist() == sorted(versions.tolist())
            assert set(versions.tolist()) <= {0, 1}
            policies.check(row)


_TRAINER = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
from test_collector_on_vllm import descendants, make_collector

if __name__ == "__main__":
    groups = iter(make_collector(Path({log!r})))
    next(groups)
    print(*(process.pid for process in descendants()), flush=True)
    for group in groups:
        pass
"""


@pytest.mark.inv5
def test_a_killed_trainer_leaves_nothing_behind(tmp_path: Path) -> None:
    (script := tmp_path / "trainer.py").write_text(
        _TRAINER.format(path=sys.path, log=str(tmp_path / "collector.log"))
    )
    trainer = subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        family = [psutil.Process(int(pid)) for pid in trainer.stdout.readline().split()]
        assert len(family) >= 2
    finally:
        trainer.kill()
        trainer.communicate()
    assert not psutil.wait_procs(family, timeout=10)[1], "processes outlived the trainer"
