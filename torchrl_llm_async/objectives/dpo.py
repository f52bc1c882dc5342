"""Online DPO: preference pairs out of a group's rewards, and their loss.

Owns the pairing of trajectories; the arithmetic of a pair is in :mod:`.functional`.
Needs no advantages, and behaviour log-probs only to weigh stale pairs.
"""

from __future__ import annotations

import heapq
from typing import Literal, get_args

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_llm_async.objectives import functional
from torchrl_llm_async.objectives.common import Layout, LossOutput, per_unit, sum_and_count
from torchrl_llm_async.objectives.group_loss import GroupLoss
from torchrl_llm_async.objectives.options import check_numbers, require

Pairing = Literal["best_worst", "all"]


def preference_pairs(
    rewards: list[float],
    pairing: Pairing = "best_worst",
    max_pairs: int | None = None,
) -> list[tuple[int, int]]:
    """Pairs (chosen, rejected) of positions in one group, from the rewards alone.

    Args:
        rewards (list[float]): the group's K rewards.
        pairing: ``"best_worst"``: one pair, the first of the best against the first of
            the worst. ``"all"``: every two trajectories of different reward, in an
            order that spreads them: each next pair is the one whose members were used
            least so far, the larger margin first.
        max_pairs (int, optional): keep only the first so many. With ``"all"`` and K / 2
            no trajectory is used twice if the rewards allow it, so the pairs cost no
            more forward passes than the group has members.

    Returns:
        list[tuple[int, int]]: empty if all rewards are equal.

    Examples:
        >>> preference_pairs([1.0, 0.0, 1.0, 0.0])
        [(0, 1)]
        >>> preference_pairs([1.0, 0.0, 1.0, 0.0], "all", max_pairs=2)
        [(0, 1), (2, 3)]
    """
    if pairing == "best_worst":
        best, worst = max(rewards), min(rewards)
        return [(rewards.index(best), rewards.index(worst))] if best > worst else []
    size = range(len(rewards))
    # (uses of both members, minus the margin, pair)
    heap = [
        (0, rewards[j] - rewards[i], i, j) for i in size for j in size if rewards[i] > rewards[j]
    ]
    heapq.heapify(heap)
    limit = len(heap) if max_pairs is None else min(max_pairs, len(heap))
    uses = [0] * len(rewards)
    pairs: list[tuple[int, int]] = []
    while len(pairs) < limit:
        counted, margin, chosen, rejected = heap[0]
        now = uses[chosen] + uses[rejected]
        if now > counted:  # Uses only grow: what is first with the right number is the first.
            heapq.heapreplace(heap, (now, margin, chosen, rejected))
            continue
        heapq.heappop(heap)
        uses[chosen] += 1
        uses[rejected] += 1
        pairs.append((chosen, rejected))
    return pairs


class OnlineDPOLossOutput(LossOutput):
    """What :class:`OnlineDPOLoss` returns; diagnostics are means over pairs.

    Attributes:
        loss_preference (Tensor): the loss.
        reward_margin: beta times the margin of implicit rewards.
        preference_accuracy: pairs whose chosen trajectory has the larger implicit reward.
        chosen_reward, rejected_reward: beta (log pi - log pi_ref) of either trajectory.
        chosen_log_prob, rejected_log_prob: log pi of either trajectory.
        importance_weight: of the pair; None without ``importance_cap``.
    """

    loss_preference: Tensor
    reward_margin: Tensor
    preference_accuracy: Tensor
    chosen_reward: Tensor
    rejected_reward: Tensor
    chosen_log_prob: Tensor
    rejected_log_prob: Tensor
    importance_weight: Tensor | None = None


