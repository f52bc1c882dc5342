"""One trajectory as plain arrays, and as the tensordict row that buffers and losses read.

Owns the names of a row's entries. Does not know how a trajectory came about, nor how rows are
stored. Between processes a :class:`Trajectory` travels instead of its tensordict, whose
arrays pickle more cheaply than as many small tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack


@dataclass(frozen=True)
class Trajectory:
    """A finished trajectory: T tokens, of which the first ``prompt_length`` are the prompt.

    Args:
        token_ids: all tokens, prompt first, int64 ``[T]``.
        sampled: True where the policy sampled the token, bool ``[T]``.
        log_probs: log-probability of each sampled token under the distribution it was sampled
            from, 0 elsewhere, float32 ``[T]``.
        versions: version of the weights that sampled each token, -1 elsewhere, int64 ``[T]``.
        prompt_length: number of prompt tokens.
        reward: sum of the rewards of the trajectory's turns.
        terminated: the environment ended the trajectory.
        truncated: the answer or the episode was cut short.
        ended_by: what ended the trajectory: the environment, an answer of ``max_new_tokens``, the
            context with no room for another turn, or the limit on turns.
        group_id: the group the trajectory belongs to.
        index: its place in the group.
        start_version: version served when the group was admitted.
        prompt: the prompt as text.
        response: everything after the prompt as text.
        extras: further entries of the environment's last step, stored under ``"next"``.

    Examples:
        >>> import numpy as np
        >>> trajectory = Trajectory(
        ...     token_ids=np.array([5, 6, 7]), sampled=np.array([False, True, True]),
        ...     log_probs=np.array([0.0, -0.5, -0.1], dtype=np.float32),
        ...     versions=np.array([-1, 3, 4]), prompt_length=1, reward=1.0, terminated=True,
        ...     truncated=False, ended_by="environment", group_id=0, index=0, start_version=3,
        ...     prompt="1", response="=1")
        >>> trajectory.to_tensordict()["tokens", "response"]
        tensor([6, 7])
    """

    token_ids: np.ndarray
    sampled: np.ndarray
    log_probs: np.ndarray
    versions: np.ndarray
    prompt_length: int
    reward: float
    terminated: bool
    truncated: bool
    ended_by: Literal["environment", "length", "context", "turns"]
    group_id: int
    index: int
    start_version: int
    prompt: str
    response: str
    extras: dict[str, Any] = field(default_factory=dict)

    def to_tensordict(self) -> TensorDictBase:
        """The row: a ragged tensordict of batch size ``()``."""
        tokens = torch.from_numpy(self.token_ids)
        return TensorDict(
            {
                "tokens": {
                    "prompt": tokens[: self.prompt_length],
                    "response": tokens[self.prompt_length :],
                    "full": tokens,
                },
                "masks": {
                    "all_attention_mask": torch.ones(len(tokens), dtype=torch.bool),
                    "all_assistant_mask": torch.from_numpy(self.sampled),
                },
                "log_probs": {"full": torch.from_numpy(self.log_probs)},
                "policy_version": {"full": torch.from_numpy(self.versions)},
                "text": {
                    "prompt": NonTensorData(self.prompt),
                    "response": NonTensorData(self.response),
                },
                "group": {
                    "id": torch.tensor(self.group_id),
                    "index": torch.tensor(self.index),
                    "start_version": torch.tensor(self.start_version),
                },
                "next": {
                    **{key: torch.as_tensor(value) for key, value in self.extras.items()},
                    "reward": torch.tensor([self.reward], dtype=torch.float32),
                    "done": torch.tensor([True]),
                    "terminated": torch.tensor([self.terminated]),
                    "truncated": torch.tensor([self.truncated]),
                },
            },
            batch_size=(),
        )

    def to_json(self) -> dict[str, Any]:
        """What a person needs to debug the sample, ready for :func:`json.dumps`."""
        sampled = self.sampled
        return {
            "group": self.group_id,
            "index": self.index,
            "start_version": self.start_version,
            "prompt": self.prompt,
            "response": self.response,
            "reward": self.reward,
            "truncated": self.truncated,
            "ended_by": self.ended_by,
            "versions": self.versions[sampled].tolist(),
            "log_probs": [round(value, 6) for value in self.log_probs[sampled].tolist()],
        }


def stack_group(trajectories: Sequence[Trajectory]) -> TensorDictBase:
    """The rows of one group, lazily stacked in order of their index, batch size ``(K,)``."""
    ordered = sorted(trajectories, key=lambda trajectory: trajectory.index)
    return lazy_stack([trajectory.to_tensordict() for trajectory in ordered])
