"""Losses for asynchronous RL of language models, as TorchRL ``LossModule`` classes."""

from __future__ import annotations

from torchrl_llm_async.objectives.advantage import GroupAdvantage
from torchrl_llm_async.objectives.common import AsyncLLMLoss, LossOutput
from torchrl_llm_async.objectives.critic import CriticPPOLoss, CriticPPOLossOutput
from torchrl_llm_async.objectives.dpo import OnlineDPOLoss, OnlineDPOLossOutput
from torchrl_llm_async.objectives.ppo import DecoupledPPOLoss, DecoupledPPOLossOutput

__all__ = [
    "AsyncLLMLoss",
    "CriticPPOLoss",
    "CriticPPOLossOutput",
    "DecoupledPPOLoss",
    "DecoupledPPOLossOutput",
    "GroupAdvantage",
    "LossOutput",
    "OnlineDPOLoss",
    "OnlineDPOLossOutput",
]
