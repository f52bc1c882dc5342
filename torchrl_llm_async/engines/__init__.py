"""Generation engines: token ids in, token ids, log-probabilities and exact versions out.

Importing this package imports no vLLM; :meth:`VLLMEngine.start` does.
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

__all__ = [
    "EngineDeadError",
    "EnginePool",
    "Generation",
    "GenerationEngine",
    "PoolStats",
    "SamplingConfig",
    "VLLMEngine",
    "WeightUpdateError",
]
