"""Decoupled PPO for trajectories of stale, possibly mixed, policy versions.

Owns the options of the loss and the reading of its micro-batches; the arithmetic is in
:mod:`.functional`. Computes no advantages (:mod:`.advantage`) and no rewards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_llm_async.modules.scores import EntropyMode, TokenScores
from torchrl_llm_async.objectives import functional
from torchrl_llm_async.objectives.common import AsyncLLMLoss, LossOutput, per_unit, sum_and_count
from torchrl_llm_async.objectives.options import (
    check_aggregation,
    check_clip_epsilon,
    check_numbers,
    require,
)

ProximalPolicy = Literal["recompute", "loglinear", "behavior"]


class DecoupledPPOLossOutput(LossOutput):
    r"""What :class:`DecoupledPPOLoss` returns; diagnostics are means over sampled tokens.

    Estimates of KL divergences are those of :func:`~.functional.kl_estimate`, k3, weighted
    by the importance ratio of the policy they are an expectation under.

    Attributes:
        loss_objective (Tensor): the clipped, corrected policy objective.
        loss_entropy (Tensor): minus the entropy bonus; None without ``entropy_coeff``.
        loss_kl_to_ref (Tensor): the KL penalty; None without ``kl_to_ref_coeff``.
        ratio: r, the policy over the proximal one.
        clip_fraction_low, clip_fraction_high: tokens whose gradient clipping removed, at the
            lower and the upper end of the ratio; dual clip removes at the upper.
        correction_fraction: tokens whose behaviour weight was truncated or rejected.
        behavior_weight: w'.
        importance, importance_squared: w' r, theta over mu under the correction, and its square.
        kl_behavior_to_policy: log mu - log theta, an unbiased estimate of KL(mu || theta).
        kl_to_prox: of KL(theta || prox).
        kl_prox_to_behavior: of KL(prox || mu).
        entropy: of the policy at the sampled positions, in nats.
        kl_to_ref: the penalty's per-token estimate; None without ``kl_to_ref_coeff``.
    """

    loss_objective: Tensor
    ratio: Tensor
    clip_fraction_low: Tensor
    clip_fraction_high: Tensor
    correction_fraction: Tensor
    behavior_weight: Tensor
    importance: Tensor
    importance_squared: Tensor
    kl_behavior_to_policy: Tensor
    kl_to_prox: Tensor
    kl_prox_to_behavior: Tensor
    entropy: Tensor
    loss_entropy: Tensor | None = None
    loss_kl_to_ref: Tensor | None = None
    kl_to_ref: Tensor | None = None

    @classmethod
    def figures(cls, totals: Mapping[str, Sequence[float]]) -> dict[str, float]:
        r"""The means, and ``effective_sample_size``, of all tokens the share that counts.

        It is :math:`(\sum w' r)^2 / (N \sum (w' r)^2)`: 1 if all weigh alike.
        """
        out = super().figures(totals)
        mean, squared = out.pop("importance", 0.0), out.pop("importance_squared", 0.0)
        if squared > 0:
            out["effective_sample_size"] = mean**2 / squared
        return out


class DecoupledPPOLoss(AsyncLLMLoss):
    r"""PPO whose trust region and whose off-policy correction have policies of their own.

    With the policy :math:`\pi_\theta` being trained, the proximal policy
    :math:`\pi_p` around which steps are clipped and the behaviour policy :math:`\mu`
    that sampled the token, the loss of a token is

    .. math::
        w' \max(-A r, -A\,\mathrm{clip}(r, 1-\epsilon_l, 1+\epsilon_h)),\quad
        r = \frac{\pi_\theta}{\mathrm{sg}[\pi_p]},\quad
        w = \mathrm{sg}\Big[\frac{\pi_p}{\mu}\Big]

    (arXiv 2110.00641; for language models AReaL, arXiv 2505.24298), where w' is w under
    the chosen correction. On fresh data all ratios are 1 and the gradient is REINFORCE's.

    Args:
        actor_network (TensorDictModuleBase): see :class:`~.common.AsyncLLMLoss`.
        clip_epsilon (float or pair of float): :math:`\epsilon`, or
            :math:`(\epsilon_l, \epsilon_h)`.
        dual_clip (float, optional): bound c > 1 on the loss of tokens with A < 0.
        prox: the proximal policy. ``"recompute"``: the weights at the start of the
            training step, by a forward pass in :meth:`anchor`; without one the current
            log-probs serve, which is exact, and free, while the step makes one
            optimizer update. ``"loglinear"``: interpolated from the token's version
            without a forward pass
            (:func:`~torchrl_llm_async.objectives.functional.loglinear_log_prob`); needs
            ``target_version`` in :meth:`select`. ``"behavior"``: mu itself, i.e. coupled
            PPO, where w is 1.
        correction: ``"truncate"``, ``"mask"``, ``"both"`` or ``"off"``; see
            :func:`~torchrl_llm_async.objectives.functional.correction_weight`. ``"off"``
            leaves w out altogether; ``"truncate"`` with a cap of infinity keeps w as it is.
        correction_level: ``"token"``, ``"sequence"`` or ``"geometric"``.
        correction_cap (float): largest weight.
        correction_floor (float, optional): smallest weight that ``"both"`` keeps; the
            reciprocal of the cap by default, so that a token that became likelier and one that
            became less likely by the same factor are treated alike.
        ratio_level: whether a ``"token"`` or a ``"sequence"`` has a ratio r of its own and is
            clipped by it. The latter, with ``aggregation="sequence"``, an epsilon of some
            1e-4 and ``prox="behavior"``, is GSPO (arXiv 2507.18071).
        aggregation: ``"token"`` (mean over all tokens of the step), ``"sequence"`` (mean
            over sequences of their mean) or ``"fixed"`` (sum over tokens, divided by
            sequences times ``fixed_length``).
        fixed_length (int, optional): in tokens, for ``"fixed"``.
        entropy_coeff (float): weight of the entropy bonus; 0 switches it off.
        kl_to_ref_coeff (float): weight of the KL penalty to the reference; 0 switches it
            off. The estimate is weighted by the importance ratio w' r (detached), since
            the tokens are mu's, not the current policy's; it is at most ``correction_cap``.
        kl_estimator: ``"k2"`` or ``"k3"``.
        reference_network (TensorDictModuleBase, optional): for the KL penalty, where
            the batch does not bring ``("log_probs", "ref")``.

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
        >>> loss = DecoupledPPOLoss(actor, clip_epsilon=(0.2, 0.28))
        >>> sampled = torch.tensor([[False, False, True, True]] * 2)
        >>> micro = TensorDict(
        ...     {
        ...         "tokens": {"full": torch.randint(11, (2, 4))},
        ...         "masks": {"all_attention_mask": torch.ones(2, 4, dtype=torch.bool),
        ...                   "all_assistant_mask": sampled},
        ...         "log_probs": {"full": -2.4 * sampled},
        ...         "advantage": torch.tensor([[0.5], [-0.5]]),
        ...     },
        ...     batch_size=(2,),
        ... )
        >>> output = loss(loss.anchor(micro), normalizer=loss.denominator(micro))
        >>> output.total().backward()
        >>> sorted(output.diagnostics())[:2]
        ['behavior_weight', 'clip_fraction_high']
    """

    @dataclass
    class _AcceptedKeys(AsyncLLMLoss._AcceptedKeys):
        """Keys this loss reads; see ``set_keys``.

        Attributes:
            advantage (NestedKey): [N, 1], or [N, T] for one per token. ``"advantage"``.
            prox_log_prob (NestedKey): written by ``anchor``. ``("log_probs", "prox")``.
        """

        advantage: NestedKey = "advantage"
        prox_log_prob: NestedKey = ("log_probs", "prox")

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys
    output_type = DecoupledPPOLossOutput
    packing_unit = "sequence"
    needs_advantages = True

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        *,
        clip_epsilon: float | Sequence[float] = 0.2,
        dual_clip: float | None = None,
        prox: ProximalPolicy = "recompute",
        correction: functional.Correction = "truncate",
        correction_level: functional.CorrectionLevel = "token",
        correction_cap: float = 5.0,
        correction_floor: float | None = None,
        ratio_level: functional.RatioLevel = "token",
        aggregation: functional.Aggregation = "token",
        fixed_length: int | None = None,
        entropy_coeff: float = 0.0,
        kl_to_ref_coeff: float = 0.0,
        kl_estimator: functional.KLEstimator = "k2",
        reference_network: TensorDictModuleBase | None = None,
    ) -> None:
        for name, value, accepted in (
            ("prox", prox, ProximalPolicy),
            ("correction", correction, functional.Correction),
            ("correction_level", correction_level, functional.CorrectionLevel),
            ("ratio_level", ratio_level, functional.RatioLevel),
            ("kl_estimator", kl_estimator, functional.KLEstimator),
        ):
            require(
                value in get_args(accepted),
                f"{name}={value!r} is not one of {get_args(accepted)}.",
            )
        check_numbers(
            dual_clip=dual_clip,
            correction_cap=correction_cap,
            correction_floor=correction_floor,
            entropy_coeff=entropy_coeff,
            kl_to_ref_coeff=kl_to_ref_coeff,
        )
        require(
            dual_clip is None or dual_clip > 1,
            f"dual_clip={dual_clip} must be above 1, e.g. 3.0, or null.",
        )
        require(
            correction_cap >= 1,
            f"correction_cap={correction_cap} must be at least 1: a fresh token weighs 1.",
        )
        require(
            correction_floor is None or 0 <= correction_floor <= 1,
            f"correction_floor={correction_floor} must lie in [0, 1], or be null.",
        )
        for name, value in (("entropy_coeff", entropy_coeff), ("kl_to_ref_coeff", kl_to_ref_coeff)):
            require(0 <= value < math.inf, f"{name}={value} must be 0 (off) or more.")
        check_aggregation(aggregation, fixed_length)
        # What is set in vain would be believed to be in effect.
        given = (correction_level, correction_cap, correction_floor)
        is_weighted = prox != "behavior" and correction != "off"
        require(
            is_weighted or (correction in ("truncate", "off") and given == ("token", 5.0, None)),
            f"prox={prox!r}, correction={correction!r} with correction_level, correction_cap, "
            f"correction_floor = {given}: the weight that these are of is 1 everywhere. Leave them "
            "out, or use prox='recompute' and another correction.",
        )
        require(
            correction_floor is None or correction == "both",
            f"correction_floor={correction_floor} with correction={correction!r}: only 'both' has "
            "a floor.",
        )
        require(
            bool(kl_to_ref_coeff) or (kl_estimator == "k2" and reference_network is None),
            "kl_estimator and reference_network are of the KL penalty, which kl_to_ref_coeff=0.0 "
            "switches off: leave them out, or set it, e.g. to 0.001.",
        )
        super().__init__(actor_network, reference_network=reference_network)
        self.clip_low, self.clip_high = check_clip_epsilon(clip_epsilon)
        self.dual_clip = dual_clip
        self.prox = prox
        self.correction = correction
        self.correction_level = correction_level
        self.correction_cap = correction_cap
        self.correction_floor = correction_floor
        self.ratio_level = ratio_level
        self.aggregation = aggregation
        self.fixed_length = fixed_length
        self.entropy_coeff = entropy_coeff
        self.kl_to_ref_coeff = kl_to_ref_coeff
        self.kl_estimator = kl_estimator

    @property
    def needs_reference(self) -> bool:
        """Only for the KL penalty."""
        return bool(self.kl_to_ref_coeff)

    def select(self, batch: TensorDictBase, *, target_version: int | None = None) -> TensorDictBase:
        """All rows, each with the version trained towards, if that is given.

        Raises:
            ValueError: no ``target_version`` where ``prox="loglinear"`` needs it.
        """
        require(
            self.prox != "loglinear" or target_version is not None,
            "prox='loglinear' needs select(batch, target_version=version + 1), version being "
            "that of the weights the step starts from.",
        )
        return super().select(batch, target_version=target_version)

    def anchor(self, micro: TensorDictBase) -> TensorDictBase:
        """With ``prox="recompute"``, adds the current log-probs [N, T], without gradient."""
        if self.prox != "recompute":
            return micro
        mask = self._read(micro, "assistant_mask", False)
        with torch.no_grad():
            log_prob = self._policy(micro).log_probs.view_as(mask)
        return self._with(micro, prox_log_prob=log_prob)

    def denominator(self, rows: TensorDictBase) -> Tensor:
        """Tokens, sequences, or sequences times ``fixed_length``, as ``aggregation`` says."""
        return functional.denominator(*self._layout(rows), self.aggregation, self.fixed_length)

    def forward(
        self, micro: TensorDictBase, *, normalizer: Tensor | float
    ) -> DecoupledPPOLossOutput:
        """See :meth:`~.common.AsyncLLMLoss.forward`."""
        return self._policy_loss(micro, self._policy(micro, self._entropy_mode), normalizer)

    @property
    def _entropy_mode(self) -> EntropyMode:
        return "differentiable" if self.entropy_coeff else "detached"

    def _policy_loss(
        self, micro: TensorDictBase, scores: TokenScores, normalizer: Tensor | float
    ) -> DecoupledPPOLossOutput:
        """The loss, given the policy's scores (N,) of the micro-batch."""
        layout = self._layout(micro)
        mask = layout.mask
        log_prob, entropy = scores.log_probs, scores.entropy
        behavior = self._tokens(micro, "sample_log_prob")
        prox = self._prox_log_prob(micro, log_prob, behavior)
        weight, corrected = functional.correction_weight(
            prox - behavior,
            *layout,
            correction=self.correction,
            level=self.correction_level,
            cap=self.correction_cap,
            floor=self.correction_floor,
        )
        surrogate = functional.clipped_surrogate(
            log_prob,
            prox,
            self._tokens(micro, "advantage"),
            *layout,
            level=self.ratio_level,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )

        def reduce(values: Tensor) -> Tensor:
            return per_unit(functional.aggregate(values, *layout, self.aggregation), normalizer)

        # w' r: what an expectation under the current policy weighs mu's tokens with.
        importance = weight * surrogate.ratio
        current = log_prob.detach()
        output = DecoupledPPOLossOutput(
            loss_objective=reduce(weight * surrogate.loss),
            ratio=sum_and_count(surrogate.ratio, mask),
            clip_fraction_low=sum_and_count(surrogate.clipped_low, mask),
            clip_fraction_high=sum_and_count(surrogate.clipped_high, mask),
            correction_fraction=sum_and_count(corrected, mask),
            behavior_weight=sum_and_count(weight, mask),
            importance=sum_and_count(importance, mask),
            importance_squared=sum_and_count(importance.square(), mask),
            kl_behavior_to_policy=sum_and_count(behavior - current, mask),
            kl_to_prox=sum_and_count(
                importance * functional.kl_estimate(current, prox, mask, "k3"), mask
            ),
            kl_prox_to_behavior=sum_and_count(
                weight * functional.kl_estimate(prox, behavior, mask, "k3"), mask
            ),
            entropy=sum_and_count(entropy, mask),
            # Where prox is made of mu it would hide what engine and trainer disagree by.
            **self._lags(micro, log_prob, prox if self.prox == "recompute" else None),
            batch_size=(),
        )
        if self.entropy_coeff:
            output.loss_entropy = -self.entropy_coeff * reduce(entropy)
        if self.kl_to_ref_coeff:
            kl = functional.kl_estimate(log_prob, self._reference(micro), mask, self.kl_estimator)
            bounded = importance.clamp_max(self.correction_cap)
            output.loss_kl_to_ref = self.kl_to_ref_coeff * reduce(bounded * kl)
            output.kl_to_ref = sum_and_count(kl, mask)
        return output

    def _prox_log_prob(self, micro: TensorDictBase, log_prob: Tensor, behavior: Tensor) -> Tensor:
        """(N,) log-probs of the proximal policy, without gradient."""
        if self.prox == "behavior":
            return behavior
        if self.prox == "loglinear":
            version = self._tokens(micro, "token_version", -1)
            sampled = self._layout(micro).mask
            require(
                bool((version[sampled] >= 0).all()),
                "prox='loglinear' needs the version of every sampled token, but some are unknown "
                f"(below 0) at {self.tensor_keys.token_version!r}. Use prox='recompute'.",
            )
            return functional.loglinear_log_prob(
                log_prob, behavior, version, self._tokens(micro, "target_version", -1)
            )
        if self._has(micro, "prox_log_prob"):
            return self._tokens(micro, "prox_log_prob")
        return log_prob.detach()
