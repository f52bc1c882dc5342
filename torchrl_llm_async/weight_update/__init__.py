"""From the trainer's shards to a publication that engines read.

:class:`WeightPublisher` gathers, :class:`WeightStore` keeps; switching to a publication is the
engine's affair (:meth:`torchrl_llm_async.engines.GenerationEngine.update_weights`).
"""

from __future__ import annotations

from torchrl_llm_async.weight_update.publisher import WeightPublisher
from torchrl_llm_async.weight_update.store import WeightStore

__all__ = ["WeightPublisher", "WeightStore"]
