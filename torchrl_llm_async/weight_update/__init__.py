"""From the trainer's shards to a publication that engines read.

:class:`WeightPublisher` gathers, :class:`WeightStore` keeps, and
:class:`VLLMSharedWeightSyncScheme` is the two in TorchRL's words; switching to a publication is the
engine's affair (:meth:`torchrl_llm_async.engines.GenerationEngine.update_weights`).
"""

from __future__ import annotations

from torchrl_llm_async.weight_update.publisher import WeightPublisher
from torchrl_llm_async.weight_update.store import WeightStore
from torchrl_llm_async.weight_update.sync_scheme import VLLMSharedWeightSyncScheme

__all__ = ["VLLMSharedWeightSyncScheme", "WeightPublisher", "WeightStore"]
