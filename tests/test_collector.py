"""The collector around a scripted engine: what it collects, and that nobody waits in silence."""

from __future__ import annotations

import functools
import json
import subprocess
import sys

import pytest
from scripted import EOS, ScriptedEngine, ScriptedEnv, save_tokenizer

from torchrl_llm_async.collectors import AsyncLLMCollector, RemoteTraceback
from torchrl_llm_async.data import StalenessReplayBuffer
from torchrl_llm_async.engines import EngineDeadError, SamplingConfig, WeightUpdateError

GROUP_SIZE, GROUPS_PER_STEP = 3, 2


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
    group = next(iter(make_collector()))
    assert group.batch_size == (GROUP_SIZE,)
    row = group[1]
    assert row["group", "id"] == 0 and row["group", "index"] == 1
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
    assert len(row["tokens", "full"]) == len(row["masks", "all_assistant_mask"]) >= 128


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
        collector.update_policy_weights_("unread", version=step + 1)
    assert collector.stats()["samples"] == 4 * GROUPS_PER_STEP * GROUP_SIZE


def test_iteration_ends_with_the_last_step(make_collector):
    collector = make_collector(total_steps=1)
    assert {int(group[0]["group", "id"]) for group in collector} == {0, 1}


def test_same_seed_same_prompts_in_the_same_order(make_collector):
    prompts = [
        {int(group[0]["group", "id"]): group[0]["text", "prompt"] for group in make_collector()}
        for _ in range(2)
    ]
    assert prompts[0] == prompts[1] == {0: "0?", 1: "1?", 2: "2?", 3: "3?"}


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
    collector.update_policy_weights_("unread", version=1)
    second = collector.evaluate()
    assert first.result(30).rewards == [3.0] * 5
    assert (first.result().version, second.result(30).version) == (0, 1)


def test_finished_samples_are_dumped_as_json_lines(make_collector, tmp_path):
    path = tmp_path / "dumps" / "samples.jsonl"
    groups = list(make_collector(dump_path=path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == len(groups) * GROUP_SIZE
    assert lines[0] == {
        "group": 0, "index": 0, "start_version": 0, "prompt": "0?", "response": "22",
        "reward": 1.0, "truncated": False, "versions": [0, 0, 0], "log_probs": [-0.5] * 3,
    }  # fmt: skip


# ---------------------------------------------------------------------- nobody waits in silence
@pytest.mark.inv5
@pytest.mark.inv7
@pytest.mark.parametrize("host", ["thread", "process"])
def test_a_crashing_reward_reaches_the_trainer_with_its_traceback(make_collector, host):
    buffer = make_buffer()
    env = functools.partial(ScriptedEnv, crash_at=1)
    make_collector(env, replay_buffer=buffer, host=host).start()
    with pytest.raises(ZeroDivisionError, match="as told") as error:
        buffer.sample(timeout=60)
    assert isinstance(error.value.__cause__, RemoteTraceback)
    assert "scripted.py" in str(error.value.__cause__)


@pytest.mark.inv5
@pytest.mark.inv7
def test_a_hanging_reward_is_an_error_in_time(make_collector):
    buffer = make_buffer()
    env = functools.partial(ScriptedEnv, hang_at=1)
    # In a process of its own, whose end does not wait for the hanging thread.
    make_collector(env, replay_buffer=buffer, host="process", step_timeout=1.0).start()
    with pytest.raises(TimeoutError, match=r"longer than 1.0 s .*collector.step_timeout"):
        buffer.sample(timeout=60)


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
    collector.update_policy_weights_("unread", version=1)  # queues behind the evaluation
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


@pytest.mark.inv3
def test_refused_weights_reach_the_trainer(make_collector):
    buffer = make_buffer()
    collector = make_collector(engine=ScriptedEngine(refuse=(1,)), replay_buffer=buffer)
    collector.start()
    buffer.sample(timeout=30)
    collector.update_policy_weights_("unread", version=1)
    with pytest.raises(WeightUpdateError, match="as told"):
        for _ in range(2):
            buffer.sample(timeout=30)


def test_what_cannot_be_is_refused_at_once(make_collector):
    with pytest.raises(ValueError, match="group_size is 0"):
        make_collector(group_size=0)
    collector = make_collector()
    collector.start()
    with pytest.raises(RuntimeError, match="started already"):
        collector.start()
    with pytest.raises(RuntimeError, match="before it starts"):
        collector.set_seed(1)
