"""vLLM as a generation engine: exact versions per token, weights switched in flight.

Owns the life of one ``AsyncLLM`` of vLLM 0.32 and its engine-core process: environment, start,
requests, weight switches, end. What happens to the weights inside the core is
:mod:`torchrl_llm_async.engines.vllm_worker`; who may generate at which version is the staleness
controller's affair, and several engines are a pool's.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import logging
import multiprocessing.util
import os
import sys
import threading
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Literal

from torchrl_llm_async._lifetime import die_with_parent
from torchrl_llm_async.engines.base import (
    EngineDeadError,
    Generation,
    SamplingConfig,
    WeightUpdateError,
)

__all__ = ["VLLMEngine"]

_WORKER_EXTENSION = "torchrl_llm_async.engines.vllm_worker.WeightUpdateExtension"
_CPU_KV_CACHE_BYTES = 256 << 20
_CORE_GRACE_S = 2.0  # then it is killed: it has nothing to save

# In force while start() runs, and inherited by the engine core; afterwards this process has its
# own environment back, rid of what vLLM's CPU platform exports too (LD_PRELOAD among others).
_ENVIRONMENT = {
    # Keeps the worker inside the engine core: one process less, and none spinning on a queue.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
_CPU_ENVIRONMENT = {
    # The sampler's helpers are compiled at the first request even when the model runs eagerly:
    # 20 s for nothing at this size.
    "TORCHDYNAMO_DISABLE": "1",
}


class VLLMEngine:
    """A :class:`~torchrl_llm_async.engines.GenerationEngine` over vLLM's ``AsyncLLM``.

    The constructor only keeps its arguments: the object can be pickled to the process that will
    own the engine. :meth:`start` takes about 10 s on a CPU, blocks the event loop it is awaited
    in for that time, and binds the engine core to the calling thread: when that thread or its
    process ends, however it ends, the core is killed with it (Linux).

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
        on_update: fate of the running requests' KV cache at a weight switch. ``"recompute"``
            prefills them again, so that later tokens are exactly the new policy's; ``"keep"``
            goes on with the old cache, which stalls less, and new requests never reuse a prefix
            computed by older weights. Recorded log-probabilities are true in either case.
        block_size: tokens per KV block, the granularity at which a group shares its prompt;
            32 is the smallest on a CPU.
        log_file: receives all that vLLM and the engine core print; None leaves it on the
            terminal.
        seed: mixed into the seed of every request.
        allow_truncated_support: accept sampling with ``top_p`` or ``top_k``.

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
        on_update: Literal["keep", "recompute"] = "recompute",
        block_size: int = 32,
        log_file: Path | None = None,
        seed: int = 0,
        allow_truncated_support: bool = False,
    ) -> None:
        if on_update not in ("keep", "recompute"):
            raise ValueError(f"on_update={on_update!r}: give 'keep' or 'recompute'")
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
        self._version = 0
        self._engine = None
        self._at_exit: multiprocessing.util.Finalize | None = None
        self._update_lock: asyncio.Lock | None = None
        self._dead_because: str | None = "it was never started"

    @property
    def version(self) -> int:
        """Version of the weights that sample the next token."""
        return self._version

    async def start(self) -> None:
        """Starts the engine core and loads the model as version 0.

        Raises:
            FileNotFoundError: if the model is neither a folder nor found on the hub.
            RuntimeError: if the engine is running already, or vLLM does not start.
        """
        if self._engine is not None:
            raise RuntimeError("this engine is running; shutdown() it first, or make another")
        fork = _can_fork()  # before vLLM's import starts threads of its own
        with _environment(_ENVIRONMENT), _output_to(self.log_file):
            from vllm import platforms

            on_cpu = platforms.current_platform.is_cpu()
            if on_cpu:
                os.environ.update(_CPU_ENVIRONMENT)
                os.environ.setdefault("OMP_NUM_THREADS", "1")
            try:
                self._engine = self._build(on_cpu, fork)
            except FileNotFoundError:
                raise
            except Exception as error:
                log = "above" if self.log_file is None else f"in {self.log_file}"
                raise RuntimeError(
                    f"vLLM did not start on {self.model} with dtype={self.dtype}, "
                    f"max_model_len={self.max_model_len}: {error} (its own words are {log})"
                ) from error
            if self.log_file is not None:
                _log_to(self.log_file)
        # A process ended by an exception joins its children before it reports, and the core ends
        # only when told to: tell it first.
        self._at_exit = multiprocessing.util.Finalize(
            None, _end, args=(self._engine,), exitpriority=1
        )
        self._dead_because = None
        self._update_lock = asyncio.Lock()
        self._version = 0
        try:
            await self._call(self._engine.update_weight_version("0"))
            await self._call(self._engine.get_supported_tasks())  # cached for all requests
        except BaseException:
            await self.shutdown()
            raise
        # The imported modules are garbage to nobody: scanning them stalls the loop for 0.3 s.
        gc.collect()
        gc.freeze()

    def _build(self, on_cpu: bool, fork: bool):
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        model = self.model
        if not Path(model).is_dir():
            # Weight updates are checked against the checkpoint's own names and shapes.
            from huggingface_hub import snapshot_download

            try:
                model = snapshot_download(model)
            except Exception as error:
                raise FileNotFoundError(
                    f"model={self.model!r} is no folder, and the hub gives none by that name; "
                    "give a folder with config.json and *.safetensors"
                ) from error
        kv_bytes = self.kv_cache_memory_bytes
        if kv_bytes is None and on_cpu:
            kv_bytes = _CPU_KV_CACHE_BYTES
        config = AsyncEngineArgs(
            model=model,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            kv_cache_memory_bytes=kv_bytes,
            block_size=self.block_size,
            enforce_eager=on_cpu,
            # vLLM 0.32 rewinds a seeded request's generator after each part of a prompt that is
            # prefilled in parts, which a CPU's generator can't do: the core would die.
            enable_chunked_prefill=not on_cpu,
            skip_tokenizer_init=True,
            logprobs_mode="processed_logprobs",
            worker_extension_cls=_WORKER_EXTENSION,
            seed=self.seed,
        ).create_engine_config()
        if fork:
            # Here, because create_engine_config() exports "spawn": 8 s of imports saved.
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
            # At once; a spawned core is bound only when it imports the worker extension, and if
            # its client is killed in these first seconds, waits 5 minutes for it before it ends.
            multiprocessing.util.register_after_fork(self, lambda _: die_with_parent())
        return AsyncLLM.from_vllm_config(config, disable_log_stats=True)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingConfig,
        *,
        request_id: str,
        seed: int | None = None,
    ) -> Generation:
        """Samples one answer.

        Args:
            prompt_ids: token ids of the whole context, at least one.
            sampling: how to draw.
            request_id: unique among the running requests.
            seed: names the random stream; None names it after ``request_id``. The same name
                gives the same answer, so a resubmitted request needs another.

        Raises:
            ValueError: if the prompt is empty, holds unknown ids or leaves no room for a token,
                or if the sampling truncates the support without leave.
            EngineDeadError: if the engine core dies, or is shut down, before the answer is whole.
        """
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError as CoreDeadError

        self.check_health()
        if not 0 < len(prompt_ids) < self.max_model_len:
            raise ValueError(
                f"prompt of {len(prompt_ids)} tokens: give 1 to {self.max_model_len - 1}, or a "
                f"larger max_model_len than {self.max_model_len} to the engine"
            )
        # vLLM 0.32 checks ids only against a tokenizer; an unknown one would kill its core.
        vocabulary = self._engine.model_config.get_vocab_size()
        if not 0 <= min(prompt_ids) <= max(prompt_ids) < vocabulary:
            raise ValueError(
                f"prompt ids run from {min(prompt_ids)} to {max(prompt_ids)}, the vocabulary of "
                f"{self.model} from 0 to {vocabulary - 1}: tokenizer and model do not match"
            )
        if sampling.truncates_support and not self.allow_truncated_support:
            raise ValueError(
                f"top_p={sampling.top_p}, top_k={sampling.top_k} truncate the support, which "
                "biases importance ratios: sample with temperature alone, or build the engine "
                "with allow_truncated_support=True"
            )
        prompt = {"type": "token", "prompt_token_ids": list(prompt_ids)}
        if self.on_update == "keep":
            prompt["cache_salt"] = str(self._version)
        params = self._sampling_params(sampling, request_id if seed is None else seed)
        try:
            async for output in self._engine.generate(prompt, params, request_id):
                answer = output.outputs[0]
        except CoreDeadError as error:
            raise self._dead() from error
        except VLLMClientError as error:
            raise ValueError(f"vLLM refuses request {request_id}: {error}") from error
        return Generation(
            token_ids=list(answer.token_ids),
            log_probs=answer.logprobs.logprobs,
            versions=[
                int(span.version)
                for span in answer.weight_versions
                for _ in range(span.end - span.start)
            ],
            finish_reason=answer.finish_reason,
        )

    def _sampling_params(self, sampling: SamplingConfig, stream: int | str):
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # Hashed, since neighbouring seeds give correlated streams to the children of a group.
        digest = hashlib.blake2b(f"{self.seed}/{stream}".encode(), digest_size=8).digest()
        return SamplingParams(
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=list(sampling.stop_token_ids),
            seed=int.from_bytes(digest, "little") >> 2,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            # With flat log-probabilities 30 us of this process per token; a message per token
            # takes 44, for chunks that carry no versions.
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    async def update_weights(self, version: int, path: Path) -> None:
        """Serves the published weights from the next token on.

        The whole publication is checked before generation pauses, so refusing it costs no
        running request anything. Running requests carry on; each of their tokens keeps the
        version that drew it.

        Args:
            version: version the weights stand for.
            path: what :meth:`torchrl_llm_async.weight_update.WeightStore.write` gave: a
                safetensors file (or a folder of them) under the names and shapes of the
                checkpoint the engine started from, without ``lm_head.weight`` if it is tied.

        Raises:
            WeightUpdateError: if the publication is missing, torn, incomplete, of wrong shapes
                or not finite. Weights and version stay the former.
            EngineDeadError: if the engine core dies meanwhile, or fails to apply what it has
                checked, after which no weights may serve.
        """
        self.check_health()
        # Shielded: a caller that gives up leaves a whole switch behind, not half of one.
        await asyncio.shield(self._switch(version, path))

    async def _switch(self, version: int, path: Path) -> None:
        engine = self._engine
        async with self._update_lock:
            refusals = await self._call(
                engine.collective_rpc("stage_weights", args=(version, str(path)))
            )
            if any(refusals):
                raise WeightUpdateError(
                    f"version {version} refused, version {self._version} keeps serving: "
                    f"{next(filter(None, refusals))}; publish it again, from the model the "
                    f"engine was started with ({self.model})"
                )
            try:
                # Not pause_generation(): it sleeps 20 ms, so that outputs come in an order on
                # which nothing here depends; the core stamps versions itself.
                await self._call(
                    engine.engine_core.pause_scheduler_async(
                        mode="keep", clear_cache=self.on_update == "recompute"
                    )
                )
                await self._call(engine.collective_rpc("apply_staged_weights"))
                await self._call(engine.update_weight_version(str(version)))
                self._version = version
                await self._call(engine.resume_generation())
            except EngineDeadError:
                raise
            except Exception as error:
                # What serves now is unknown, and nothing may be sampled from it.
                await self.shutdown()
                self._dead_because = f"the switch to version {version} broke off ({error})"
                raise self._dead() from error

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
        finally:
            call.cancel()

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
        """Ends the engine core; answers still pending raise :class:`EngineDeadError`."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        from vllm.v1.engine.exceptions import EngineDeadError as CoreDeadError

        self._dead_because = "it was shut down"
        # vLLM 0.32 cancels its output task and would leave these waiting for ever.
        engine.output_processor.propagate_error(CoreDeadError())
        await asyncio.sleep(0)
        self._at_exit()


def _end(engine) -> None:
    engine.shutdown(timeout=_CORE_GRACE_S)
    gc.unfreeze()  # frozen objects outlive the interpreter, and extension modules complain of it


def _can_fork() -> bool:
    """Whether this process may be forked: no second thread, no process group."""
    import torch.distributed as dist

    tasks = Path("/proc/self/task")
    threads = len(list(tasks.iterdir())) if tasks.is_dir() else threading.active_count() + 1
    return threads == 1 and not (dist.is_available() and dist.is_initialized())


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    former = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(former)


@contextlib.contextmanager
def _output_to(log_file: Path | None) -> Iterator[None]:
    """Sends file descriptors 1 and 2 to the file; child processes started inside keep it."""
    if log_file is None:
        yield
        return
    log_file.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(saved[0], 1)
        os.dup2(saved[1], 2)
        for descriptor in (*saved, log):
            os.close(descriptor)


def _log_to(log_file: Path) -> None:
    """Sends this process's vLLM logger to the file, from now on."""
    logger = logging.getLogger("vllm")
    handler = logging.FileHandler(log_file)
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(name)s] %(message)s"))
    for old in list(logger.handlers):
        logger.removeHandler(old)
    logger.addHandler(handler)