class OnlineDPOLoss(GroupLoss):
    r"""Direct preference optimisation on pairs made of freshly sampled groups.

    :meth:`select` pairs the trajectories of each group by their rewards and skips groups
    in which all rewards are equal; the loss of a pair is a function of

    .. math:: h = \log\frac{\pi_\theta(y_c)}{\pi_\text{ref}(y_c)}
        - \log\frac{\pi_\theta(y_r)}{\pi_\text{ref}(y_r)}

    with sequence log-probs summed over the sampled tokens. It keeps working on stale
    samples without an off-policy correction (arXiv 2410.18252).

    Args:
        actor_network (TensorDictModuleBase): see :class:`~.common.AsyncLLMLoss`.
        beta (float): strength of the pull towards the reference.
        loss_type: ``"sigmoid"``, ``"ipo"`` or ``"hinge"``; see
            :func:`~torchrl_llm_async.objectives.functional.preference_loss`.
        label_smoothing (float): probability that a pair is the wrong way round, in
            [0, 0.5).
        pairing: ``"best_worst"`` or ``"all"``; see :func:`preference_pairs`.
        max_pairs_per_group (int, optional): for ``pairing="all"``.
        importance_cap (float, optional): weigh each pair by
            :math:`\min(c, \rho)`, without gradient, with :math:`\rho` the geometric mean of
            :math:`\pi_\theta / \mu` over the sampled tokens of both trajectories: pairs that
            the policy would hardly sample any more count for less. None, the default, weighs
            all alike.
        reference_network (TensorDictModuleBase, optional): the frozen policy, where the
            batch does not bring ``("log_probs", "ref")``.

    Attributes:
        groups_tied (int): groups that the last call of :meth:`select` skipped, all their
            rewards being equal.

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
        >>> loss = OnlineDPOLoss(actor, beta=0.1)
        >>> sampled = torch.tensor([[False, False, True, True]] * 4)
        >>> batch = TensorDict(
        ...     {
        ...         "tokens": {"full": torch.randint(11, (4, 4))},
        ...         "masks": {"all_attention_mask": torch.ones(4, 4, dtype=torch.bool),
        ...                   "all_assistant_mask": sampled},
        ...         "log_probs": {"ref": -2.4 * sampled},
        ...         "next": {"reward": torch.tensor([[0.0], [1.0], [1.0], [1.0]])},
        ...         "group": {"id": torch.tensor([0, 0, 1, 1])},
        ...     },
        ...     batch_size=(4,),
        ... )
        >>> rows = loss.select(batch)
        >>> len(rows), loss.groups_tied
        (2, 1)
        >>> loss(rows, normalizer=loss.denominator(rows)).total().backward()
    """

    output_type = OnlineDPOLossOutput
    packing_unit = "pair"

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        *,
        beta: float = 0.1,
        loss_type: functional.PreferenceLoss = "sigmoid",
        label_smoothing: float = 0.0,
        pairing: Pairing = "best_worst",
        max_pairs_per_group: int | None = None,
        importance_cap: float | None = None,
        reference_network: TensorDictModuleBase | None = None,
    ) -> None:
        for name, value, accepted in (
            ("loss_type", loss_type, functional.PreferenceLoss),
            ("pairing", pairing, Pairing),
        ):
            require(
                value in get_args(accepted),
                f"{name}={value!r} is not one of {get_args(accepted)}.",
            )
        check_numbers(
            beta=beta,
            label_smoothing=label_smoothing,
            max_pairs_per_group=max_pairs_per_group,
            importance_cap=importance_cap,
        )
        require(beta > 0, f"beta={beta} must be above 0, e.g. 0.1.")
        require(
            0 <= label_smoothing < 0.5,
            f"label_smoothing={label_smoothing} must lie in [0, 0.5).",
        )
        require(
            max_pairs_per_group is None or (pairing == "all" and max_pairs_per_group >= 1),
            f"max_pairs_per_group={max_pairs_per_group} with pairing={pairing!r}: it must be "
            "at least 1, and limits pairing='all' only.",
        )
        require(
            importance_cap is None or importance_cap > 0,
            f"importance_cap={importance_cap} must be above 0, e.g. 2.0, or null.",
        )
        super().__init__(actor_network, reference_network=reference_network)
        self.beta = beta
        self.loss_type = loss_type
        self.label_smoothing = label_smoothing
        self.pairing = pairing
        self.max_pairs_per_group = max_pairs_per_group
        self.importance_cap = importance_cap

    @property
    def needs_reference(self) -> bool:
        """Always."""
        return True

    def select(self, batch: TensorDictBase, *, target_version: int | None = None) -> TensorDictBase:
        """Chosen and rejected rows, those of a pair adjacent, the chosen one first.

        Args:
            batch (TensorDictBase): ``(B * K,)``, the rows of a group adjacent.
            target_version (int, optional): the version this step trains towards.

        Returns:
            TensorDictBase: ``(2 P,)``; empty if all groups are tied.

        Raises:
            ValueError: the rows are no whole groups of one size K >= 2, or a reward is not
                finite.
        """
        rewards = self._group_rewards(batch).tolist()
        indices: list[int] = []
        ties = 0
        for group, group_rewards in enumerate(rewards):
            pairs = preference_pairs(group_rewards, self.pairing, self.max_pairs_per_group)
            ties += not pairs
            start = group * len(group_rewards)
            indices.extend(start + position for pair in pairs for position in pair)
        self.groups_tied = ties
        rows = super().select(batch, target_version=target_version)
        # An empty list is no valid index of a lazy stack; an empty slice is.
        return rows[indices] if indices else rows[:0]

    def denominator(self, rows: TensorDictBase) -> Tensor:
        """Number of pairs."""
        return self._valid_pairs(self._layout(rows)).sum()

    def forward(self, micro: TensorDictBase, *, normalizer: Tensor | float) -> OnlineDPOLossOutput:
        """See :meth:`~.common.AsyncLLMLoss.forward`; sequences 2 i and 2 i + 1 are a pair."""
        layout = self._layout(micro)
        require(
            layout.num_segments % 2 == 0,
            f"{layout.num_segments} sequences are no whole pairs: pack with unit=2, so that none "
            "is split.",
        )
        self._check_order(micro, layout)
        log_prob = self._policy(micro).log_probs
        policy = layout.sum(log_prob)
        implicit_reward = policy - layout.sum(self._reference(micro))
        chosen, rejected = implicit_reward[0::2], implicit_reward[1::2]
        margin = chosen - rejected
        valid = self._valid_pairs(layout)
        loss = functional.preference_loss(
            margin, self.loss_type, beta=self.beta, label_smoothing=self.label_smoothing
        )
        weight = None
        if self.importance_cap is not None:
            weight = self._importance_weight(
                layout, log_prob, self._tokens(micro, "sample_log_prob")
            )
            loss = weight * loss
        return OnlineDPOLossOutput(
            loss_preference=per_unit(torch.where(valid, loss, 0.0).sum(), normalizer),
            reward_margin=sum_and_count(self.beta * margin, valid),
            preference_accuracy=sum_and_count(margin > 0, valid),
            chosen_reward=sum_and_count(self.beta * chosen, valid),
            rejected_reward=sum_and_count(self.beta * rejected, valid),
            chosen_log_prob=sum_and_count(policy[0::2], valid),
            rejected_log_prob=sum_and_count(policy[1::2], valid),
            importance_weight=None if weight is None else sum_and_count(weight, valid),
            **self._lags(micro, log_prob),
            batch_size=(),
        )

    def _importance_weight(self, layout: Layout, log_prob: Tensor, behavior: Tensor) -> Tensor:
        """(P,) of each pair, without gradient."""
        pairs = layout._replace(
            segment_ids=layout.segment_ids // 2, num_segments=layout.num_segments // 2
        )
        log_weight = functional.segment_mean(log_prob.detach() - behavior, *pairs)
        return functional.bounded_exp(log_weight).clamp_max(self.importance_cap)

    def _check_order(self, micro: TensorDictBase, layout: Layout) -> None:
        """Rows that are no pairs would be trained on as if the first were the better one."""
        if not self._has(micro, "reward") or not self._has(micro, "group_id"):
            return
        reward, group = (
            layout.per_segment(self._tokens(micro, name)).view(-1, 2)
            for name in ("reward", "group_id")
        )
        both = (layout.lengths() > 0).view(-1, 2).all(-1)
        wrong = both & ((reward[:, 0] <= reward[:, 1]) | (group[:, 0] != group[:, 1]))
        require(
            not wrong.any(),
            f"Rows of groups {group[wrong].tolist()} with rewards {reward[wrong].tolist()} "
            "are no pairs of a better and a worse answer: train on the rows that select() "
            "returns, and keep those of a pair together (unit=2).",
        )

    @staticmethod
    def _valid_pairs(layout: Layout) -> Tensor:
        """(P,) bool: pairs with sampled tokens, in one of them at least; padding rows have none."""
        return (layout.lengths() > 0).view(-1, 2).any(-1)
