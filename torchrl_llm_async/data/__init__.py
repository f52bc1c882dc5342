"""Data between generation and training: the replay buffer of whole groups."""

from torchrl_llm_async.data.filters import (
    FirstReason,
    GroupFilter,
    RejectEqualRewards,
    RejectRepeatedPrompts,
)
from torchrl_llm_async.data.replay_buffer import StalenessReplayBuffer
from torchrl_llm_async.data.sampler import StalenessSampler
from torchrl_llm_async.data.trajectory import Trajectory

__all__ = [
    "FirstReason",
    "GroupFilter",
    "RejectEqualRewards",
    "RejectRepeatedPrompts",
    "StalenessReplayBuffer",
    "StalenessSampler",
    "Trajectory",
]
