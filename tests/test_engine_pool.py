"""The pool of engines, on engines that do as told and a clock that never waits."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import pickle
import selectors
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from torchrl_llm_async.engines import (
    EngineDeadError,
    EnginePool,
    Generation,
    GenerationEngine,
    PoolStats,
    SamplingConfig,
    WeightUpdateError,
)

EOS = 1
LONG = 40  # tokens of the longest answers


# ---------------------------------------------------------------------- a clock that never waits
TURN = 0.05  # seconds a turn of the loop takes


class _Selector(selectors.SelectSelector):
    def select(self, timeout=None):
        self.loop.turns += 1
        if timeout is None:
            raise AssertionError("deadlock: nothing is ready and nothing ever will be")
        if self.loop.turns > self.loop.budget:
            raise AssertionError(f"not done after {self.loop.budget} turns of the loop")
        self.loop.now += max(timeout, TURN)
        return super().select(0)


class ClockLoop(asyncio.SelectorEventLoop):
    """Instead of waiting for a timer it sets its clock forward; it ends what takes too long."""

    def __init__(self, budget: int = 5000):
        self.now, self.turns, self.budget = 0.0, 0, budget
        super().__init__(selector := _Selector())
        selector.loop = self

    def time(self) -> float:
        return self.now


def on_the_clock(test: Callable[..., Coroutine]) -> Callable[..., None]:
    """Runs a test that is a coroutine to its end, within the loop's budget of turns."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        with asyncio.Runner(loop_factory=ClockLoop) as runner:
            runner.run(test(*args, **kwargs))

    run.__signature__ = inspect.signature(test)
    return run


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


# ---------------------------------------------------------------------- engines that do as told
def token(prompt: list[int], position: int) -> int:
    """What every engine answers: depends on nothing but prompt and position."""
    length = prompt[0]
    return EOS if position == length - 1 else 2 + (31 * sum(prompt) + 7 * position) % 97


def log_prob(weights: int, position: int) -> float:
    """Tells of the weights that really drew a token, as opposed to the version it is stamped."""
    return -(weights + (1 + position) / 1024)


def publication(version: int) -> Path:
    return Path(f"weights-{version}")


class Engine:
    """One token per turn of the loop; its weights are the number in the publication's name.

    Attributes:
        refuse: names of the publications it refuses.
        fail_starts: how many of its next starts fail.
        slow: turns a start or a switch takes.
        unproven: tokens at the end of an interrupted answer whose version is not proven.
    """

    max_model_len = 128

    def __init__(self) -> None:
        self.refuse: set[str] = set()
        self.fail_starts = self.unproven = 0
        self.slow = 1
        self.alive = self.silent = self.paused = False
        self.version = self.weights = 0
        self.life = 0
        self.calls: list[str] = []
        self.running: dict[str, int] = {}
        self.request_ids: list[str] = []
        self.starts_since_answer = 0

    async def start(self) -> None:
        assert not self.alive, "started while it runs"
        self.calls.append("start")
        self.starts_since_answer += 1
        await turns(self.slow)
        if self.fail_starts:
            self.fail_starts -= 1
            raise OSError("no memory, as told")
        self.alive, self.silent, self.paused = True, False, False
        self.version = self.weights = 0
        self.life += 1

    def kill(self, *, silent: bool = False) -> None:
        """Ends it; silently: requests and calls hear of it only by ``shutdown``."""
        self.alive, self.silent = False, silent and self.alive

    async def _end_of(self, life: int) -> None:
        while (self.alive or self.silent) and self.life == life:
            await turns(1)

    def _dead(self, partial: Generation | None = None) -> EngineDeadError:
        return EngineDeadError("the engine died, as told", partial)

    async def generate(self, prompt_ids, sampling, *, request_id, seed=None, partial=None):
        self.check_health()
        assert request_id not in self.request_ids, "an id of a former request"
        assert len(prompt_ids) < self.max_model_len
        life = self.life
        self.request_ids.append(request_id)
        given = 0 if partial is None else len(partial.token_ids)
        answer = Generation([], [], [], "abort") if partial is None else partial
        self.running[request_id] = seed
        try:
            while True:
                await turns(1)
                if self.life != life or not (self.alive or self.silent):
                    kept = max(given, len(answer.token_ids) - self.unproven)
                    proven = Generation(
                        answer.token_ids[:kept],
                        answer.log_probs[:kept],
                        answer.versions[:kept],
                        "abort",
                    )
                    raise self._dead(proven if kept else None)
                position = len(answer.token_ids)
                if position and answer.token_ids[-1] == EOS:
                    reason = "stop"
                elif position == sampling.max_new_tokens:
                    reason = "length"
                else:
                    if not self.silent and not self.paused:
                        drawn = token(prompt_ids, position), log_prob(self.weights, position)
                        drawn = Generation([drawn[0]], [drawn[1]], [self.version], "abort")
                        answer = answer.followed_by(drawn)
                    continue
                self.starts_since_answer = 0
                return Generation(answer.token_ids, answer.log_probs, answer.versions, reason)
        finally:
            del self.running[request_id]

    async def update_weights(self, version: int, path: Path) -> None:
        self.check_health()
        life = self.life
        self.calls.append(f"update {version}")
        await turns(self.slow)
        if self.silent:
            await self._end_of(life)
        if self.life != life or not self.alive:
            raise self._dead()
        if path.name in self.refuse:
            raise WeightUpdateError(f"{path} refused, as told")
        self.version, self.weights = version, int(path.name.rpartition("-")[2])

    async def pause(self) -> None:
        self.check_health()
        self.calls.append("pause")
        self.paused = True

    async def resume(self) -> None:
        self.check_health()
        self.calls.append("resume")
        self.paused = False

    def check_health(self) -> None:
        if not self.alive:
            raise self._dead()

    async def shutdown(self) -> None:
        self.calls.append("shutdown")
        self.alive = self.silent = False


