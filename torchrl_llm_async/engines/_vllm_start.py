"""Starts vLLM 0.32 with an engine core whose weights can be switched exactly, and ends it.

Owns the arguments and the environment that the rest of this package relies on, and how the core is
made to die with its client. What is done with the running engine is
:mod:`torchrl_llm_async.engines.vllm_engine`.
"""

from __future__ import annotations

import gc
import multiprocessing.util
import os
from pathlib import Path

from torchrl_llm_async._lifetime import die_with_parent
from torchrl_llm_async.engines._process import log_to, starting

WORKER_EXTENSION = "torchrl_llm_async.engines.vllm_worker.WeightUpdateExtension"
_CPU_KV_CACHE_BYTES = 256 << 20
_CORE_GRACE_S = 2.0  # then it is killed: it has nothing to save

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


def start_vllm(
    model: str,
    *,
    fork: bool,
    log_file: Path | None,
    kv_cache_memory_bytes: int | None,
    dtype: str,
    max_model_len: int,
    **engine_args,
):
    """Starts an engine core and waits until it has loaded the model.

    Args:
        model: folder, or name on the hub.
        fork: fork the core from this process, which must have no second thread; otherwise it is
            started afresh.
        log_file: as for :class:`~torchrl_llm_async.engines.VLLMEngine`, like all that follow.
        kv_cache_memory_bytes: size of the KV cache, or None.
        dtype: of the model.
        max_model_len: context in tokens.
        **engine_args: passed on to vLLM's ``AsyncEngineArgs``.

    Returns:
        The ``vllm.v1.engine.async_llm.AsyncLLM``.

    Raises:
        FileNotFoundError: if the model is neither a folder nor found on the hub.
        RuntimeError: if vLLM does not start.
    """
    with starting(_ENVIRONMENT, log_file):
        from vllm import platforms

        on_cpu = platforms.current_platform.is_cpu()
        if on_cpu:
            os.environ.update(_CPU_ENVIRONMENT)
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            kv_cache_memory_bytes = kv_cache_memory_bytes or _CPU_KV_CACHE_BYTES
        folder = _folder(model)
        try:
            # Not into a variable: modules that failed to import keep this frame for ever.
            return _start(
                on_cpu,
                fork,
                model=folder,
                kv_cache_memory_bytes=kv_cache_memory_bytes,
                dtype=dtype,
                max_model_len=max_model_len,
                **engine_args,
            )
        except Exception as error:
            log = "above" if log_file is None else f"in {log_file}"
            raise RuntimeError(
                f"vLLM did not start on {model} with dtype={dtype}, "
                f"max_model_len={max_model_len}: {error} (its own words are {log})"
            ) from error
        finally:
            if log_file is not None:
                log_to(log_file)


def _folder(model: str) -> str:
    if Path(model).is_dir():
        return model
    # Weight updates are checked against the checkpoint's own names and shapes.
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(model)
    except Exception as error:
        raise FileNotFoundError(
            f"model={model!r} is no folder, and the hub gives none by that name; "
            "give a folder with config.json and *.safetensors"
        ) from error


def _start(on_cpu: bool, fork: bool, **engine_args):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    config = AsyncEngineArgs(
        enforce_eager=on_cpu,
        # vLLM 0.32 rewinds a seeded request's generator after each part of a prompt that is
        # prefilled in parts, which a CPU's generator can't do: the core would die.
        enable_chunked_prefill=not on_cpu,
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
        worker_extension_cls=WORKER_EXTENSION,
        **engine_args,
    ).create_engine_config()
    if fork:
        # Here, because create_engine_config() exports "spawn": 8 s of imports saved.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        # At once; a spawned core is bound only when it imports the worker extension, and if
        # its client is killed in these first seconds, waits 5 minutes for it before it ends.
        multiprocessing.util.register_after_fork(config, lambda _: die_with_parent())
    return AsyncLLM.from_vllm_config(config, disable_log_stats=True)


def end_vllm(engine) -> None:
    """Ends the core and whatever else :func:`start_vllm` began; takes seconds at most."""
    engine.shutdown(timeout=_CORE_GRACE_S)
    # The __del__ of vLLM 0.32 does it again, at the interpreter's end on modules taken apart.
    engine.shutdown = lambda: None
    gc.unfreeze()  # frozen objects outlive the interpreter, and extension modules complain of it
