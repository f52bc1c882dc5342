"""The collector around a scripted engine: what it collects, and what may change meanwhile."""

from __future__ import annotations

import asyncio
import functools
import json
import threading

import pytest
import torch
from scripted import (
    ALL,
    EOS,
    GROUP_SIZE,
    GROUPS_PER_STEP,
    ScriptedEngine,
    ScriptedEnv,
    make_buffer,
    run_all_steps,
)

from torchrl_llm_async.engines import (
    EnginePool,
    Generation,
    SamplingConfig,
    WeightUpdateError,
)
from torchrl_llm_async.weight_update import WeightStore


def test_rows_hold_what_was_sampled(make_collector):
    (row,) = (group[1] for group in make_collector() if group[0]["group", "id"] == 0)
    assert row["group", "index"] == 1
    prompt = row["tokens", "prompt"].tolist()
    assert row["tokens", "full"].tolist() == [*prompt, 20, 20, EOS]
    assert row["tokens", "response"].tolist() == [20, 20, EOS]
    assert row["masks", "all_assistant_mask"].tolist() == [False, False, True, True, True]
    assert row["log_probs", "full"].tolist() == [0, 0, -0.5, -0.5, -0.5]
    assert row["policy_version", "full"].tolist() == [-1, -1, 0, 0, 0]
    assert row["next", "reward"].tolist() == [1] and row["next", "success"].tolist() == [True]
    assert row["next", "terminated"].all() and not row["next", "truncated"].any()
    assert row["text", "prompt"] == "0?" and row["text", "response"] == "22"


@pytest.mark.inv8
def test_several_turns_are_one_trajectory(make_collector):
    env = functools.partial(ScriptedEnv, turns=2)
    row = next(iter(make_collector(env, max_turns=4)))[0]
    mask = row["masks", "all_assistant_mask"]
    assert row["tokens", "full"][mask].tolist() == [20, 20, EOS] * 2
    assert row["text", "response"] == "22 more?22"
    assert (row["policy_version", "full"] >= 0).tolist() == mask.tolist()
    assert row["next", "reward"].item() == 2


@pytest.mark.inv7
@pytest.mark.parametrize(
    ("options", "env"),
    [
        (dict(sampling=SamplingConfig(max_new_tokens=2)), ScriptedEnv),
        (dict(max_turns=1), functools.partial(ScriptedEnv, turns=2)),
    ],
    ids=["tokens", "turns"],
)
def test_a_cut_trajectory_is_marked_truncated(make_collector, options, env):
    group = next(iter(make_collector(env, **options)))
    assert group["next", "truncated"].all()


@pytest.mark.inv7
def test_a_conversation_that_fills_the_context_is_truncated(make_collector):
    env = functools.partial(ScriptedEnv, turns=100)
    row = next(iter(make_collector(env, max_turns=100)))[0]
    assert row["next", "truncated"].all()
    assert len(row["tokens", "full"]) == len(row["masks", "all_assistant_mask"]) <= 128


@pytest.mark.inv7
def test_rewards_come_from_the_environment_that_asked(make_collector):
    """Whatever the collector's seed: it is the prompts' and the rewards' alike."""
    for group in make_collector(seed=5, total_steps=1):
        assert (group["next", "reward"] == 1).all()


@pytest.mark.inv1
def test_generation_stops_at_the_staleness_bound_and_goes_on_with_new_weights(make_collector):
    buffer = make_buffer()
    collector = make_collector(replay_buffer=buffer, total_steps=4)
    collector.start()
    for step in range(4):
        batch = buffer.sample(timeout=30)
        versions = batch["group", "start_version"]
        assert (versions <= step).all() and (versions >= step - 1).all()
        collector.serve_weights("unread", version=step + 1)
    assert collector.stats()["samples"] == 4 * GROUPS_PER_STEP * GROUP_SIZE


def test_iteration_ends_with_the_last_step_and_can_be_resumed(make_collector):
    collector = make_collector(total_steps=1)
    first = next(iter(collector))
    ids = {int(group[0]["group", "id"]) for group in (first, *collector)}
    assert ids == {0, 1}
    assert list(collector) == []


@pytest.mark.inv5
def test_an_error_is_there_for_whoever_iterates_next(make_collector):
    collector = make_collector(functools.partial(ScriptedEnv, crash_at=ALL), max_failures=1)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="as told"):
            next(iter(collector))


