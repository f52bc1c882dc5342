"""Proximal RLOO: REINFORCE with a leave-one-out baseline, clipped by whole sequences.

Owns the options of the loss and the advantages it computes of a group's rewards; the arithmetic
of both is in :mod:`.functional`. Shapes no rewards: a penalty for leaving the reference belongs
into the reward that comes in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_llm_async.objectives import functional
from torchrl_llm_async.objectives.common import LossOutput, per_unit, sum_and_count
from torchrl_llm_async.objectives.group_loss import GroupLoss
from torchrl_llm_async.objectives.options import check_clip_epsilon


class ProximalRLOOLossOutput(LossOutput):
    """What :class:`ProximalRLOOLoss` returns; diagnostics are means over sequences.

    Attributes:
        loss_objective (Tensor): the clipped objective.
        ratio, ratio_squared: r, the policy over the behaviour policy, and its square.
        clip_fraction_low, clip_fraction_high: sequences whose gradient clipping removed.
        kl_behavior_to_policy: log mu - log theta, an unbiased estimate of KL(mu || theta).
    """

    loss_objective: Tensor
    ratio: Tensor
    ratio_squared: Tensor
    clip_fraction_low: Tensor
    clip_fraction_high: Tensor
    kl_behavior_to_policy: Tensor

    @classmethod
    def figures(cls, totals: Mapping[str, Sequence[float]]) -> dict[str, float]:
        r"""The means, and ``effective_sample_size``, of all sequences the share that counts.

        It is :math:`(\sum r)^2 / (N \sum r^2)`: 1 if all weigh alike.
        """
        out = super().figures(totals)
        squared = out.pop("ratio_squared", 0.0)
        if squared > 0:
            out["effective_sample_size"] = out["ratio"] ** 2 / squared
        return out


class ProximalRLOOLoss(GroupLoss):
    r"""REINFORCE leave-one-out with PPO's clipping, a whole answer being one action.

    The loss of an answer y with reward R, in a group of K, is

    .. math::
        \max(-A r, -A\,\mathrm{clip}(r, 1-\epsilon_l, 1+\epsilon_h)),\quad
        A_i = R_i - \frac{1}{K-1} \sum_{j \ne i} R_j,\quad
        r = \frac{\pi_\theta(y)}{\mu(y)} = \exp \sum_t \log\frac{\pi_\theta(y_t)}{\mu(y_t)}

    with the sum over sampled tokens (RLOO, arXiv 2402.14740; with the ratio, for stale data,
    Asynchronous RLHF, arXiv 2410.18252). The step's loss is the mean over sequences. On fresh
    data r is 1 and the gradient is REINFORCE's with advantages A. The ratio of an answer is the
    product of its tokens', so it leaves the clipping range the sooner, the longer the answer is:
    :class:`~.ppo.DecoupledPPOLoss` is for long ones.

    :meth:`select` computes the advantages; those of :class:`~.advantage.GroupAdvantage` are not
    read.

    Args:
        actor_network (TensorDictModuleBase): see :class:`~.common.AsyncLLMLoss`.
        clip_epsilon (float or pair of float): :math:`\epsilon`, or
            :math:`(\epsilon_l, \epsilon_h)`.

    Two things differ from TRL's ``RLOOTrainer``, whose clipping has the same default. The ratio is
    over :math:`\mu`, the log-probs that the engine recorded, instead of the trainer's own weights
    at the start of the step: those would leave stale data without a correction. And the reward
    is taken as it comes, where TRL deducts 0.05 times the log-ratio to a reference.

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
        >>> loss = ProximalRLOOLoss(actor)
        >>> sampled = torch.tensor([[False, False, True, True]] * 3)
        >>> batch = TensorDict(
        ...     {
        ...         "tokens": {"full": torch.randint(11, (3, 4))},
        ...         "masks": {"all_attention_mask": torch.ones(3, 4, dtype=torch.bool),
        ...                   "all_assistant_mask": sampled},
        ...         "log_probs": {"full": -2.4 * sampled},
        ...         "next": {"reward": torch.tensor([[1.0], [0.0], [0.0]])},
        ...         "group": {"id": torch.tensor([7, 7, 7])},
        ...     },
        ...     batch_size=(3,),
        ... )
        >>> rows = loss.select(batch)
        >>> rows["group", "advantage"].flatten()
        tensor([ 1.0000, -0.5000, -0.5000])
        >>> loss(rows, normalizer=loss.denominator(rows)).total().backward()
    """

    @dataclass
    class _AcceptedKeys(GroupLoss._AcceptedKeys):
        """Keys this loss reads; see ``set_keys``.

        Attributes:
            advantage (NestedKey): A, in the shape of the rewards; written by ``select``.
                ``("group", "advantage")``.
        """

        advantage: NestedKey = ("group", "advantage")

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys
    output_type = ProximalRLOOLossOutput
    written_by_select = ("target_version", "advantage")
    packing_unit = "sequence"

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        *,
        clip_epsilon: float | Sequence[float] = 0.2,
    ) -> None:
        low_and_high = check_clip_epsilon(clip_epsilon)
        super().__init__(actor_network)
        self.clip_low, self.clip_high = low_and_high

    def select(self, batch: TensorDictBase, *, target_version: int | None = None) -> TensorDictBase:
        """All rows, each with its advantage over the others of its group.

        Args:
            batch (TensorDictBase): ``(B * K,)``, the rows of a group adjacent.
            target_version (int, optional): the version this step trains towards.

        Raises:
            ValueError: the rows are no whole groups of one size K >= 2, or a reward is not
                finite.
        """
        rewards = self._group_rewards(batch)
        groups = torch.arange(len(rewards), device=rewards.device)
        advantage = functional.group_advantage(
            rewards.flatten(),
            groups.repeat_interleave(rewards.shape[1]),
            len(rewards),
            estimator="leave_one_out",
        )
        shape = self._read(batch, "reward").shape
        rows = super().select(batch, target_version=target_version)
        return self._with(rows, advantage=advantage.view(shape))

    def denominator(self, rows: TensorDictBase) -> Tensor:
        """Number of sequences with sampled tokens."""
        return functional.denominator(*self._layout(rows), "sequence")

    def forward(
        self, micro: TensorDictBase, *, normalizer: Tensor | float
    ) -> ProximalRLOOLossOutput:
        """See :meth:`~.common.AsyncLLMLoss.forward`."""
        layout = self._layout(micro)
        log_prob = self._policy(micro).log_probs
        log_ratio = layout.sum(log_prob - self._tokens(micro, "sample_log_prob"))
        valid = layout.lengths() > 0
        # A sequence is one action: the unit here is what a token is elsewhere.
        surrogate = functional.clipped_surrogate(
            log_ratio,
            torch.zeros_like(log_ratio),
            layout.per_segment(self._tokens(micro, "advantage")),
            valid,
            torch.arange(layout.num_segments, device=valid.device),
            layout.num_segments,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )
        return ProximalRLOOLossOutput(
            loss_objective=per_unit(surrogate.loss.sum(), normalizer),
            ratio=sum_and_count(surrogate.ratio, valid),
            ratio_squared=sum_and_count(surrogate.ratio.square(), valid),
            clip_fraction_low=sum_and_count(surrogate.clipped_low, valid),
            clip_fraction_high=sum_and_count(surrogate.clipped_high, valid),
            kl_behavior_to_policy=sum_and_count(-log_ratio, valid),
            **self._lags(micro, log_prob),
            batch_size=(),
        )
