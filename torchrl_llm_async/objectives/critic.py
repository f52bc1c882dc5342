"""PPO with a critic: a value per token on the policy's own decoder, and advantages from it.

Owns what the critic adds to :mod:`.ppo`, whose policy loss it keeps; the arithmetic is in
:mod:`.values`. Adds no head to a model (:func:`torchrl_llm_async.modules.add_value_head`
does) and shapes no rewards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_llm_async.objectives import functional, values
from torchrl_llm_async.objectives.common import per_unit, sum_and_count
from torchrl_llm_async.objectives.options import check_numbers, require
from torchrl_llm_async.objectives.ppo import DecoupledPPOLoss, DecoupledPPOLossOutput


class CriticPPOLossOutput(DecoupledPPOLossOutput):
    """What :class:`CriticPPOLoss` returns; diagnostics are means over sampled tokens.

    Attributes:
        loss_value (Tensor): the critic's loss, times ``value_coeff``.
        value_target, value_target_squared: R, what the values are drawn to, and its square.
        value_bias: R - V.
        value_error: its square.
        value_clip_fraction: tokens whose value's gradient clipping removed.
    """

    loss_value: Tensor | None = None
    value_target: Tensor | None = None
    value_target_squared: Tensor | None = None
    value_bias: Tensor | None = None
    value_error: Tensor | None = None
    value_clip_fraction: Tensor | None = None

    @classmethod
    def figures(cls, totals: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Those of the policy, the means, and ``explained_variance`` of all tokens.

        The last is left out where all targets are equal; see
        :func:`~torchrl_llm_async.objectives.values.explained_variance`.
        """
        out = super().figures(totals)
        square = out.pop("value_target_squared", None)
        if square is not None:
            moments = (out["value_target"], square, out["value_bias"], out["value_error"])
            explained = values.explained_variance(*moments)
            if not math.isnan(explained):
                out["explained_variance"] = explained
        return out


