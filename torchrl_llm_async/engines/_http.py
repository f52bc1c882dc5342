"""Requests to an HTTP server that is either alive or lost, never in between.

Owns connections, time limits and the heartbeat, and turns every way in which a server can fail to
answer into :class:`~torchrl_llm_async.engines.EngineDeadError`, for all requests at once. What is
asked, and what a refusal means, is :mod:`torchrl_llm_async.engines.vllm_server`'s affair.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from torchrl_llm_async.engines._heartbeat import until_silent
from torchrl_llm_async.engines.base import EngineDeadError

# Below the 5 s after which vLLM closes an idle connection: a request must not meet that.
_KEEP_ALIVE_S = 2.0


class ServerSession:
    """Requests to one server, until it is lost or :meth:`close` is called; then never again.

    Args:
        url: the server's, without a slash at its end.
        silence_s: seconds of silence after which the server counts as lost.
    """

    def __init__(self, url: str, *, silence_s: float) -> None:
        self.url = url
        self.silence_s = silence_s
        self._lost_because: str | None = None
        self._heartbeat: asyncio.Task | None = None
        self._limits: set[asyncio.Timeout] = set()
        self._session = aiohttp.ClientSession(
            base_url=f"{url}/",
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=silence_s / 2),
        )

    async def wait_for(self, path: str, *, within_s: float, poll_s: float) -> None:
        """Returns once GET ``path`` is answered by 200.

        Raises:
            TimeoutError: if that does not come to pass within ``within_s`` seconds; it says what
                was found instead.
        """
        found = "nothing answers"
        try:
            async with asyncio.timeout(within_s):
                while True:
                    try:
                        async with self._session.get(path) as response:
                            if response.status == 200:
                                return
                            found = f"/{path} answers {response.status}"
                    except aiohttp.ClientError as error:
                        found = str(error)
                    await asyncio.sleep(poll_s)  # nobody calls when a server comes up
        except TimeoutError:
            raise TimeoutError(found) from None

    def keep_watch(self, path: str) -> None:
        """Asks GET ``path`` for a sign of life from now on, often enough for ``silence_s``."""
        self._heartbeat = asyncio.create_task(self._beat(path), name=f"heartbeat of {self.url}")

    async def _beat(self, path: str) -> None:
        try:
            await until_silent(lambda: self.call(path, method="GET"), self.silence_s)
            reason = f"it gave no sign of life for {self.silence_s:g} s"
        except Exception as error:  # without a heartbeat a server that hangs is not noticed
            reason = f"asked for a sign of life, it failed: {error}"
        self.lose(reason)

    async def call(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        method: str = "POST",
        params: dict[str, str] | None = None,
    ) -> Any:
        """The JSON that is answered.

        Raises:
            ValueError: the server refuses (4xx), in its words.
            EngineDeadError: the server is lost.
        """
        async with self.ask(path, body, method=method, params=params) as response:
            if response.status >= 400:
                raise self.refusal(await response.text())
            return await response.json()

    @contextlib.asynccontextmanager
    async def ask(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        method: str = "POST",
        params: dict[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A response below 500, while it is being read; leaving it early aborts the request.

        Raises:
            EngineDeadError: the server is lost, whether by this request or another.
        """
        self.check()
        try:
            async with (
                self._limited(),
                self._session.request(method, path, json=body, params=params) as response,
            ):
                if response.status >= 500:
                    words = await response.text()
                    raise self.lose(f"it answers {response.status} to /{path}: {words}")
                yield response
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self.lose(f"{type(error).__name__}: {error}") from error

    @contextlib.asynccontextmanager
    async def _limited(self) -> AsyncIterator[None]:
        """A time limit that is over when the server is lost."""
        async with asyncio.timeout(None) as limit:
            self._limits.add(limit)
            try:
                yield
            finally:
                self._limits.remove(limit)

    def refusal(self, words: str) -> ValueError:
        """The error for a request that the server refuses."""
        return ValueError(f"the server at {self.url} refuses this: {words}")

    def check(self) -> None:
        """Raises :class:`EngineDeadError` if the server is lost."""
        if self._lost_because is not None:
            raise EngineDeadError(f"the server at {self.url} is lost: {self._lost_because}")

    def lose(self, reason: str) -> EngineDeadError:
        """Gives the server up for ``reason``, unless that is known; all requests hear of it."""
        if self._lost_because is None:
            self._lost_because = reason
            # Closing the session would leave them waiting (aiohttp 3.14).
            now = asyncio.get_running_loop().time()
            for limit in self._limits:
                limit.reschedule(now)
        return EngineDeadError(f"the server at {self.url} is lost: {self._lost_because}")

    async def close(self, reason: str) -> None:
        """Ends the session; requests still waiting raise :class:`EngineDeadError`."""
        self.lose(reason)
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        await self._session.close()


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Server-sent events that are JSON objects, of any length: readline() has a limit."""
    rest = b""
    async for piece in response.content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))
