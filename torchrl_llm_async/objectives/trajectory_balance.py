"""Trajectory balance: a policy in proportion to the reference times exp(reward / beta).

Owns the loss and its estimate of log Z. Samples may come from any policy, so it reads no
behaviour log-probs and corrects for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_llm_async.objectives import functional
from torchrl_llm_async.objectives.common import LossOutput, per_unit, sum_and_count
from torchrl_llm_async.objectives.group_loss import GroupLoss
from torchrl_llm_async.objectives.options import check_numbers, require


class Balance(NamedTuple):
    """What :func:`trajectory_balance` returns; every entry has shape (S,)."""

    residual: Tensor
    log_z: Tensor


def trajectory_balance(
    log_ratio: Tensor,
    reward: Tensor,
    valid: Tensor,
    group_ids: Tensor,
    num_groups: int,
    *,
    beta: float = 0.1,
) -> Balance:
    r"""How far each trajectory is off balance, given the others of its group.

    .. math::
        \delta_i = \log Z + \log\frac{\pi_\theta(y_i)}{\pi_\text{ref}(y_i)} - \frac{R_i}{\beta},
        \qquad \log Z = \frac{1}{K} \sum_j
        \Big( \frac{R_j}{\beta} - \log\frac{\pi_\theta(y_j)}{\pi_\text{ref}(y_j)} \Big)

    Args:
        log_ratio (Tensor): (S,), log pi / pi_ref of whole sequences, with gradient.
        reward (Tensor): (S,).
        valid (Tensor): (S,) bool; other sequences take no part, and have zeros in the result.
        group_ids (Tensor): (S,) int64 in ``[0, num_groups)``.
        num_groups (int): number of groups.
        beta (float): > 0.

    Returns:
        Balance: the residuals :math:`\delta`, and the estimate of log Z of each sequence's group,
        without gradient.

    Examples:
        >>> import torch
        >>> trajectory_balance(
        ...     torch.tensor([0.0, 1.0]), torch.tensor([0.0, 0.5]), torch.tensor([True, True]),
        ...     torch.tensor([0, 0]), 1, beta=0.1,
        ... )
        Balance(residual=tensor([ 2., -2.]), log_z=tensor([2., 2.]))
    """
    gap = reward / beta - log_ratio
    mean = functional.segment_mean(gap.detach(), valid, group_ids, num_groups)[group_ids]
    return Balance(
        residual=(mean - gap).where(valid, 0.0),
        log_z=mean.where(valid, 0.0),
    )


class TrajectoryBalanceLossOutput(LossOutput):
    """What :class:`TrajectoryBalanceLoss` returns; diagnostics are means over trajectories.

    Attributes:
        loss_balance (Tensor): the loss.
        residual_size: the absolute value of the residual.
        log_z: the estimate of log Z.
        log_ratio_to_ref: log pi - log pi_ref; on fresh data an estimate of KL(pi || pi_ref).
    """

    loss_balance: Tensor
    residual_size: Tensor
    log_z: Tensor
    log_ratio_to_ref: Tensor


class TrajectoryBalanceLoss(GroupLoss):
    r"""Trajectory balance with log Z estimated from the group (VarGrad).

    The loss of a trajectory y of a group of K is the square of

    .. math::
        \delta = \log Z + \log \pi_\theta(y) - \log \pi_\text{ref}(y) - \frac{R}{\beta},
        \qquad \log Z = \mathrm{sg}\Big[ \frac{1}{K} \sum_j \log\pi_\text{ref}(y_j)
        - \log\pi_\theta(y_j) + \frac{R_j}{\beta} \Big]

    with log-probs summed over the sampled tokens (TBA, arXiv 2503.18929; VarGrad,
    arXiv 2010.10436; trajectory balance, arXiv 2201.13259). The step's loss is the mean over
    trajectories. Whatever policy sampled them, it is 0 on all groups if and only if

    .. math:: \pi_\theta(y) = \frac{1}{Z}\, \pi_\text{ref}(y)\, e^{R(y) / \beta},

    the policy that is best for the reward with a KL penalty of weight beta. So stale data needs
    no correction. On fresh data the gradient, times beta / 2, is that of REINFORCE for the
    reward minus beta log(pi / pi_ref), with the group's mean as the baseline.

    log Z is detached, as in TBA. There is no option to do otherwise since it makes no
    difference: the residuals of a group sum to 0, and with them what log Z would add to the
    gradient. For the same reason the loss is the variance of R / beta - log(pi / pi_ref) within
    each group.

    A trajectory without sampled tokens takes no part. Groups of equal rewards do: they pull the
    policy back to the reference.

    Args:
        actor_network (TensorDictModuleBase): see :class:`~.common.AsyncLLMLoss`.
        beta (float): strength of the pull towards the reference, in units of the reward; of
            the same meaning as in :class:`~.dpo.OnlineDPOLoss`, hence of the same default. TBA
            takes less, 0.004 to 0.014 on mathematics with a reward of 0 or 1. The gradient
            grows with 1 / beta.
        reference_network (TensorDictModuleBase, optional): the frozen policy, where the
            batch does not bring ``("log_probs", "ref")``.

    Raises:
        ValueError: for an option out of range, naming it.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchtune.models.qwen2 import qwen2
        >>> from torchrl_llm_async.modules import TorchtuneActor
        >>> actor = TorchtuneActor(
        ...     qwen2(vocab_size=11, num_layers=1, num_heads=2, num_kv_heads=1,
        ...           embed_dim=8, intermediate_dim=16, max_seq_len=16)
        ... )
        >>> loss = TrajectoryBalanceLoss(actor, beta=0.5)
        >>> sampled = torch.tensor([[False, False, True, True]] * 2)
        >>> batch = TensorDict(
        ...     {
        ...         "tokens": {"full": torch.tensor([[1, 2, 3, 4]] * 2)},
        ...         "masks": {"all_attention_mask": torch.ones(2, 4, dtype=torch.bool),
        ...                   "all_assistant_mask": sampled},
        ...         "log_probs": {"ref": -2.4 * sampled},
        ...         "next": {"reward": torch.tensor([[1.0], [0.0]])},
        ...         "group": {"id": torch.tensor([7, 7])},
        ...     },
        ...     batch_size=(2,),
        ... )
        >>> rows = loss.select(batch)
        >>> output = loss(rows, normalizer=loss.denominator(rows))
        >>> output.total().backward()
        >>> round(output.total().item(), 4)  # Twice the same answer, R / beta being 2 and 0.
        1.0
    """

    @dataclass
    class _AcceptedKeys(GroupLoss._AcceptedKeys):
        """Keys this loss reads; see ``set_keys``.

        Attributes:
            group_size (NestedKey): how many of the row's group have sampled tokens, written by
                ``select``; shows whether a micro-batch has the whole group.
                ``("group", "size")``.
        """

        group_size: NestedKey = ("group", "size")

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys
    output_type = TrajectoryBalanceLossOutput
    written_by_select = ("target_version", "group_size")
    packing_unit = "group"

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        *,
        beta: float = 0.1,
        reference_network: TensorDictModuleBase | None = None,
    ) -> None:
        check_numbers(beta=beta)
        require(beta > 0, f"beta={beta} must be above 0, e.g. 0.1.")
        super().__init__(actor_network, reference_network=reference_network)
        self.beta = beta

    @property
    def needs_reference(self) -> bool:
        """Always."""
        return True

    def select(self, batch: TensorDictBase, *, target_version: int | None = None) -> TensorDictBase:
        """All rows, each with the size of its group.

        Args:
            batch (TensorDictBase): ``(B * K,)``, the rows of a group adjacent.
            target_version (int, optional): the version this step trains towards.

        Raises:
            ValueError: the rows are no whole groups of one size K >= 2, or a reward is not
                finite.
        """
        size = self._group_rewards(batch).shape[1]
        sampled = (self._layout(batch).lengths() > 0).view(-1, size).sum(-1)
        rows = super().select(batch, target_version=target_version)
        return self._with(rows, group_size=sampled.repeat_interleave(size))

    def denominator(self, rows: TensorDictBase) -> Tensor:
        """Number of trajectories with sampled tokens."""
        return functional.denominator(*self._layout(rows), "sequence")

    def forward(
        self, micro: TensorDictBase, *, normalizer: Tensor | float
    ) -> TrajectoryBalanceLossOutput:
        """See :meth:`~.common.AsyncLLMLoss.forward`.

        Raises:
            ValueError: the micro-batch has part of a group only.
        """
        layout = self._layout(micro)
        valid = layout.lengths() > 0
        found, groups = layout.per_segment(self._tokens(micro, "group_id")).unique(
            return_inverse=True
        )
        present = functional.segment_sum(valid.long(), groups, len(found))[groups]
        whole = layout.per_segment(self._tokens(micro, "group_size"))
        split = valid & (present != whole)
        require(
            not split.any(),
            f"Groups {found[groups[split].unique()].tolist()} are not in one micro-batch, as "
            "their log Z needs: pack with unit=group_size.",
        )
        log_prob = self._policy(micro).log_probs
        log_ratio = layout.sum(log_prob - self._reference(micro))
        reward = layout.per_segment(self._tokens(micro, "reward"))
        residual, log_z = trajectory_balance(
            log_ratio, reward, valid, groups, len(found), beta=self.beta
        )
        return TrajectoryBalanceLossOutput(
            loss_balance=per_unit(residual.square().sum(), normalizer),
            residual_size=sum_and_count(residual.abs(), valid),
            log_z=sum_and_count(log_z, valid),
            log_ratio_to_ref=sum_and_count(log_ratio, valid),
            **self._lags(micro, log_prob),
            batch_size=(),
        )
