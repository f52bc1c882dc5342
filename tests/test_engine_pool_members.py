"""The pool of engines: weights and pauses for all of them, joining and leaving."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest
from scripted_pool import (
    Engine,
    ask,
    check_whole,
    on_the_clock,
    publication,
    running,
    turns,
    until,
    with_context,
)

from torchrl_llm_async.engines import EngineDeadError, EnginePool, PoolStats, WeightUpdateError


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
            with pytest.raises(WeightUpdateError, match=r"by 1 of 3 engines.*version 1.*engine 1"):
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
    async def test_no_engine_is_told_of_older_weights_than_it_serves(self) -> None:
        async with running(2) as (pool, (a, b)):
            b.slow = 40
            a.kill()
            pool.check_health()
            updates = [
                asyncio.create_task(pool.update_weights(v, publication(v))) for v in (1, 2, 3)
            ]
            await until(lambda: len(pool.engines) == 2)
            assert (a.version, b.version) == (3, 0)
            await asyncio.gather(*updates)
            assert [call for call in a.calls if "update" in call] == ["update 3"] * 2
            assert pool.version == 3

    @on_the_clock
    async def test_refused_by_one_that_then_joined_with_a_later_one(self) -> None:
        async with running(2) as (pool, (a, b)):
            await pool.update_weights(1, publication(1))
            a.refuse |= {"weights-1", "weights-2"}
            b.slow = 50
            a.kill()
            b.kill()
            pool.check_health()
            second = asyncio.create_task(pool.update_weights(2, publication(2)))
            await until(lambda: a.calls[-2:] == ["update 2", "update 1"])
            await turns(5)
            await asyncio.gather(second, pool.update_weights(3, publication(3)))
            assert pool.engines == (a,)

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
    async def test_nothing_older_while_others_serve(self) -> None:
        """It would hold back the version that is just being switched to."""
        async with running(2) as (pool, (a, b)):
            await pool.update_weights(1, publication(1))
            b.slow = 50
            a.refuse.add("weights-2")
            a.kill()
            await pool.update_weights(2, publication(2))
            assert (pool.engines, pool.version) == ((b,), 2)

    @pytest.mark.parametrize("how", ["the one that lagged behind died", "the caller gave up"])
    @on_the_clock
    async def test_nothing_older_than_the_last_served(self, how: str) -> None:
        async with running(2) as (pool, (a, b)):
            await pool.update_weights(1, publication(1))
            update = asyncio.create_task(pool.update_weights(2, publication(2)))
            if how == "the caller gave up":
                await until(lambda: a.version == b.version == 2)
                update.cancel()
            else:
                a.refuse.add("weights-2")
                await asyncio.wait([update])
                a.kill()
                pool.check_health()
                assert pool.engines == (b,)
            for engine in (a, b):
                engine.refuse.add("weights-2")
                engine.kill()
            request = ask(pool, [3], "x")
            await asyncio.sleep(30)
            assert pool.engines == ()
            await pool.update_weights(3, publication(3))
            assert (await request).versions == [3] * 3

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
            message = r"version 1 or later.*weights-1 refused"
            with pytest.raises(EngineDeadError, match=message) as died:
                await ask(pool, [3], "x")
            assert isinstance(died.value.__cause__, WeightUpdateError)


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
            assert type(error) is (asyncio.CancelledError if death == "cancel" else RuntimeError)
            assert not b.alive
            assert pool.engines == (a,)
            with pytest.raises(ValueError, match="not in the pool"):
                await pool.remove(b)
            b.slow = 1
            await pool.add(b)
            assert pool.engines == (a, b)

    @pytest.mark.inv5
    @on_the_clock
    async def test_the_last_hope_fails(self) -> None:
        async with running(1, max_restarts=0) as (pool, (a,)):
            b = Engine()
            b.slow, b.fail_starts = 30, 1
            adding = asyncio.create_task(pool.add(b))
            await turns(2)
            a.kill()
            request = ask(pool, [5], "x")
            await turns(10)
            assert not request.done()
            for error in await asyncio.gather(request, adding, return_exceptions=True):
                assert type(error) is EngineDeadError
                assert "no engine is left" in str(error)
                assert "no memory, as told" in str(error)

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

    @pytest.mark.inv5
    @on_the_clock
    async def test_one_that_is_still_joining_replaces_nobody(self) -> None:
        async with running(1) as (pool, (a,)):
            b = Engine()
            b.slow, b.fail_starts = 10, 1
            adding = asyncio.create_task(pool.add(b))
            await turns(3)
            with pytest.raises(ValueError, match="last engine"):
                await pool.remove(a)
            with pytest.raises(RuntimeError, match="was not added"):
                await adding
            check_whole(await ask(pool, [5], "x"), [5])

    @on_the_clock
    async def test_one_that_is_being_replaced_counts(self) -> None:
        async with running(2) as (pool, (a, b)):
            b.kill()
            pool.check_health()
            await pool.remove(a)
            check_whole(await ask(pool, [5], "x"), [5])

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
            a.slow = 10**6
            a.kill()
            pool.check_health()
            await turns(5)
            await pool.remove(a)
            assert a.calls == ["start", "shutdown", "start", "shutdown"]
            assert pool.engines == (b,)
            assert not a.alive

    @pytest.mark.parametrize("wait", range(5))
    @on_the_clock
    async def test_engine_being_given_up_is_removed(self, wait: int) -> None:
        async with running(2, max_restarts=0) as (pool, (a, b)):
            a.kill()
            pool.check_health()
            await turns(wait)
            with suppress(ValueError):  # it is gone already
                await pool.remove(a)
            await turns(5)
            check_whole(await ask(pool, [5], "x"), [5])
            assert pool.engines == (b,)

    @on_the_clock
    async def test_strangers_and_misfits(self) -> None:
        async with running(1) as (pool, (a,)):
            with pytest.raises(ValueError, match="not in the pool"):
                await pool.remove(Engine())
            with pytest.raises(ValueError, match="in the pool already"):
                await pool.add(a)
            with pytest.raises(ValueError, match="max_model_len=64"):
                await pool.add(with_context(64))


class OfAnotherRun(Engine):
    """As a server that an earlier run has left at version 2."""

    async def start(self) -> None:
        await super().start()
        self.version = self.weights = 2


class TestOfAnotherRun:
    @pytest.mark.inv2
    @on_the_clock
    async def test_its_weights_are_refused_at_the_start(self) -> None:
        fresh, used = Engine(), OfAnotherRun()
        with pytest.raises(RuntimeError, match=r"serves version 2, .*launch its server anew"):
            await EnginePool([fresh, used]).start()
        assert not fresh.alive and not used.alive

    @pytest.mark.inv2
    @on_the_clock
    async def test_its_weights_are_refused_where_it_would_join(self) -> None:
        async with running(1) as (pool, _):
            await pool.update_weights(1, publication(1))
            with pytest.raises(RuntimeError, match="nothing later than 1 was published"):
                await pool.add(OfAnotherRun())
            await pool.update_weights(2, publication(2))
            await pool.add(OfAnotherRun())
            assert len(pool.engines) == 2
