"""The pool of engines under any schedule: nothing lost, nothing doubled, nobody left waiting."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scripted_pool import (
    LONG,
    ClockLoop,
    Engine,
    ask,
    check_begun,
    check_whole,
    publication,
    turns,
)

from torchrl_llm_async.engines import EngineDeadError, EnginePool, WeightUpdateError

MAX_RESTARTS = 2


class PoolMachine(RuleBasedStateMachine):
    """Requests, deaths, failing starts, updates, refusals, pauses, joining, leaving, giving up."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = ClockLoop(budget=50_000)
        self.names, self.versions = itertools.count(), itertools.count(1)
        self.engines: list[Engine] = []  # all there ever were
        self.requests: dict[str, tuple[asyncio.Task, list[int], int, int]] = {}
        self.updates: list[asyncio.Task] = []
        self.others: list[asyncio.Task] = []
        self.newest = self.seen = self.answered = self.given_up = 0

    def run(self, coroutine) -> object:
        return self.loop.run_until_complete(coroutine)

    def new_engine(self) -> Engine:
        self.engines.append(engine := Engine())
        return engine

    def do(self, coroutine) -> asyncio.Task:
        return self.loop.create_task(coroutine)

    @initialize(count=st.integers(1, 3))
    def start(self, count: int) -> None:
        self.pool = EnginePool([self.new_engine() for _ in range(count)], max_restarts=MAX_RESTARTS)
        self.run(self.pool.start())

    # ------------------------------------------------------------------ what callers do
    @rule(
        sizes=st.lists(st.tuples(st.integers(1, 50), st.integers(1, LONG)), min_size=1, max_size=4),
        wait=st.integers(0, 20),
    )
    def ask(self, sizes: list[tuple[int, int]], wait: int) -> None:
        async def submit():
            for length, most in sizes:
                name = next(self.names)
                prompt = [length, name]
                task = ask(self.pool, prompt, str(name), most=most)
                self.requests[str(name)] = task, prompt, most, self.pool.version
            await turns(wait)

        self.run(submit())

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests, key=int)))
        task = self.requests[name][0]
        if not task.done():
            del self.requests[name]
            task.cancel()
            self.run(asyncio.wait([task]))
            assert task.cancelled()
            for engine in self.engines:
                assert not any(i.partition("/")[0] == name for i in engine.running)

    @rule(skip=st.integers(0, 2), data=st.data(), cancel=st.booleans())
    def update(self, skip: int, data, cancel: bool) -> None:
        version = self.newest = self.newest + skip or 1
        path = Path(f"{next(self.versions)}/{publication(version)}")
        for engine in data.draw(st.lists(st.sampled_from(self.engines), max_size=3)):
            engine.refuse.add(str(path))
        self.updates.append(task := self.do(self.pool.update_weights(version, path)))
        if cancel:
            self.run(turns(2))
            task.cancel()

    @rule(paused=st.booleans())
    def pause(self, paused: bool) -> None:
        self.others.append(self.do(self.pool.pause() if paused else self.pool.resume()))
        self.run(turns(1))

    @precondition(lambda self: len(self.engines) < 6)
    @rule(fail_starts=st.integers(0, 1), cancel=st.booleans())
    def add(self, fail_starts: int, cancel: bool) -> None:
        engine = self.new_engine()
        engine.fail_starts = fail_starts
        self.others.append(task := self.do(self.pool.add(engine)))
        if cancel:
            self.run(turns(2))
            task.cancel()

    @rule(data=st.data())
    def remove(self, data) -> None:
        self.others.append(self.do(self.pool.remove(data.draw(st.sampled_from(self.engines)))))
        self.run(turns(1))

    # ------------------------------------------------------------------ what happens to engines
    @rule(data=st.data(), silent=st.booleans(), unproven=st.integers(0, 3))
    def kill(self, data, silent: bool, unproven: int) -> None:
        engine = data.draw(st.sampled_from(self.engines))
        engine.unproven = unproven
        engine.kill(silent=silent)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), times=st.integers(2, MAX_RESTARTS + 2))
    def kills_its_engines(self, data, times: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests, key=int)))
        for _ in range(times):
            self.run(turns(8))
            for engine in self.engines:
                if any(i.partition("/")[0] == name for i in engine.running):
                    engine.kill()

    @rule(data=st.data(), slow=st.integers(0, 30), fail_starts=st.integers(0, MAX_RESTARTS + 1))
    def hamper(self, data, slow: int, fail_starts: int) -> None:
        engine = data.draw(st.sampled_from(self.engines))
        engine.slow, engine.fail_starts = slow, fail_starts

    @rule(data=st.data())
    def lose_publications(self, data) -> None:
        """As a store sweeps them when newer ones are written."""
        engine = data.draw(st.sampled_from(self.engines))
        engine.oldest_kept = self.newest

    @rule(count=st.integers(1, 100))
    def go_on(self, count: int) -> None:
        self.run(turns(count))

    # ------------------------------------------------------------------ what holds at any time
    @invariant()
    def version_is_honest(self) -> None:
        version = self.pool.version
        assert version >= self.seen
        self.seen = version
        assert all(engine.version >= version for engine in self.pool.engines)

    @invariant()
    def answers_are_whole(self) -> None:
        for name, (task, prompt, most, version) in list(self.requests.items()):
            if task.done() and not isinstance(task.exception(), EngineDeadError):
                answer = task.result()
                if answer.finish_reason == "abort":
                    self.given_up += 1
                    check_begun(answer, prompt)
                else:
                    check_whole(answer, prompt, most)
                assert min(answer.versions, default=version) >= version
                self.answered += 1
                del self.requests[name]
        assert self.pool.stats.given_up == self.given_up
        discarded = sum(engine.discarded for engine in self.engines)
        assert self.pool.stats.discarded_tokens == discarded

    @invariant()
    def restarts_are_limited(self) -> None:
        for engine in self.engines:
            assert engine.starts_since_answer <= MAX_RESTARTS + 1

    # ------------------------------------------------------------------ the end
    def teardown(self) -> None:
        """Nothing happens any more, and everybody must get an answer or the error."""
        try:
            self.run(self.everybody_ends())
        finally:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(turns(3))
            self.loop.close()

    async def everybody_ends(self) -> None:
        for engine in self.engines:
            engine.fail_starts = 0
        await asyncio.gather(self.pool.resume(), return_exceptions=True)
        version = self.newest + 1
        last = await asyncio.gather(
            self.pool.update_weights(version, publication(version)), return_exceptions=True
        )
        tasks = [task for task, *_ in self.requests.values()]
        if tasks:
            await asyncio.wait(tasks)
        heard = await asyncio.gather(*tasks, return_exceptions=True)
        if any(isinstance(error, EngineDeadError) for error in [*heard, *last]):
            with pytest.raises(EngineDeadError):
                self.pool.check_health()
        else:
            assert last == [None]
            assert self.pool.version == version
            self.answers_are_whole()
            assert not self.requests
        for error in await asyncio.gather(*self.updates, return_exceptions=True):
            assert error is None or isinstance(
                error, WeightUpdateError | EngineDeadError | asyncio.CancelledError
            )
        for error in await asyncio.gather(*self.others, return_exceptions=True):
            assert error is None or isinstance(
                error, ValueError | RuntimeError | asyncio.CancelledError
            )
        await self.pool.shutdown()
        assert not any(engine.running for engine in self.engines)
        await turns(40)  # an engine that was just being added ends
        assert not any(engine.alive or engine.silent for engine in self.engines)
        assert asyncio.all_tasks() == {asyncio.current_task()}


TestPool = pytest.mark.inv2(pytest.mark.inv5(PoolMachine.TestCase))
TestPool.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
