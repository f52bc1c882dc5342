"""The collector around a scripted engine: what it collects, and that nobody waits in silence."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import time

import pytest
from scripted import EOS, ScriptedEngine, ScriptedEnv, save_tokenizer

from torchrl_llm_async.collectors import AsyncLLMCollector, RemoteTraceback
from torchrl_llm_async.collectors.env_pool import EpisodeError
from torchrl_llm_async.data import RejectEqualRewards, StalenessReplayBuffer
from torchrl_llm_async.engines import (
    EngineDeadError,
    EnginePool,
    Generation,
    SamplingConfig,
    WeightUpdateError,
)

GROUP_SIZE, GROUPS_PER_STEP = 3, 2
ALL = range(10**9)  # problems


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def make_collector(tokenizer_path):
    collectors = []

    def make(env=ScriptedEnv, engine=None, **options):
        defaults = dict(
            tokenizer=tokenizer_path,
            sampling=SamplingConfig(max_new_tokens=8),
            group_size=GROUP_SIZE,
            groups_per_step=GROUPS_PER_STEP,
            max_staleness=1,
            total_steps=2,
            host="thread",
        )
        collector = AsyncLLMCollector(env, engine or ScriptedEngine(), **(defaults | options))
        collectors.append(collector)
        return collector

    yield make
    for collector in collectors:
        collector.shutdown(timeout=1.0)


def make_buffer(max_staleness=1):
    return StalenessReplayBuffer(
        groups_per_step=GROUPS_PER_STEP, max_staleness=max_staleness, group_size=GROUP_SIZE
    )


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
        collector.receive_weights("unread", version=step + 1)
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
    collector.receive_weights("unread", version=1)
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


# ---------------------------------------------------------------------- failures
def run_all_steps(collector, buffer, steps=2):
    """Trains on nothing, ``steps`` times; returns all rows."""
    collector.start()
    batches = []
    for step in range(steps):
        batches.append(buffer.sample(timeout=60))
        collector.receive_weights("unread", version=step + 1)
    return [row for batch in batches for row in batch]


def assert_the_books_add_up(stats, *, rejected):
    states = [stats[state] for state in ("running", "accepted", "rejected", "dropped")]
    assert stats["submitted"] == sum(states)
    assert (stats["running"], stats["rejected"], stats["dropped"]) == (0, rejected, 0)


@pytest.mark.inv4
@pytest.mark.inv7
@pytest.mark.parametrize(
    ("env", "options", "reason"),
    [
        (dict(crash_at={1, 3}), {}, "environment failed"),
        (dict(crash_at={1, 3}, crash_turn=3, turns=4), dict(max_turns=9), "environment failed"),
        (dict(hang_at={1, 3}), dict(step_timeout=0.2), "environment timed out"),
    ],
    ids=["reward", "third turn", "hang"],
)
def test_a_group_that_fails_is_replaced_and_counted(make_collector, env, options, reason):
    buffer = make_buffer()
    collector = make_collector(
        functools.partial(ScriptedEnv, **env), replay_buffer=buffer, **options
    )
    rows = run_all_steps(collector, buffer)
    assert {int(row["group", "id"]) for row in rows} == {0, 2, 4, 5}
    assert all(row["next", "reward"] > 0 for row in rows)
    stats = collector.stats()
    assert_the_books_add_up(stats, rejected=2)
    assert stats[f"rejected/{reason}"] == 2
    assert stats["env_retries"] >= (0 if reason == "environment timed out" else 2)
    assert buffer.stats()["groups_retracted"] == 2


@pytest.mark.inv5
@pytest.mark.inv7
@pytest.mark.parametrize("host", ["thread", "process"])
def test_failures_in_a_row_reach_the_trainer_with_their_traceback(make_collector, host):
    buffer = make_buffer()
    env = functools.partial(ScriptedEnv, crash_at=ALL)
    make_collector(env, replay_buffer=buffer, host=host, max_failures=3).start()
    with pytest.raises(ZeroDivisionError, match="as told") as error:
        buffer.sample(timeout=60)
    assert isinstance(error.value.__cause__, RemoteTraceback)
    assert "scripted.py" in str(error.value.__cause__)
    assert "3 problems in a row failed" in error.value.__notes__[0]


@pytest.mark.inv5
@pytest.mark.inv7
def test_rewards_that_never_come_are_an_error_in_time(make_collector):
    buffer = make_buffer()
    env = functools.partial(ScriptedEnv, hang_at=ALL)
    make_collector(env, replay_buffer=buffer, step_timeout=0.1, max_failures=2).start()
    with pytest.raises(TimeoutError, match=r"longer than 0.1 s .*collector.step_timeout"):
        buffer.sample(timeout=60)


def test_a_reset_that_fails_is_skipped(make_collector):
    class Shy(ScriptedEnv):
        def _reset(self, tensordict=None, **kwargs):
            out = super()._reset(tensordict, **kwargs)
            if int(out["number"]) in (1, 2):
                raise ZeroDivisionError("no problem, as told")
            return out

    groups = list(make_collector(Shy))
    assert {group[0]["text", "prompt"] for group in groups} == {"0?", "3?", "4?", "5?"}


@pytest.mark.inv4
def test_a_problem_that_fills_the_context_is_rejected(make_collector):
    class Verbose(ScriptedEnv):
        def _reset(self, tensordict=None, **kwargs):
            out = super()._reset(tensordict, **kwargs)
            if int(out["number"]) == 1:
                out["text", "prompt"] = "x" * 128
            return out

    buffer = make_buffer()
    collector = make_collector(Verbose, replay_buffer=buffer)
    run_all_steps(collector, buffer)
    assert_the_books_add_up(collector.stats(), rejected=1)
    assert collector.stats()["rejected/prompt too long"] == 1


@pytest.mark.inv7
def test_an_environment_without_a_reward_is_an_error(make_collector):
    class Free(ScriptedEnv):
        def _step(self, tensordict):
            return super()._step(tensordict).exclude("reward")

        def step(self, tensordict):
            return tensordict.set("next", self._step(tensordict))

    buffer = make_buffer()
    make_collector(Free, replay_buffer=buffer, max_failures=1).start()
    with pytest.raises(EpisodeError, match="gave no 'reward'"):
        buffer.sample(timeout=30)


class Lucky(ScriptedEnv):
    """Rewards the first answer to odd problems more."""

    answers = 0

    def _step(self, tensordict):
        out = super()._step(tensordict)
        Lucky.answers += 1
        bonus = float(Lucky.answers % GROUP_SIZE) if int(out["number"]) % 2 else 0.0
        return out.set("reward", out["reward"] + bonus)


@pytest.mark.inv4
def test_groups_that_the_filter_rejects_are_replaced_and_counted(make_collector):
    buffer = make_buffer()
    collector = make_collector(
        Lucky, replay_buffer=buffer, group_filter=RejectEqualRewards(), env_workers=1
    )
    rows = run_all_steps(collector, buffer)
    assert all(int(row["group", "id"]) % 2 for row in rows)
    rejected = int(collector.stats()["rejected"])
    assert collector.stats()["rejected/equal rewards"] == rejected >= 3
    assert collector.stats()["rejected_tokens"] == rejected * GROUP_SIZE * 3
    assert_the_books_add_up(collector.stats(), rejected=rejected)


@pytest.mark.inv5
def test_rejecting_without_end_stops_with_that_reason(make_collector):
    buffer = make_buffer()
    make_collector(
        replay_buffer=buffer, group_filter=RejectEqualRewards(), max_rejections=5
    ).start()
    with pytest.raises(RuntimeError, match=r"5 groups in a row were rejected \(5 x equal rewards"):
        buffer.sample(timeout=30)


@pytest.mark.inv2
def test_an_engine_that_dies_is_replaced_and_its_answers_are_taken_up(make_collector):
    buffer = make_buffer()
    collector = make_collector(engine=ScriptedEngine(die_once_at=4), replay_buffer=buffer)
    rows = run_all_steps(collector, buffer)
    for row in rows:
        assert row["tokens", "response"].tolist() == [20, 20, EOS]
        versions = row["policy_version", "full"][-3:]
        assert (versions >= row["group", "start_version"]).all()
    stats = collector.stats()
    assert stats["engine_restarts"] == 1 and stats["resubmitted"] >= 1
    assert_the_books_add_up(stats, rejected=0)


# ---------------------------------------------------------------------- while it runs
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
@pytest.mark.inv5
def test_refused_weights_raise_at_the_bound(make_collector):
    buffer = make_buffer()
    collector = make_collector(
        engine=ScriptedEngine(refuse=(1, 2)), replay_buffer=buffer, total_steps=4
    )
    with pytest.raises(WeightUpdateError, match="version 2 refused, as told"):
        run_all_steps(collector, buffer, steps=3)


def test_pausing_stops_generation_and_resuming_goes_on(make_collector):
    collector = make_collector(engine=ScriptedEngine(ticks=20), total_steps=None)
    groups = iter(collector)
    next(groups)
    with collector.pause():
        before = collector.stats()
        collector.receive_weights("unread", version=1)
        while collector.policy_version == 0:  # The switch goes through.
            time.sleep(0.01)
        assert collector.stats()["submitted"] <= before["submitted"] + 1
    versions = [next(groups)["policy_version", "full"].max() for _ in range(5)]
    assert max(versions) == 1


def test_engines_join_and_leave_while_it_runs(make_collector):
    collector = make_collector(engine=EnginePool([ScriptedEngine(ticks=5)]), total_steps=None)
    groups = iter(collector)
    next(groups)
    collector.receive_weights("unread", version=1)
    collector.add_engine(ScriptedEngine(ticks=5)).result(30)
    collector.remove_engine(0).result(30)
    versions = [next(groups)["policy_version", "full"].max() for _ in range(5)]
    assert max(versions) == 1
    with pytest.raises(ValueError):
        collector.remove_engine(0).result(30)


# ---------------------------------------------------------------------- nobody waits in silence
@pytest.mark.inv5
def test_an_environment_without_further_problems_is_an_error(make_collector):
    buffer = make_buffer()
    make_collector(functools.partial(ScriptedEnv, problems=1), replay_buffer=buffer).start()
    with pytest.raises(RuntimeError, match="ran out of problems"):
        buffer.sample(timeout=30)


@pytest.mark.inv5
def test_stopping_does_not_wait_for_an_evaluation(make_collector):
    collector = make_collector(
        create_eval_env_fn=ScriptedEnv, eval_problems=1, engine=ScriptedEngine(ticks=10**9)
    )
    collector.start()
    pending = collector.evaluate()
    collector.receive_weights("unread", version=1)  # queues behind the evaluation
    collector.shutdown(timeout=10)
    with pytest.raises(RuntimeError, match="shut down"):
        pending.result(timeout=1)


@pytest.mark.inv5
def test_a_program_that_forgets_to_shut_down_ends(tokenizer_path):
    program = f"""
