"""Text environments with verifiable rewards."""

from torchrl_llm_async.envs.reasoning_gym import ReasoningGymEnv, WrittenSumsEnv

__all__ = ["ReasoningGymEnv", "WrittenSumsEnv"]
