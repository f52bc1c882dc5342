"""Environments off the loop: bounded threads, time limits, what is tried again and what is not."""

from __future__ import annotations

import asyncio
import threading

import pytest
from scripted import ScriptedEnv

from torchrl_llm_async.collectors.env_pool import (
    EnvPool,
    EpisodeError,
    OutOfTimeError,
    StuckThreadsError,
    WorkerThreads,
)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


def test_no_more_calls_run_at_once_than_there_are_threads():
    async def main():
        threads = WorkerThreads(3)
        lock, now, most = threading.Lock(), 0, 0
        barrier = threading.Barrier(3)

        def call():
            nonlocal now, most
            with lock:
                now += 1
                most = max(most, now)
            barrier.wait(10)  # Three do run at once, or this breaks.
            with lock:
                now -= 1

        await asyncio.gather(*(threads.call(20, call) for _ in range(9)))
        threads.close()
        return most

    assert run(main()) == 3


def test_time_in_the_queue_does_not_count():
    async def main():
        threads = WorkerThreads(1)
        go = threading.Event()
        first = asyncio.ensure_future(threads.call(20, go.wait))
        await asyncio.sleep(0)
        second = asyncio.ensure_future(threads.call(2.0, lambda: "in time"))
        await asyncio.wait({second}, timeout=2.5)
        assert not second.done()
        go.set()
        await first
        return await second

    assert run(main()) == "in time"


@pytest.mark.inv5
def test_a_call_that_hangs_costs_no_thread():
    async def main():
        threads = WorkerThreads(1)
        hang = threading.Event()
        for _ in range(3):
            with pytest.raises(OutOfTimeError):
                await threads.call(0.02, hang.wait)
        assert await threads.call(20, lambda: 5) == 5
        hang.set()

    run(main())


@pytest.mark.inv5
def test_a_cancelled_caller_costs_no_thread():
    async def main():
        threads = WorkerThreads(1)
        go = threading.Event()
        call = asyncio.ensure_future(threads.call(20, go.wait))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        after = asyncio.ensure_future(threads.call(20, lambda: 5))
        go.set()
        return await after

    assert run(main()) == 5


@pytest.mark.inv5
def test_too_many_calls_that_hang_are_an_error():
    async def main():
        threads = WorkerThreads(1)
        hang = threading.Event()
        calls = [asyncio.ensure_future(threads.call(0.001, hang.wait)) for _ in range(33)]
        done = await asyncio.gather(*calls, return_exceptions=True)
        for _ in range(2):  # whoever comes, however the others took it
            with pytest.raises(StuckThreadsError, match="33 environment calls hang"):
                await threads.call(20, lambda: 5)
        hang.set()
        return {type(error) for error in done}

    assert run(main()) == {OutOfTimeError}


class Unsteady(ScriptedEnv):
    """Fails as often as told, over all instances; counts what was done to each."""

    def __init__(self, failures=0, hangs=0, turns=1):
        super().__init__(turns=turns)
        self.resets = self.steps = self.closes = 0
        made.append(self)
        self.failures, self.hangs = failures, hangs

    def _reset(self, tensordict=None, **kwargs):
        self.resets += 1
        return super()._reset(tensordict, **kwargs)

    def close(self, **kwargs):
        self.closes += 1
        super().close(**kwargs)

    def _step(self, tensordict):
        self.steps += 1
        tries = sum(env.steps for env in made)
        if tries <= self.failures:
            raise ZeroDivisionError("as told")
        if tries <= self.hangs:
            threading.Event().wait()
        return super()._step(tensordict)


made: list[Unsteady] = []


async def step(pool, *, stateful, steps=1):
    observation = ScriptedEnv().reset().set(("text", "response"), "1")
    async with pool.lease(stateful=stateful) as env:
        return [await env.step(observation) for _ in range(steps)]


def make_pool(timeout=20.0, **options):
    made.clear()

    def make():
        return Unsteady(**options)

    return EnvPool(make, WorkerThreads(2), timeout=timeout, retries=1, seed=0)


