"""One engine of a pool: what the pool knows of it.

Owns the bookkeeping of a single engine and the calls that change it. When to make them is the
pool's affair (:mod:`torchrl_llm_async.engines.pool`).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path

from torchrl_llm_async.engines.base import (
    EngineDeadError,
    Generation,
    GenerationEngine,
    WeightUpdateError,
)


@dataclass(frozen=True, eq=False)
class Publication:
    """Weights as announced; without a path, those an engine starts with."""

    version: int
    path: Path | None


START = Publication(0, None)
# Loading a large model takes minutes; nobody looks after an engine that is started later than the
# pool, so a start that never returns must be told from one that is slow.
_START_S = 600.0


@dataclass
class PoolStats:
    """Counters of an :class:`.EnginePool` since its start.

    Args:
        restarts: attempts to start a dead engine again.
        resubmitted: times an answer was taken up by another engine, or by a replacement.
        given_up: answers that were taken up too often, and ended where they were.
        kept_tokens: sampled tokens that outlived the engine they came from.
        discarded_tokens: sampled tokens that did not, since their versions were not proven; they
            are sampled again.
    """

    restarts: int = 0
    resubmitted: int = 0
    given_up: int = 0
    kept_tokens: int = 0
    discarded_tokens: int = 0


@dataclass
class Request:
    """An answer that the pool has been asked for.

    Args:
        partial: what former engines have sampled of it.
        engine: the one at work on it now.
        name: the request's id there.
    """

    partial: Generation | None
    engine: GenerationEngine | None = None
    name: str = ""

    @property
    def begun(self) -> int:
        """Tokens that former engines have sampled of it."""
        return 0 if self.partial is None else len(self.partial.token_ids)

    def broken_off(self, error: EngineDeadError) -> int:
        """Its engine died; returns how many tokens more there are of it now."""
        self.engine, before = None, self.begun
        self.partial = error.partial or self.partial
        return self.begun - before

    def unfinished(self) -> Generation:
        """As an answer that never will be whole."""
        begun = self.partial or Generation([], [], [], "abort")
        return replace(begun, finish_reason="abort")

    def so_far(self) -> Generation | None:
        """What is known of it."""
        if self.engine is None:
            return self.partial
        return self.engine.partial_answer(self.name) or self.partial


@dataclass(eq=False)
class Member:
    """An engine of the pool, dead or alive.

    Attributes:
        live: it answers, and is told of weights and pauses.
        leaving: it gets no new requests.
        life: counts its deaths, to tell apart what is heard late of a former life.
        restarts: since its last answer.
        requests, load: those it works on, and the tokens they were expected to sample when they
            came.
        paused, serves, refused: of this life, as its engine said.
        replacement: the task that starts it again.
    """

    engine: GenerationEngine
    name: str
    live: bool = False
    leaving: bool = False
    life: int = 0
    restarts: int = 0
    requests: int = 0
    load: int = 0
    paused: bool = False
    serves: Publication = START
    refused: dict[Publication, WeightUpdateError] = field(default_factory=dict)
    replacement: asyncio.Task | None = None

    @property
    def has_joined(self) -> bool:
        """Whether it has ever been live; the replacement of one that died belongs to the pool."""
        return self.live or self.replacement is not None

    async def start(self) -> None:
        """Starts the engine.

        Raises:
            EngineDeadError: it does not start, or not within 10 minutes.
        """
        self.paused, self.serves, self.refused = False, START, {}
        try:
            async with asyncio.timeout(_START_S) as limit:
                await self.engine.start()
        except Exception as error:
            reason = f"not within {_START_S:g} s" if limit.expired() else error
            raise EngineDeadError(f"it does not start: {reason}") from error

    async def switch(self, publication: Publication) -> None:
        """Gives it a publication, and notes whether it accepts it."""
        try:
            await self.engine.update_weights(publication.version, publication.path)
        except WeightUpdateError as error:
            self.refused[publication] = error
        else:
            self.serves = publication
            version = publication.version
            self.refused = {p: e for p, e in self.refused.items() if p.version > version}

    async def set_paused(self, paused: bool) -> None:
        """Pauses or resumes it."""
        await (self.engine.pause() if paused else self.engine.resume())
        self.paused = paused

    def died(self) -> None:
        """Ends this life."""
        self.live = False
        self.life += 1

    def first_choice(self, publications: list[Publication]) -> Publication | None:
        """The first publication that it has not refused."""
        return next((p for p in publications if p not in self.refused), None)
