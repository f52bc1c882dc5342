"""Losses for asynchronous RL of language models, as TorchRL ``LossModule`` classes."""

from __future__ import annotations

from torchrl_llm_async.objectives.advantage import GroupAdvantage
from torchrl_llm_async.objectives.best_of_n import BestOfNLoss, BestOfNLossOutput
from torchrl_llm_async.objectives.common import AsyncLLMLoss, LossOutput
from torchrl_llm_async.objectives.critic import CriticPPOLoss, CriticPPOLossOutput
from torchrl_llm_async.objectives.dpo import OnlineDPOLoss, OnlineDPOLossOutput
from torchrl_llm_async.objectives.ppo import DecoupledPPOLoss, DecoupledPPOLossOutput
from torchrl_llm_async.objectives.rloo import ProximalRLOOLoss, ProximalRLOOLossOutput
from torchrl_llm_async.objectives.trajectory_balance import (
    TrajectoryBalanceLoss,
    TrajectoryBalanceLossOutput,
)

__all__ = [
    "AsyncLLMLoss",
    "BestOfNLoss",
    "BestOfNLossOutput",
    "CriticPPOLoss",
    "CriticPPOLossOutput",
    "DecoupledPPOLoss",
    "DecoupledPPOLossOutput",
    "GroupAdvantage",
    "LossOutput",
    "OnlineDPOLoss",
    "OnlineDPOLossOutput",
    "ProximalRLOOLoss",
    "ProximalRLOOLossOutput",
    "TrajectoryBalanceLoss",
    "TrajectoryBalanceLossOutput",
]
