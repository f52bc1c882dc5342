"""The pool of engines: life, routing, death and its end."""

from __future__ import annotations

import asyncio
import functools
import itertools
import pickle
from collections.abc import Callable
from contextlib import nullcontext

import pytest
from scripted_pool import (
    TURN,
    Engine,
    ask,
    check_begun,
    check_whole,
    on_the_clock,
    publication,
    running,
    token,
    turns,
    until,
    with_context,
)

from torchrl_llm_async.engines import (
    EngineDeadError,
    EnginePool,
    GenerationEngine,
    PoolStats,
    SamplingConfig,
)


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

    @on_the_clock
    async def test_shutdown_breaks_off_a_restart(self) -> None:
        async with running(1) as (pool, (engine,)):
            engine.slow = 10**6
            engine.kill()
            pool.check_health()
            await turns(5)
            await pool.shutdown()

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: EnginePool([]), "give at least one"),
            (lambda: EnginePool([Engine()] * 2), "in the pool already"),
            (lambda: EnginePool([Engine()], max_restarts=-1), "max_restarts=-1"),
            (lambda: EnginePool([Engine(), with_context(64)]), "max_model_len=64"),
        ],
    )
    def test_refused_arguments(self, make: Callable[[], EnginePool], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            make()


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
    async def test_answers_that_are_expected_to_be_long_are_spread(self) -> None:
        async with running(2) as (pool, (a, b)):
            sampling = SamplingConfig(max_new_tokens=50)
            lengths = {"long 0": 40, "short 0": 5, "short 1": 5, "long 1": 999, "short 2": 5}
            answers = [
                asyncio.create_task(
                    pool.generate([9, 0], sampling, request_id=name, expected_tokens=length)
                )
                for name, length in lengths.items()
            ]
            await turns(2)
            # Loads: a 40; b 5; b 10; b 10 + 50; a 45.
            assert list(a.running) == ["long 0", "short 2"]
            assert list(b.running) == ["short 0", "short 1", "long 1"]
            for answer in await asyncio.gather(*answers):
                check_whole(answer, [9, 0])

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
            assert pool.stats.discarded_tokens == 2

    @on_the_clock
    async def test_the_former_partial_is_kept_if_the_next_engine_has_none(self) -> None:
        class Forgetful(Engine):
            def _dead(self, partial=None, discarded=0):
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

    @pytest.mark.inv2
    @pytest.mark.parametrize("unproven", [0, 2])
    @on_the_clock
    async def test_partial_answers_follow_their_request(self, unproven: int) -> None:
        async with running(1) as (pool, (engine,)):
            engine.slow, engine.unproven = 20, unproven
            asked = ask(pool, [30], "x")
            assert pool.partial_answer("x") is None  # not asked yet
            seen = []
            while not asked.done():
                await turns(1)
                seen.append(pool.partial_answer("x"))
                if len(seen) in (10, 45):
                    engine.kill()
                    await until(lambda: "shutdown" in engine.calls)
            assert pool.stats.resubmitted == 2
            answer = await asked
            begun = [partial for partial in seen if partial is not None]
            assert None not in seen[seen.index(begun[0]) : -1]
            for partial in begun:
                check_begun(partial, [30])
                assert partial.finish_reason == "abort"
            sizes = [len(partial.token_ids) for partial in begun]
            assert max(a - b for a, b in itertools.pairwise(sizes)) == unproven
            assert sizes[0] == 1 and sizes[-1] == len(answer.token_ids)
            assert pool.partial_answer("x") is None

    @on_the_clock
    async def test_late_word_of_a_former_life_kills_nothing(self) -> None:
        class Slow(Engine):
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
    @pytest.mark.parametrize("unproven", [5, 99])
    @on_the_clock
    async def test_a_request_that_kills_its_engines_late(self, unproven: int) -> None:
        class Fragile(Engine):
            async def generate(self, prompt_ids, *args, **kwargs):
                if prompt_ids[0] == 90:
                    asyncio.get_running_loop().call_later(20 * TURN, self.kill)
                return await super().generate(prompt_ids, *args, **kwargs)

        async with running([Fragile(), Fragile()], max_restarts=2) as (pool, engines):
            for engine in engines:
                engine.unproven = unproven
            killer = ask(pool, [90], "killer", most=100)
            names = itertools.count()
            while not killer.done():  # every answer in between resets the count of restarts
                check_whole(await ask(pool, [3], f"short {next(names)}"), [3])
            answer = await killer
            check_begun(answer, [90])
            assert bool(answer.token_ids) == (unproven == 5)
            assert answer.finish_reason == "abort"
            assert pool.stats.given_up == 1
            lives = {i for engine in engines for i in engine.request_ids if "killer" in i}
            assert lives == {"killer", "killer/1", "killer/2", "killer/3"}

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

    @pytest.mark.inv5
    @on_the_clock
    async def test_a_restart_that_never_returns_has_failed(self) -> None:
        class Hangs(Engine):
            async def start(self):
                if "start" in self.calls:
                    self.calls.append("start")
                    await asyncio.Event().wait()
                await super().start()

        async with running([Hangs()], max_restarts=2) as (pool, (engine,)):
            request = ask(pool, [20], "x")
            await turns(8)
            engine.kill()
            with pytest.raises(EngineDeadError, match="does not start: not within 600 s"):
                await request
            assert engine.calls == ["start", "shutdown"] * 3

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
    @pytest.mark.parametrize("where", ["shutdown", "update_weights", "check_health"])
    @on_the_clock
    async def test_a_bug_in_a_replacement_reaches_everybody(self, where: str) -> None:
        class Buggy(Engine):
            buggy = False

            def __getattribute__(self, name):
                if name == where and self.buggy:
                    return functools.partial(fail, self)
                return super().__getattribute__(name)

        async def later(self, *args):
            raise ZeroDivisionError("a bug, as told")

        def at_once(self, *args):
            raise ZeroDivisionError("a bug, as told")

        fail = at_once if where == "check_health" else later
        pool = EnginePool([a := Buggy(), b := Engine()])
        await pool.start()
        await pool.update_weights(1, publication(1))
        requests = [ask(pool, [60, i], str(i)) for i in range(4)]
        await turns(6)
        a.buggy = True
        if where != "check_health":
            a.kill()
        for error in await asyncio.gather(*requests, return_exceptions=True):
            assert type(error) is EngineDeadError
            assert isinstance(error.__cause__, ZeroDivisionError)
            assert error.partial.token_ids
        with pytest.raises(EngineDeadError, match="a bug, as told"):
            pool.check_health()
        assert not b.alive
        # What could not be ended is said by shutdown().
        with pytest.raises(ZeroDivisionError) if where == "shutdown" else nullcontext():
            await pool.shutdown()