def test_same_seed_same_prompts_in_the_same_order(make_collector):
    prompts = [
        {int(group[0]["group", "id"]): group[0]["text", "prompt"] for group in make_collector()}
        for _ in range(2)
    ]
    assert prompts[0] == prompts[1] == {0: "0?", 1: "1?", 2: "2?", 3: "3?"}


class Lengthy(ScriptedEnv):
    """Problems of 1, 2, 3, 1, 2, 3, ... characters."""

    def _reset(self, tensordict=None, **kwargs):
        out = super()._reset(tensordict, **kwargs)
        out["text", "prompt"] = "x" * (1 + int(out["number"]) % 3)
        return out


class EchoEngine(ScriptedEngine):
    """Answers as long as the prompt."""

    async def generate(self, prompt_ids, sampling, **request):
        tokens = len(prompt_ids)
        return Generation([20] * tokens, [-0.5] * tokens, [self._version] * tokens, "stop")


def test_longest_first_reorders_the_problems_of_a_step_and_leaves_none_out(make_collector):
    collector = make_collector(
        Lengthy, EchoEngine(), longest_first=True, groups_per_step=3, max_concurrent_groups=1
    )
    lengths = [len(group[0]["text", "prompt"]) for group in collector]
    assert sorted(lengths[:3]) == [1, 2, 3]  # nothing is known yet
    assert lengths[3:] == [3, 2, 1]


def test_evaluation_uses_its_own_environment_and_one_version(make_collector):
    collector = make_collector(
        create_eval_env_fn=functools.partial(ScriptedEnv, turns=3),
        eval_problems=5,
        engine=ScriptedEngine(ticks=50),
        max_turns=3,
        replay_buffer=make_buffer(),
    )
    collector.start()
    first = collector.evaluate()
    collector.serve_weights("unread", version=1)
    second = collector.evaluate()
    assert first.result(30).rewards == [3.0] * 5
    assert (first.result().version, second.result(30).version) == (0, 1)


