"""Group-relative advantages, computed where a group enters the replay buffer.

Owns the check that a group is whole. Holds no incomplete groups: whoever extends the
buffer does so with finished groups (TorchRL's ``MCAdvantage`` queues partial ones instead).
"""

from __future__ import annotations

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.envs.transforms import Transform

from torchrl_llm_async.objectives.functional import AdvantageEstimator, group_advantage


class GroupAdvantage(Transform):
    """Writes each trajectory's advantage over its group when rows enter a replay buffer.

    Acts on ``ReplayBuffer.extend`` only; what is sampled passes through unchanged.

    Args:
        group_size (int): K, the trajectories of a group, at least 2.
        estimator: ``"mean"`` (the group's mean is the baseline) or ``"leave_one_out"``
            (the mean of the others is); see
            :func:`~torchrl_llm_async.objectives.functional.group_advantage`.
        divide_by_std (bool): divide by the group's standard deviation, as GRPO does.
        reward_key (NestedKey): returns, [..., 1].
        advantage_key (NestedKey): where the advantages go, in the shape of the returns.
        group_key (NestedKey): id of the group, int64.
        index_key (NestedKey): place within the group, 0 to K - 1, int64.

    Raises:
        ValueError: for a group that is not whole (its K rows adjacent, each index once),
            and for a return that is not finite; nothing is written to the buffer then.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyStackStorage, ReplayBuffer
        >>> buffer = ReplayBuffer(
        ...     storage=LazyStackStorage(8), batch_size=2, transform=GroupAdvantage(2)
        ... )
        >>> group = TensorDict(
        ...     {
        ...         "group": {"id": torch.tensor([7, 7]), "index": torch.arange(2)},
        ...         "next": {"reward": torch.tensor([[1.0], [0.0]])},
        ...     },
        ...     batch_size=(2,),
        ... )
        >>> _ = buffer.extend(group)
        >>> buffer[:]["advantage"]
        tensor([[ 0.5000],
                [-0.5000]])
    """

    def __init__(
        self,
        group_size: int,
        *,
        estimator: AdvantageEstimator = "mean",
        divide_by_std: bool = False,
        reward_key: NestedKey = ("next", "reward"),
        advantage_key: NestedKey = "advantage",
        group_key: NestedKey = ("group", "id"),
        index_key: NestedKey = ("group", "index"),
    ) -> None:
        if group_size < 2:
            raise ValueError(
                f"group_size={group_size}: a group-relative advantage needs at least 2 "
                "trajectories per prompt."
            )
        if estimator not in ("mean", "leave_one_out"):
            raise ValueError(f"estimator={estimator!r} is not one of 'mean', 'leave_one_out'.")
        super().__init__(in_keys=[reward_key, group_key, index_key], out_keys=[advantage_key])
        self.group_size = group_size
        self.estimator = estimator
        self.divide_by_std = divide_by_std

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Sampled data passes unchanged: the advantage was written on entry."""
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        reward_key, group_key, index_key = self.in_keys
        size = self.group_size
        if tensordict.ndim != 1 or len(tensordict) % size:
            raise ValueError(
                f"Rows of batch size {tuple(tensordict.batch_size)} are no whole groups of "
                f"group_size={size}: extend the buffer with finished groups only."
            )
        group_ids = tensordict.get(group_key).reshape(-1, size)
        indices = tensordict.get(index_key).reshape(-1, size)
        for group, index in zip(group_ids.tolist(), indices.tolist(), strict=True):
            if len(set(group)) > 1 or sorted(index) != list(range(size)):
                raise ValueError(
                    f"Rows of groups {sorted(set(group))} with indices {index} are no whole "
                    f"group of group_size={size}: the rows of one group must be adjacent, "
                    f"each index from 0 to {size - 1} once."
                )
        reward = tensordict.get(reward_key)
        if not reward.isfinite().all():
            raise ValueError(
                f"{reward_key!r} of groups {sorted(set(group_ids.flatten().tolist()))} has a "
                "value that is not finite. Reject a group whose reward failed instead."
            )
        advantage = group_advantage(
            reward.flatten(),
            torch.arange(len(tensordict), device=reward.device) // size,
            len(tensordict) // size,
            estimator=self.estimator,
            divide_by_std=self.divide_by_std,
        )
        return tensordict.set(self.out_keys[0], advantage.reshape(reward.shape))