@contextlib.asynccontextmanager
async def running(count: int | list[Engine], **kwargs: Any):
    engines = [Engine() for _ in range(count)] if isinstance(count, int) else count
    pool = EnginePool(engines, **kwargs)
    await pool.start()
    try:
        yield pool, engines
    finally:
        await pool.shutdown()
        assert not any(engine.alive or engine.silent or engine.running for engine in engines)
        assert asyncio.all_tasks() == {asyncio.current_task()}


def ask(pool: EnginePool, prompt: list[int], name: str, *, most: int = LONG) -> asyncio.Task:
    return asyncio.create_task(
        pool.generate(prompt, SamplingConfig(max_new_tokens=most), request_id=name, seed=5)
    )


def check_whole(answer: Generation, prompt: list[int], most: int = LONG) -> None:
    size = min(prompt[0], most)
    assert answer.token_ids == [token(prompt, i) for i in range(size)]
    assert answer.log_probs == [log_prob(v, i) for i, v in enumerate(answer.versions)]
    assert answer.finish_reason == ("stop" if prompt[0] <= most else "length")


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await turns(1)


# ---------------------------------------------------------------------- tests
class TestLife:
    def test_it_is_an_engine_that_can_be_pickled(self) -> None:
        pool = pickle.loads(pickle.dumps(EnginePool([Engine(), Engine()])))
        assert isinstance(pool, GenerationEngine)
        assert pool.max_model_len == 128
        assert pool.engines == ()
        assert pool.version == 0

    @on_the_clock
    async def test_starts_one_after_the_other(self) -> None:
        order = []

        class Slow(Engine):
            async def start(self):
                order.append(("begins", self))
                await super().start()
                order.append(("runs", self))

        async with running([Slow(), Slow()]) as (pool, (a, b)):
            assert order == [("begins", a), ("runs", a), ("begins", b), ("runs", b)]
            assert pool.engines == (a, b)
            pool.check_health()
            with pytest.raises(RuntimeError, match="is running"):
                await pool.start()

    @on_the_clock
    async def test_failed_start_ends_those_started(self) -> None:
        engines = [Engine(), Engine(), Engine()]
        engines[1].fail_starts = 1
        pool = EnginePool(engines)
        with pytest.raises(OSError, match="no memory"):
            await pool.start()
        assert [e.calls for e in engines] == [["start", "shutdown"], ["start"], []]
        with pytest.raises(EngineDeadError, match="never started"):
            pool.check_health()

    @on_the_clock
    async def test_can_be_started_again(self) -> None:
        async with running(2) as (pool, _):
            await pool.update_weights(3, publication(3))
            await pool.shutdown()
            await pool.start()
            assert pool.version == 0
            check_whole(await ask(pool, [4], "a"), [4])

    @pytest.mark.inv5
    @on_the_clock
    async def test_shutdown_ends_every_wait(self) -> None:
        async with running(1) as (pool, (engine,)):
            engine.slow = 30
            requests = [ask(pool, [30, i], str(i)) for i in range(3)]
            await turns(5)
            adding = asyncio.create_task(pool.add(Engine()))
            updating = asyncio.create_task(pool.update_weights(1, publication(1)))
            await turns(2)
            await pool.shutdown()
            heard = await asyncio.gather(*requests, adding, updating, return_exceptions=True)
            assert [type(e) for e in heard] == [EngineDeadError] * 5
            assert all("was shut down" in str(e) for e in heard)
            for i, error in enumerate(heard[:3]):
                proven = error.partial.token_ids
                assert proven == [token([30, i], at) for at in range(len(proven))]
                assert proven
            with pytest.raises(EngineDeadError, match="was shut down"):
                await pool.generate([3], SamplingConfig(max_new_tokens=2), request_id="late")

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: EnginePool([]), "give at least one"),
            (lambda: EnginePool([Engine()] * 2), "in the pool already"),
            (lambda: EnginePool([Engine()], max_restarts=-1), "max_restarts=-1"),
            (lambda: EnginePool([Engine(), _with_context(64)]), "max_model_len=64"),
        ],
    )
    def test_refused_arguments(self, make: Callable[[], EnginePool], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            make()


def _with_context(size: int) -> Engine:
    engine = Engine()
    engine.max_model_len = size
    return engine


class TestRouting:
    @on_the_clock
    async def test_least_tokens_not_fewest_requests(self) -> None:
        async with running(3) as (pool, (a, b, c)):
            for name, most in [("0", 30), ("1", 10), ("2", 10), ("3", 10), ("4", 20), ("5", 5)]:
                ask(pool, [50], name, most=most)
            await turns(2)
            # Loads: a 30; b 10; c 10; b 20; c 30; b 25.
            assert [list(e.running) for e in (a, b, c)] == [["0"], ["1", "3", "5"], ["2", "4"]]

    @on_the_clock
    async def test_answers_free_their_tokens(self) -> None:
        async with running(2) as (pool, (a, b)):
            await ask(pool, [3], "first")
            ask(pool, [30], "second")
            await turns(1)
            assert (list(a.running), list(b.running)) == (["second"], [])

    @on_the_clock
    async def test_cancelling_aborts_the_request_and_frees_its_tokens(self) -> None:
        async with running(2) as (pool, (a, b)):
            request = ask(pool, [30], "0")
            await turns(4)
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request
            assert not a.running
            ask(pool, [30], "1")
            await turns(1)
            assert (list(a.running), list(b.running)) == (["1"], [])

    @on_the_clock
    async def test_errors_of_a_request_are_its_own(self) -> None:
        class Strict(Engine):
            async def generate(self, prompt_ids, sampling, **kwargs):
                raise ValueError("prompt of 0 tokens")

        async with running([Strict()]) as (pool, _):
            with pytest.raises(ValueError, match="prompt of 0 tokens"):
                await ask(pool, [5], "0")
            assert pool.stats == PoolStats()


class TestDeath:
    @pytest.mark.inv2
    @on_the_clock
    async def test_answer_goes_on_where_its_proven_tokens_end(self) -> None:
        async with running(2) as (pool, (a, b)):
            a.unproven = 2
            answer = ask(pool, [20], "x")
            await until(lambda: "x" in a.running)
            await turns(6)
            await pool.update_weights(4, publication(4))
            a.fail_starts = 9
            a.kill()
            answer = await answer
            check_whole(answer, [20])
            assert b.request_ids == ["x/1"]
            assert pool.stats.resubmitted == 1
            assert pool.stats.kept_tokens == answer.versions.count(0) > 0

    @on_the_clock
    async def test_the_former_partial_is_kept_if_the_next_engine_has_none(self) -> None:
        class Forgetful(Engine):
            def _dead(self, partial=None):
                return super()._dead()

        async with running([Engine(), Forgetful()]) as (pool, (a, b)):
            answer = ask(pool, [20], "x")
            await turns(8)
            a.fail_starts = 1
            a.kill()
            await until(lambda: b.running)
            await turns(3)
            kept = pool.stats.kept_tokens
            assert kept > 0
            b.kill()
            check_whole(await answer, [20])
            assert pool.stats.kept_tokens == kept
            assert a.request_ids + b.request_ids == ["x", "x/2", "x/1"]

    @on_the_clock
    async def test_request_waits_for_a_replacement(self) -> None:
        async with running(1) as (pool, (engine,)):
            answers = [ask(pool, [20, i], str(i)) for i in range(3)]
            await turns(8)
            engine.kill()
            for i, answer in enumerate(await asyncio.gather(*answers)):
                check_whole(answer, [20, i])
            assert pool.stats.restarts == 1
            assert pool.stats.resubmitted == 3
            assert engine.calls == ["start", "shutdown", "start"]

    @on_the_clock
    async def test_idle_engine_is_replaced(self) -> None:
        async with running(2) as (pool, (a, b)):
            b.kill()
            await asyncio.sleep(3)
            assert pool.engines == (a, b)
            assert b.alive
            a.kill()
            pool.check_health()  # notices it at once, too
            assert pool.engines == (b,)

    @pytest.mark.inv5
    @on_the_clock
    async def test_engine_that_goes_silent_loses_no_request(self) -> None:
        async with running(1) as (pool, (engine,)):
            answers = [ask(pool, [20, i], str(i)) for i in range(3)]
            await turns(8)
            updating = asyncio.create_task(pool.update_weights(2, publication(2)))
            await turns(1)
            engine.kill(silent=True)
            for i, answer in enumerate(await asyncio.gather(*answers)):
                check_whole(answer, [20, i])
            await updating
            assert pool.version == engine.version == 2

    @on_the_clock
    async def test_late_word_of_a_former_life_kills_nothing(self) -> None:
        class Slow(Engine):
            def _dead(self, partial=None):
                error = super()._dead(partial)
                return error

            async def generate(self, *args, request_id, **kwargs):
                try:
                    return await super().generate(*args, request_id=request_id, **kwargs)
                except EngineDeadError:
                    await turns(20 if request_id == "late" else 0)
                    raise

        async with running([Slow()]) as (pool, (engine,)):
            late, early = ask(pool, [20, 1], "late"), ask(pool, [20, 2], "early")
            await turns(8)
            engine.kill()
            check_whole(await late, [20, 1])
            check_whole(await early, [20, 2])
            assert pool.stats.restarts == 1

    @on_the_clock
    async def test_replacement_serves_the_newest_before_it_joins(self) -> None:
        async with running(1) as (pool, (engine,)):
            await pool.update_weights(2, publication(2))
            await pool.update_weights(5, publication(5))
            engine.kill()
            answer = await ask(pool, [5], "x")
            assert answer.versions == [5] * 5
            assert engine.calls[-2:] == ["start", "update 5"]
            assert pool.version == 5

    @on_the_clock
    async def test_without_a_publication_the_first_weights_are_version_0(self) -> None:
        async with running(1) as (pool, (engine,)):
            engine.kill()
            assert (await ask(pool, [3], "x")).versions == [0] * 3
            assert engine.calls == ["start", "shutdown", "start"]

    @on_the_clock
    async def test_update_during_a_restart_is_caught_up_with(self) -> None:
        async with running(2) as (pool, (a, b)):
            await pool.update_weights(1, publication(1))
            a.slow = 20
            a.kill()
            pool.check_health()
            await until(lambda: a.calls.count("update 1") == 2)
            await pool.update_weights(2, publication(2))
            assert pool.engines == (b,)
            await until(lambda: len(pool.engines) == 2)
            assert a.calls[-2:] == ["update 1", "update 2"]
            assert (a.version, b.version, pool.version) == (2, 2, 2)


class TestGivingUp:
    @pytest.mark.inv5
    @on_the_clock
    async def test_every_wait_and_later_call_gets_the_last_reason(self) -> None:
        async with running(2, max_restarts=2) as (pool, engines):
            requests = [ask(pool, [20, i], str(i)) for i in range(4)]
            await turns(6)
            for engine in engines:
                engine.fail_starts = 99
                engine.kill()
            heard = await asyncio.gather(
                *requests, pool.update_weights(1, publication(1)), return_exceptions=True
            )
            for call in (
                lambda: pool.generate([2], SamplingConfig(max_new_tokens=2), request_id="late"),
                lambda: pool.update_weights(2, publication(2)),
                pool.pause,
                pool.resume,
                lambda: pool.add(Engine()),
                lambda: pool.remove(engines[0]),
            ):
                heard += await asyncio.gather(call(), return_exceptions=True)
            for error in heard:
                assert type(error) is EngineDeadError
                assert "no engine is left" in str(error)
                assert "no memory, as told" in str(error)
                assert isinstance(error.__cause__.__cause__, OSError)
            assert all(len(error.partial.token_ids) > 0 for error in heard[:4])
            with pytest.raises(EngineDeadError, match="no memory"):
                pool.check_health()
            assert pool.stats.restarts == 4
            assert [engine.calls.count("start") for engine in engines] == [3, 3]

    @on_the_clock
    async def test_one_engine_given_up_leaves_the_others(self) -> None:
        async with running(2, max_restarts=1) as (pool, (a, b)):
            a.fail_starts = 99
            a.kill()
            pool.check_health()
            await until(lambda: a.calls.count("shutdown") == 2)
            await turns(2)
            assert pool.engines == (b,)
            check_whole(await ask(pool, [5], "x"), [5])
            with pytest.raises(ValueError, match="last engine"):
                await pool.remove(b)

    @on_the_clock
    async def test_an_answer_in_between_counts_anew(self) -> None:
        async with running(1, max_restarts=1) as (pool, (engine,)):
            for i in range(4):
                engine.kill()
                check_whole(await ask(pool, [5], str(i)), [5])
            assert pool.stats.restarts == 4
            engine.fail_starts = 1
            engine.kill()
            with pytest.raises(EngineDeadError, match="no engine is left"):
                await ask(pool, [5], "x")

    @on_the_clock
    async def test_never_restarts_if_told_so(self) -> None:
        async with running(1, max_restarts=0) as (pool, (engine,)):
            engine.kill()
            with pytest.raises(EngineDeadError, match="as told"):
                await ask(pool, [5], "x")
            assert engine.calls == ["start", "shutdown"]

    @pytest.mark.inv5
    @pytest.mark.parametrize("where", ["update_weights", "check_health"])
    @on_the_clock
    async def test_a_bug_in_a_replacement_reaches_everybody(self, where: str) -> None:
        class Buggy(Engine):
            buggy = False

        def broken(self, *args):
            if self.buggy:
                raise ZeroDivisionError("a bug, as told")
            return getattr(Engine, where)(self, *args)

        async def broken_coroutine(self, *args):
            await broken(self, *args)

        setattr(Buggy, where, broken if where == "check_health" else broken_coroutine)
        async with running([Buggy(), Engine()]) as (pool, (a, b)):
            await pool.update_weights(1, publication(1))
            requests = [ask(pool, [60, i], str(i)) for i in range(4)]
            await turns(6)
            a.buggy = True
            if where != "check_health":
                a.kill()
            heard = await asyncio.gather(*requests, return_exceptions=True)
            a.buggy = False
            for error in heard:
                assert type(error) is EngineDeadError
                assert isinstance(error.__cause__, ZeroDivisionError)
            with pytest.raises(EngineDeadError, match="a bug, as told"):
                pool.check_health()
            assert not b.alive


class TestUpdateWeights:
    @pytest.mark.inv2
    @on_the_clock
    async def test_all_engines_at_once(self) -> None:
        async with running(3) as (pool, engines):
            answers = [ask(pool, [30, i], str(i)) for i in range(6)]
            await turns(6)
            for engine in engines:
                engine.slow = 10
            turn = asyncio.get_running_loop().turns
            await pool.update_weights(7, publication(7))
            assert asyncio.get_running_loop().turns - turn < 15
            assert pool.version == 7
            for i, answer in enumerate(await asyncio.gather(*answers)):
                check_whole(answer, [30, i])
                assert set(answer.versions) == {0, 7}

    @on_the_clock
    async def test_version_is_the_smallest(self) -> None:
        async with running(2) as (pool, (a, b)):
            b.slow = 10
            updating = asyncio.create_task(pool.update_weights(3, publication(3)))
            await until(lambda: a.version == 3)
            assert pool.version == 0
            await updating
            assert pool.version == 3

    @pytest.mark.inv3
    @on_the_clock
    async def test_refused_by_some_and_repaired_by_the_next(self) -> None:
        async with running(3) as (pool, (a, b, c)):
            await pool.update_weights(1, publication(1))
            b.refuse.add("weights-2")
            with pytest.raises(WeightUpdateError, match="by 1 of 3 engines.*version 1.*engine 1"):
                await pool.update_weights(2, publication(2))
            assert [e.version for e in (a, b, c)] == [2, 1, 2]
            assert pool.version == 1
            await pool.update_weights(3, publication(3))
            assert pool.version == 3

    @pytest.mark.inv3
    @on_the_clock
    async def test_refused_by_all(self) -> None:
        async with running(2) as (pool, engines):
            for engine in engines:
                engine.refuse.add("torn-1")
            with pytest.raises(WeightUpdateError, match="by 2 of 2 engines"):
                await pool.update_weights(1, Path("torn-1"))
            assert pool.version == 0
            await pool.update_weights(1, publication(1))  # the same version, whole
            assert pool.version == 1

    @on_the_clock
    async def test_engine_that_dies_meanwhile_does_not_hold_it_up(self) -> None:
        async with running(2) as (pool, (a, b)):
            a.slow = 10
            updating = asyncio.create_task(pool.update_weights(1, publication(1)))
            await turns(4)
            a.kill()
            await updating
            assert pool.engines == (b,)
            await until(lambda: len(pool.engines) == 2)
            assert a.version == 1

    @on_the_clock
    async def test_while_none_lives_it_waits_until_it_is_served(self) -> None:
        async with running(1) as (pool, (engine,)):
            engine.slow = 10
            engine.kill()
            pool.check_health()
            await turns(2)
            await pool.update_weights(4, publication(4))
            assert pool.version == engine.version == 4

    @on_the_clock
    async def test_older_than_the_last_is_a_mistake(self) -> None:
        async with running(1) as (pool, _):
            await pool.update_weights(4, publication(4))
            with pytest.raises(ValueError, match="version 3 after version 4"):
                await pool.update_weights(3, publication(3))

    @on_the_clock
    async def test_giving_up_leaves_the_next_update_unharmed(self) -> None:
        async with running(2) as (pool, (_, b)):
            b.slow = 20
            first = asyncio.create_task(pool.update_weights(1, publication(1)))
            await turns(4)
            second = asyncio.create_task(pool.update_weights(2, publication(2)))
            await turns(2)
            first.cancel()
            await second
            assert pool.version == 2


class TestPublicationGone:
    @on_the_clock
    async def test_replacement_waits_for_the_next_one(self) -> None:
        async with running(2) as (pool, (a, b)):
            await pool.update_weights(1, publication(1))
            await pool.update_weights(2, publication(2))
            a.refuse |= {"weights-2"}
            a.kill()
            await asyncio.sleep(500)  # longer than any grace: the other one serves
            assert pool.engines == (b,)
            assert a.calls[-2:] == ["start", "update 2"]
            await pool.update_weights(3, publication(3))
            await until(lambda: len(pool.engines) == 2)
            assert (a.version, pool.version) == (3, 3)

    @on_the_clock
    async def test_the_last_served_will_do_if_nobody_else_answers(self) -> None:
        """Else nothing is answered, nothing trained, and nothing published ever again."""
        async with running(1) as (pool, (engine,)):
            await pool.update_weights(1, publication(1))
            await pool.update_weights(2, publication(2))
            engine.refuse.add("weights-3")
            with pytest.raises(WeightUpdateError):
                await pool.update_weights(3, publication(3))
            engine.kill()
            assert (await ask(pool, [3], "x")).versions == [2] * 3
            assert engine.calls[-3:] == ["start", "update 3", "update 2"]

    @on_the_clock
    async def test_update_refused_while_none_lives_raises(self) -> None:
        """The caller must be free to bring the next one."""
        async with running(1) as (pool, (engine,)):
            await pool.update_weights(1, publication(1))
            engine.refuse |= {"weights-1", "weights-2"}
            engine.kill()
            request = ask(pool, [3], "x")
            with pytest.raises(WeightUpdateError, match="engine 0: weights-2 refused"):
                await pool.update_weights(2, publication(2))
            await pool.update_weights(3, publication(3))
            assert (await request).versions == [3] * 3

    @pytest.mark.inv5
    @on_the_clock
    async def test_the_wait_for_a_publication_has_an_end(self) -> None:
        async with running(1) as (pool, (engine,)):
            await pool.update_weights(1, publication(1))
            engine.refuse.add("weights-1")
            engine.kill()
            with pytest.raises(EngineDeadError, match="version 1 or later.*weights-1 refused") as e:
                await ask(pool, [3], "x")
            assert isinstance(e.value.__cause__, WeightUpdateError)


class TestPause:
    @on_the_clock
    async def test_stops_all_and_replacements_join_paused(self) -> None:
        async with running(2) as (pool, (a, b)):
            answers = [ask(pool, [20, i], str(i)) for i in range(4)]
            await turns(4)
            await pool.pause()
            await turns(3)
            b.kill()
            await until(lambda: len(pool.engines) == 1)
            await until(lambda: len(pool.engines) == 2)
            assert (a.paused, b.paused) == (True, True)
            await turns(100)
            assert not any(answer.done() for answer in answers)
            await pool.resume()
            for i, answer in enumerate(await asyncio.gather(*answers)):
                check_whole(answer, [20, i])

    @on_the_clock
    async def test_resumed_during_a_replacement(self) -> None:
        async with running(1) as (pool, (engine,)):
            await pool.pause()
            engine.slow = 10
            engine.kill()
            answer = ask(pool, [5], "x")
            await turns(4)
            await pool.resume()
            check_whole(await answer, [5])

    @on_the_clock
    async def test_weights_switch_while_paused(self) -> None:
        async with running(1) as (pool, _):
            await pool.pause()
            answer = ask(pool, [5], "x")
            await pool.update_weights(1, publication(1))
            await pool.resume()
            assert (await answer).versions == [1] * 5


class TestAddAndRemove:
    @on_the_clock
    async def test_added_engine_serves_the_newest_before_it_joins(self) -> None:
        async with running(1) as (pool, (a,)):
            await pool.update_weights(3, publication(3))
            await pool.pause()
            b = Engine()
            adding = asyncio.create_task(pool.add(b))
            await until(lambda: b.alive)
            assert (b.version, pool.engines, pool.version) == (0, (a,), 3)
            await adding
            assert (b.version, b.paused, pool.engines) == (3, True, (a, b))
            await pool.shutdown()
            assert not b.alive

    @on_the_clock
    async def test_added_engine_is_replaced_when_it_dies(self) -> None:
        async with running(1) as (pool, _):
            await pool.add(b := Engine())
            b.kill()
            await asyncio.sleep(2)
            assert pool.engines[1] is b

    @on_the_clock
    async def test_added_engine_waits_for_a_publication_it_can_load(self) -> None:
        async with running(1) as (pool, _):
            await pool.update_weights(1, publication(1))
            b = Engine()
            b.refuse.add("weights-1")
            adding = asyncio.create_task(pool.add(b))
            await asyncio.sleep(5)
            assert not adding.done()
            await pool.update_weights(2, publication(2))
            await adding
            assert b.version == 2

    @pytest.mark.parametrize("death", ["start", "update", "cancel"])
    @on_the_clock
    async def test_engine_that_can_not_be_added(self, death: str) -> None:
        async with running(1) as (pool, (a,)):
            await pool.update_weights(1, publication(1))
            b = Engine()
            b.slow, b.fail_starts = 10, int(death == "start")
            adding = asyncio.create_task(pool.add(b))
            await turns(15)
            if death == "update":
                b.kill()
            elif death == "cancel":
                adding.cancel()
            (error,) = await asyncio.gather(adding, return_exceptions=True)
            wanted = {"start": OSError, "update": RuntimeError, "cancel": asyncio.CancelledError}
            assert type(error) is wanted[death]
            assert not b.alive
            assert pool.engines == (a,)
            with pytest.raises(ValueError, match="not in the pool"):
                await pool.remove(b)
            b.slow = 1
            await pool.add(b)
            assert pool.engines == (a, b)

    @on_the_clock
    async def test_removed_engine_finishes_what_it_has_begun(self) -> None:
        async with running(2) as (pool, (a, b)):
            answers = [ask(pool, [20, i], str(i)) for i in range(4)]
            await turns(5)
            removing = asyncio.create_task(pool.remove(a))
            await turns(1)
            answers += [ask(pool, [20, i], str(i)) for i in (4, 5)]
            await pool.update_weights(1, publication(1))  # told of weights to the last
            assert a.version == 1
            with pytest.raises(ValueError, match="leaving"):
                await pool.remove(a)
            with pytest.raises(ValueError, match="last engine"):
                await pool.remove(b)
            await removing
            assert not a.alive
            assert a.request_ids == ["0", "2"]
            assert pool.engines == (b,)
            for i, answer in enumerate(await asyncio.gather(*answers)):
                check_whole(answer, [20, i])
            assert pool.stats == PoolStats()

    @on_the_clock
    async def test_removal_is_carried_through(self) -> None:
        async with running(2) as (pool, (a, _)):
            answer = ask(pool, [20], "x")
            await turns(5)
            removing = asyncio.create_task(pool.remove(a))
            await turns(2)
            removing.cancel()
            check_whole(await answer, [20])
            await turns(3)
            assert removing.cancelled()
            assert not a.alive

    @on_the_clock
    async def test_engine_that_dies_while_leaving_is_not_replaced(self) -> None:
        async with running(2) as (pool, (a, b)):
            answers = [ask(pool, [20, i], str(i)) for i in range(2)]
            await turns(5)
            removing = asyncio.create_task(pool.remove(a))
            await turns(2)
            a.kill(silent=True)
            await removing
            for i, answer in enumerate(await asyncio.gather(*answers)):
                check_whole(answer, [20, i])
            assert a.calls.count("start") == 1
            assert b.request_ids == ["1", "0/1"]

    @on_the_clock
    async def test_engine_being_replaced_is_removed(self) -> None:
        async with running(2) as (pool, (a, b)):
            a.slow = 50
            a.kill()
            pool.check_health()
            await turns(5)
            await pool.remove(a)
            assert a.calls == ["start", "shutdown", "start", "shutdown"]
            await turns(100)
            assert pool.engines == (b,)
            assert not a.alive

    @on_the_clock
    async def test_strangers_and_misfits(self) -> None:
        async with running(1) as (pool, (a,)):
            with pytest.raises(ValueError, match="not in the pool"):
                await pool.remove(Engine())
            with pytest.raises(ValueError, match="in the pool already"):
                await pool.add(a)
            with pytest.raises(ValueError, match="max_model_len=64"):
                await pool.add(_with_context(64))
