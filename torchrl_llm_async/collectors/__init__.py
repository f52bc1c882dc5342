"""Collectors: from prompts to finished groups, asynchronously."""

from torchrl_llm_async.collectors.collector import AsyncLLMCollector
from torchrl_llm_async.collectors.cut import Cut
from torchrl_llm_async.collectors.evaluation import Evaluation
from torchrl_llm_async.collectors.host import RemoteTraceback

__all__ = ["AsyncLLMCollector", "Cut", "Evaluation", "RemoteTraceback"]
