"""What runs inside vLLM's own processes: weight updates, and dying with the parent.

vLLM imports this module in the process that holds the model, from the name it is given in
``worker_extension_cls``, and mixes :class:`WeightUpdateExtension` into its worker; the methods are
then reached by ``collective_rpc``. Nothing else may import it: the import itself ties an engine
core to the life of its parent. When to pause, and which version is served, is the client's
affair (:mod:`torchrl_llm_async.engines.vllm_engine`).
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from torchrl_llm_async._lifetime import die_with_parent

if multiprocessing.current_process().name.startswith("EngineCore"):
    # vLLM 0.32 leaves the core running for ever once its client is killed.
    die_with_parent()
    # An interrupt typed at the terminal reaches the whole process group; what it means is for the
    # client to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A forked core inherits the wake-up socket of the client's loop, which would take a SIGTERM
    # meant for the core as its own.
    signal.set_wakeup_fd(-1)
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        # Read from the environment at import only, and a forked core imported it long ago.
        import torch._dynamo.config

        torch._dynamo.config.disable = True


class _Staged(NamedTuple):
    version: int
    refusal: str  # empty if there is nothing against it
    tensors: dict[str, torch.Tensor]  # in the model's dtype


def _safetensors_files(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors")) if path.is_dir() else [path]


class WeightUpdateExtension:
    """Loads a published set of weights in two steps: check all of it, then apply all of it.

    Checking takes as long as reading does, and runs in a thread beside the engine's steps: the
    client begins it and asks until there is a verdict, since a core can't call back.
    """

    _staging: Future[_Staged] | None = None

    def begin_staging(self, version: int, path: str) -> None:
        """Starts to read a publication and to check it whole, changing nothing that serves.

        One that was begun before and is not applied is given up, even if it never ends.

        Args:
            version: version the publication must carry, where its metadata names one.
            path: safetensors file, or a folder of them, under Hugging Face names.
        """
        staging = self._staging = Future()

        def stage() -> None:
            try:
                staging.set_result(self._read_and_check(version, Path(path)))
            except Exception as error:
                staging.set_result(_Staged(version, f"{path} can't be checked ({error!r})", {}))

        # A thread of its own: one that hangs in a dead file system blocks neither the next one,
        # as an executor's would, nor the process's end.
        threading.Thread(target=stage, name=f"stages version {version}", daemon=True).start()

    def staging_verdict(self) -> str | None:
        """None while the publication is being read, then the reason to refuse it, or ``""``."""
        return self._staging.result().refusal if self._staging.done() else None

    def apply_staged_weights(self, version: int) -> dict[str, float]:
        """Replaces the model's weights by the staged ones; call it while generation is paused.

        Args:
            version: version they were staged for.

        Returns:
            Seconds it took to ``"load"`` them and to ``"repack"`` a tied head.

        Raises:
            RuntimeError: if something else is staged, or nothing.
        """
        staging, self._staging = self._staging, None
        if staging is None or not staging.done() or (staged := staging.result()).refusal:
            raise RuntimeError(f"version {version} is not staged")
        if staged.version != version:
            raise RuntimeError(f"version {staged.version} is staged, not version {version}")
        begun = time.perf_counter()
        self.reload_weights(weights_iterator=iter(staged.tensors.items()))
        loaded = time.perf_counter()
        if self.model_config.hf_config.tie_word_embeddings:
            for module in self.model_runner.get_model().modules():
                # On a CPU the head holds a repacked copy of the tied weight, which
                # reload_weights of vLLM 0.32 leaves as it was.
                if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
                    dispatch_cpu_unquantized_gemm(module, remove_weight=False)
        return {"load": loaded - begun, "repack": time.perf_counter() - loaded}

    def _read_and_check(self, version: int, path: Path) -> _Staged:
        tensors: dict[str, torch.Tensor] = {}
        stamps = set()
        try:
            for file in _safetensors_files(path):
                # safe_open() keeps the interpreter lock while it waits for a file system.
                file.open("rb").close()
                with safe_open(file, framework="pt") as opened:
                    stamps.add((opened.metadata() or {}).get("version", str(version)))
                    names = opened.keys()
                    tensors.update((name, opened.get_tensor(name)) for name in names)
        except (OSError, SafetensorError) as error:
            refusal = f"{path} can't be read ({type(error).__name__}: {error})"
        else:
            refusal = (
                f"{path} is stamped version {', '.join(sorted(stamps))}"
                if stamps - {str(version)}
                else self._misfit(tensors)
            )
        if refusal:
            return _Staged(version, refusal, {})
        # vLLM 0.32's bf16 CPU kernels keep an fp32 bias unrounded: cast before loading.
        dtype = self.model_config.dtype
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            # What is finite as published may not be so any more. One pass without a temporary; a
            # NaN makes both ends of the range NaN.
            if not all(end.isfinite() for end in tensor.aminmax()):
                return _Staged(version, f"{name} holds values that are not finite in {dtype}", {})
        return _Staged(version, "", tensors)

    def _misfit(self, tensors: dict[str, torch.Tensor]) -> str:
        expected = self._expected_shapes
        missing = sorted(expected.keys() - tensors.keys())
        unknown = sorted(tensors.keys() - expected.keys())
        if missing or unknown:
            return f"{len(missing)} missing {missing[:3]}, {len(unknown)} unknown {unknown[:3]}"
        for name, tensor in tensors.items():
            if tuple(tensor.shape) != expected[name]:
                return f"{name} has shape {tuple(tensor.shape)}, the model {expected[name]}"
        return ""

    @functools.cached_property
    def _expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the checkpoint the engine started from; a tied head has none."""
        shapes = {}
        for file in _safetensors_files(Path(self.model_config.model)):
            with safe_open(file, framework="pt") as tensors:
                names = tensors.keys()
                shapes.update((name, tuple(tensors.get_slice(name).get_shape())) for name in names)
        if self.model_config.hf_config.tie_word_embeddings:
            shapes.pop("lm_head.weight", None)
        return shapes
