"""Held-out problems, answered greedily beside the rollouts.

Owns the problems and their scores. When to evaluate, and that no weights switch meanwhile, is the
host's affair (:mod:`.host`).
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from torchrl._utils import logger as torchrl_logger

from torchrl_llm_async.collectors.conversation import Conversation
from torchrl_llm_async.collectors.env_pool import EnvPool, EpisodeError
from torchrl_llm_async.collectors.episode import run_episode
from torchrl_llm_async.data.trajectory import Trajectory
from torchrl_llm_async.engines import EnginePool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from torchrl_llm_async.collectors.settings import RolloutConfig


@dataclass
class Evaluation:
    """Greedy answers to the held-out problems, all under one version of the weights."""

    version: int
    rewards: list[float]
    answer_tokens: float
    truncated: float
    seconds: float

    @property
    def accuracy(self) -> float:
        """Share of problems with a reward of 1 or more."""
        return float(np.mean(np.asarray(self.rewards) >= 1.0))

    @property
    def mean_reward(self) -> float:
        """Mean over the problems of the rewards summed over each one's turns."""
        return float(np.mean(self.rewards))


class HeldOut:
    """The held-out problems; they are drawn with the first evaluation.

    Args:
        config: the rollouts', whose limits hold here too.
        engine: a started pool of engines.
        tokenizer: the policy's tokenizer.
        env_pool: of the environment that poses and scores the problems.
    """

    def __init__(
        self,
        config: RolloutConfig,
        engine: EnginePool,
        tokenizer: PreTrainedTokenizerBase,
        env_pool: EnvPool,
    ):
        self.env_pool = env_pool
        self._config, self._engine, self._tokenizer = config, engine, tokenizer
        self._greedy = replace(config.sampling, temperature=0.0, top_p=1.0, top_k=0)
        self._problems: list[Conversation] | None = None

    async def evaluate(self) -> Evaluation:
        """Answers all problems; the caller sees to it that no weights switch meanwhile.

        Raises:
            EpisodeError: a problem could not be scored.
            RuntimeError: engines answered with different versions, after one of several refused
                the weights.
        """
        if self._problems is None:
            self._problems = await self._draw()
        start = time.perf_counter()
        version = self._engine.version
        async with asyncio.TaskGroup() as tasks:
            answers = [
                tasks.create_task(self._answer(index, problem, version))
                for index, problem in enumerate(self._problems)
            ]
        trajectories = [answer.result() for answer in answers]
        versions = {int(v) for t in trajectories for v in t.versions[t.sampled]}
        if versions != {version}:
            raise RuntimeError(f"the held-out answers come from versions {sorted(versions)}")
        return Evaluation(
            version=version,
            rewards=[t.reward for t in trajectories],
            answer_tokens=float(np.mean([t.sampled.sum() for t in trajectories])),
            truncated=float(np.mean([t.truncated for t in trajectories])),
            seconds=time.perf_counter() - start,
        )

    async def _draw(self) -> list[Conversation]:
        env = await self.env_pool.make()
        problems = [
            Conversation(self._tokenizer, await self.env_pool.reset(env))
            for _ in range(self._config.eval_problems)
        ]
        self.env_pool.give_back(env)
        return problems

    async def _answer(self, index: int, problem: Conversation, version: int) -> Trajectory:
        """A whole episode, begun anew if it fails: nothing is trained on what is left out here."""
        for attempt in range(1 + self._config.step_retries):
            try:
                return await run_episode(
                    self._engine,
                    self.env_pool,
                    problem,
                    sampling=self._greedy,
                    max_turns=self._config.max_turns,
                    seed=self._config.seed,
                    name=f"eval-{version}-{attempt}-",
                    group_id=index,
                    index=0,
                    start_version=version,
                )
            except EpisodeError as error:
                if attempt == self._config.step_retries:
                    raise
                torchrl_logger.warning(f"held-out problem {index} is tried again: {error}")
        raise AssertionError("unreachable")
