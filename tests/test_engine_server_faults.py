"""The engine over HTTP against servers that are wrong: launched so, or ailing later.

They answer as vLLM 0.32 does then, which a healthy one can't be made to do; only their texts matter
here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from torchrl_llm_async.engines import (
    EngineDeadError,
    Generation,
    SamplingConfig,
    VLLMServerEngine,
    WeightUpdateError,
)

PROMPT = [5, 6, 7]
SAMPLING = SamplingConfig(max_new_tokens=8)
EXTENSION = "torchrl_llm_async.engines.vllm_worker.WeightUpdateExtension"


class Server:
    """Answers by path; an exception is an HTTP status with its text, an event is waited for.

    Attributes:
        answers: what it answers next, to be changed at will.
        events: what it streams to a request for tokens, which it otherwise refuses.
    """

    def __init__(self) -> None:
        self.config = {
            "model_config": {"logprobs_mode": "processed_logprobs", "max_model_len": 4096},
            "parallel_config": {"worker_extension_cls": EXTENSION},
            "device_config": {"device": "cpu"},
            "scheduler_config": {"enable_chunked_prefill": False},
        }
        self.answers: dict[str, Any] = {
            "/health": {},
            "/server_info": {"vllm_config": self.config},
            "/inference/v1/generate": {"error": {"message": "Vocabulary size: 9"}},
            "/weight_info": {"weight_version": "3"},
            "/resume": {},
        }
        self.events: list[dict[str, Any]] | None = None
        self.asked = asyncio.Event()  # for tokens
        self.ends = asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Gives the server's address."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await (site := web.TCPSite(runner, "127.0.0.1", 0)).start()
            yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        finally:
            self.ends.set()
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/inference/v1/generate" and self.events is not None:
            response = web.StreamResponse()
            await response.prepare(request)
            self.asked.set()
            for event in self.events:
                await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            if not self.events:
                await self.ends.wait()
            return response
        found = self.answers.get(request.path, web.HTTPNotFound(text="{}"))
        if isinstance(found, web.HTTPException):
            return web.Response(status=found.status, text=found.text)
        return web.json_response(found)


@contextlib.asynccontextmanager
async def _taken_over(server: Server, **arguments: Any) -> AsyncIterator[VLLMServerEngine]:
    async with server.running() as url:
        engine = VLLMServerEngine(url, **arguments)
        await engine.start()
        try:
            yield engine
        finally:
            await engine.shutdown()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("dev mode", "VLLM_SERVER_DEV_MODE=1"),
        ("extension", f"--worker-extension-cls {EXTENSION}"),
        ("log-probs", "gives raw_logprobs.*--logprobs-mode processed_logprobs"),
        ("chunked prefill", "--no-enable-chunked-prefill"),
        ("tokens", r"Scale-out endpoints are disabled.*--tokens-only"),
        ("context", "takes 64 tokens.*max_model_len=256: .*--max-model-len 256 or more"),
        ("switch", "'switching'.* launch it anew"),
    ],
)
def test_a_server_launched_wrongly_is_refused(wrong: str, message: str) -> None:
    async def main() -> None:
        server = Server()
        if wrong == "dev mode":
            del server.answers["/server_info"]
        elif wrong == "extension":
            server.config["parallel_config"]["worker_extension_cls"] = ""
        elif wrong == "log-probs":
            server.config["model_config"]["logprobs_mode"] = "raw_logprobs"
        elif wrong == "chunked prefill":
            server.config["scheduler_config"]["enable_chunked_prefill"] = True
        elif wrong == "tokens":
            words = {"error": {"message": "Scale-out endpoints are disabled"}}
            server.answers["/inference/v1/generate"] = words
        elif wrong == "context":
            server.config["model_config"]["max_model_len"] = 64
        else:
            server.answers["/weight_info"] = {"weight_version": "switching"}
        async with _taken_over(server):
            pass

    with pytest.raises(RuntimeError, match=message):
        asyncio.run(main())


@pytest.mark.inv5
def test_a_heartbeat_that_is_refused_is_a_loss() -> None:
    """Else nobody would watch any more, and a server that hangs later be waited for for ever."""

    async def main() -> None:
        server = Server()
        async with _taken_over(server, heartbeat_s=0.2) as engine:
            server.events = []
            answer = asyncio.ensure_future(engine.generate(PROMPT, SAMPLING, request_id="0"))
            await server.asked.wait()
            server.answers["/weight_info"] = web.HTTPTooManyRequests(text="slow down")
            with pytest.raises(EngineDeadError, match=r"sign of life.*slow down"):
                await asyncio.wait_for(answer, 10)
            with pytest.raises(EngineDeadError, match="slow down"):
                engine.check_health()

    asyncio.run(main())


def _tokens(*ids: int, reason: str | None = None) -> dict[str, Any]:
    """A message of a stream; the last one, with a reason, tells the versions of two tokens."""
    choice = {
        "token_ids": ids,
        "logprobs": {"content": [{"logprob": -0.5}] * len(ids)},
        "finish_reason": reason,
        "weight_versions": reason and [{"version": "3", "start": 0, "end": 2}],
    }
    return {"choices": [choice]}


_FAILED = {"error": {"code": 500, "message": "Internal server error"}}  # "error", streamed


@pytest.mark.parametrize("last", [_tokens(reason="repetition"), _tokens(reason="abort"), _FAILED])
def test_an_answer_that_sampling_did_not_end_is_aborted(last: dict[str, Any]) -> None:
    async def main() -> None:
        server = Server()
        async with _taken_over(server) as engine:
            server.events = [_tokens(5, 6), last]
            answer = await engine.generate(PROMPT, SAMPLING, request_id="0")
            assert answer == Generation([5, 6], [-0.5, -0.5], [3, 3], "abort")
            engine.check_health()

    asyncio.run(main())


@pytest.mark.parametrize("last", [_tokens(reason="abort"), _FAILED])
def test_an_answer_that_its_servers_end_ended_is_taken_elsewhere(last: dict[str, Any]) -> None:
    async def main() -> None:
        server = Server()
        async with _taken_over(server) as engine:
            server.events = [_tokens(5, 6), last]
            server.answers["/weight_info"] = web.HTTPInternalServerError(text="the core is dead")
            with pytest.raises(EngineDeadError, match="the core is dead") as died:
                await engine.generate(PROMPT, SAMPLING, request_id="0")
            assert died.value.partial == Generation([5, 6], [-0.5, -0.5], [3, 3], "abort")

    asyncio.run(main())


@pytest.mark.inv5
def test_a_publication_that_is_never_read_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        server = Server()
        server.answers["/collective_rpc"] = {"results": [None]}
        async with _taken_over(server, heartbeat_s=0.2) as engine:
            late = "version 3 keeps serving: .*torn could not be read in 2 s"
            with pytest.raises(WeightUpdateError, match=late):
                await asyncio.wait_for(engine.update_weights(4, tmp_path / "torn"), 20)
            engine.check_health()

    asyncio.run(main())
