"""Which groups a step trains on once more, among those it still may.

Owns the choice alone, as pure functions of a few numbers per group. Which groups may be reused at
all is the sampler's affair (:mod:`.sampler`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

Reuse = Literal["recency", "reward", "uniform"]


def choose_reused(
    groups: Sequence[tuple[int, int, float]],
    count: int,
    *,
    by: Reuse,
    generator: torch.Generator | None = None,
) -> list[int]:
    """Chooses groups to train on again, none twice.

    ``"recency"`` takes the newest, ``"reward"`` draws with probabilities proportional to
    exp(mean reward), and ``"uniform"`` gives all the same chance: the ways in which Trajectory
    Balance with Asynchrony (arXiv:2503.18929) samples its buffer.

    Args:
        groups: group id, start version and mean reward of each candidate.
        count: how many; all, if there are not more.
        by: the way to choose.
        generator: of the random numbers; None takes torch's own.

    Returns:
        Ids in ascending order.

    Examples:
        >>> choose_reused([(3, 0, 1.0), (4, 1, 0.0), (5, 1, 1.0)], 2, by="recency")
        [4, 5]
    """
    if len(groups) > count and by == "recency":
        groups = sorted(groups, key=lambda group: (group[1], group[0]))[-count:]
    elif len(groups) > count:
        rewards = torch.tensor([reward for _, _, reward in groups], dtype=torch.float64)
        logits = rewards if by == "reward" else torch.zeros_like(rewards)
        # Gumbel's trick needs logits only: exp(reward) of very different rewards would be 0 or inf.
        noise = -torch.rand(len(groups), dtype=torch.float64, generator=generator).log()
        order = (logits - noise.log()).topk(count).indices
        groups = [groups[index] for index in order.tolist()]
    return sorted(group_id for group_id, _, _ in groups)
