"""What the losses share that look at the rewards of a whole group.

Owns the keys of rewards and group ids, and the check that a batch is whole groups. Computes
nothing of the rewards: each loss does so by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_llm_async.objectives.common import AsyncLLMLoss
from torchrl_llm_async.objectives.options import require


class GroupLoss(AsyncLLMLoss):
    """A loss whose ``select`` needs the rewards of whole groups.

    Args:
        actor_network (TensorDictModuleBase): see :class:`~.common.AsyncLLMLoss`.
        reference_network (TensorDictModuleBase, optional): see there.
    """

    @dataclass
    class _AcceptedKeys(AsyncLLMLoss._AcceptedKeys):
        """Keys these losses read; see ``set_keys``.

        Attributes:
            reward (NestedKey): of the whole trajectory, [N, 1]. ``("next", "reward")``.
            group_id (NestedKey): [N] int64. ``("group", "id")``.
        """

        reward: NestedKey = ("next", "reward")
        group_id: NestedKey = ("group", "id")

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys
    least_group_size = 2

    def _group_rewards(self, batch: TensorDictBase) -> Tensor:
        """(B, K) the rewards of B groups of K rows each, in the order of the rows.

        Raises:
            ValueError: the rows are no whole groups, at least two rows each and adjacent, all
                groups of one size; or a reward is not finite.
        """
        ids = self._read(batch, "group_id").flatten()
        rewards = self._read(batch, "reward").flatten()
        require(
            len(ids) == len(rewards) == len(batch) > 0,
            f"{len(batch)} rows have {len(ids)} group ids and {len(rewards)} rewards: a row has "
            "one of each, and there must be rows.",
        )
        found, sizes = torch.unique_consecutive(ids, return_counts=True)
        size = int(sizes[0])
        require(
            size >= self.least_group_size
            and bool((sizes == size).all())
            and len(found.unique()) == len(found),
            f"Groups {found.tolist()} have {sizes.tolist()} adjacent rows: {type(self).__name__} "
            "needs whole groups, all of one size of at least 2, their rows adjacent "
            "(group_size >= 2, and rows as the replay buffer gives them).",
        )
        if not rewards.is_floating_point() or rewards.dtype in (torch.float16, torch.bfloat16):
            rewards = rewards.float()  # An advantage of integers would be cut down to one.
        rewards = rewards.view(-1, size)
        wrong = ~rewards.isfinite().all(-1)
        require(
            not wrong.any(),
            f"Groups {found[wrong].tolist()} have the rewards {rewards[wrong].tolist()}: they must "
            "be finite. Reject a group whose reward failed instead.",
        )
        return rewards
