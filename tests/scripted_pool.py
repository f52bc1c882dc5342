"""Engines that do as told for tests of a pool, and a clock that never waits.

Each engine answers with tokens that depend on prompt and position alone, and with log-probabilities
that tell of the weights, so that any answer can be checked to be whole, whoever gave its parts.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import selectors
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from torchrl_llm_async.engines import (
    EngineDeadError,
    EnginePool,
    Generation,
    SamplingConfig,
    WeightUpdateError,
)

EOS = 1
LONG = 40  # tokens of the longest answers
TURN = 0.05  # seconds that a turn of the loop takes


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
        refuse: paths of the publications it refuses.
        oldest_kept: it finds no older publications.
        fail_starts: how many of its next starts fail.
        slow: turns a start or a switch takes.
        unproven: tokens at the end of an interrupted answer whose version is not proven.
        discarded: how many such tokens it has lost.
    """

    max_model_len = 128

    def __init__(self) -> None:
        self.refuse: set[str] = set()
        self.fail_starts = self.unproven = self.oldest_kept = self.discarded = 0
        self.slow = 1
        self.alive = self.silent = self.paused = False
        self.version = self.weights = 0
        self.life = 0
        self.calls: list[str] = []
        self.running: dict[str, int] = {}
        self.answers: dict[str, Generation] = {}
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

    def _dead(self, partial: Generation | None = None, discarded: int = 0) -> EngineDeadError:
        self.discarded += discarded
        return EngineDeadError("the engine died, as told", partial, discarded)

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
                    lost = len(answer.token_ids) - kept
                    raise self._dead(proven if kept else None, lost)
                position = len(answer.token_ids)
                if position and answer.token_ids[-1] == EOS:
                    reason = "stop"
                elif position == sampling.max_new_tokens:
                    reason = "length"
                else:
                    if not self.silent and not self.paused:
                        drawn = token(prompt_ids, position), log_prob(self.weights, position)
                        drawn = Generation([drawn[0]], [drawn[1]], [self.version], "abort")
                        answer = self.answers[request_id] = answer.followed_by(drawn)
                    continue
                self.starts_since_answer = 0
                return Generation(answer.token_ids, answer.log_probs, answer.versions, reason)
        finally:
            del self.running[request_id]
            self.answers.pop(request_id, None)

    def partial_answer(self, request_id):
        answer = self.answers.get(request_id)
        return answer if answer is not None and answer.token_ids else None

    async def update_weights(self, version: int, path: Path) -> None:
        self.check_health()
        life = self.life
        self.calls.append(f"update {version}")
        for _ in range(self.slow):
            await turns(1)
            if self.silent:
                await self._end_of(life)
            if self.life != life or not self.alive:
                raise self._dead()
        if str(path) in self.refuse or version < self.oldest_kept:
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
        await turns(1)


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


def check_begun(answer: Generation, prompt: list[int]) -> None:
    assert answer.token_ids == [token(prompt, i) for i in range(len(answer.token_ids))]
    assert answer.log_probs == [log_prob(v, i) for i, v in enumerate(answer.versions)]


def check_whole(answer: Generation, prompt: list[int], most: int = LONG) -> None:
    check_begun(answer, prompt)
    assert len(answer.token_ids) == min(prompt[0], most)
    assert answer.finish_reason == ("stop" if prompt[0] <= most else "length")


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await turns(1)


def with_context(size: int) -> Engine:
    engine = Engine()
    engine.max_model_len = size
    return engine
