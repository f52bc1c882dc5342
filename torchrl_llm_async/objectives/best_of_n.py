"""Best of N: supervised training on the best answer of each group.

Owns the choice of the rows; the arithmetic is in :mod:`.functional`. Needs no behaviour log-probs,
no reference and no advantages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_llm_async.objectives import functional
from torchrl_llm_async.objectives.common import Layout, LossOutput, per_unit, sum_and_count
from torchrl_llm_async.objectives.group_loss import GroupLoss
from torchrl_llm_async.objectives.options import check_aggregation


class BestOfNLossOutput(LossOutput):
    """What :class:`BestOfNLoss` returns.

    Attributes:
        loss_nll (Tensor): the loss.
        token_log_prob: log pi of a token, the mean over tokens.
        chosen_log_prob: log pi of an answer, the mean over answers.
    """

    loss_nll: Tensor
    token_log_prob: Tensor
    chosen_log_prob: Tensor


class BestOfNLoss(GroupLoss):
    r"""Negative log-likelihood of the best answer of each group.

    .. math:: -\log \pi_\theta(y_b) = -\sum_t \log \pi_\theta(y_{b,t}),
        \qquad b = \arg\max_i R_i

    over the sampled tokens of the answer (best-of-2 in Asynchronous RLHF, arXiv 2410.18252).
    Whatever policy sampled the answer, so there is no correction for stale data. A group in which
    all rewards are equal tells nothing and is skipped.

    Args:
        actor_network (TensorDictModuleBase): see :class:`~.common.AsyncLLMLoss`.
        aggregation: ``"token"`` (mean over all tokens of the step, as supervised fine-tuning
            has it, the default), ``"sequence"`` (mean over answers of their mean) or ``"fixed"``
            (sum over tokens, divided by answers times ``fixed_length``; with a length of 1 it
            is the mean over answers of the equation above, which Asynchronous RLHF takes; its
            gradient grows with the length of the answers).
        fixed_length (int, optional): in tokens, for ``"fixed"``.

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
        >>> loss = BestOfNLoss(actor)
        >>> batch = TensorDict(
        ...     {
        ...         "tokens": {"full": torch.randint(11, (4, 4))},
        ...         "masks": {"all_attention_mask": torch.ones(4, 4, dtype=torch.bool),
        ...                   "all_assistant_mask": torch.tensor([[False, False, True, True]] * 4)},
        ...         "next": {"reward": torch.tensor([[0.0], [1.0], [1.0], [1.0]])},
        ...         "group": {"id": torch.tensor([0, 0, 1, 1]), "index": torch.arange(4) % 2},
        ...     },
        ...     batch_size=(4,),
        ... )
        >>> rows = loss.select(batch)
        >>> rows["group", "index"], loss.groups_tied
        (tensor([1]), 1)
        >>> loss(rows, normalizer=loss.denominator(rows)).total().backward()
    """

    @dataclass
    class _AcceptedKeys(GroupLoss._AcceptedKeys):
        """Keys this loss reads; see ``set_keys``.

        Attributes:
            is_best (NestedKey): [N] bool, written by ``select``; other rows count for nothing.
                ``("group", "is_best")``.
        """

        is_best: NestedKey = ("group", "is_best")

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys
    output_type = BestOfNLossOutput
    written_by_select = ("target_version", "is_best")
    packing_unit = "sequence"

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        *,
        aggregation: functional.Aggregation = "token",
        fixed_length: int | None = None,
    ) -> None:
        check_aggregation(aggregation, fixed_length)
        super().__init__(actor_network)
        self.aggregation = aggregation
        self.fixed_length = fixed_length

    def select(self, batch: TensorDictBase, *, target_version: int | None = None) -> TensorDictBase:
        """The best row of each group, the first of several equals.

        Args:
            batch (TensorDictBase): ``(B * K,)``, the rows of a group adjacent.
            target_version (int, optional): the version this step trains towards.

        Returns:
            TensorDictBase: at most one row per group; empty if all groups are tied.

        Raises:
            ValueError: the rows are no whole groups of one size K >= 2, or a reward is not
                finite.
        """
        rewards = self._group_rewards(batch)
        groups = (rewards.amax(-1) > rewards.amin(-1)).nonzero().squeeze(-1)
        self.groups_tied = len(rewards) - len(groups)
        # torch.argmax is the first of several equals.
        best = (groups * rewards.shape[1] + rewards[groups].argmax(-1)).tolist()
        is_best = torch.zeros(len(batch), dtype=torch.bool, device=rewards.device)
        is_best[best] = True
        rows = super().select(batch, target_version=target_version)
        rows = self._with(rows, is_best=is_best)
        # An empty list is no valid index of a lazy stack; an empty slice is.
        return rows[best] if best else rows[:0]

    def denominator(self, rows: TensorDictBase) -> Tensor:
        """Tokens, sequences, or sequences times ``fixed_length``, as ``aggregation`` says."""
        return functional.denominator(*self._best(rows), self.aggregation, self.fixed_length)

    def forward(self, micro: TensorDictBase, *, normalizer: Tensor | float) -> BestOfNLossOutput:
        """See :meth:`~.common.AsyncLLMLoss.forward`."""
        layout = self._best(micro)
        log_prob = self._policy(micro).log_probs
        total = functional.aggregate(-log_prob, *layout, self.aggregation)
        return BestOfNLossOutput(
            loss_nll=per_unit(total, normalizer),
            token_log_prob=sum_and_count(log_prob, layout.mask),
            chosen_log_prob=sum_and_count(layout.sum(log_prob), layout.lengths() > 0),
            **self._lags(micro, log_prob),
            batch_size=(),
        )

    def _best(self, rows: TensorDictBase) -> Layout:
        """The tokens of the best answers."""
        layout = self._layout(rows)
        if len(rows) == 0:
            return layout
        return layout._replace(mask=layout.mask & self._tokens(rows, "is_best").bool())
