"""Several engines as one: routing, replacement of the dead, joining and leaving at run time.

Owns which engine answers a request, what becomes of an answer whose engine dies, and at which
version a replacement may join. It deliberately knows nothing of how an engine works, of where
publications come from, or of what versions mean to training: it only keeps to the rule that its
:attr:`EnginePool.version` is served by every engine that answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchrl._utils import logger as torchrl_logger

from torchrl_llm_async.engines.base import (
    EngineDeadError,
    Generation,
    GenerationEngine,
    SamplingConfig,
    WeightUpdateError,
)

__all__ = ["EnginePool", "PoolStats"]

_HEARTBEAT_S = 1.0
# How long no engine may serve while all of them wait for a publication they can load. What makes
# a publication vanish is a newer one, so the next is only a message away.
_PUBLICATION_GRACE_S = 60.0


@dataclass
class PoolStats:
    """Counters of an :class:`EnginePool` since its start.

    Args:
        restarts: attempts to start a dead engine again.
        resubmitted: times an answer was taken up by another engine, or by a replacement.
        kept_tokens: sampled tokens that outlived the engine they came from.
    """

    restarts: int = 0
    resubmitted: int = 0
    kept_tokens: int = 0


@dataclass(frozen=True, eq=False)
class _Publication:
    """Weights as announced; without a path, those an engine starts with."""

    version: int
    path: Path | None


_START = _Publication(0, None)


@dataclass(eq=False)
class _Member:
    """An engine of the pool, dead or alive.

    ``life`` counts its deaths, so that what is heard late of a former life is told apart.
    """

    engine: GenerationEngine
    name: str
    live: bool = False
    leaving: bool = False
    life: int = 0
    restarts: int = 0  # since its last answer
    requests: int = 0
    load: int = 0  # tokens its requests may still sample
    paused: bool = False
    serves: _Publication = _START
    refused: dict[_Publication, WeightUpdateError] = field(default_factory=dict)
    replacement: asyncio.Task | None = None


class EnginePool:
    """A :class:`~torchrl_llm_async.engines.GenerationEngine` made of engines.

    A request goes to the engine whose running requests may sample the fewest further tokens. If
    its engine dies, another one, or a replacement, takes the answer up where its proven tokens
    end. A dead engine is started again in the background and joins once it serves weights no
    older than :attr:`version`, normally the newest. It is given up after ``max_restarts`` attempts
    without an answer in between; when no engine is left, every call and everybody who waits gets
    an :class:`EngineDeadError` with the last reason.

    As long as any engine is live or being replaced, :class:`EngineDeadError` is never raised.

    Args:
        engines: engines that have not been started; all with the same ``max_model_len``.
        max_restarts: restarts of one engine, failed ones included, without an answer completed by
            it in between.

    Raises:
        ValueError: if there is no engine, one is given twice, their ``max_model_len`` differ, or
            ``max_restarts`` is negative.

    Examples:
        >>> async def answer(folder, prompt_ids):  # doctest: +SKIP
        ...     pool = EnginePool([VLLMEngine(folder), VLLMEngine(folder)])
        ...     await pool.start()
        ...     try:
        ...         return await pool.generate(
        ...             prompt_ids, SamplingConfig(max_new_tokens=16), request_id="0"
        ...         )
        ...     finally:
        ...         await pool.shutdown()
    """

    def __init__(self, engines: Sequence[GenerationEngine], *, max_restarts: int = 3) -> None:
        if not engines:
            raise ValueError("a pool of no engines: give at least one")
        if max_restarts < 0:
            raise ValueError(f"max_restarts={max_restarts}: give 0 (never restart) or more")
        self.max_model_len = engines[0].max_model_len
        self.max_restarts = max_restarts
        self.stats = PoolStats()
        self._engines: list[GenerationEngine] = []
        for engine in engines:
            self._check_fits(engine)
            self._engines.append(engine)
        self._members: list[_Member] = []
        self._published = {0: _START}
        self._served = 0
        self._paused = False
        self._ended: EngineDeadError | None = EngineDeadError("the pool was never started")
        self._closing: asyncio.Task | None = None

    @property
    def engines(self) -> tuple[GenerationEngine, ...]:
        """The live engines, those that finish their last requests included."""
        return tuple(member.engine for member in self._live())

    @property
    def version(self) -> int:
        """The smallest version a live engine serves; it never decreases.

        While no engine is live, the last version served.
        """
        versions = [member.engine.version for member in self._live()]
        self._served = max(self._served, min(versions, default=0))
        return self._served

    # ------------------------------------------------------------------ life
    async def start(self) -> None:
        """Starts the engines one after the other, since only a process without threads may fork.

        Raises:
            RuntimeError: if the pool is running already.
            Exception: what the first engine that did not start raised; the others are shut down.
        """
        if self._ended is None:
            raise RuntimeError("this pool is running; shutdown() it first, or make another")
        if self._closing is not None:
            await asyncio.shield(self._closing)
        self._members, self._published, self._closing = [], {0: _START}, None
        self._served, self._paused, self.stats, self._named = 0, False, PoolStats(), 0
        self._news = asyncio.Event()
        self._switching, self._pausing = asyncio.Lock(), asyncio.Lock()
        self._background: set[asyncio.Task] = set()  # cancelled when the pool ends
        self._departures: set[asyncio.Task] = set()  # never cancelled
        try:
            for engine in self._engines:
                await engine.start()
                self._members.append(self._new_member(engine, live=True))
        except BaseException:
            for member in self._members:
                await member.engine.shutdown()
            self._members = []
            raise
        self._ended = None
        self._spawn(self._watch(), self._background)

    async def shutdown(self) -> None:
        """Ends all engines; whoever waits gets an :class:`EngineDeadError`.

        Raises:
            Exception: what an engine's ``shutdown`` raised, after all of them were told.
        """
        self._end(EngineDeadError("the pool was shut down"))
        if self._closing is not None:
            await asyncio.shield(self._closing)

    def check_health(self) -> None:
        """Raises :class:`EngineDeadError` if no engine is live and none will be again.

        Engines found dead are replaced.
        """
        self._raise_if_ended()
        for member in self._live():
            try:
                member.engine.check_health()
            except EngineDeadError as error:
                self._bury(member, member.life, error)
        self._raise_if_ended()

    # ------------------------------------------------------------------ requests
    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingConfig,
        *,
        request_id: str,
        seed: int | None = None,
        partial: Generation | None = None,
    ) -> Generation:
        """Samples one answer, by as many engines as it takes; cancelling aborts the request.

        Args and errors are those of
        :meth:`~torchrl_llm_async.engines.GenerationEngine.generate`. An answer that is taken up
        again has ``/1``, ``/2``, ... behind its ``request_id``, and the same ``seed``.
        """
        attempt = 0
        while True:
            while (member := self._least_loaded(partial)) is None:
                await self._news.wait()
            if attempt:
                self.stats.resubmitted += 1
            life = member.life
            left = sampling.max_new_tokens - _length(partial)
            member.requests += 1
            member.load += left
            try:
                answer = await member.engine.generate(
                    prompt_ids,
                    sampling,
                    request_id=f"{request_id}/{attempt}" if attempt else request_id,
                    seed=seed,
                    partial=partial,
                )
                if member.life == life:
                    member.restarts = 0
                return answer
            except EngineDeadError as error:
                self._bury(member, life, error)
                if error.partial is not None:
                    self.stats.kept_tokens += _length(error.partial) - _length(partial)
                    partial = error.partial
            finally:
                member.requests -= 1
                member.load -= left
                if member.leaving:
                    self._tell()
            attempt += 1

    def _least_loaded(self, partial: Generation | None) -> _Member | None:
        self._raise_if_ended(partial)
        candidates = [member for member in self._live() if not member.leaving]
        return min(candidates, key=lambda member: member.load, default=None)

    # ------------------------------------------------------------------ all engines at once
    async def update_weights(self, version: int, path: Path) -> None:
        """Switches all live engines; those being replaced switch before they join.

        Returns once every live engine, and at least one, serves ``version`` or a later one.

        Raises:
            ValueError: if a later version was published before.
            WeightUpdateError: if engines refused the publication. Those that accepted it serve it,
                and :attr:`version` stays at the oldest that is served, until a later publication
                is accepted by all.
            EngineDeadError: if no engine is left.
        """
        self._raise_if_ended()
        newest = max(self._published)
        if version < newest:
            raise ValueError(f"version {version} after version {newest}: publish a later one")
        # Before anything is awaited, so that a replacement can't join without having seen it.
        publication = self._published[version] = _Publication(version, Path(path))
        self._tell()
        async with self._switching:
            await self._all_live(
                lambda member: self._switch(member, publication),
                [member for member in self._live() if member.engine.version <= version],
            )
            self._raise_if_ended()
            while not self._live() and not self._all_wait_for_a_publication():
                await self._news.wait()
                self._raise_if_ended()
            asked = self._live() or self._members
            refusals = {m.name: m.refused[publication] for m in asked if publication in m.refused}
            if refusals:
                reasons = "; ".join(f"{name}: {error}" for name, error in refusals.items())
                raise WeightUpdateError(
                    f"version {version} was refused by {len(refusals)} of {len(asked)} engines, "
                    f"and the pool serves version {self.version} until a publication is accepted "
                    f"by all ({reasons})"
                ) from next(iter(refusals.values()))
            oldest = self.version
            self._published = {v: p for v, p in self._published.items() if v >= oldest}

    async def pause(self) -> None:
        """Stops sampling at the next token boundary; a replacement joins paused."""
        await self._set_paused(True)

    async def resume(self) -> None:
        """Goes on after :meth:`pause`."""
        await self._set_paused(False)

    async def _set_paused(self, paused: bool) -> None:
        async with self._pausing:
            self._raise_if_ended()
            self._paused = paused
            await self._all_live(self._follow_pause, self._live())
            self._raise_if_ended()

    async def _all_live(
        self, call: Callable[[_Member], Coroutine[Any, Any, None]], members: list[_Member]
    ) -> None:
        async def one(member: _Member, life: int) -> None:
            try:
                await call(member)
            except EngineDeadError as error:
                self._bury(member, life, error)

        await asyncio.gather(*(one(member, member.life) for member in members))

    async def _switch(self, member: _Member, publication: _Publication) -> None:
        """Gives an engine a publication, and notes whether it accepts it."""
        try:
            await member.engine.update_weights(publication.version, publication.path)
        except WeightUpdateError as error:
            member.refused[publication] = error
            self._tell()
        else:
            member.serves = publication
            member.refused = {
                p: e for p, e in member.refused.items() if p.version > member.serves.version
            }

    async def _follow_pause(self, member: _Member) -> None:
        paused = self._paused
        await (member.engine.pause() if paused else member.engine.resume())
        member.paused = paused

    # ------------------------------------------------------------------ joining and leaving
    async def add(self, engine: GenerationEngine) -> None:
        """Starts an engine and lets it join once it serves the newest publication.

        If this is cancelled, the engine is shut down and does not join.

        Args:
            engine: one that has not been started.

        Raises:
            ValueError: if it is in the pool already, or has another ``max_model_len``.
            RuntimeError: if it dies before it joins.
            EngineDeadError: if the pool has ended.
            Exception: what its ``start`` raised.
        """
        self._raise_if_ended()
        self._check_fits(engine)
        self._engines.append(engine)
        self._members.append(member := self._new_member(engine))
        try:
            await engine.start()
            await self._join(member)
        except BaseException as error:
            self._engines.remove(engine)
            self._members.remove(member)
            await engine.shutdown()
            if isinstance(error, EngineDeadError) and self._ended is None:
                error = RuntimeError(f"{member.name} died before it joined: {error}")
            self._end_if_nobody_is_left(member.name, error)
            raise error

    async def remove(self, engine: GenerationEngine) -> None:
        """Lets an engine finish its requests and ends it; it gets no new ones.

        Once begun this is carried through, even if the caller is cancelled.

        Raises:
            ValueError: if it is not in the pool, is joining or leaving, or is the last one.
            EngineDeadError: if the pool has ended.
        """
        self._raise_if_ended()
        member = next((member for member in self._members if member.engine is engine), None)
        if member is None or member.leaving or not (member.live or member.replacement):
            raise ValueError(
                f"{engine!r} is not in the pool, is still joining it, or is leaving: give one of "
                "its engines"
            )
        if not any(other is not member and not other.leaving for other in self._members):
            raise ValueError(
                f"{member.name} is the last engine of the pool: add() another first, or "
                "shutdown() the pool"
            )
        member.leaving = True
        self._engines.remove(engine)
        await asyncio.shield(self._spawn(self._depart(member), self._departures))

    async def _depart(self, member: _Member) -> None:
        if member.replacement is not None:
            member.replacement.cancel()
            await asyncio.wait({member.replacement})
        while member.live and member.requests:
            await self._news.wait()
        await member.engine.shutdown()
        member.live = False
        if member in self._members:  # else it was just given up
            self._members.remove(member)
        self._tell()
        torchrl_logger.info(f"{member.name} left the pool")

    def _check_fits(self, engine: GenerationEngine) -> None:
        if any(engine is other for other in self._engines):
            raise ValueError(f"{engine!r} is in the pool already; make another")
        if engine.max_model_len != self.max_model_len:
            raise ValueError(
                f"max_model_len={engine.max_model_len} of an engine and {self.max_model_len} of "
                "the pool's first: any engine must be able to take up any answer, so give all "
                "the same"
            )

    def _new_member(self, engine: GenerationEngine, *, live: bool = False) -> _Member:
        self._named += 1
        return _Member(engine, f"engine {self._named - 1}", live)

    # ------------------------------------------------------------------ death and replacement
    def _live(self) -> list[_Member]:
        return [member for member in self._members if member.live]

    def _bury(self, member: _Member, life: int, error: EngineDeadError) -> None:
        """Takes note of a death, once, and sets its replacement going."""
        if member.life != life or self._ended is not None:
            return
        self._served = self.version  # while it still counts
        member.live, member.refused = False, {}
        member.life += 1
        if not member.leaving:
            member.replacement = self._spawn(self._replace(member, error), self._background)
        self._tell()

    async def _replace(self, member: _Member, reason: EngineDeadError) -> None:
        """Starts a dead engine again, until it has joined or is given up."""
        while True:
            await member.engine.shutdown()
            if member.restarts == self.max_restarts:
                break
            member.restarts += 1
            self.stats.restarts += 1
            torchrl_logger.warning(
                f"{member.name} died ({_first_line(reason)}); restart {member.restarts} of at "
                f"most {self.max_restarts} without an answer"
            )
            try:
                await self._start_again(member.engine)
                await self._join(member)
                return
            except EngineDeadError as error:
                reason = error
        torchrl_logger.error(f"{member.name} is given up ({_first_line(reason)})")
        self._members.remove(member)
        given_up = f"{member.name} died after {member.restarts} restarts without an answer"
        self._end_if_nobody_is_left(given_up, reason)
        self._tell()

    async def _start_again(self, engine: GenerationEngine) -> None:
        try:
            await engine.start()
        except Exception as error:
            raise EngineDeadError(f"it does not start: {error}") from error

    async def _join(self, member: _Member) -> None:
        """Brings a started engine to where the pool is; only then do requests reach it.

        Between the last look at the pool's state and joining nothing is awaited.
        """
        member.serves, member.refused, member.paused = _START, {}, False
        while True:
            self._raise_if_ended()
            publication = self._next_publication(member)
            if publication is None:
                await self._news.wait()
            elif publication is not member.serves:
                await self._switch(member, publication)
            elif member.paused != self._paused:
                await self._follow_pause(member)
            else:
                break
        member.engine.check_health()
        member.live = True
        self._tell()
        torchrl_logger.info(f"{member.name} serves version {member.engine.version}")

    def _next_publication(self, member: _Member) -> _Publication | None:
        """What an engine that wants to join should serve; None if it has to wait for it.

        The newest publication. Only if no engine is live an older one that it has not refused,
        yet none older than the last version served: nobody else would ever answer, and without
        answers there may be no further publication.
        """
        versions = sorted((v for v in self._published if v >= self.version), reverse=True)
        for version in versions[:1] if self._live() else versions:
            if self._published[version] not in member.refused:
                return self._published[version]
        return None

    def _all_wait_for_a_publication(self) -> bool:
        return all(self._next_publication(member) is None for member in self._members)

    async def _watch(self) -> None:
        """Notices engines that die while nobody talks to them, and a wait that has no end."""
        waited = 0.0
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            self.check_health()
            stuck = not self._live() and self._all_wait_for_a_publication()
            waited = waited + _HEARTBEAT_S if stuck else 0.0
            if waited >= _PUBLICATION_GRACE_S:
                name, reason = next((m.name, e) for m in self._members for e in m.refused.values())
                self._end(
                    EngineDeadError(
                        f"no engine serves, and none can load weights of version {self.version} "
                        f"or later, nor were others published for {waited:.0f} s "
                        f"({name}: {reason})"
                    ),
                    reason,
                )
                return

    # ------------------------------------------------------------------ the end
    def _end_if_nobody_is_left(self, last: str, reason: BaseException) -> None:
        if all(member.leaving for member in self._members):
            self._end(EngineDeadError(f"no engine is left; of {last}: {reason!r}"), reason)

    def _end(self, error: EngineDeadError, cause: BaseException | None = None) -> None:
        """From now on everybody gets the error, and the engines end."""
        if self._ended is not None:
            return
        error.__cause__ = cause
        self._ended = error
        for task in self._background - {asyncio.current_task()}:
            task.cancel()
        self._tell()
        self._closing = asyncio.create_task(self._close())

    async def _close(self) -> None:
        """Ends all engines, so that the requests they still have end too."""
        if self._background:
            await asyncio.wait(self._background)
        outcomes = await asyncio.gather(
            *(member.engine.shutdown() for member in self._members), return_exceptions=True
        )
        if self._departures:
            await asyncio.wait(self._departures)
        for member in self._members:
            member.live = False
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    def _raise_if_ended(self, partial: Generation | None = None) -> None:
        if self._ended is not None:
            # Its own exception for everybody: each grows its own traceback.
            raise EngineDeadError(str(self._ended), partial) from self._ended.__cause__

    def _spawn(self, coroutine: Coroutine, tasks: set[asyncio.Task]) -> asyncio.Task:
        """A task whose exception, which none should raise, ends the pool."""

        def done(task: asyncio.Task) -> None:
            tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                self._end(EngineDeadError(f"the pool broke down: {error!r}"), error)

        task = asyncio.create_task(coroutine)
        tasks.add(task)
        task.add_done_callback(done)
        return task

    def _tell(self) -> None:
        """Wakes all who wait, to look at the pool's state again."""
        self._news.set()
        self._news.clear()


def _length(partial: Generation | None) -> int:
    return 0 if partial is None else len(partial.token_ids)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
