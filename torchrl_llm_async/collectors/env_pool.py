"""Environments off the event loop: a bounded number of threads, a time limit on every call.

Owns the worker threads, the environment instances and the rule for a step that fails: again where
that is sound, then an :class:`EpisodeError`. What becomes of the group is the affair of
:mod:`.rollouts`; what is said in the conversation that of :mod:`.episode`.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from tensordict import TensorDictBase
from torch import Tensor
from torchrl._utils import logger as torchrl_logger
from torchrl.envs import EnvBase

T = TypeVar("T")

# Making an instance may load a data set, which says nothing about how long a step may take.
_MAKE_TIMEOUT_S = 600.0
# Each holds a thread and an environment until its call returns, if it ever does.
_MAX_STUCK_THREADS = 32
_SEEN_ELSEWHERE = {"reward", "done", "terminated", "truncated", "tokens", "text", "history"}


class EpisodeError(RuntimeError):
    """A trajectory that can't be finished, for a reason of its own; its cause is the error met.

    Args:
        message: what happened.
        reason: under which its group's rejection is counted; one of few, fixed names.
    """

    def __init__(self, message: str, reason: str = "episode failed"):
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Step:
    """What an environment's step gave.

    Args:
        after: its ``"next"`` entry.
        reward: sum of the reward's elements; None if there was none.
        terminated, truncated, done: whether any element is set; False if there was none.
        extras: tensor entries that are the environment's own (``"success"``, ...), flat.
    """

    after: TensorDictBase
    reward: float | None
    terminated: bool
    truncated: bool
    done: bool
    extras: dict[str, np.ndarray]

    @classmethod
    def take(cls, env: EnvBase, action: TensorDictBase) -> Step:
        """Steps an environment with a copy of ``action``, which it may change in place."""
        after = env.step(action.clone())["next"]
        reward = after.get("reward", None)
        flags = {key: after.get(key, None) for key in ("terminated", "truncated", "done")}
        return cls(
            after=after,
            reward=None if reward is None else float(reward.sum()),
            **{key: flag is not None and bool(flag.any()) for key, flag in flags.items()},
            extras={
                key: value.detach().cpu().numpy().reshape(-1)
                for key, value in after.items()
                if key not in _SEEN_ELSEWHERE and isinstance(value, Tensor)
            },
        )


class StuckThreadsError(RuntimeError):
    """So many environment calls hang that going on would only pile up more."""


class OutOfTimeError(TimeoutError):
    """A call took longer than its limit, and may go on in its thread."""


class WorkerThreads:
    """A bounded pool of threads for calls that may hang.

    Unlike an executor's, a call's time limit does not count its time in the queue, a thread whose
    call does not return in time is given up and replaced, and none keeps the interpreter from
    ending. Belongs to one event loop.

    Args:
        count: calls that run at once.
    """

    def __init__(self, count: int):
        self._idle: asyncio.LifoQueue[queue.SimpleQueue] = asyncio.LifoQueue()
        self._stuck = 0
        for _ in range(count):
            self._idle.put_nowait(self._new_thread())

    async def call(self, timeout: float, function: Callable, *args: Any) -> Any:
        """Calls ``function(*args)`` in a thread and returns what it returns.

        Raises:
            OutOfTimeError: it has not returned after ``timeout`` seconds; it may still run.
            StuckThreadsError: too many calls hang.
            RuntimeError: ``function`` raised a StopIteration.
            BaseException: whatever else ``function`` raises.
        """
        thread = await self._idle.get()
        if self._stuck > _MAX_STUCK_THREADS:
            self._idle.put_nowait(thread)
            raise StuckThreadsError(
                f"{self._stuck} environment calls hang, each in a thread of its own; give what "
                "they wait for (a tool, a reward server) a time limit"
            )
        # A caller that is cancelled leaves the call behind, which has to be waited for all the
        # same, or given up: the thread must not be lost.
        watch = asyncio.ensure_future(self._watch(thread, timeout, function, args))
        watch.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(watch)

    async def _watch(
        self, thread: queue.SimpleQueue, timeout: float, function: Callable, args: tuple
    ) -> Any:
        answer = asyncio.get_running_loop().create_future()
        thread.put((answer, function, args))
        done, _ = await asyncio.wait({answer}, timeout=timeout)
        if done:
            self._idle.put_nowait(thread)
            return answer.result()
        thread.put(None)  # Ends it, should the call ever return.
        self._stuck += 1
        answer.add_done_callback(self._returned_late)
        self._idle.put_nowait(self._new_thread())
        raise OutOfTimeError

    def _returned_late(self, answer: asyncio.Future) -> None:
        self._stuck -= 1
        if not answer.cancelled():
            answer.exception()  # Nobody is left to read it.

    def _new_thread(self) -> queue.SimpleQueue:
        inbox: queue.SimpleQueue = queue.SimpleQueue()
        loop = asyncio.get_running_loop()
        threading.Thread(target=_work, args=(inbox, loop), name="env", daemon=True).start()
        return inbox

    def close(self) -> None:
        """Ends the idle threads; the others end with the process."""
        while not self._idle.empty():
            self._idle.get_nowait().put(None)


def _work(inbox: queue.SimpleQueue, loop: asyncio.AbstractEventLoop) -> None:
    while (job := inbox.get()) is not None:
        answer, function, args = job
        try:
            outcome = (answer.set_result, function(*args))
        except StopIteration as error:  # No future can hold it.
            exhausted = RuntimeError(
                "the environment ran out of problems (StopIteration); let it begin anew"
            )
            exhausted.__cause__ = error
            outcome = (answer.set_exception, exhausted)
        except BaseException as error:
            outcome = (answer.set_exception, error)
        try:
            loop.call_soon_threadsafe(_settle, answer, *outcome)
        except RuntimeError:  # The loop is closed: nobody waits any more.
            return


def _settle(answer: asyncio.Future, settle: Callable, value: Any) -> None:
    if not answer.done():
        settle(value)


class EnvPool:
    """Instances of one environment, made as they are needed and used again.

    Args:
        make_env: makes an instance.
        threads: where they are made, reset and stepped.
        timeout: seconds one step or reset may take.
        retries: how often a step that failed is tried again.
        seed: every instance's seed; None leaves it alone.

    Attributes:
        retried: steps tried again up to now.
    """

    def __init__(
        self,
        make_env: Callable[[], EnvBase],
        threads: WorkerThreads,
        *,
        timeout: float,
        retries: int,
        seed: int | None = None,
    ):
        self.timeout, self.retries, self.retried = timeout, retries, 0
        self._make_env, self._threads, self._seed = make_env, threads, seed
        self._free: list[EnvBase] = []

    async def make(self) -> EnvBase:
        """A new instance."""

        def make() -> EnvBase:
            env = self._make_env()
            if self._seed is not None:
                env.set_seed(self._seed)
            return env

        return await self._call("constructor", _MAKE_TIMEOUT_S, make)

    async def reset(self, env: EnvBase) -> TensorDictBase:
        """Resets an instance; raises OutOfTimeError, or what the reset raises."""
        return await self._call("reset", self.timeout, env.reset)

    async def discard(self, env: EnvBase) -> None:
        """Closes an instance that is not used again: a tool may hold a process."""
        try:
            await self._call("close", self.timeout, env.close)
        except StuckThreadsError:
            raise
        except Exception as error:  # It may have failed for good, and is of no more use.
            torchrl_logger.warning(f"an environment could not be closed: {error!r}")

    def lease(self, *, stateful: bool) -> EnvLease:
        """An instance for one trajectory.

        Args:
            stateful: the trajectory has several turns, between which tools may keep a state in
                the instance.
        """
        return EnvLease(self, stateful=stateful)

    async def take(self) -> EnvBase:
        """An instance that nobody uses, or a new one."""
        return self._free.pop() if self._free else await self.make()

    def give_back(self, env: EnvBase) -> None:
        """Lets others use an instance."""
        self._free.append(env)

    async def step(self, env: EnvBase, action: TensorDictBase) -> Step:
        """Steps an instance; raises OutOfTimeError, or what the step raises."""
        # All of it in the thread: in the loop's, each tensor operation would give the interpreter
        # away and wait to get it back.
        return await self._call("step", self.timeout, Step.take, env, action)

    async def _call(self, what: str, timeout: float, function: Callable, *args: Any) -> Any:
        try:
            return await self._threads.call(timeout, function, *args)
        except OutOfTimeError as error:
            raise OutOfTimeError(
                f"an environment's {what} took longer than {timeout} s (rewards and tools run "
                "there); make it faster or raise collector.step_timeout"
            ) from error

    async def close(self) -> None:
        """Closes the instances that nobody uses."""
        while self._free:
            await self.discard(self._free.pop())


class EnvLease:
    """One trajectory's hold on an environment; an async context manager.

    A stateful lease keeps one instance throughout, which is reset first, so that tools start afresh
    (what the reset draws is not used: the trajectory begins with its group's problem). Otherwise
    an instance is held for the time of a step only.
    """

    def __init__(self, pool: EnvPool, *, stateful: bool):
        self._pool, self._stateful = pool, stateful
        self._env: EnvBase | None = None
        self._is_called = False  # a thread is at work in the instance, or was when last seen

    async def __aenter__(self) -> EnvLease:
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        await self._release(failed=kind is not None and issubclass(kind, Exception))

    async def _release(self, *, failed: bool) -> None:
        env, self._env = self._env, None
        if env is None or self._is_called:
            return
        if failed:
            await self._pool.discard(env)
        else:
            self._pool.give_back(env)

    async def step(self, action: TensorDictBase) -> Step:
        """Steps the environment; a failure is never a reward of 0.

        A step that fails is tried again with another instance; not so if the lease is stateful,
        since no other instance has its tools' state, and in this one they may have acted already.

        Raises:
            EpisodeError: the last try failed or took too long.
        """
        retries = 0 if self._stateful else self._pool.retries
        for attempt in range(1 + retries):
            try:
                return await self._attempt(action)
            except StuckThreadsError:
                raise
            except Exception as error:  # An environment, a tool or a reward may raise anything.
                if attempt == retries:
                    out_of_time = isinstance(error, OutOfTimeError)
                    reason = "environment timed out" if out_of_time else "environment failed"
                    raise EpisodeError(f"{type(error).__name__}: {error}", reason) from error
                torchrl_logger.warning(f"an environment step failed and is tried again: {error!r}")
                self._pool.retried += 1
        raise AssertionError("unreachable")

    async def _attempt(self, action: TensorDictBase) -> Step:
        self._is_called = False
        failed = True
        try:
            if self._env is None:
                self._env = await self._pool.take()
                if self._stateful:
                    await self._while_called(self._pool.reset(self._env))
            step = await self._while_called(self._pool.step(self._env, action))
            failed = False
        finally:
            if not self._stateful:
                await self._release(failed=failed)
        return step

    async def _while_called(self, call: Coroutine[None, None, T]) -> T:
        self._is_called = True
        try:
            result = await call
        except (asyncio.CancelledError, OutOfTimeError):
            raise  # The call goes on.
        except BaseException:
            self._is_called = False
            raise
        self._is_called = False
        return result