@pytest.mark.inv7
class TestFailures:
    def test_a_step_is_tried_again_with_another_instance(self):
        async def main():
            pool = make_pool(failures=1)
            (after,) = await step(pool, stateful=False)
            return pool.retried, after.reward

        retried, reward = run(main())
        assert retried == 1 and reward == 1.0
        assert [env.steps for env in made] == [1, 1]
        assert [env.closes for env in made] == [1, 0]

    def test_the_last_failure_is_the_cause(self):
        async def main():
            with pytest.raises(EpisodeError, match="ZeroDivisionError: as told") as caught:
                await step(make_pool(failures=2), stateful=False)
            return caught.value

        error = run(main())
        assert error.reason == "environment failed"
        assert isinstance(error.__cause__, ZeroDivisionError)

    def test_a_step_that_hangs_is_tried_again(self):
        async def main():
            (after,) = await step(make_pool(hangs=1, timeout=3.0), stateful=False)
            return after.reward

        assert run(main()) == 1.0

    @pytest.mark.parametrize("stateful", [False, True])
    def test_one_that_always_hangs_is_no_reward(self, stateful):
        async def main():
            pool = make_pool(hangs=100, timeout=0.5)
            with pytest.raises(EpisodeError, match=r"longer than 0.5 s") as caught:
                await step(pool, stateful=stateful)
            return caught.value.reason, pool.retried

        assert run(main()) == ("environment timed out", 0 if stateful else 1)

    def test_an_instance_that_failed_for_good_is_closed(self):
        async def main():
            with pytest.raises(EpisodeError):
                await step(make_pool(failures=100), stateful=True)

        run(main())
        assert [env.closes for env in made] == [1]

    def test_several_turns_stay_with_one_instance(self):
        async def main():
            pool = make_pool(turns=3)
            await step(pool, stateful=True, steps=3)
            await step(pool, stateful=True, steps=3)

        run(main())
        (env,) = made
        assert env.steps == 6 and env.resets == 2

    def test_between_turns_nothing_is_tried_again(self):
        """In this instance a tool may have acted already, and no other has its state."""

        async def main():
            pool = make_pool(failures=1)
            with pytest.raises(EpisodeError):
                await step(pool, stateful=True)
            return pool.retried

        assert run(main()) == 0

    def test_a_time_limit_of_the_environments_own_is_a_failure_like_others(self):
        class Impatient(ScriptedEnv):
            def _step(self, tensordict):
                raise TimeoutError("the reward server took 2 s")

        async def main():
            pool = EnvPool(Impatient, WorkerThreads(1), timeout=20, retries=1)
            with pytest.raises(EpisodeError, match="the reward server took 2 s") as caught:
                await step(pool, stateful=False)
            return caught.value.reason, pool.retried

        assert run(main()) == ("environment failed", 1)

    def test_an_instance_that_cannot_be_closed_is_let_go(self):
        class Stubborn(ScriptedEnv):
            def _step(self, tensordict):
                raise ZeroDivisionError("as told")

            def close(self, **kwargs):
                raise BrokenPipeError("its tool is gone")

        async def main():
            pool = EnvPool(Stubborn, WorkerThreads(1), timeout=20, retries=0)
            for stateful in (False, True):
                with pytest.raises(EpisodeError, match="ZeroDivisionError"):
                    await step(pool, stateful=stateful)

        run(main())

    def test_an_instance_of_a_cancelled_trajectory_is_used_again(self):
        async def main():
            pool = make_pool(turns=3)
            answering = asyncio.Event()

            async def trajectory():
                async with pool.lease(stateful=True) as env:
                    await env.step(ScriptedEnv().reset().set(("text", "response"), "1"))
                    answering.set()
                    await asyncio.Event().wait()

            task = asyncio.ensure_future(trajectory())
            await answering.wait()
            task.cancel()
            await asyncio.wait({task})
            await step(pool, stateful=True)

        run(main())
        (env,) = made
        assert env.steps == 2 and env.resets == 2


def test_instances_are_used_again_and_seeded():
    async def main():
        pool = make_pool()
        for _ in range(5):
            await step(pool, stateful=False)
        await pool.close()

    run(main())
    (env,) = made
    assert env.steps == 5 and env.resets == 0 and env.closes == 1


def test_an_environment_that_ran_out_of_problems():
    async def main():
        pool = EnvPool(lambda: ScriptedEnv(problems=0), WorkerThreads(1), timeout=5, retries=0)
        with pytest.raises(RuntimeError, match="ran out of problems"):
            await pool.reset(await pool.make())

    run(main())