def test_finished_samples_are_dumped_as_json_lines(make_collector, tmp_path):
    path = tmp_path / "dumps" / "samples.jsonl"
    groups = list(make_collector(dump_path=path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == len(groups) * GROUP_SIZE
    first = min(lines, key=lambda line: (line["group"], line["index"]))
    assert first == {
        "group": 0, "index": 0, "start_version": 0, "prompt": "0?", "response": "22",
        "reward": 1.0, "truncated": False, "ended_by": "environment",
        "versions": [0, 0, 0], "log_probs": [-0.5] * 3,
    }  # fmt: skip


@pytest.mark.inv3
def test_refused_weights_are_repaired_by_the_next(make_collector):
    buffer = make_buffer()
    collector = make_collector(
        engine=ScriptedEngine(refuse=(1,)), replay_buffer=buffer, total_steps=4
    )
    rows = run_all_steps(collector, buffer, steps=4)
    served = {int(version) for row in rows for version in row["policy_version", "full"]}
    assert 1 not in served and 2 in served
    assert collector.stats()["weight_updates_refused"] == 1


@pytest.mark.inv3
def test_whoever_sends_weights_is_told_whether_they_serve(make_collector):
    collector = make_collector(engine=ScriptedEngine(refuse=(1,)), total_steps=4)
    collector.start()
    assert collector.serve_weights("unread", version=1).result(30) is False
    assert collector.serve_weights("unread", version=2).result(30) is True
    assert collector.policy_version == 2


@pytest.mark.inv3
@pytest.mark.inv5
def test_refused_weights_raise_at_the_bound_of_rarer_publications(make_collector):
    """Published every second step, version 4 would need steps that version 0 does not allow."""
    buffer = make_buffer(max_staleness=2)
    collector = make_collector(
        engine=ScriptedEngine(refuse=(2,)), replay_buffer=buffer, total_steps=8, max_staleness=2
    )
    collector.start()
    buffer.sample(timeout=30)
    buffer.sample(timeout=30)
    collector.serve_weights("unread", version=2)
    with pytest.raises(WeightUpdateError, match="version 2 refused, as told"):
        buffer.sample(timeout=30)
        buffer.sample(timeout=30)


@pytest.mark.inv3
@pytest.mark.inv5
def test_refused_weights_raise_at_the_bound(make_collector):
    buffer = make_buffer()
    collector = make_collector(
        engine=ScriptedEngine(refuse=(1, 2)), replay_buffer=buffer, total_steps=4
    )
    with pytest.raises(WeightUpdateError, match="version 2 refused, as told"):
        run_all_steps(collector, buffer, steps=3)


def test_pausing_stops_generation_and_resuming_goes_on(make_collector):
    engine = ScriptedEngine(ticks=20)
    collector = make_collector(engine=engine, total_steps=None)
    groups = iter(collector)
    next(groups)
    with collector.pause():
        sampled = engine.sampled
        assert collector.serve_weights("unread", version=1).result(30)  # The switch goes through.
        assert collector.policy_version == 1
        assert engine.sampled == sampled
    versions = [next(groups)["policy_version", "full"].max() for _ in range(5)]
    assert max(versions) == 1


def test_engines_join_and_leave_while_it_runs(make_collector):
    collector = make_collector(engine=EnginePool([ScriptedEngine(ticks=5)]), total_steps=None)
    groups = iter(collector)
    next(groups)
    collector.serve_weights("unread", version=1)
    collector.add_engine(ScriptedEngine(ticks=5)).result(30)
    collector.remove_engine(0).result(30)
    versions = [next(groups)["policy_version", "full"].max() for _ in range(5)]
    assert max(versions) == 1
    with pytest.raises(ValueError, match="last engine"):
        collector.remove_engine(0).result(30)
    with pytest.raises(ValueError, match="no live engine 5: 1 are live"):
        collector.remove_engine(5).result(30)


def test_an_evaluation_that_failed_leaves_no_trace(make_collector):
    class Moody(ScriptedEnv):
        resets = 0

        def _reset(self, tensordict=None, **kwargs):
            Moody.resets += 1
            if Moody.resets == 3:
                raise ZeroDivisionError("no problem, as told")
            return super()._reset(tensordict, **kwargs)

    collector = make_collector(create_eval_env_fn=Moody, eval_problems=5, total_steps=None)
    collector.start()
    with pytest.raises(ZeroDivisionError, match="as told"):
        collector.evaluate().result(30)
    assert collector.evaluate().result(30).rewards == [1.0] * 5


class CarefulEngine(ScriptedEngine):
    """Refuses a publication that is not there, and dies when told."""

    async def update_weights(self, version, path):
        if not path.exists():
            raise WeightUpdateError(f"{path} is not there")
        await super().update_weights(version, path)


class Gated(ScriptedEnv):
    """Two turns, the first of which ends when the gate opens."""

    gate = threading.Event()

    def __init__(self):
        super().__init__(turns=2)

    def _step(self, tensordict):
        assert Gated.gate.wait(30)
        return super()._step(tensordict)


@pytest.mark.inv5
def test_an_engine_that_dies_during_an_evaluation_finds_the_weights_it_needs(
    make_collector, tmp_path
):
    """While the evaluation holds version 1, the trainer publishes up to the bound."""
    store = WeightStore(tmp_path, keep=2 + 2)
    engine = CarefulEngine()
    buffer = make_buffer(max_staleness=2)
    collector = make_collector(
        engine=engine, replay_buffer=buffer, max_staleness=2, total_steps=8, max_turns=2,
        create_eval_env_fn=Gated, eval_problems=1, env_workers=3,
    )  # fmt: skip
    collector.start()
    for version in range(1, 5):
        buffer.sample(timeout=30)
        path = store.write(version, [("weight", torch.ones(1))])
        collector.serve_weights(path, version=version)
        if version == 1:
            evaluation = collector.evaluate()
    engine.die_once_at = 0
    Gated.gate.set()
    assert evaluation.result(30).version == 1
    for _ in range(3):
        buffer.sample(timeout=30)
    assert collector.stats()["engine_restarts"] == 1


class Straggler(ScriptedEngine):
    """Never answers the first problem."""

    async def generate(self, prompt_ids, sampling, *, request_id, **request):
        if request_id.startswith("0-"):
            await asyncio.Event().wait()
        return await super().generate(prompt_ids, sampling, request_id=request_id, **request)


@pytest.mark.inv1
@pytest.mark.inv4
def test_a_straggler_is_dropped_at_its_deadline_and_replaced(make_collector):
    buffer = make_buffer(on_stale="drop", on_drop=lambda *group: collector.drop(*group))
    collector = make_collector(engine=Straggler(), replay_buffer=buffer, total_steps=4)
    rows = run_all_steps(collector, buffer, steps=4)
    ids = {int(row["group", "id"]) for row in rows}
    assert len(ids) == 4 * GROUPS_PER_STEP and 0 not in ids
    stats = collector.stats()
    assert (stats["dropped"], stats["rejected"]) == (1, 0)
    assert stats["submitted"] == 4 * GROUPS_PER_STEP + 1
    assert buffer.stats()["groups_dropped"] == 1
    assert buffer.stats()["lag_sample_max"] <= 1
