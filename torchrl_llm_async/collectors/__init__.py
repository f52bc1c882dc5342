"""Collectors: from prompts to finished groups, asynchronously."""

from torchrl_llm_async.collectors.collector import AsyncLLMCollector, RemoteTraceback
from torchrl_llm_async.collectors.cut import Cut
from torchrl_llm_async.collectors.evaluation import Evaluation

__all__ = ["AsyncLLMCollector", "Cut", "Evaluation", "RemoteTraceback"]