class CriticPPOLoss(DecoupledPPOLoss):
    r"""Decoupled PPO whose advantages a critic estimates, token by token.

    The policy loss is :class:`~.ppo.DecoupledPPOLoss`'s, with the advantages of
    :func:`~torchrl_llm_async.objectives.values.gae` over the sampled tokens of each
    sequence in place of its group's; tool outputs and other roles in between are no steps.
    To it comes, aggregated like it,

    .. math::
        c_v\,\tfrac12 \max\big((V - R)^2,\;
        (\mathrm{clip}(V, V_\text{old} - \epsilon, V_\text{old} + \epsilon) - R)^2\big)

    with the value target :math:`R = A + V_\text{old}`. The values are those at the start of
    the training step, from :meth:`anchor`, in the same forward pass as the proximal
    log-probs; without it the current ones serve, which is exact while the step makes one
    optimizer update. Targets are not corrected for staleness: they are of the policy that
    sampled the tokens.

    A sequence ends with its last sampled token, whether it was finished or cut
    (``("next", "truncated")``): its reward was given for what is there, so that nothing is
    left to bootstrap. In TorchRL's terms all ends are ``terminated``. AReaL adds the value
    of the last state where an answer fills its whole batch; verl and OpenRLHF do not.

    Advantages are not whitened: that takes their mean and spread over all micro-batches and
    ranks before the first of them is trained on, which no rank knows at that time.

    Args:
        actor_network (TensorDictModuleBase): see :class:`~.common.AsyncLLMLoss`; its scores
            must bring values, e.g. a :class:`~torchrl_llm_async.modules.TorchtuneActor` of a
            decoder with a value head.
        gamma (float): discount per sampled token. 1, as in AReaL, verl, OpenRLHF and TRL:
            the reward of an answer must not depend on how many tokens it took.
        lmbda (float): GAE's trade of variance for the critic's bias. 1, as in AReaL, verl
            and OpenRLHF: with TRL's 0.95 a reward at the end weighs 0.6 % of itself 100
            tokens before, and a critic that begins at zero would have to carry it there.
        value_coeff (float): :math:`c_v`. 0.1, as in TRL, which sums both losses, too, if of
            two models. Here they share a decoder, whose gradient the values must not rule;
            the others train the critic as a model of its own.
        value_clip (float, optional): :math:`\epsilon`, in units of the reward; None for no
            clipping. 0.5, as in AReaL, verl and OpenRLHF.
        **policy_options: of :class:`~.ppo.DecoupledPPOLoss`, all but
            ``ratio_level="sequence"``.

    Raises:
        ValueError: for an option out of range, naming it.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchtune.models.qwen2 import qwen2
        >>> from torchrl_llm_async.modules import TorchtuneActor, add_value_head
        >>> model = qwen2(vocab_size=11, num_layers=1, num_heads=2, num_kv_heads=1,
        ...               embed_dim=8, intermediate_dim=16, max_seq_len=16)
        >>> loss = CriticPPOLoss(TorchtuneActor(add_value_head(model)), lmbda=0.95)
        >>> sampled = torch.tensor([[False, False, True, True]] * 2)
        >>> micro = TensorDict(
        ...     {
        ...         "tokens": {"full": torch.randint(11, (2, 4))},
        ...         "masks": {"all_attention_mask": torch.ones(2, 4, dtype=torch.bool),
        ...                   "all_assistant_mask": sampled},
        ...         "log_probs": {"full": -2.4 * sampled},
        ...         "next": {"reward": torch.tensor([[1.0], [0.0]])},
        ...     },
        ...     batch_size=(2,),
        ... )
        >>> micro = loss.anchor(micro)
        >>> micro["value_target"]
        tensor([[0.0000, 0.0000, 0.9500, 1.0000],
                [0.0000, 0.0000, 0.0000, 0.0000]])
        >>> output = loss(micro, normalizer=loss.denominator(micro))
        >>> output.total().backward()
        >>> round(model.value_head.bias.grad.item(), 3)
        -0.049
    """

    @dataclass
    class _AcceptedKeys(DecoupledPPOLoss._AcceptedKeys):
        """Keys this loss reads; see ``set_keys``. Those it writes are TorchRL's ``GAE``'s.

        Attributes:
            reward (NestedKey): of the whole sequence, [N, 1]; received with its last sampled
                token. ``("next", "reward")``.
            token_reward (NestedKey): what comes to it at single sampled tokens, [N, T], e.g.
                of a process reward model; in all rows or in none.
                ``("next", "token_reward")``.
            old_value (NestedKey): values [N, T], written by ``anchor``. ``"state_value"``.
            advantage (NestedKey): advantages [N, T], written by ``anchor``; what else is
                there, e.g. a group's, is not read. ``"advantage"``.
            value_target (NestedKey): R [N, T], written by ``anchor``. ``"value_target"``.
        """

        reward: NestedKey = ("next", "reward")
        token_reward: NestedKey = ("next", "token_reward")
        old_value: NestedKey = "state_value"
        value_target: NestedKey = "value_target"

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys
    output_type = CriticPPOLossOutput
    needs_value_head = True
    needs_advantages = False

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        *,
        gamma: float = 1.0,
        lmbda: float = 1.0,
        value_coeff: float = 0.1,
        value_clip: float | None = 0.5,
        **policy_options: Any,
    ) -> None:
        check_numbers(gamma=gamma, lmbda=lmbda, value_coeff=value_coeff, value_clip=value_clip)
        for name, number in (("gamma", gamma), ("lmbda", lmbda)):
            require(0 <= number <= 1, f"{name}={number} must lie in [0, 1], e.g. 1.0.")
        require(value_coeff > 0, f"value_coeff={value_coeff} must be above 0, e.g. 0.1.")
        require(
            value_clip is None or value_clip > 0,
            f"value_clip={value_clip} must be above 0, e.g. 0.5, or null.",
        )
        super().__init__(actor_network, **policy_options)
        require(
            self.ratio_level == "token",
            f"ratio_level={self.ratio_level!r} gives all tokens of a sequence one ratio, which "
            "would average the critic's advantages away: use 'token', or DecoupledPPOLoss.",
        )
        self.gamma = gamma
        self.lmbda = lmbda
        self.value_coeff = value_coeff
        self.value_clip = value_clip

    def select(self, batch: TensorDictBase, *, target_version: int | None = None) -> TensorDictBase:
        """All rows, each with the version trained towards, if that is given.

        Raises:
            ValueError: some rows have rewards of single tokens, and some have none.
        """
        key = unravel_key(self.tensor_keys.token_reward)
        having = sum(key in row.keys(include_nested=True) for row in batch.unbind(0))
        require(
            having in (0, len(batch)),
            f"{having} of {len(batch)} rows have a token_reward at {key!r}: give all of them one, "
            "with 0 where there is nothing to reward.",
        )
        return super().select(batch, target_version=target_version)

    def anchor(self, micro: TensorDictBase) -> TensorDictBase:
        """Adds values, advantages, value targets and, if need be, proximal log-probs [N, T]."""
        with torch.no_grad():
            scores = self._policy(micro, values=True)
        micro = self._estimate(micro, scores.values)
        if self.prox == "recompute":
            shape = micro.get(self.tensor_keys.old_value).shape
            micro = self._with(micro, prox_log_prob=scores.log_probs.view(shape))
        return micro

    def forward(self, micro: TensorDictBase, *, normalizer: Tensor | float) -> CriticPPOLossOutput:
        """See :meth:`~.common.AsyncLLMLoss.forward`."""
        scores = self._policy(micro, self._entropy_mode, values=True)
        if not self._has(micro, "old_value"):
            micro = self._estimate(micro, scores.values)
        policy = self._policy_loss(micro, scores, normalizer)

        layout = self._layout(micro)
        mask = layout.mask
        target = self._tokens(micro, "value_target")
        critic = values.clipped_value_loss(
            scores.values, self._tokens(micro, "old_value"), target, mask, self.value_clip
        )
        total = functional.aggregate(critic.loss, *layout, self.aggregation)
        error = target - scores.values
        return CriticPPOLossOutput(
            **dict(policy.items()),
            loss_value=self.value_coeff * per_unit(total, normalizer),
            value_target=sum_and_count(target, mask),
            value_target_squared=sum_and_count(target.square(), mask),
            value_bias=sum_and_count(error, mask),
            value_error=sum_and_count(error.square(), mask),
            value_clip_fraction=sum_and_count(critic.clipped, mask),
            batch_size=(),
        )

    def _estimate(self, micro: TensorDictBase, value: Tensor) -> TensorDictBase:
        """A copy of the micro-batch with what follows from the values (N,) of its tokens."""
        mask, segment_ids, _ = self._layout(micro)
        reward = values.terminal_reward(self._tokens(micro, "reward"), mask, segment_ids)
        if self._has(micro, "token_reward"):
            reward = reward + self._tokens(micro, "token_reward")
        advantage, target = values.gae(
            reward, value, mask, segment_ids, gamma=self.gamma, lmbda=self.lmbda
        )
        shape = self._read(micro, "assistant_mask", False).shape
        return self._with(
            micro,
            old_value=value.detach().view(shape),
            advantage=advantage.view(shape),
            value_target=target.view(shape),
        )
