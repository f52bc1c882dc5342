"""A vLLM server elsewhere as a generation engine, reached over HTTP.

Owns what one client has to do with one ``vllm serve`` process of vLLM 0.32: the checks that it was
launched rightly, requests, weight switches, and noticing that it is gone. Starting, placing and
ending the server are not its affair, nor is carrying the weights: a publication is a path, and the
server reads it from a file system both machines see. What happens to the weights inside the server
is :mod:`torchrl_llm_async.engines.vllm_worker`.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torchrl_llm_async.engines._heartbeat import STAGING_BEATS
from torchrl_llm_async.engines._requests import check_request, finish_reason, stream_seed
from torchrl_llm_async.engines._vllm_start import WORKER_EXTENSION
from torchrl_llm_async.engines.base import (
    EngineDeadError,
    Generation,
    SamplingConfig,
    WeightUpdateError,
)

if TYPE_CHECKING:
    from torchrl_llm_async.engines._http import ServerSession

__all__ = ["VLLMServerEngine"]

_HOW_TO_LAUNCH = "docs/engines.md has the whole command"
_STREAM_INTERVAL = 16  # tokens per message: what a lost server costs, against a message's cost
_POLL_S = 0.05
_NAN = -9999.0  # vLLM 0.32's word for it over HTTP, which must not pass for a log-probability
# In force while a switch is under way: a client that finds it knows that nobody finished it.
_SWITCHING = "switching"


@dataclass(eq=False)
class _Answer:
    """What has come of an answer; the server tells the versions only with its last token."""

    version: int
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    proven: int | None = None
    whole: Generation | None = None

    def freeze(self) -> None:
        """A switch begins: what comes from now on may be of either version."""
        if self.proven is None:
            self.proven = len(self.token_ids)

    def so_far(self) -> Generation:
        """The tokens whose version is known."""
        if self.whole is not None:
            return self.whole
        kept = len(self.token_ids) - self.unproven
        return Generation(
            self.token_ids[:kept], self.log_probs[:kept], [self.version] * kept, "abort"
        )

    @property
    def unproven(self) -> int:
        """How many tokens have come whose version is not known."""
        if self.whole is not None or self.proven is None:
            return 0
        return len(self.token_ids) - self.proven


class VLLMServerEngine:
    """A :class:`~torchrl_llm_async.engines.GenerationEngine` that is a vLLM server elsewhere.

    The server must have been launched for it, with these (docs/engines.md has the whole command)::

        VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --tokens-only \\
            --logprobs-mode processed_logprobs --worker-extension-cls \\
            torchrl_llm_async.engines.vllm_worker.WeightUpdateExtension

    and :meth:`start` refuses any other. Answers are streamed, so that when the server dies the
    tokens whose version is proven can be taken to another engine: those that had arrived before
    the first weight switch that the answer lived through.

    One engine object per server: it alone switches the weights. The server outlives it, and may
    be taken over by another one, at the version it serves.

    Args:
        url: where the server listens, such as ``"http://10.0.0.7:8000"``.
        max_model_len: context in tokens, prompt and answer together; the server must have been
            launched with as much or more.
        on_update: fate of the running requests' KV cache at a weight switch, as for
            :class:`~torchrl_llm_async.engines.VLLMEngine`.
        start_timeout: seconds :meth:`start` waits for the server to answer.
        heartbeat_s: seconds within which a server that hangs is noticed. Loading weights stops it
            too: give more than twice that.
        seed: mixed into the seed of every request.
        allow_truncated_support: accept sampling with ``top_p`` or ``top_k``.

    Raises:
        ValueError: if an argument is out of its range.

    Examples:
        >>> async def answer(prompt_ids):  # doctest: +SKIP
        ...     engine = VLLMServerEngine("http://10.0.0.7:8000")
        ...     await engine.start()
        ...     try:
        ...         return await engine.generate(
        ...             prompt_ids, SamplingConfig(max_new_tokens=16), request_id="0"
        ...         )
        ...     finally:
        ...         await engine.shutdown()
    """

    def __init__(
        self,
        url: str,
        *,
        max_model_len: int = 256,
        on_update: Literal["keep", "recompute"] = "recompute",
        start_timeout: float = 300.0,
        heartbeat_s: float = 60.0,
        seed: int = 0,
        allow_truncated_support: bool = False,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url={url!r}: give one such as 'http://10.0.0.7:8000'")
        if on_update not in ("keep", "recompute"):
            raise ValueError(f"on_update={on_update!r}: give 'keep' or 'recompute'")
        if heartbeat_s <= 0:
            raise ValueError(f"heartbeat_s={heartbeat_s}: give more than 0 seconds")
        self.url = url.rstrip("/")
        self.max_model_len = max_model_len
        self.on_update = on_update
        self.start_timeout = start_timeout
        self.heartbeat_s = heartbeat_s
        self.seed = seed
        self.allow_truncated_support = allow_truncated_support
        self._vocabulary = 0
        self._version = 0
        self._paused = False
        self._switching = False
        self._answers: dict[str, tuple[Generation, _Answer]] = {}
        self._server: ServerSession | None = None

    @property
    def version(self) -> int:
        """Version of the weights that sample the next token."""
        return self._version

    async def start(self) -> None:
        """Waits for the server and takes it over at the version it serves, 0 if it has none.

        Raises:
            RuntimeError: if nothing answers within ``start_timeout``, if the server was launched
                without something this engine needs, if a former client left a weight switch
                unfinished, or if the engine is running already.
        """
        if self._server is not None:
            raise RuntimeError("this engine is running; shutdown() it first, or make another")
        from torchrl_llm_async.engines._http import ServerSession

        self._server = ServerSession(self.url, silence_s=self.heartbeat_s)
        self._switching = self._paused = False
        self._update_lock = asyncio.Lock()
        self._pause_lock = asyncio.Lock()
        try:
            await self._wait_for_the_server()
            self._server.keep_watch("weight_info")  # asks the core itself, which /health does not
            await self._check_its_launch()
            self._version = await self._served_version()
            await self._server.call("resume")
        except BaseException:
            await self.shutdown()
            raise

    async def _wait_for_the_server(self) -> None:
        try:
            await self._server.wait_for("health", within_s=self.start_timeout, poll_s=_POLL_S)
        except TimeoutError as found:
            raise RuntimeError(
                f"no vLLM server at {self.url} within {self.start_timeout} s ({found}): launch one "
                f"there ({_HOW_TO_LAUNCH}), or give start_timeout more seconds than it needs"
            ) from None

    async def _check_its_launch(self) -> None:
        def launched_wrongly(found: str, wanted: str) -> RuntimeError:
            return RuntimeError(
                f"the server at {self.url} {found}: launch it with {wanted} ({_HOW_TO_LAUNCH})"
            )

        form = {"config_format": "json"}
        async with self._server.ask("server_info", method="GET", params=form) as response:
            if response.status == 404:
                raise launched_wrongly(
                    "offers no weight updates", "VLLM_SERVER_DEV_MODE=1 in its environment"
                )
            config = (await response.json())["vllm_config"]
        if config["parallel_config"]["worker_extension_cls"] != WORKER_EXTENSION:
            raise launched_wrongly(
                "can't load a publication", f"--worker-extension-cls {WORKER_EXTENSION}"
            )
        mode = config["model_config"]["logprobs_mode"]
        if mode != "processed_logprobs":
            raise launched_wrongly(
                f"gives {mode}, which are not those of the sampling distribution",
                "--logprobs-mode processed_logprobs",
            )
        on_cpu = config["device_config"]["device"] == "cpu"
        if on_cpu and config["scheduler_config"]["enable_chunked_prefill"]:
            # vLLM 0.32 rewinds a seeded request's generator after each part of a prompt that is
            # prefilled in parts, which a CPU's generator can't do: the server would die.
            raise launched_wrongly(
                "prefills prompts in parts, on a CPU", "--no-enable-chunked-prefill"
            )
        # vLLM 0.32 tells the size of its vocabulary nowhere but in such a refusal.
        impossible = {"token_ids": [0], "sampling_params": {"logit_bias": {1 << 40: 0.0}}}
        async with self._server.ask("inference/v1/generate", impossible) as response:
            words = await response.text()
        if (size := re.search(r"Vocabulary size: (\d+)", words)) is None:
            raise launched_wrongly(f"takes no token ids ({words})", "--tokens-only")
        self._vocabulary = int(size[1])
        if config["model_config"]["max_model_len"] < self.max_model_len:
            raise launched_wrongly(
                f"takes {config['model_config']['max_model_len']} tokens of context, this engine "
                f"was built with max_model_len={self.max_model_len}",
                f"--max-model-len {self.max_model_len} or more",
            )

    async def _served_version(self) -> int:
        served = (await self._server.call("weight_info", method="GET"))["weight_version"]
        if served == "default":  # vLLM's word for never set
            await self._server.call("update_weight_version", {"new_version": "0"})
            return 0
        if not served.isdecimal():
            raise RuntimeError(
                f"the server at {self.url} serves version {served!r}: a switch was begun and not "
                "finished, so that its weights are unknown; launch it anew"
            )
        return int(served)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingConfig,
        *,
        request_id: str,
        seed: int | None = None,
        partial: Generation | None = None,
    ) -> Generation:
        """Samples one answer; cancelling the coroutine aborts the request on the server.

        Args:
            prompt_ids: token ids of the whole context, at least one.
            sampling: how to draw.
            request_id: unique among the running requests.
            seed: names the random stream; None names it after ``request_id``. The same name gives
                the same answer.
            partial: the beginning of this answer, from an engine that could not finish it.
                Sampling goes on after it, from a stream named after its length too. One that a
                stop token ended, or that leaves no room for a token, is returned as the answer.

        Returns:
            The whole answer, ``partial`` included. ``finish_reason="abort"`` means that somebody,
            or something else than sampling, ended the request on the server.

        Raises:
            ValueError: if the prompt is empty, holds unknown ids or leaves no room for a token, if
                the sampling truncates the support without leave, or if the server refuses the
                request.
            EngineDeadError: if the server is lost, or :meth:`shutdown` called, before the answer
                is whole; its ``partial`` holds the tokens whose version is proven, and its
                ``discarded`` counts the others.
        """
        begun = Generation([], [], [], "abort") if partial is None else partial
        answer = None
        try:
            self.check_health()
            check_request(
                prompt_ids,
                begun.token_ids,
                sampling,
                max_model_len=self.max_model_len,
                vocabulary=self._vocabulary,
                allow_truncated_support=self.allow_truncated_support,
                served=f"the model at {self.url}",
            )
            room = min(sampling.max_new_tokens, self.max_model_len - len(prompt_ids))
            room -= len(begun.token_ids)
            if begun.finish_reason == "stop":
                return begun
            if room <= 0:
                return begun.followed_by(Generation([], [], [], "length"))
            if self._switching:
                async with self._pause_lock:  # until the switch is over
                    self.check_health()
            answer = _Answer(self._version)
            self._answers[request_id] = (begun, answer)
            stream = request_id if seed is None else seed
            request = {
                "request_id": request_id,
                "token_ids": [*prompt_ids, *begun.token_ids],
                "stream": True,
                "sampling_params": self._sampling_params(
                    sampling, room, stream_seed(self.seed, stream, len(begun.token_ids))
                ),
            }
            if self.on_update == "keep":
                request["cache_salt"] = str(self._version)
            await self._stream(self._server, request, answer)
            return begun.followed_by(answer.so_far())
        except EngineDeadError as error:
            whole = begun if answer is None else begun.followed_by(answer.so_far())
            error.partial = whole if whole.token_ids else None
            error.discarded = 0 if answer is None else answer.unproven
            raise
        finally:
            self._answers.pop(request_id, None)

    def partial_answer(self, request_id: str) -> Generation | None:
        """What is known so far of a running answer, or None; see the protocol."""
        if request_id not in self._answers:
            return None
        begun, answer = self._answers[request_id]
        whole = replace(begun.followed_by(answer.so_far()), finish_reason="abort")
        return whole if whole.token_ids else None

    def _sampling_params(self, sampling: SamplingConfig, room: int, seed: int) -> dict[str, Any]:
        return {
            "max_tokens": room,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop_token_ids": list(sampling.stop_token_ids),
            "seed": seed,
            "logprobs": 0,
            "detokenize": False,
            "stream_interval": _STREAM_INTERVAL,
        }

    async def _stream(self, server: ServerSession, request: dict, answer: _Answer) -> None:
        """Fills the answer as messages come; the last one brings its versions."""
        from torchrl_llm_async.engines._http import events

        async with server.ask("inference/v1/generate", request) as response:
            if response.status >= 400:
                raise server.refusal(await response.text())
            # To the end: the connection is not used again otherwise.
            async for message in events(response):
                if (error := message.get("error")) is not None:
                    if error["code"] >= 500:
                        # Of this request alone, unless the core answers no more.
                        await server.call("weight_info", method="GET")
                        return
                    raise server.refusal(error["message"])
                (choice,) = message["choices"]
                answer.token_ids += choice["token_ids"]
                answer.log_probs += (
                    math.nan if token["logprob"] == _NAN else token["logprob"]
                    for token in choice["logprobs"]["content"]
                )
                if choice["finish_reason"] is not None:
                    versions = [
                        int(span["version"])
                        for span in choice["weight_versions"] or ()
                        for _ in range(span["end"] - span["start"])
                    ]
                    reason = finish_reason(choice["finish_reason"])
                    answer.whole = Generation(answer.token_ids, answer.log_probs, versions, reason)
        if answer.whole is None:
            raise server.lose("it broke off an answer")
        if answer.whole.finish_reason == "abort":
            # Nobody here did it: a server that is told to end aborts its requests first.
            await server.call("weight_info", method="GET")

    async def update_weights(self, version: int, path: Path) -> None:
        """Serves the published weights from the next token on.

        The server reads and checks the whole publication before generation pauses, so refusing it
        costs no running request anything.

        Args:
            version: version the weights stand for.
            path: what :meth:`torchrl_llm_async.weight_update.WeightStore.write` gave, on a file
                system the server sees under the same path.

        Raises:
            WeightUpdateError: if the publication is missing, torn, incomplete, of wrong shapes,
                not finite in the server's dtype, or not read within 10 times ``heartbeat_s``.
                Weights and version stay the former.
            EngineDeadError: if the server is lost meanwhile, or fails to apply what it has
                checked, after which no weights may serve.
        """
        self.check_health()
        # Shielded: a caller that gives up leaves a whole switch behind, not half of one.
        await asyncio.shield(self._switch(self._server, version, path))

    async def _switch(self, server: ServerSession, version: int, path: Path) -> None:
        async with self._update_lock:
            limit_s = STAGING_BEATS * self.heartbeat_s
            try:
                async with asyncio.timeout(limit_s):
                    await _rpc(server, "begin_staging", version, str(Path(path).absolute()))
                    # A server can't call back.
                    while None in (verdicts := await _rpc(server, "staging_verdict")):
                        await asyncio.sleep(_POLL_S)
            except TimeoutError:
                verdicts = [f"{path} could not be read in {limit_s:g} s (10 times heartbeat_s)"]
            if any(verdicts):
                raise WeightUpdateError(
                    f"version {version} refused, version {self._version} keeps serving: "
                    f"{next(filter(None, verdicts))}; publish it again, where the server at "
                    f"{self.url} can read it, from the model it was launched with"
                )
            async with self._pause_lock:
                try:
                    await self._apply(server, version)
                except ValueError as error:
                    raise server.lose(
                        f"the switch to version {version} broke off ({error})"
                    ) from error

    async def _apply(self, server: ServerSession, version: int) -> None:
        self._switching = True
        for _, answer in self._answers.values():
            answer.freeze()
        await _pause(server, clear_cache=self.on_update == "recompute")
        await server.call("update_weight_version", {"new_version": _SWITCHING})
        await _rpc(server, "apply_staged_weights", version)
        await server.call("update_weight_version", {"new_version": str(version)})
        self._version = version
        self._switching = False
        if not self._paused:
            await server.call("resume")

    async def pause(self) -> None:
        """Stops sampling at the next token boundary; requests stay, and new ones queue.

        Weights can be switched meanwhile, and generation stays paused.

        Raises:
            EngineDeadError: if the server is lost.
        """
        self.check_health()
        await asyncio.shield(self._set_paused(self._server, True))

    async def resume(self) -> None:
        """Goes on after :meth:`pause`; during a weight switch, once that is whole.

        Raises:
            EngineDeadError: if the server is lost.
        """
        self.check_health()
        await asyncio.shield(self._set_paused(self._server, False))

    async def _set_paused(self, server: ServerSession, paused: bool) -> None:
        async with self._pause_lock:
            self._paused = paused
            if paused:
                await _pause(server, clear_cache=False)
            else:
                await server.call("resume")

    def check_health(self) -> None:
        """Raises :class:`EngineDeadError` if the server is not known to be running."""
        if self._server is None:
            raise EngineDeadError(
                f"there is no session with the server at {self.url}: it was never begun, or "
                "was shut down; start() the engine"
            )
        self._server.check()

    async def shutdown(self) -> None:
        """Ends the session; pending answers raise :class:`EngineDeadError`.

        The server lives on, at the version it serves, and aborts what this client had asked for.
        """
        server, self._server = self._server, None
        if server is not None:
            await server.close("the engine was shut down")


async def _rpc(server: ServerSession, method: str, *args: int | str) -> list[Any]:
    """Calls the worker extension; gives one result per worker."""
    answer = await server.call("collective_rpc", {"method": method, "args": args})
    return answer["results"]


async def _pause(server: ServerSession, *, clear_cache: bool) -> None:
    choices = {"mode": "keep", "clear_cache": "true" if clear_cache else "false"}
    await server.call("pause", params=choices)
