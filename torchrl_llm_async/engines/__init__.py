"""Generation engines: token ids in, token ids, log-probabilities and exact versions out.

Importing this package imports neither vLLM nor aiohttp; an engine's :meth:`start` does.
"""

from __future__ import annotations

from torchrl_llm_async.engines.base import (
    EngineDeadError,
    Generation,
    GenerationEngine,
    SamplingConfig,
    WeightUpdateError,
)
from torchrl_llm_async.engines.pool import EnginePool, PoolStats
from torchrl_llm_async.engines.vllm_engine import VLLMEngine
from torchrl_llm_async.engines.vllm_server import VLLMServerEngine

__all__ = [
    "EngineDeadError",
    "EnginePool",
    "Generation",
    "GenerationEngine",
    "PoolStats",
    "SamplingConfig",
    "VLLMEngine",
    "VLLMServerEngine",
    "WeightUpdateError",
]
