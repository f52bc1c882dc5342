"""Group-relative advantages, computed where a group enters the replay buffer.

Owns the shaping of rewards on the way in, the check that a group is whole, and the normalisation
of advantages over the sampled batch on the way out; the arithmetic is in :mod:`.rewards` and
:mod:`.functional`. Holds no incomplete groups: whoever extends the buffer does so with finished
groups (TorchRL's ``MCAdvantage`` queues partial ones instead).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.distributed as dist
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor
from torchrl.envs.transforms import Transform

from torchrl_llm_async.objectives import functional, rewards
from torchrl_llm_async.objectives.options import check_numbers, require

Baseline = functional.AdvantageEstimator | Literal["none"]
_BASELINES = (*get_args(functional.AdvantageEstimator), "none")


class GroupAdvantage(Transform):
    r"""Writes each trajectory's advantage over its group when rows enter a replay buffer.

    On ``ReplayBuffer.extend``, of each group's returns :math:`r_i`:

    .. math:: A_i = \frac{r'_i - b_i}{\sigma + 10^{-6}}, \qquad
        r'_i = \mathrm{clip}\big(s\,(r_i + p_i) + c\big)

    with the overlong penalty :math:`p_i` (:func:`~.rewards.overlong_penalty`), ``reward_scale`` s
    and ``reward_bias`` c, each off by default, the baseline :math:`b_i` and, on demand, the group's
    standard deviation :math:`\sigma`. The penalty comes first, as in AReaL and OpenRLHF: what an
    overlong answer loses then stands in one relation to what a right one gains, whatever the scale.

    With any shaping, :math:`r'` replaces the reward, for the losses that read rewards, and the
    raw one is kept at ``raw_reward_key``, for whatever counts right answers.

    On ``ReplayBuffer.sample`` nothing changes but with ``batch_norm``.

    Args:
        group_size (int): K, the trajectories of a group.
        estimator: ``"mean"`` (the group's mean is the baseline) or ``"leave_one_out"``
            (the mean of the others is); see
            :func:`~torchrl_llm_async.objectives.functional.group_advantage`. ``"none"``: there is
            no baseline, A is the return; for ``batch_norm`` (REINFORCE++, arXiv 2501.03262), and
            the only one for groups of 1.
        divide_by_std (bool): divide by the group's sample standard deviation, as GRPO does.
        reward_scale (float): s, above 0.
        reward_bias (float): c. It matters to ``"none"``, to clipping and to a critic only.
        reward_clip (float or pair of float, optional): bounds of r', :math:`\pm` one number or
            (low, high).
        overlong_buffer (int, optional): tokens before ``max_new_tokens`` over which the overlong
            penalty grows from 0 to ``overlong_factor``; None switches it off. A trajectory's
            length is that of all its sampled tokens.
        overlong_factor (float): the full penalty, in units of the raw reward.
        max_new_tokens (int, optional): for ``overlong_buffer``: the sampler's limit of an answer;
            with several turns, the limit of them all together.
        batch_norm (bool): take the mean of the *sampled batch* off its advantages and divide them
            by its standard deviation, both over sampled tokens, as AReaL, verl and OpenRLHF do
            (:func:`~.rewards.batch_normalize`). It acts on copies of the sampled rows: stored
            ones keep the advantage over their group, and may be sampled again.
        process_group (dist.ProcessGroup, optional): for ``batch_norm``, where every rank samples
            its own part of the batch: the ranks whose parts make it up. All of them must then
            read from the buffer together. None: this process samples the whole batch.
        reward_key (NestedKey): returns, one per trajectory.
        raw_reward_key (NestedKey): where the unshaped returns are kept.
        advantage_key (NestedKey): where the advantages go, in the shape of the returns.
        group_key (NestedKey): id of the group, int64.
        index_key (NestedKey): place within the group, 0 to K - 1, int64.
        mask_key (NestedKey): [T] bool, True where the policy sampled the token; read for the
            overlong penalty and for ``batch_norm``.

    Raises:
        ValueError: for options that contradict each other. On the way in, for a group that is
            not whole (its K rows adjacent, each index once), for a return that is not finite, or
            one that was shaped before; nothing is written to the buffer then.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyStackStorage, ReplayBuffer
        >>> sampled = torch.tensor([[False, True, True, True], [True, True, True, True]])
        >>> group = TensorDict(
        ...     {
        ...         "group": {"id": torch.tensor([7, 7]), "index": torch.arange(2)},
        ...         "masks": {"all_assistant_mask": sampled},
        ...         "next": {"reward": torch.tensor([[1.0], [1.0]])},
        ...     },
        ...     batch_size=(2,),
        ... )
        >>> transform = GroupAdvantage(2, overlong_buffer=2, max_new_tokens=4)
        >>> buffer = ReplayBuffer(storage=LazyStackStorage(8), batch_size=2, transform=transform)
        >>> _ = buffer.extend(group)  # Both are right; the second is as long as it may be.
        >>> rows = buffer[:]
        >>> rows["advantage"].flatten(), rows["next", "reward"].flatten()
        (tensor([ 0.2500, -0.2500]), tensor([0.5000, 0.0000]))
    """

    def __init__(
        self,
        group_size: int,
        *,
        estimator: Baseline = "mean",
        divide_by_std: bool = False,
        reward_scale: float = 1.0,
        reward_bias: float = 0.0,
        reward_clip: float | Sequence[float] | None = None,
        overlong_buffer: int | None = None,
        overlong_factor: float = 1.0,
        max_new_tokens: int | None = None,
        batch_norm: bool = False,
        process_group: dist.ProcessGroup | None = None,
        reward_key: NestedKey = ("next", "reward"),
        raw_reward_key: NestedKey = ("next", "raw_reward"),
        advantage_key: NestedKey = "advantage",
        group_key: NestedKey = ("group", "id"),
        index_key: NestedKey = ("group", "index"),
        mask_key: NestedKey = ("masks", "all_assistant_mask"),
    ) -> None:
        require(
            estimator in _BASELINES,
            f"estimator={estimator!r} is not one of {', '.join(map(repr, _BASELINES))}.",
        )
        check_numbers(
            group_size=group_size,
            reward_scale=reward_scale,
            reward_bias=reward_bias,
            overlong_buffer=overlong_buffer,
            overlong_factor=overlong_factor,
            max_new_tokens=max_new_tokens,
        )
        require(
            group_size >= 2 or (group_size == 1 and estimator == "none"),
            f"group_size={group_size}: a group-relative advantage needs at least 2 trajectories "
            "per prompt, as that of a single one over itself is always 0. Raise group_size, or "
            "use estimator='none' with batch_norm=True.",
        )
        require(
            not (divide_by_std and estimator == "none"),
            "divide_by_std=True with estimator='none': the deviation from the group's mean says "
            "nothing about rewards that keep their mean. Use batch_norm=True, or another "
            "estimator.",
        )
        require(
            0 < reward_scale < math.inf,
            f"reward_scale={reward_scale} must be above 0: a negative one would reward failure.",
        )
        require(math.isfinite(reward_bias), f"reward_bias={reward_bias} must be finite.")
        _check_overlong(overlong_buffer, overlong_factor, max_new_tokens)
        require(
            process_group is None or batch_norm,
            "process_group is given with batch_norm=False: only sums over the batch are reduced "
            "over ranks. Set batch_norm=True, or leave process_group out.",
        )
        super().__init__(in_keys=[reward_key, group_key, index_key], out_keys=[advantage_key])
        self.group_size = group_size
        self.estimator = estimator
        self.divide_by_std = divide_by_std
        self.reward_scale = reward_scale
        self.reward_bias = reward_bias
        self.reward_clip = _bounds(reward_clip)
        self.overlong_buffer = overlong_buffer
        self.overlong_factor = overlong_factor
        self.max_new_tokens = max_new_tokens
        self.batch_norm = batch_norm
        self.process_group = process_group
        self.raw_reward_key = raw_reward_key
        self.mask_key = mask_key

    @property
    def shapes_reward(self) -> bool:
        """Whether losses read another reward than the environment gave."""
        plain = self.reward_scale == 1.0 and self.reward_bias == 0.0 and self.reward_clip is None
        return not plain or self.overlong_buffer is not None

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Sampled rows; with ``batch_norm`` copies of them whose advantages are normalised.

        A single row, as ``buffer[i]`` reads it, is no batch and comes as it is stored.
        """
        if not self.batch_norm or tensordict.ndim == 0:
            return tensordict
        key = self.out_keys[0]
        advantage = tensordict.get(key)
        normalized = rewards.batch_normalize(
            advantage.flatten(), self._lengths(tensordict), process_group=self.process_group
        )
        return tensordict.copy().set(key, normalized.to(advantage.dtype).view_as(advantage))

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        self._check_keys(tensordict)
        self._check_groups(tensordict)
        reward = self._reward(tensordict)
        if self.shapes_reward:
            tensordict.set(self.raw_reward_key, tensordict.get(self.in_keys[0]))
            tensordict.set(self.in_keys[0], reward)
        advantage = reward
        if self.estimator != "none":
            groups = torch.arange(len(tensordict), device=reward.device) // self.group_size
            advantage = functional.group_advantage(
                reward.flatten(),
                groups,
                len(tensordict) // self.group_size,
                estimator=self.estimator,
                divide_by_std=self.divide_by_std,
            ).view_as(reward)
        return tensordict.set(self.out_keys[0], advantage)

    def _check_keys(self, rows: TensorDictBase) -> None:
        there = rows.keys(include_nested=True)
        needed = dict(zip(("reward_key", "group_key", "index_key"), self.in_keys, strict=True))
        if self.overlong_buffer is not None or self.batch_norm:
            needed["mask_key"] = self.mask_key
        for name, key in needed.items():
            if unravel_key(key) not in there:
                raise KeyError(
                    f"GroupAdvantage found nothing at {key!r} among "
                    f"{sorted(map(str, rows.keys(True, True)))}. Write it there, or say where it "
                    f"is with {name}=...."
                )

    def _check_groups(self, rows: TensorDictBase) -> None:
        """Raises ``ValueError`` unless the rows are whole groups."""
        size = self.group_size
        require(
            rows.ndim == 1 and len(rows) % size == 0,
            f"Rows of batch size {tuple(rows.batch_size)} are no whole groups of "
            f"group_size={size}: extend the buffer with finished groups only.",
        )
        group_ids, indices = (rows.get(key).reshape(-1, size) for key in self.in_keys[1:])
        for group, index in zip(group_ids.tolist(), indices.tolist(), strict=True):
            require(
                len(set(group)) == 1 and sorted(index) == list(range(size)),
                f"Rows of groups {sorted(set(group))} with indices {index} are no whole "
                f"group of group_size={size}: the rows of one group must be adjacent, "
                f"each index from 0 to {size - 1} once.",
            )

    def _reward(self, rows: TensorDictBase) -> Tensor:
        """The shaped returns, in the shape and, if that is a floating one, dtype of the raw ones.

        Raises:
            ValueError: not one finite return per row, before or after shaping, or one that was
                shaped before.
        """
        key, group_key, _ = self.in_keys
        raw = rows.get(key)
        require(
            raw.numel() == len(rows),
            f"{key!r} has the shape {tuple(raw.shape)} for {len(rows)} rows: an advantage over a "
            "group is of one return per trajectory. Sum rewards of single tokens or turns first.",
        )
        # An advantage of integers would be cut down to one.
        reward = raw if raw.is_floating_point() else raw.to(torch.get_default_dtype())
        if self.shapes_reward:
            require(
                rows.get(self.raw_reward_key, None) is None,
                f"There are returns at {self.raw_reward_key!r} already: these rows' rewards were "
                "shaped before. Extend with unshaped rows, or keep the raw ones elsewhere with "
                "raw_reward_key.",
            )
            reward = self._shaped(reward.flatten(), rows).to(reward.dtype).view_as(reward)
        require(
            bool(raw.isfinite().all() and reward.isfinite().all()),
            f"{key!r} of groups {sorted(set(rows.get(group_key).flatten().tolist()))} has a "
            "value that is not finite. Reject a group whose reward failed instead.",
        )
        return reward

    def _shaped(self, reward: Tensor, rows: TensorDictBase) -> Tensor:
        penalty: Tensor | float = 0.0
        if self.overlong_buffer is not None:
            penalty = rewards.overlong_penalty(
                self._lengths(rows), self.max_new_tokens, self.overlong_buffer, self.overlong_factor
            )
        return rewards.shape_reward(
            reward,
            penalty,
            scale=self.reward_scale,
            bias=self.reward_bias,
            clip=self.reward_clip,
        )

    def _lengths(self, rows: TensorDictBase) -> Tensor:
        """Sampled tokens of each row, (N,) int64; the rows may be ragged."""
        return torch.stack([row.get(self.mask_key).sum() for row in rows.unbind(0)])


def _check_overlong(buffer: int | None, factor: float, max_new_tokens: int | None) -> None:
    require(
        (buffer is None) == (max_new_tokens is None),
        f"overlong_buffer={buffer} with max_new_tokens={max_new_tokens}: the overlong penalty "
        "needs both, the limit of an answer and how many tokens before it the penalty begins; "
        "without a penalty leave out both.",
    )
    require(
        buffer is not None or factor == 1.0,
        f"overlong_factor={factor} without overlong_buffer: there is no penalty to weigh. Give "
        "overlong_buffer and max_new_tokens, too.",
    )
    require(
        0 < factor < math.inf,
        f"overlong_factor={factor} must be above 0; leave out overlong_buffer for no penalty.",
    )
    require(
        buffer is None or 1 <= buffer <= max_new_tokens,
        f"overlong_buffer={buffer} must lie between 1 and max_new_tokens={max_new_tokens}, "
        "e.g. a fifth of it.",
    )


def _bounds(clip: float | Sequence[float] | None) -> tuple[float, float] | None:
    """(low, high) of the option ``reward_clip``."""
    if clip is None:
        return None
    is_pair = isinstance(clip, Sequence) and not isinstance(clip, str) and len(clip) == 2
    low, high = clip if is_pair else (clip, clip)
    check_numbers(reward_clip=low)
    check_numbers(reward_clip=high)
    low = low if is_pair else -low
    require(
        low < high,
        f"reward_clip={clip} must be above 0, or a pair of a lower and a higher bound, e.g. 5.0 "
        "or [0.0, 1.0].",
    )
    return float(low), float(high)
