"""Several engines as one: routing, replacement of the dead, joining and leaving at run time.

Owns which engine answers a request, what becomes of an answer whose engine dies, and at which
version a replacement may join. It deliberately knows nothing of how an engine works, of where
publications come from, or of what versions mean to training: it only keeps to the rule that its
:attr:`EnginePool.version` is served, or surpassed, by every engine that answers.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

from torchrl._utils import logger as torchrl_logger

from torchrl_llm_async.engines._pool_member import START, Member, PoolStats, Publication, Request
from torchrl_llm_async.engines._supervisor import Supervisor
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


class EnginePool:
    """A :class:`~torchrl_llm_async.engines.GenerationEngine` made of engines.

    A request goes to the engine with the least load: the tokens that its running requests may
    sample, or are expected to, counted whole until they end. If that engine dies, another one, or
    a replacement, takes the answer up where its proven tokens end, up to ``max_restarts + 1``
    times: an answer that goes on losing engines may be what kills them, and is given up. A dead
    engine is started again in the background and joins once it serves weights no older than
    :attr:`version`, normally the newest. It is given up after ``max_restarts`` attempts, of 10
    minutes at most, without an answer in between. When no engine is left, every call and everybody
    who waits gets an :class:`EngineDeadError` with the last reason; until then nobody gets one.

    Args:
        engines: engines that have not been started; all with the same ``max_model_len``.
        max_restarts: restarts of one engine, failed ones included, without an answer completed by
            it in between.

    Raises:
        ValueError: if there is no engine, one is given twice, their ``max_model_len`` differ, or
            ``max_restarts`` is negative.

    Examples:
        >>> pool = EnginePool([VLLMEngine(folder), VLLMEngine(folder)])  # doctest: +SKIP
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
        self._members: list[Member] = []
        self._named = 0
        self._asked: dict[str, Request] = {}
        self._published = {0: START}
        self._served = 0
        self._paused = False
        self._supervisor = Supervisor(
            self._shutdown_engines, EngineDeadError("the pool was never started")
        )

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

    def _live(self) -> list[Member]:
        return [member for member in self._members if member.live]

    # ------------------------------------------------------------------ life
    async def start(self) -> None:
        """Starts the engines one after the other, since only a process without threads may fork.

        Raises:
            RuntimeError: if the pool is running already, or an engine serves weights that another
                run has left in it.
            Exception: what the first engine that did not start raised; the others are shut down.
        """
        if self._supervisor.ended is None:
            raise RuntimeError("this pool is running; shutdown() it first, or make another")
        await self._supervisor.closed()
        self._members, self._named, self.stats = [], 0, PoolStats()
        self._published, self._served, self._paused = {0: START}, 0, False
        self._switching, self._pausing = asyncio.Lock(), asyncio.Lock()
        try:
            for engine in self._engines:
                await engine.start()
                self._enter(engine).live = True
                self._check_run(engine)
        except BaseException:
            await self._shutdown_engines()
            raise
        self._supervisor = Supervisor(self._shutdown_engines)
        self._supervisor.spawn(self._watch())

    async def shutdown(self) -> None:
        """Ends all engines; whoever waits gets an :class:`EngineDeadError`.

        Raises:
            Exception: what an engine's ``shutdown`` raised, after all of them were told.
        """
        self._supervisor.end(EngineDeadError("the pool was shut down"))
        await self._supervisor.closed()

    async def _shutdown_engines(self) -> None:
        outcomes = await asyncio.gather(
            *(member.engine.shutdown() for member in self._members), return_exceptions=True
        )
        for member in self._members:
            member.live = False
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    def check_health(self) -> None:
        """Raises :class:`EngineDeadError` if no engine is live and none will be again.

        Engines found dead are replaced.
        """
        self._supervisor.check()
        for member in self._live():
            try:
                member.engine.check_health()
            except EngineDeadError as error:
                self._bury(member, member.life, error)

    # ------------------------------------------------------------------ requests
    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingConfig,
        *,
        request_id: str,
        seed: int | None = None,
        partial: Generation | None = None,
        expected_tokens: int | None = None,
    ) -> Generation:
        """Samples one answer, by several engines if it must; cancelling aborts the request.

        Arguments and errors are those of
        :meth:`~torchrl_llm_async.engines.GenerationEngine.generate`. An answer that is taken up
        again has ``/1``, ``/2``, ... behind its ``request_id``, and the same ``seed``. One that
        has lost ``max_restarts + 2`` engines is given up: what there is of it is returned, with
        ``finish_reason="abort"``.

        Args:
            expected_tokens: how long the whole answer is expected to be, where that is known: what
                counts as its load. None expects ``max_new_tokens``.
        """
        asked = self._asked[request_id] = Request(partial)
        most = sampling.max_new_tokens
        expected = most if expected_tokens is None else min(expected_tokens, most)
        try:
            return await self._answer(asked, prompt_ids, sampling, request_id, seed, expected)
        finally:
            del self._asked[request_id]

    async def _answer(
        self,
        asked: Request,
        prompt_ids: Sequence[int],
        sampling: SamplingConfig,
        request_id: str,
        seed: int | None,
        expected: int,
    ) -> Generation:
        for attempt in itertools.count():
            partial = asked.partial
            self._supervisor.check(partial)
            while (member := self._least_loaded()) is None:
                await self._supervisor.news(partial)
            if attempt:
                self.stats.resubmitted += 1
            life = member.life
            left = max(expected - asked.begun, 0)
            member.requests += 1
            member.load += left
            asked.engine = member.engine
            asked.name = f"{request_id}/{attempt}" if attempt else request_id
            try:
                answer = await member.engine.generate(
                    prompt_ids,
                    sampling,
                    request_id=asked.name,
                    seed=seed,
                    partial=partial,
                )
                if member.life == life:
                    member.restarts = 0
                return answer
            except EngineDeadError as error:
                self._bury(member, life, error)
                self.stats.discarded_tokens += error.discarded
                self.stats.kept_tokens += asked.broken_off(error)
                if attempt > self.max_restarts:
                    self.stats.given_up += 1
                    torchrl_logger.error(
                        f"request {request_id} is given up: {attempt + 1} engines died under it"
                    )
                    return asked.unfinished()
            finally:
                member.requests -= 1
                member.load -= left
                if member.leaving:
                    self._supervisor.tell()

    def partial_answer(self, request_id: str) -> Generation | None:
        """What is known so far of a running answer, wherever it is; see the protocol."""
        asked = self._asked.get(request_id)
        return None if asked is None else asked.so_far()

    def _least_loaded(self) -> Member | None:
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
        self._supervisor.check()
        newest = max(self._published)
        if version < newest:
            raise ValueError(f"version {version} after version {newest}: publish a later one")
        # Before anything is awaited, so that a replacement can't join without having seen it.
        publication = self._published[version] = Publication(version, Path(path))
        self._supervisor.tell()
        async with self._switching:
            await self._all_live(
                lambda member: member.switch(publication),
                [member for member in self._live() if member.engine.version <= version],
            )
            self._supervisor.check()
            while not self._live() and not self._all_wait_for_a_publication():
                await self._supervisor.news()
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
            self._supervisor.check()
            self._paused = paused
            await self._all_live(lambda member: member.set_paused(paused), self._live())
            self._supervisor.check()

    async def _all_live(
        self, call: Callable[[Member], Coroutine[None, None, None]], members: list[Member]
    ) -> None:
        async def one(member: Member, life: int) -> None:
            try:
                await call(member)
            except EngineDeadError as error:
                self._bury(member, life, error)

        await asyncio.gather(*(one(member, member.life) for member in members))

    # ------------------------------------------------------------------ joining and leaving
    async def add(self, engine: GenerationEngine) -> None:
        """Starts an engine and lets it join once it serves the newest publication.

        If this is cancelled, the engine is shut down and does not join.

        Args:
            engine: one that has not been started.

        Raises:
            ValueError: if it is in the pool already, or has another ``max_model_len``.
            RuntimeError: if it does not start within 10 minutes, dies before it joins, or serves
                weights that another run has left in it.
            EngineDeadError: if the pool has ended.
        """
        self._supervisor.check()
        self._check_fits(engine)
        self._engines.append(engine)
        member = self._enter(engine)
        try:
            await member.start()
            self._check_run(engine)
            await self._join(member)
        except BaseException as error:
            self._engines.remove(engine)
            self._dismiss(member, error)
            await engine.shutdown()
            if not isinstance(error, EngineDeadError):
                raise
            self._supervisor.check()
            raise RuntimeError(f"{member.name} was not added, since {error}") from error

    async def remove(self, engine: GenerationEngine) -> None:
        """Lets an engine finish its requests and ends it; it gets no new ones.

        Once begun this is carried through, even if the caller is cancelled.

        Raises:
            ValueError: if it is not in the pool, is joining or leaving, or is the last one.
            EngineDeadError: if the pool has ended.
        """
        self._supervisor.check()
        member = next((member for member in self._members if member.engine is engine), None)
        if member is None or member.leaving or not member.has_joined:
            raise ValueError(
                f"{engine!r} is not in the pool, is joining, or is leaving: give one of its engines"
            )
        if not any(m is not member and m.has_joined and not m.leaving for m in self._members):
            raise ValueError(
                f"{member.name} is the last engine of the pool (one that is still joining it may "
                "fail): add() another first, or shutdown() the pool"
            )
        member.leaving = True
        self._engines.remove(engine)
        await asyncio.shield(self._supervisor.spawn(self._depart(member), lasting=True))

    async def _depart(self, member: Member) -> None:
        if member.replacement is not None:
            member.replacement.cancel()
            await asyncio.wait({member.replacement})
        while member.live and member.requests:
            await self._supervisor.news()
        await member.engine.shutdown()
        member.live = False
        if member in self._members:  # else it has just been given up
            self._members.remove(member)
        self._supervisor.tell()
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

    def _check_run(self, engine: GenerationEngine) -> None:
        newest = max(self._published)
        if engine.version > newest:
            raise RuntimeError(
                f"{engine!r} serves version {engine.version}, but nothing later than {newest} was "
                "published here: these are the weights of another run; launch its server anew"
            )

    def _enter(self, engine: GenerationEngine) -> Member:
        member = Member(engine, f"engine {self._named}")
        self._named += 1
        self._members.append(member)
        return member

    # ------------------------------------------------------------------ death and replacement
    def _bury(self, member: Member, life: int, error: EngineDeadError) -> None:
        """Takes note of a death, once, and sets its replacement going."""
        if member.life != life or self._supervisor.ended is not None:
            return
        self._served = self.version  # while it still counts
        member.died()
        if not member.leaving:
            member.replacement = self._supervisor.spawn(self._replace(member, error))
        self._supervisor.tell()

    async def _replace(self, member: Member, reason: EngineDeadError) -> None:
        """Starts a dead engine again, until it has joined or is given up."""
        while True:
            await member.engine.shutdown()
            why = str(reason).partition("\n")[0]
            if member.restarts == self.max_restarts:
                torchrl_logger.error(f"{member.name} is given up, since {why}")
                self._dismiss(member, reason)
                return
            member.restarts += 1
            self.stats.restarts += 1
            torchrl_logger.warning(
                f"{member.name} died: {why}; restart {member.restarts} of at most "
                f"{self.max_restarts} without an answer"
            )
            try:
                await member.start()
                await self._join(member)
                return
            except EngineDeadError as error:
                reason = error

    async def _join(self, member: Member) -> None:
        """Brings a started engine to where the pool is; only then do requests reach it.

        Between the last look at the pool's state and joining nothing is awaited.
        """
        while True:
            self._supervisor.check()
            publication = member.first_choice(self._to_join_with())
            if publication is None:
                await self._supervisor.news()
            elif publication is not member.serves:
                await member.switch(publication)
                self._supervisor.tell()
            elif member.paused != self._paused:
                await member.set_paused(self._paused)
            else:
                break
        member.live = True
        self._supervisor.tell()
        torchrl_logger.info(f"{member.name} serves version {member.engine.version}")

    def _to_join_with(self) -> list[Publication]:
        """What a joining engine may serve, best first.

        The newest publication. Only if no engine is live also older ones, yet none older than the
        last version served: nobody else would ever answer, and without answers there may be no
        further publication.
        """
        versions = sorted((v for v in self._published if v >= self.version), reverse=True)
        return [self._published[v] for v in (versions[:1] if self._live() else versions)]

    def _all_wait_for_a_publication(self) -> bool:
        choices = self._to_join_with()
        return all(member.first_choice(choices) is None for member in self._members)

    async def _watch(self) -> None:
        """Notices engines that die while nobody talks to them, and a wait that has no end."""
        waited = 0.0
        while waited < _PUBLICATION_GRACE_S:
            await asyncio.sleep(_HEARTBEAT_S)
            self.check_health()
            stuck = not self._live() and self._all_wait_for_a_publication()
            waited = waited + _HEARTBEAT_S if stuck else 0.0
        name, reason = next((m.name, error) for m in self._members for error in m.refused.values())
        self._supervisor.end(
            EngineDeadError(
                f"no engine serves, and none can load weights of version {self.version} or later, "
                f"nor were others published for {waited:.0f} s ({name}: {reason})"
            ),
            reason,
        )

    def _dismiss(self, member: Member, reason: BaseException) -> None:
        """Forgets an engine that will not answer any more; without any left, the pool ends."""
        self._members.remove(member)
        if all(other.leaving for other in self._members):
            self._supervisor.end(
                EngineDeadError(f"no engine is left; {member.name} went last: {reason!r}"), reason
            )
        self._supervisor.tell()
