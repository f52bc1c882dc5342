"""Background tasks that end together, and a wait that always ends.

Owns what makes a pool of engines never leave anybody waiting in silence: one place for its end,
heard by all who wait, and no task whose exception gets lost. It knows nothing of engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from torchrl_llm_async.engines.base import EngineDeadError, Generation


class Supervisor:
    """One asyncio loop's worth of tasks with a common end.

    Args:
        close: run once, when the end has come and the tasks that end with it are gone.
        ended: makes a supervisor whose end has come already.

    Attributes:
        ended: the error that ended it, or None.
    """

    def __init__(
        self, close: Callable[[], Coroutine[None, None, None]], ended: EngineDeadError | None = None
    ) -> None:
        self.ended = ended
        self._close = close
        self._closing: asyncio.Task | None = None
        self._news = asyncio.Event()
        self._ending: set[asyncio.Task] = set()
        self._lasting: set[asyncio.Task] = set()

    def spawn(self, coroutine: Coroutine, *, lasting: bool = False) -> asyncio.Task:
        """Starts a task; an exception in it is a bug, and ends all.

        Args:
            coroutine: what to do.
            lasting: it is not cancelled at the end, but hears of it by :meth:`news`.
        """
        tasks = self._lasting if lasting else self._ending

        def done(task: asyncio.Task) -> None:
            tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                self.end(EngineDeadError(f"the pool broke down: {error!r}"), error)

        task = asyncio.create_task(coroutine)
        tasks.add(task)
        task.add_done_callback(done)
        return task

    def tell(self) -> None:
        """Wakes all who wait for :meth:`news`."""
        self._news.set()
        self._news.clear()

    async def news(self, partial: Generation | None = None) -> None:
        """Waits until something has changed, or raises as :meth:`check` does."""
        self.check(partial)
        await self._news.wait()
        self.check(partial)

    def end(self, error: EngineDeadError, cause: BaseException | None = None) -> None:
        """Gives everybody the error, from now on; only the first end counts."""
        if self.ended is not None:
            return
        error.__cause__ = cause
        self.ended = error
        for task in self._ending - {asyncio.current_task()}:
            task.cancel()
        self.tell()
        self._closing = asyncio.create_task(self._close_after_tasks())

    async def _close_after_tasks(self) -> None:
        if self._ending:
            await asyncio.wait(self._ending)
        try:
            await self._close()
        finally:
            if self._lasting:
                await asyncio.wait(self._lasting)

    async def closed(self) -> None:
        """Waits until what :meth:`end` began is over, and raises what went wrong in it."""
        if self._closing is not None:
            await asyncio.shield(self._closing)

    def check(self, partial: Generation | None = None) -> None:
        """Raises the error that ended it, for an answer that got as far as ``partial``."""
        if self.ended is not None:
            # Its own exception for everybody: each grows its own traceback.
            raise EngineDeadError(str(self.ended), partial) from self.ended.__cause__
