"""Noticing that something which lives has stopped answering.

Owns the timing alone: how to ask, and what to do about silence, is the caller's affair.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

_PARTS = 10
# So many such silences a publication may take to be read, beside generation: a file system that is
# dead keeps its readers waiting for ever, while everything else is well.
STAGING_BEATS = 10


async def until_silent(ask: Callable[[], Coroutine], seconds: float) -> None:
    """Asks now and then, and returns once a question has gone unanswered for so long.

    Time in which this event loop itself stood still does not count as silence.

    Args:
        ask: puts one question; whatever it raises ends the watch, and is raised.
        seconds: silence that is too long. A tenth of it lies between two questions.

    Examples:
        >>> asyncio.run(until_silent(lambda: asyncio.sleep(60), seconds=0.01))
    """
    while True:
        answer = asyncio.ensure_future(ask())
        try:
            # In parts: after a stall of the loop all timers are due at once, the answer that
            # came meanwhile is yet to be read, and one part is all that is lost.
            for _ in range(_PARTS):
                await asyncio.wait({answer}, timeout=seconds / _PARTS)
                if answer.done():
                    break
            else:
                return
            answer.result()
        finally:
            answer.cancel()
        await asyncio.sleep(seconds / _PARTS)
