"""Data between generation and training: the replay buffer of whole groups."""

from torchrl_llm_async.data.replay_buffer import StalenessReplayBuffer
from torchrl_llm_async.data.sampler import StalenessSampler

__all__ = ["StalenessReplayBuffer", "StalenessSampler"]
