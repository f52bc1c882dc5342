"""The collector when rewards, environments, engines or processes fail: books kept, nobody waits."""

from __future__ import annotations

import asyncio
import functools
import subprocess
import sys
import threading

import pytest
from scripted import (
    ALL,
    EOS,
    GROUP_SIZE,
    ScriptedEngine,
    ScriptedEnv,
    assert_the_books_add_up,
    make_buffer,
    run_all_steps,
)

from torchrl_llm_async.collectors import RemoteTraceback
from torchrl_llm_async.collectors.env_pool import EpisodeError
from torchrl_llm_async.data import RejectEqualRewards, StalenessReplayBuffer
from torchrl_llm_async.engines import (
    EngineDeadError,
    Generation,
)


@pytest.mark.inv4
@pytest.mark.inv7
@pytest.mark.parametrize(
    ("env", "options", "reason"),
    [
        (dict(crash_at={1, 3}), {}, "environment failed"),
        (dict(crash_at={1, 3}, crash_turn=3, turns=4), dict(max_turns=9), "environment failed"),
        (dict(hang_at={1, 3}), dict(step_timeout=3.0), "environment timed out"),
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
    assert_the_books_add_up(collector, rows, rejected=2)
    assert collector.stats()[f"rejected/{reason}"] == 2


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
    rows = run_all_steps(collector, buffer)
    assert_the_books_add_up(collector, rows, rejected=1)
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


@pytest.mark.inv7
def test_a_reward_that_is_not_finite_is_no_reward(make_collector):
    class Dividing(ScriptedEnv):
        def _step(self, tensordict):
            out = super()._step(tensordict)
            return out.set("reward", out["reward"] / (int(out["number"]) != 1))

    buffer = make_buffer()
    collector = make_collector(Dividing, replay_buffer=buffer)
    rows = run_all_steps(collector, buffer)
    assert_the_books_add_up(collector, rows, rejected=1)
    assert collector.stats()["rejected/reward not finite"] == 1


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
    assert_the_books_add_up(collector, rows, rejected=rejected)


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
    assert_the_books_add_up(collector, rows, rejected=0)


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
    collector.serve_weights("unread", version=1)  # queues behind the evaluation
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


class Unpicklable(ScriptedEngine):
    def __reduce__(self):
        return (_not_there, ())


def _not_there():
    raise ModuleNotFoundError("its class is not there")


@pytest.mark.inv5
def test_what_cannot_be_read_on_the_other_side_reaches_whoever_sent_it(make_collector):
    collector = make_collector(total_steps=None)
    collector.start()
    with pytest.raises(ModuleNotFoundError, match="its class is not there"):
        collector.add_engine(Unpicklable()).result(30)


@pytest.mark.inv5
def test_a_group_the_buffer_objects_to_ends_the_collector(make_collector):
    class Objecting(StalenessReplayBuffer):
        def extend(self, data, **kwargs):
            raise ValueError("not this one")

    buffer = Objecting(groups_per_step=64, max_staleness=1, group_size=GROUP_SIZE)
    collector = make_collector(groups_per_step=64, replay_buffer=buffer)
    collector.start()
    with pytest.raises(ValueError, match="not this one"):
        buffer.sample(timeout=30)
    collector.shutdown(timeout=20)


@pytest.mark.inv5
def test_giving_up_on_an_answer_harms_nobody(make_collector):
    collector = make_collector(create_eval_env_fn=ScriptedEnv, eval_problems=3, total_steps=None)
    collector.start()
    assert not collector.evaluate().cancel()
    assert collector.evaluate().result(30).rewards == [1.0] * 3


@pytest.mark.inv5
def test_a_dead_engine_reaches_the_trainer(make_collector):
    buffer = make_buffer()
    make_collector(engine=ScriptedEngine(die_after=2), replay_buffer=buffer).start()
    with pytest.raises(EngineDeadError, match="as told"):
        buffer.sample(timeout=30)


def dropping_collector(make_collector, engine, steps):
    """A collector and its buffer, which drops the groups that are late."""
    buffer = make_buffer(on_stale="drop", on_drop=lambda *group: collector.drop(*group))
    collector = make_collector(engine=engine, replay_buffer=buffer, total_steps=steps)
    collector.start()
    return collector, buffer


class SlowlyAborting(ScriptedEngine):
    """Told to, it aborts an answer of group 0; the group's others take until they are let go."""

    async def start(self):
        self.loop = asyncio.get_running_loop()
        self.abort, self.let_go = asyncio.Event(), asyncio.Event()
        self.is_aborting = threading.Event()
        await super().start()

    async def generate(self, prompt_ids, sampling, *, request_id, **options):
        if request_id.startswith("0-0-"):
            await self.abort.wait()
            return Generation([20], [-0.5], [0], "abort")
        if request_id.startswith("0-"):
            try:
                await asyncio.Event().wait()
            finally:  # As where the abort has to reach a server.
                self.is_aborting.set()
                await self.let_go.wait()
        return await super().generate(prompt_ids, sampling, request_id=request_id, **options)

    def do(self, event):
        self.loop.call_soon_threadsafe(event.set)


@pytest.mark.inv4
def test_a_group_that_is_dropped_while_it_fails_is_refunded_once(make_collector):
    engine = SlowlyAborting()
    collector, buffer = dropping_collector(make_collector, engine, steps=4)
    for step in range(4):
        if step == 1:  # the deadline of group 0
            engine.do(engine.abort)
            assert engine.is_aborting.wait(20)
        buffer.sample(timeout=20)
        if step == 1:
            collector.cut()  # which comes behind the drop
            engine.do(engine.let_go)
        collector.serve_weights("unread", version=step + 1).result(20)
    stats = collector.stats()
    assert (stats["accepted"], stats["rejected"], stats["dropped"]) == (8, 0, 1)
    assert buffer.ledger()["consumed"] == 8


class Stuck(ScriptedEngine):
    """Never gives the third token of one of group 1's answers."""

    def __init__(self):
        super().__init__()
        self.is_stuck = threading.Event()

    async def _before_token(self, request_id, answer):
        await super()._before_token(request_id, answer)
        if request_id.startswith("1-1-") and len(answer.token_ids) == 2:
            self.is_stuck.set()
            await asyncio.Event().wait()


@pytest.mark.inv4
def test_tokens_of_groups_that_are_dropped_are_counted(make_collector):
    engine = Stuck()
    collector, buffer = dropping_collector(make_collector, engine, steps=3)
    for step in range(3):
        assert engine.is_stuck.wait(20)
        buffer.sample(timeout=20)
        collector.serve_weights("unread", version=step + 1).result(20)
    stats = collector.stats()
    assert stats["dropped"] == 1
    assert stats["discarded_tokens"] == 3 + 2 + 3
    assert engine.sampled == stats["sampled_tokens"] + stats["discarded_tokens"]


@pytest.mark.inv5
def test_a_killed_collector_process_reaches_the_trainer(make_collector):
    buffer = make_buffer()
    env = functools.partial(ScriptedEnv, kill_at=1)
    collector = make_collector(env, replay_buffer=buffer, host="process")
    collector.start()
    with pytest.raises(RuntimeError, match="died"):
        buffer.sample(timeout=60)
    with pytest.raises(RuntimeError, match="died"):
        collector.serve_weights("unread", version=1)


def test_what_cannot_be_is_refused_at_once(make_collector):
    with pytest.raises(ValueError, match="create_eval_env_fn"):
        make_collector().evaluate()
    with pytest.raises(ValueError, match="group_size is 0"):
        make_collector(group_size=0)
    collector = make_collector()
    collector.start()
    with pytest.raises(RuntimeError, match="started already"):
        collector.start()
    with pytest.raises(RuntimeError, match="before it starts"):
        collector.set_seed(1)


@pytest.mark.inv7
def test_a_held_out_problem_that_fails_is_answered_again(make_collector):
    class Moody(ScriptedEnv):
        steps = 0

        def _step(self, tensordict):
            Moody.steps += 1
            if Moody.steps == 3:
                raise ZeroDivisionError("as told")
            return super()._step(tensordict)

    options = dict(create_eval_env_fn=Moody, eval_problems=4, max_turns=2, total_steps=None)
    collector = make_collector(**options)
    collector.start()
    assert collector.evaluate().result(30).rewards == [1.0] * 4
    Moody.steps = 2
    strict = make_collector(**options, step_retries=0)
    strict.start()
    with pytest.raises(EpisodeError, match="ZeroDivisionError: as told"):
        strict.evaluate().result(30)


@pytest.mark.parametrize(("max_turns", "warned"), [(1, True), (2, False)])
def test_conversations_that_are_all_cut_are_warned_of(make_collector, caplog, max_turns, warned):
    env = functools.partial(ScriptedEnv, turns=2)
    list(make_collector(env, max_turns=max_turns))
    messages = [m for m in caplog.messages if "raise collector.max_turns" in m]
    assert len(messages) == warned
