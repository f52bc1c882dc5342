"""The collector on a real engine that is killed and stopped, and one that is killed itself."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDictBase

from torchrl_llm_async.checkpoint import load_tree, save_tree
from torchrl_llm_async.collectors import AsyncLLMCollector, Cut
from torchrl_llm_async.data import StalenessReplayBuffer
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


def descendants(*, but: list[psutil.Process]) -> list[psutil.Process]:
    """All but some, and this process's own resource tracker, which ends with it."""
    family = psutil.Process().children(recursive=True)
    return [
        process
        for process in family
        if process not in but
        and (process.ppid() != os.getpid() or "resource_tracker" not in " ".join(process.cmdline()))
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
    others = psutil.Process().children(recursive=True)  # e.g. the fork server of earlier tests
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
        family = descendants(but=others)
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


def under_way(cut: Cut) -> int:
    """Answers of which the cut has a part."""
    members = [member for group in cut.collector["groups"] for member in group["members"]]
    return sum(
        turn["finish_reason"] == "abort" and len(turn["token_ids"]) > 0
        for member in members
        if isinstance(member, list)
        for turn in member
    )


@pytest.mark.inv2
@pytest.mark.inv4
def test_answers_under_way_at_a_cut_are_taken_up_by_another_collector(tmp_path: Path) -> None:
    start = load_file(MODEL / "model.safetensors")
    changed = {name: tensor * 1.02 for name, tensor in start.items()}
    weights = WeightStore(tmp_path / "weights").write(1, changed.items())

    def make():
        buffer = StalenessReplayBuffer(groups_per_step=4, max_staleness=1000, group_size=GROUP_SIZE)
        return make_collector(tmp_path / "collector.log", replay_buffer=buffer), buffer

    collector, buffer = make()
    try:
        collector.start()
        collector.wait_until_ready()
        rows = [buffer.sample(timeout=60)]
        collector.serve_weights(weights, version=1).result(60)
        deadline = time.monotonic() + 60
        while under_way(cut := collector.cut()) < GROUP_SIZE:  # Between two answers of each, maybe.
            assert time.monotonic() < deadline
        save_tree(tmp_path / "collector", cut.collector)
        cut.buffer.save(tmp_path)
        (host,) = (p for p in psutil.Process().children() if "spawn_main" in str(p.cmdline()))
        host.kill()
        with pytest.raises(RuntimeError, match="the collector's process died"):
            while True:
                buffer.sample(timeout=60)
    finally:
        collector.shutdown()

    collector, buffer = make()
    buffer.loads(tmp_path)
    collector.load_state_dict(load_tree(tmp_path / "collector"))
    waited_for = {group["id"]: group for group in cut.collector["groups"]}
    try:
        collector.start()
        collector.serve_weights(weights, version=1)
        while waited_for.keys() - {int(row["group", "id"]) for batch in rows for row in batch}:
            rows.append(buffer.sample(timeout=60))
    finally:
        collector.shutdown()
    policies = Policies({0: start, 1: changed})
    taken_up = 0
    for row in (row for batch in rows for row in batch):
        policies.check(row)
        group = waited_for.get(int(row["group", "id"]), {"members": []})
        for member in group["members"][int(row["group", "index"]) :][:1]:
            if isinstance(member, list) and member:  # else it was finished, or not begun
                (turn,) = member
                size = len(turn["token_ids"])
                sampled = row["masks", "all_assistant_mask"]
                assert row["tokens", "full"][sampled][:size].tolist() == turn["token_ids"].tolist()
                versions = row["policy_version", "full"][sampled][:size]
                assert versions.tolist() == turn["versions"].tolist()
                taken_up += turn["finish_reason"] == "abort" and size > 0
    assert taken_up == under_way(cut)
