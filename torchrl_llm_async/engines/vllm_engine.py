"""vLLM as a generation engine: exact versions per token, weights switched in flight.

Owns the life of one ``AsyncLLM`` of vLLM 0.32 and its engine-core process: environment, start,
requests, weight switches, end. What happens to the weights inside the core is
:mod:`torchrl_llm_async.engines.vllm_worker`; who may generate at which version is the staleness
controller's affair, and several engines are a pool's.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import gc
import multiprocessing.util
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Literal, get_args

from torchrl_llm_async.engines._heartbeat import STAGING_BEATS, until_silent
from torchrl_llm_async.engines._process import LastingThread, can_fork
from torchrl_llm_async.engines._requests import check_request, stream_seed
from torchrl_llm_async.engines._vllm_request import sample, sampling_params, so_far
from torchrl_llm_async.engines._vllm_start import end_vllm, start_vllm
from torchrl_llm_async.engines.base import (
    EngineDeadError,
    Generation,
    SamplingConfig,
    WeightUpdateError,
)

__all__ = ["VLLMEngine"]

_OnUpdate = Literal["keep", "recompute", "abort"]

_STAGING_POLL_S = 0.02  # such a call costs the core 0.1 ms between two steps


class VLLMEngine:
    """A :class:`~torchrl_llm_async.engines.GenerationEngine` over vLLM's ``AsyncLLM``.

    The constructor only keeps its arguments: the object can be pickled to the process that will
    own the engine. When the process that starts it ends, however it ends, the engine core is
    killed with it (Linux).

    Log-probabilities are those of the sampling distribution (``logprobs_mode=
    "processed_logprobs"``), i.e. ``log_softmax(logits / temperature)``. Every request is seeded,
    so in float32 an answer depends on weights, prompt, sampling and seed alone, whatever else is
    in the batch.

    Args:
        model: folder in Hugging Face format, or the name of a model on the hub.
        dtype: ``"float32"``, ``"bfloat16"``, ...; published weights are cast to it.
        max_model_len: context in tokens, prompt and answer together.
        max_num_seqs: requests decoded at once; further ones queue.
        kv_cache_memory_bytes: size of the KV cache; None takes 256 MiB on a CPU and what vLLM
            finds free on a GPU.
        on_update: fate of the running requests at a weight switch. ``"recompute"`` prefills them
            again, so that later tokens are exactly the new policy's. ``"abort"`` ends them and
            submits prompt and tokens anew, as AReaL does (arXiv 2505.24298): the same policy, at
            more cost. ``"keep"`` goes on with the KV cache of the old weights, which stalls
            least, and new requests never reuse a prefix computed by older weights. Recorded
            log-probabilities and versions are true in any case.
        block_size: tokens per KV block, the granularity at which a group shares its prompt;
            32 is the smallest on a CPU.
        log_file: receives all that vLLM and the engine core print; None leaves it on the
            terminal.
        seed: mixed into the seed of every request.
        allow_truncated_support: accept sampling with ``top_p`` or ``top_k``.
        repeatable: an answer to be taken up whose tokens are all of the version served is sampled
            from its start instead: in its own random stream the same tokens come again, and what
            follows does not depend on where it broke off. So a run at staleness 0 on a CPU repeats
            to the bit whatever died in it.
        heartbeat_s: an engine core that answers nothing for so many seconds is killed, so that
            all who wait for it get :class:`EngineDeadError`. It must be more than the core takes
            for one step or for loading a set of weights, during which it answers no call.

    Attributes:
        last_update: seconds that each part of the last weight switch took. ``"stage"`` is reading
            and checking, beside generation; the rest stops it: ``"pause"`` (which waits for the
            step under way), ``"load"``, ``"repack"`` (of a tied head on a CPU), ``"resume"`` (the
            version, then generation), and all of these with the calls between them, ``"stall"``.

    Examples:
        >>> async def answer(folder, prompt_ids):  # doctest: +SKIP
        ...     engine = VLLMEngine(folder, log_file=Path("vllm.log"))
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
        model: str | Path,
        *,
        dtype: str = "float32",
        max_model_len: int = 256,
        max_num_seqs: int = 128,
        kv_cache_memory_bytes: int | None = None,
        on_update: _OnUpdate = "recompute",
        block_size: int = 32,
        log_file: Path | None = None,
        seed: int = 0,
        allow_truncated_support: bool = False,
        repeatable: bool = False,
        heartbeat_s: float = 60.0,
    ) -> None:
        if on_update not in get_args(_OnUpdate):
            raise ValueError(f"on_update={on_update!r}: give one of {get_args(_OnUpdate)}")
        if heartbeat_s <= 0:
            raise ValueError(f"heartbeat_s={heartbeat_s}: give more than 0 seconds")
        self.model = str(model)
        self.dtype = dtype
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.kv_cache_memory_bytes = kv_cache_memory_bytes
        self.on_update = on_update
        self.block_size = block_size
        self.log_file = None if log_file is None else Path(log_file)
        self.seed = seed
        self.allow_truncated_support = allow_truncated_support
        self.repeatable = repeatable
        self.heartbeat_s = heartbeat_s
        self.last_update: dict[str, float] = {}
        self._version = 0
        self._begun: dict[str, Generation] = {}  # of running answers, what was there before
        self._engine = None
        self._thread: LastingThread | None = None
        self._at_exit: multiprocessing.util.Finalize | None = None
        self._watch: asyncio.Task | None = None
        self._ending: asyncio.Task | None = None
        self._dead_because: str | None = "it was never started"

    @property
    def version(self) -> int:
        """Version of the weights that sample the next token."""
        return self._version

    async def start(self) -> None:
        """Starts the engine core and loads the model as version 0.

        It takes about 10 s on a CPU, and after :meth:`shutdown` it can be done again. In a process
        without threads the core is forked, which is fastest, and the event loop stands still;
        otherwise a thread of its own starts it and the loop goes on. What this process prints
        meanwhile goes to the ``log_file`` too.

        Raises:
            FileNotFoundError: if the model is neither a folder nor found on the hub.
            RuntimeError: if the engine is running already, or vLLM does not start.
        """
        if self._engine is not None:
            raise RuntimeError("this engine is running; shutdown() it first, or make another")
        await self.shutdown()  # one whose caller was cancelled may be under way
        build = functools.partial(
            start_vllm,
            self.model,
            log_file=self.log_file,
            kv_cache_memory_bytes=self.kv_cache_memory_bytes,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            block_size=self.block_size,
            seed=self.seed,
        )
        if can_fork():  # before vLLM's import starts threads of its own
            self._engine = build(fork=True)
        else:
            thread = LastingThread(lambda: build(fork=False))
            self._engine = await thread.result(unwanted=end_vllm)
            self._thread = thread
        # A process ended by an exception joins its children before it reports, and the core ends
        # only when told to: tell it first.
        finalize = multiprocessing.util.Finalize
        self._at_exit = finalize(None, end_vllm, args=(self._engine,), exitpriority=1)
        # vLLM 0.32 starts it with the first request where it is built outside the loop.
        self._engine._run_output_handler()
        self._dead_because = None
        self._version = 0
        self._update_lock = asyncio.Lock()  # held by one weight switch
        self._pause_lock = asyncio.Lock()  # held by whoever pauses or resumes
        self._paused = False  # by pause(), not by a switch
        self._admitting = asyncio.Event()  # not set while anyone has paused
        self._admitting.set()
        self._aborting_switches = 0
        try:
            await self._call(self._engine.update_weight_version("0"))
            await self._call(self._engine.get_supported_tasks())  # cached for all requests
        except BaseException:
            await self.shutdown()
            raise
        self._watch = asyncio.create_task(self._watch_heartbeat(self._engine))
        # The imported modules are garbage to nobody: scanning them stalls the loop for 0.3 s.
        gc.collect()
        gc.freeze()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingConfig,
        *,
        request_id: str,
        seed: int | None = None,
        partial: Generation | None = None,
    ) -> Generation:
        """Samples one answer; cancelling the coroutine aborts the request.

        Args:
            prompt_ids: token ids of the whole context, at least one.
            sampling: how to draw.
            request_id: unique among the running requests.
            seed: names the random stream; None names it after ``request_id``. The same name
                gives the same answer.
            partial: the beginning of this answer, as an :class:`EngineDeadError` carries it.
                Sampling goes on after it, from a stream named after its length too. One that a
                stop token ended, or that leaves no room for a token, is returned as the answer.

        Returns:
            The whole answer; with ``finish_reason="abort"`` if somebody, or an error of this
            request alone, ended it inside vLLM.

        Raises:
            ValueError: if the prompt is empty, holds unknown ids or leaves no room for a token,
                or if the sampling truncates the support without leave.
            EngineDeadError: if the engine core dies, or is shut down, before the answer is whole.
        """
        answer = Generation([], [], [], "abort") if partial is None else partial
        try:
            self.check_health()
            if self.repeatable and set(answer.versions) <= {self._version}:
                answer = Generation([], [], [], "abort")
            check_request(
                prompt_ids,
                answer.token_ids,
                sampling,
                max_model_len=self.max_model_len,
                vocabulary=self._engine.model_config.get_vocab_size(),
                allow_truncated_support=self.allow_truncated_support,
                served=self.model,
            )
            stream = request_id if seed is None else seed
            room = min(sampling.max_new_tokens, self.max_model_len - len(prompt_ids))
            while answer.finish_reason != "stop" and len(answer.token_ids) < room:
                while not self._admitting.is_set():
                    await self._call(self._admitting.wait())
                self.check_health()
                switches = self._aborting_switches
                ids = [*prompt_ids, *answer.token_ids]
                begun = len(answer.token_ids)
                seed = stream_seed(self.seed, stream, begun)
                params = sampling_params(sampling, begun=begun, seed=seed)
                salt = str(self._version) if self.on_update == "keep" else None
                self._begun[request_id] = answer
                rest = await sample(self._engine, ids, params, request_id, salt)
                answer = answer.followed_by(rest)
                if answer.finish_reason != "abort":
                    return answer
                if switches == self._aborting_switches:
                    # Nobody here did it: the core is dead, or ending, which aborts all requests.
                    self.check_health()
                    await self._call(self._engine.get_weight_version())
                    return answer
                self._begun[request_id] = answer
        except EngineDeadError as error:
            error.partial = answer if answer.token_ids else None
            raise
        finally:
            self._begun.pop(request_id, None)
        if answer.finish_reason != "stop":
            answer = dataclasses.replace(answer, finish_reason="length")
        return answer

    def partial_answer(self, request_id: str) -> Generation | None:
        """What is known so far of a running answer, or None; see the protocol."""
        begun = self._begun.get(request_id)
        if begun is None or self._engine is None:
            return None
        answer = begun.followed_by(so_far(self._engine, request_id))
        return answer if answer.token_ids else None

    async def update_weights(self, version: int, path: Path) -> None:
        """Serves the published weights from the next token on.

        The whole publication is read and checked beside generation, so refusing it costs no
        running request anything. Running requests carry on; each of their tokens keeps the
        version that drew it. :attr:`last_update` says what the switch cost.

        Args:
            version: version the weights stand for.
            path: what :meth:`torchrl_llm_async.weight_update.WeightStore.write` gave: a
                safetensors file (or a folder of them) under the names and shapes of the
                checkpoint the engine started from, without ``lm_head.weight`` if it is tied.

        Raises:
            WeightUpdateError: if the publication is missing, torn, incomplete, of wrong shapes,
                not finite in the engine's dtype, or not read within 10 times ``heartbeat_s``.
                Weights and version stay the former.
            EngineDeadError: if the engine core dies meanwhile, or fails to apply what it has
                checked, after which no weights may serve.
        """
        self.check_health()
        # Shielded: a caller that gives up leaves a whole switch behind, not half of one.
        await asyncio.shield(self._switch(version, path))

    async def _switch(self, version: int, path: Path) -> None:
        async with self._update_lock:
            self.check_health()
            begun = time.perf_counter()
            await self._stage(version, path)
            staged = time.perf_counter()
            async with self._pause_lock:
                self.check_health()
                try:
                    parts = await self._apply(version)
                except EngineDeadError:
                    raise
                except Exception as error:
                    # What serves now is unknown, and nothing may be sampled from it.
                    await self.shutdown()
                    self._dead_because = f"the switch to version {version} broke off ({error})"
                    raise self._dead() from error
            self.last_update = {"stage": staged - begun, **parts}

    async def _stage(self, version: int, path: Path) -> None:
        engine = self._engine
        limit_s = STAGING_BEATS * self.heartbeat_s
        try:
            async with asyncio.timeout(limit_s) as limit:
                await self._call(engine.collective_rpc("begin_staging", args=(version, str(path))))
                refusals = [None]
                while None in refusals:
                    await asyncio.sleep(_STAGING_POLL_S)
                    refusals = await self._call(engine.collective_rpc("staging_verdict"))
        except EngineDeadError:
            raise
        except Exception as error:
            late = f"{path} could not be read in {limit_s:g} s (10 times heartbeat_s)"
            refusals = [late if limit.expired() else repr(error)]
        if any(refusals):
            raise WeightUpdateError(
                f"version {version} refused, version {self._version} keeps serving: "
                f"{next(filter(None, refusals))}; publish it again, from the model the "
                f"engine was started with ({self.model})"
            )

    async def _apply(self, version: int) -> dict[str, float]:
        engine, on_update = self._engine, self.on_update
        times = [time.perf_counter()]
        self._admitting.clear()
        self._aborting_switches += on_update == "abort"
        await self._call(
            # Not pause_generation(): it sleeps 20 ms, so that outputs come in an order on which
            # nothing here depends; the core stamps versions itself.
            engine.engine_core.pause_scheduler_async(
                mode="abort" if on_update == "abort" else "keep",
                clear_cache=on_update != "keep",
            )
        )
        times.append(time.perf_counter())
        parts = await self._call(engine.collective_rpc("apply_staged_weights", args=(version,)))
        times.append(time.perf_counter())
        await self._call(engine.update_weight_version(str(version)))
        self._version = version
        if not self._paused:
            await self._call(engine.resume_generation())
            self._admitting.set()
        times.append(time.perf_counter())
        return {
            "pause": times[1] - times[0],
            **parts[0],
            "resume": times[3] - times[2],
            "stall": times[3] - times[0],
        }

    async def pause(self) -> None:
        """Stops sampling at the next token boundary; requests stay, and new ones queue.

        A weight switch meanwhile leaves it paused.

        Raises:
            EngineDeadError: if the engine core is dead, or dies meanwhile.
        """
        self.check_health()
        await asyncio.shield(self._set_paused(True))

    async def resume(self) -> None:
        """Goes on after :meth:`pause`; during a weight switch, once that is whole.

        Raises:
            EngineDeadError: if the engine core is dead, or dies meanwhile.
        """
        self.check_health()
        await asyncio.shield(self._set_paused(False))

    async def _set_paused(self, paused: bool) -> None:
        async with self._pause_lock:
            self.check_health()
            self._paused = paused
            core = self._engine.engine_core
            if paused:
                self._admitting.clear()
                await self._call(core.pause_scheduler_async(mode="keep", clear_cache=False))
            else:
                await self._call(core.resume_scheduler_async())
                self._admitting.set()

    async def _call(self, coroutine: Coroutine):
        """Awaits a call into the core; vLLM 0.32 leaves it pending if the core dies under it."""
        from vllm.v1.engine.exceptions import EngineDeadError as CoreDeadError

        if self._engine is None:
            coroutine.close()
            raise self._dead()
        call = asyncio.ensure_future(coroutine)
        try:
            await asyncio.wait(
                {call, self._engine.output_handler}, return_when=asyncio.FIRST_COMPLETED
            )
            if not call.done():
                raise self._dead()
            return call.result()
        except CoreDeadError as error:
            raise self._dead() from error
        except Exception as error:
            if str(error) == "Server shutting down":  # a core of vLLM 0.32 that got a SIGTERM
                raise self._dead() from error
            raise
        finally:
            call.cancel()

    async def _watch_heartbeat(self, engine) -> None:
        """Kills a core that hangs or ails, so that all who wait for it hear of its end."""
        try:
            await until_silent(lambda: self._call(engine.get_weight_version()), self.heartbeat_s)
            self._dead_because = (
                f"its engine core answered nothing for {self.heartbeat_s:g} s and was killed; if "
                "it was at work, give a larger heartbeat_s"
            )
        except EngineDeadError:
            return
        except Exception as error:  # unwatched, it might hang for ever
            self._dead_because = f"its engine core answered {error!r} and was killed"
        for process in engine.engine_core.resources.engine_manager.processes:
            process.kill()

    def check_health(self) -> None:
        """Raises :class:`EngineDeadError` if the engine is not running."""
        if self._engine is None or self._engine.errored:
            raise self._dead()

    def _dead(self) -> EngineDeadError:
        log = "" if self.log_file is None else f"; its last words are in {self.log_file}"
        return EngineDeadError(
            f"the vLLM engine for {self.model} does not run: "
            f"{self._dead_because or 'its engine core died'}{log}"
        )

    async def shutdown(self) -> None:
        """Ends the engine core; answers still pending raise :class:`EngineDeadError`.

        Once begun it is carried through, even if the caller is cancelled; whoever calls it
        meanwhile waits for it.
        """
        if self._engine is not None:
            self._dead_because = self._dead_because or "it was shut down"
            self._ending = asyncio.create_task(self._end(self._engine))
            self._engine = None
        if self._ending is not None:
            await asyncio.shield(self._ending)

    async def _end(self, engine) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError as CoreDeadError

        try:
            # vLLM 0.32 cancels its output task and would leave these waiting for ever.
            engine.output_processor.propagate_error(CoreDeadError())
            await asyncio.sleep(0)
            if self._watch is not None:
                self._watch.cancel()
                await asyncio.wait({self._watch})
                self._watch = None
            # A healthy core takes a second to end: not in this loop.
            await asyncio.to_thread(self._at_exit)
        finally:
            if self._thread is not None:
                self._thread.end()
                self._thread = None
            self._ending = None
