"""Neural modules that losses and collectors use. Importing this package imports no torchtune."""

from __future__ import annotations

from torchrl_llm_async.modules.torchtune_actor import TorchtuneActor

__all__ = ["TorchtuneActor"]
