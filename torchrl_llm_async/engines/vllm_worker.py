"""What runs inside vLLM's own processes: weight updates, and dying with the parent.

vLLM imports this module in the process that holds the model, from the name it is given in
``worker_extension_cls``, and mixes :class:`WeightUpdateExtension` into its worker; the methods are
then reached by ``collective_rpc``. Nothing else may import it: the import itself ties an engine
core to the life of its parent. When to pause, and which version is served, is the client's
affair (:mod:`torchrl_llm_async.engines.vllm_engine`).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

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


def _safetensors_files(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors")) if path.is_dir() else [path]


class WeightUpdateExtension:
    """Loads a published set of weights in two steps: check all of it, then apply all of it."""

    def stage_weights(self, version: int, path: str) -> str:
        """Reads a publication and checks it whole, changing nothing that serves.

        Args:
            version: version the publication must carry, where its metadata names one.
            path: safetensors file, or a folder of them, under Hugging Face names.

        Returns:
            The reason for refusing it, or an empty string.
        """
        staged, stamps = {}, set()
        try:
            for file in _safetensors_files(Path(path)):
                with safe_open(file, framework="pt") as tensors:
                    stamps.add((tensors.metadata() or {}).get("version", str(version)))
                    names = tensors.keys()
                    staged.update((name, tensors.get_tensor(name)) for name in names)
        except (OSError, SafetensorError) as error:
            return f"{path} can't be read ({type(error).__name__}: {error})"
        if stamps - {str(version)}:
            return f"{path} is stamped version {', '.join(sorted(stamps))}"
        expected = self._expected_shapes()
        missing = sorted(expected.keys() - staged.keys())
        unknown = sorted(staged.keys() - expected.keys())
        if missing or unknown:
            return f"{len(missing)} missing {missing[:3]}, {len(unknown)} unknown {unknown[:3]}"
        for name, tensor in staged.items():
            if tuple(tensor.shape) != expected[name]:
                return f"{name} has shape {tuple(tensor.shape)}, the model {expected[name]}"
            if not torch.isfinite(tensor).all():
                return f"{name} holds values that are not finite"
        # vLLM 0.32's bf16 CPU kernels keep an fp32 bias unrounded: cast before loading.
        dtype = self.model_config.dtype
        self._staged_weights = {name: tensor.to(dtype) for name, tensor in staged.items()}
        return ""

    def apply_staged_weights(self) -> None:
        """Replaces the model's weights by the staged ones; call it while generation is paused."""
        staged, self._staged_weights = self._staged_weights, None
        self.reload_weights(weights_iterator=iter(staged.items()))
        if self.model_config.hf_config.tie_word_embeddings:
            for module in self.model_runner.get_model().modules():
                # On a CPU the head holds a repacked copy of the tied weight, which
                # reload_weights of vLLM 0.32 leaves as it was.
                if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
                    dispatch_cpu_unquantized_gemm(module, remove_weight=False)

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
