"""Neural modules that losses and collectors use. Importing this package imports no torchtune."""

from __future__ import annotations

from torchrl_llm_async.modules.scores import TokenScores, score_tokens
from torchrl_llm_async.modules.torchtune_actor import TorchtuneActor, add_value_head

__all__ = ["TokenScores", "TorchtuneActor", "add_value_head", "score_tokens"]