import sys
sys.path[:0] = {sys.path!r}
from scripted import ScriptedEngine, ScriptedEnv
from torchrl_llm_async.collectors import AsyncLLMCollector
from torchrl_llm_async.engines import SamplingConfig
collector = AsyncLLMCollector(
    ScriptedEnv, ScriptedEngine(), tokenizer={str(tokenizer_path)!r},
    sampling=SamplingConfig(max_new_tokens=8), group_size=2, groups_per_step=2, max_staleness=1)
for group in collector:
    raise SystemExit(7)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=90).returncode == 7


@pytest.mark.inv5
def test_a_dead_engine_reaches_the_trainer(make_collector):
    buffer = make_buffer()
    make_collector(engine=ScriptedEngine(die_after=2), replay_buffer=buffer).start()
    with pytest.raises(EngineDeadError, match="as told"):
        buffer.sample(timeout=30)


@pytest.mark.inv5
def test_a_killed_collector_process_reaches_the_trainer(make_collector):
    buffer = make_buffer()
    env = functools.partial(ScriptedEnv, kill_at=1)
    collector = make_collector(env, replay_buffer=buffer, host="process")
    collector.start()
    with pytest.raises(RuntimeError, match="died"):
        buffer.sample(timeout=60)
    with pytest.raises(RuntimeError, match="died"):
        collector.evaluate()


def test_what_cannot_be_is_refused_at_once(make_collector):
    with pytest.raises(ValueError, match="group_size is 0"):
        make_collector(group_size=0)
    collector = make_collector()
    collector.start()
    with pytest.raises(RuntimeError, match="started already"):
        collector.start()
    with pytest.raises(RuntimeError, match="before it starts"):
        collector.set_seed(1)
