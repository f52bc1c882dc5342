"""One trajectory: a conversation between engine and environment, turn by turn.

Owns which tokens were sampled, by which version and at what log-probability, and what ends the
conversation. How text becomes tokens is :mod:`.conversation`'s affair, how the environment is
stepped :mod:`.env_pool`'s, what a checkpoint keeps of it :mod:`.state`'s, groups are
:mod:`.rollouts`'.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
from tensordict import TensorDictBase

from torchrl_llm_async.collectors.conversation import Conversation
from torchrl_llm_async.collectors.env_pool import EnvPool, EpisodeError
from torchrl_llm_async.collectors.state import Progress
from torchrl_llm_async.data.trajectory import Trajectory
from torchrl_llm_async.engines import Generation, GenerationEngine, SamplingConfig


async def run_episode(
    engine: GenerationEngine,
    env_pool: EnvPool,
    problem: Conversation,
    *,
    sampling: SamplingConfig,
    max_turns: int,
    seed: int,
    name: str = "",
    group_id: int,
    index: int,
    start_version: int,
    expected_tokens: int | None = None,
    progress: Progress | None = None,
) -> Trajectory:
    """Answers one problem, until the environment or a limit ends the conversation.

    Args:
        engine: a started engine.
        env_pool: where the environment is stepped.
        problem: how every conversation of the group begins; it is not changed.
        sampling: how each turn is sampled.
        max_turns: turns after which the conversation is cut.
        seed: the run's; requests are seeded by it, the group, the index and the turn.
        name: tells requests apart from those of an equal group and index.
        group_id: the group the trajectory belongs to.
        index: its place in the group.
        start_version: version served when the group was admitted.
        expected_tokens: how long the answer is expected to be, for an
            :class:`~torchrl_llm_async.engines.EnginePool` to spread long ones.
        progress: is kept up to date; answers that it has recorded are not asked for again, and the
            environment is stepped with them.

    Returns:
        The trajectory. It ends with a sampled token: what the environment says after the last
        answer is not part of it.

    Raises:
        EpisodeError: the problem does not fit the context, the environment failed or took too
            long, rewrote the conversation or gave no finite reward, or the engine aborted the
            request or gave a log-probability that is not finite.
        EngineDeadError: from the engine.
    """
    conversation = problem.fork()
    record = _Record(conversation.prompt_length)
    rewards: list[float] = []
    routing = {} if expected_tokens is None else {"expected_tokens": expected_tokens}
    progress = Progress() if progress is None else progress
    async with env_pool.lease(stateful=max_turns > 1) as env:
        for turn in range(max_turns):
            if len(conversation.token_ids) >= engine.max_model_len:
                ended_by = "context"
                break
            request_id = f"{name}{group_id}-{index}-{turn}"
            generation = progress.recall(conversation.token_ids)
            if generation is None or generation.finish_reason == "abort":
                progress.request_id = request_id
                generation = await engine.generate(
                    conversation.token_ids,
                    sampling,
                    request_id=request_id,
                    seed=request_seed(seed, group_id, index, turn),
                    partial=generation,
                    **routing,
                )
            progress.record(generation)
            if generation.finish_reason == "abort":
                raise EpisodeError(f"somebody aborted {request_id} in the engine", "aborted")
            if not np.isfinite(generation.log_probs).all():
                raise EpisodeError(
                    f"{request_id} has log-probabilities that are not finite: the weights served "
                    "may have diverged",
                    "log-probability not finite",
                )
            record.sampled(generation)
            action = conversation.respond(generation.token_ids)
            response = conversation.response
            step = await env.step(action)
            if step.reward is not None:
                if not math.isfinite(step.reward):
                    raise EpisodeError(f"the reward is {step.reward}", "reward not finite")
                rewards.append(step.reward)
            if step.terminated or step.truncated or step.done:
                ended_by = "environment"
                break
            if generation.finish_reason == "length":
                ended_by = "length"
                break
            if turn + 1 < max_turns:
                _observe(conversation, step.after)
                record.given(len(conversation.token_ids))
        else:
            ended_by = "turns"
    if not record.turns:
        raise EpisodeError(
            f"the problem takes {conversation.prompt_length} tokens, the engine's context holds "
            f"{engine.max_model_len}; filter the problems or raise engine.max_model_len",
            "prompt too long",
        )
    if not rewards:
        raise EpisodeError(
            "the environment gave no 'reward' in any step; append a transform that computes one",
            "no reward",
        )
    size = record.last_sampled
    # TorchRL's CountdownEnv, for one, truncates where it terminates: it is the last step anyway.
    cut_by_env = step.truncated and not step.terminated
    return Trajectory(
        token_ids=np.asarray(conversation.token_ids[:size], dtype=np.int64),
        sampled=np.asarray(record.is_sampled[:size], dtype=bool),
        log_probs=np.asarray(record.log_probs[:size], dtype=np.float32),
        versions=np.asarray(record.versions[:size], dtype=np.int64),
        prompt_length=conversation.prompt_length,
        reward=sum(rewards),
        terminated=step.terminated,
        truncated=ended_by != "environment" or generation.finish_reason == "length" or cut_by_env,
        ended_by=ended_by,
        group_id=group_id,
        index=index,
        start_version=start_version,
        prompt=conversation.prompt,
        response=response,
        extras=step.extras,
    )


def request_seed(seed: int, group_id: int, index: int, turn: int) -> int:
    """A 62-bit seed that depends on nothing but what is sampled, so that runs repeat."""
    digest = hashlib.blake2b(f"{seed}/{group_id}/{index}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


class _Record:
    """What is known of each token of a conversation, prompt first."""

    def __init__(self, prompt_length: int):
        self.is_sampled: list[bool] = []
        self.log_probs: list[float] = []
        self.versions: list[int] = []
        self.turns = 0
        self.last_sampled = 0
        self.given(prompt_length)

    def given(self, size: int) -> None:
        """Up to ``size``, the tokens not recorded yet are the environment's."""
        added = size - len(self.is_sampled)
        self.is_sampled += [False] * added
        self.log_probs += [0.0] * added
        self.versions += [-1] * added

    def sampled(self, generation: Generation) -> None:
        """The next tokens are the policy's."""
        self.is_sampled += [True] * len(generation.token_ids)
        self.log_probs += generation.log_probs
        self.versions += generation.versions
        self.turns += 1
        self.last_sampled = len(self.is_sampled)


def _observe(conversation: Conversation, after: TensorDictBase) -> None:
    try:
        conversation.observe(after)
    except Exception as error:  # A chat template may raise anything, too.
        message = f"{type(error).__name__}: {error}"
        raise EpisodeError(message, "conversation unreadable") from error
