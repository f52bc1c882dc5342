"""Loss arithmetic as pure functions on flat tokens.

Every function takes the tokens of a micro-batch as one flat axis ``(N,)``, a
boolean ``mask`` (N,) that is True where the policy sampled the token, and
``segment_ids`` (N,) that say which sequence a token belongs to, so that padded
and packed batches share one code path. Results are sums; dividing by the
denominator of the whole training step is the caller's business.

Owns no state, reads no tensordict, runs no model and talks to no other rank.
Arguments of ``exp`` are bounded by +-20 (:data:`MAX_LOG_RATIO`); nothing else is.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

MAX_LOG_RATIO = 20.0

AdvantageEstimator = Literal["mean", "leave_one_out"]
Aggregation = Literal["token", "sequence", "fixed"]
Correction = Literal["truncate", "mask", "both", "off"]
CorrectionLevel = Literal["token", "sequence", "geometric"]
KLEstimator = Literal["k2", "k3"]
PreferenceLoss = Literal["sigmoid", "ipo", "hinge"]
RatioLevel = Literal["token", "sequence"]


def bounded_exp(value: Tensor) -> Tensor:
    """``exp`` of an argument clamped to +-20, so that no ratio overflows.

    Args:
        value (Tensor): log-ratios of any shape.

    Returns:
        Tensor: of the same shape, within [2.1e-9, 4.9e8]. The gradient is zero
        where the argument was clamped.

    Examples:
        >>> bounded_exp(torch.tensor([0.0, float("inf")]))
        tensor([1.0000e+00, 4.8517e+08])
    """
    return value.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def segment_sum(values: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """Sums of ``values`` (N,) per segment, shape ``(num_segments,)``.

    Examples:
        >>> segment_sum(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 0, 1]), 3)
        tensor([3., 4., 0.])
    """
    return values.new_zeros(num_segments).index_add(0, segment_ids, values)


def segment_mean(values: Tensor, mask: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """Means of ``values`` (N,) per segment where ``mask`` holds, (num_segments,); 0 of nothing.

    Examples:
        >>> segment_mean(
        ...     torch.tensor([1.0, 2.0, 4.0]), torch.tensor([True, True, False]),
        ...     torch.tensor([0, 0, 1]), 2,
        ... )
        tensor([1.5000, 0.0000])
    """
    total = segment_sum(torch.where(mask, values, 0.0), segment_ids, num_segments)
    length = segment_sum(mask.to(values.dtype), segment_ids, num_segments)
    return total / length.clamp_min(1)


def group_advantage(
    reward: Tensor,
    group_ids: Tensor,
    num_groups: int,
    *,
    estimator: AdvantageEstimator = "mean",
    divide_by_std: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    r"""Advantage of each trajectory relative to the others of its group.

    ``"mean"`` is :math:`A_i = r_i - \bar r` (GRPO, arXiv 2402.03300; without the
    division it is Dr. GRPO, arXiv 2503.20783), ``"leave_one_out"`` is
    :math:`A_i = r_i - \frac{1}{K-1}\sum_{j \ne i} r_j` (RLOO, arXiv 2402.14740).
    Both sum to zero over a group.

    Args:
        reward (Tensor): (N,), one return per trajectory.
        group_ids (Tensor): (N,) int64 in ``[0, num_groups)``; every group needs at
            least two members, or its result is NaN.
        num_groups (int): number of groups.
        estimator: the baseline, see above.
        divide_by_std (bool): divide by the group's sample standard deviation
            (Bessel-corrected) plus ``eps``.
        eps (float): in units of the reward.

    Returns:
        Tensor: (N,) in the dtype of ``reward``. The arithmetic is float64: in
        float32, a group of equal rewards would be divided by its own rounding
        error and give advantages near +-1 instead of 0.

    Examples:
        >>> group_advantage(
        ...     torch.tensor([1.0, 0.0, 0.0]), torch.zeros(3, dtype=torch.long), 1,
        ...     estimator="leave_one_out",
        ... )
        tensor([ 1.0000, -0.5000, -0.5000])
    """
    value = reward.double()
    size = segment_sum(torch.ones_like(value), group_ids, num_groups)
    mean = segment_sum(value, group_ids, num_groups) / size
    advantage = value - mean[group_ids]
    if divide_by_std:
        variance = segment_sum(advantage.square(), group_ids, num_groups) / (size - 1)
        scale = 1.0 / (variance.sqrt() + eps)
    else:
        scale = torch.ones_like(size)
    if estimator == "leave_one_out":
        # r_i - mean of the others = K / (K - 1) * (r_i - mean of all)
        scale = scale * size / (size - 1)
    return (advantage * scale[group_ids]).to(reward.dtype)


def loglinear_log_prob(
    log_prob: Tensor,
    behavior_log_prob: Tensor,
    token_version: Tensor,
    target_version: Tensor | int,
) -> Tensor:
    r"""Proximal log-probs interpolated between behaviour and current policy.

    .. math:: \log \pi_\text{prox} = \log \mu + a\,(\log \pi_\theta - \log \mu),
        \qquad a = \frac{c - 1 - v}{c - v} \text{ clamped to } [0, 1]

    for a token sampled by version :math:`v` in the step that trains towards version
    :math:`c`. Saves the forward pass that decoupled PPO (arXiv 2505.24298) spends on
    its anchor; a token of the newest version (``v >= c - 1``) has the behaviour
    policy as its anchor.

    Args:
        log_prob (Tensor): (N,) of the current policy; detached here.
        behavior_log_prob (Tensor): (N,).
        token_version (Tensor): (N,) int64.
        target_version (Tensor or int): c, (N,) or scalar; in step i it is i + 1.

    Returns:
        Tensor: (N,), without gradient.

    Examples:
        >>> loglinear_log_prob(
        ...     torch.tensor([-1.0, -1.0]), torch.tensor([-2.0, -2.0]),
        ...     torch.tensor([4, 3]), 5,
        ... )
        tensor([-2.0000, -1.5000])
    """
    age = torch.as_tensor(target_version, device=token_version.device) - token_version
    share = (age - 1).clamp_min(0).to(log_prob.dtype) / age.clamp_min(1)
    return behavior_log_prob + share * (log_prob.detach() - behavior_log_prob)


def correction_weight(
    log_weight: Tensor,
    mask: Tensor,
    segment_ids: Tensor,
    num_segments: int,
    *,
    correction: Correction = "truncate",
    level: CorrectionLevel = "token",
    cap: float = 5.0,
    floor: float | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Off-policy correction :math:`w'` from :math:`\log w = \log\pi_\text{prox} - \log\mu`.

    ``level`` says what one weight covers: a ``"token"``, a ``"sequence"`` (the product
    over its sampled tokens) or ``"geometric"``, the sequence's geometric mean.
    ``correction`` says what happens to weights out of range: ``"truncate"`` takes
    ``min(w, cap)`` (truncated importance sampling), ``"mask"`` takes 0 above ``cap``,
    ``"both"`` takes 0 above ``cap`` and below ``floor`` (IcePop), ``"off"`` takes 1
    everywhere. ``cap=inf`` leaves w as it is.

    Args:
        log_weight (Tensor): (N,); values outside ``mask`` are ignored.
        mask (Tensor): (N,) bool.
        segment_ids (Tensor): (N,) int64 in ``[0, num_segments)``.
        num_segments (int): number of sequences.
        correction: see above.
        level: see above.
        cap (float): upper end of the range.
        floor (float, optional): lower end for ``"both"``; ``1 / cap`` by default.

    Returns:
        tuple[Tensor, Tensor]: w' (N,), without gradient, and (N,) bool, True where a
        sampled token's weight was out of range.

    Examples:
        >>> weight, hit = correction_weight(
        ...     torch.tensor([0.0, 3.0]), torch.ones(2, dtype=torch.bool),
        ...     torch.tensor([0, 0]), 1,
        ... )
        >>> weight
        tensor([1., 5.])
    """
    log_weight = torch.where(mask, log_weight, 0.0).detach()
    if correction == "off":
        return torch.ones_like(log_weight), torch.zeros_like(mask)
    if level == "sequence":
        log_weight = segment_sum(log_weight, segment_ids, num_segments)[segment_ids]
    elif level == "geometric":
        log_weight = segment_mean(log_weight, mask, segment_ids, num_segments)[segment_ids]
    weight = bounded_exp(log_weight)
    outside = weight > cap
    if correction == "truncate":
        return weight.clamp_max(cap), outside & mask
    if correction == "both":
        outside = outside | (weight < (1 / cap if floor is None else floor))
    return weight.masked_fill(outside, 0.0), outside & mask


class Surrogate(NamedTuple):
    """What :func:`clipped_surrogate` returns; every entry has shape (N,)."""

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


def clipped_surrogate(
    log_prob: Tensor,
    prox_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    segment_ids: Tensor,
    num_segments: int,
    *,
    level: RatioLevel = "token",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Surrogate:
    r"""PPO's clipped objective per token, as a loss.

    .. math:: \max(-A r,\; -A\,\mathrm{clip}(r, 1-\epsilon_l, 1+\epsilon_h)),
        \qquad r = \pi_\theta / \pi_\text{prox}

    (arXiv 1707.06347). With ``level="sequence"`` r is one ratio per sequence, the geometric
    mean of its tokens' (GSPO, arXiv 2507.18071); each token has the loss of its sequence.
    With ``dual_clip`` c > 1 the loss of a token with A < 0 is at most -c A
    (arXiv 1912.09729).

    Args:
        log_prob (Tensor): (N,) of the current policy, with gradient.
        prox_log_prob (Tensor): (N,) of the trust region's anchor; detached here.
        advantage (Tensor): (N,).
        mask (Tensor): (N,) bool; the loss is 0 elsewhere.
        segment_ids (Tensor): (N,) int64 in ``[0, num_segments)``.
        num_segments (int): number of sequences.
        level: see above.
        clip_low (float): epsilon_l.
        clip_high (float): epsilon_h.
        dual_clip (float, optional): c.

    Returns:
        Surrogate: the loss, the detached ratio r, and where clipping took the
        gradient away at the lower end (A < 0) and the upper (A > 0, or A < 0 by dual clip).

    Examples:
        >>> one = torch.ones(1, dtype=torch.bool)
        >>> clipped_surrogate(
        ...     torch.tensor([0.5]), torch.tensor([0.0]), torch.tensor([1.0]), one,
        ...     torch.tensor([0]), 1,
        ... ).loss
        tensor([-1.2000])
    """
    log_ratio = torch.where(mask, log_prob - prox_log_prob.detach(), 0.0)
    if level == "sequence":
        log_ratio = segment_mean(log_ratio, mask, segment_ids, num_segments)[segment_ids]
    ratio = bounded_exp(log_ratio)
    advantage = torch.where(mask, advantage, 0.0)
    plain = -advantage * ratio
    clipped = -advantage * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(plain, clipped)
    clipped_high = (advantage > 0) & (ratio > 1 + clip_high)
    if dual_clip is not None:
        loss = torch.where(advantage < 0, torch.minimum(loss, -dual_clip * advantage), loss)
        clipped_high = clipped_high | ((advantage < 0) & (ratio > dual_clip))
    return Surrogate(
        loss=loss,
        ratio=ratio.detach(),
        clipped_low=(advantage < 0) & (ratio < 1 - clip_low),
        clipped_high=clipped_high,
    )


def kl_estimate(
    log_prob: Tensor, ref_log_prob: Tensor, mask: Tensor, estimator: KLEstimator
) -> Tensor:
    r"""Per-token estimate of KL(policy || reference) on sampled tokens.

    With :math:`d = \log\pi_\text{ref} - \log\pi_\theta`: ``"k2"`` is :math:`d^2/2`,
    whose expected gradient is that of the KL itself; ``"k3"`` is
    :math:`e^d - 1 - d`, unbiased in value and never negative (Schulman, 2020,
    joschu.net/blog/kl-approx.html). ``k1 = -d`` is not offered: as a loss its expected
    gradient is zero, it belongs in the reward.

    Args:
        log_prob (Tensor): (N,) of the current policy, with gradient.
        ref_log_prob (Tensor): (N,) of the reference; detached here.
        mask (Tensor): (N,) bool; the result is 0 elsewhere.
        estimator: see above.

    Returns:
        Tensor: (N,).

    Examples:
        >>> one = torch.ones(1, dtype=torch.bool)
        >>> kl_estimate(torch.tensor([-1.0]), torch.tensor([-2.0]), one, "k2")
        tensor([0.5000])
    """
    difference = torch.where(mask, ref_log_prob.detach() - log_prob, 0.0)
    if estimator == "k2":
        return difference.square() / 2
    # Bounded before both terms: where the exponential stops growing, the other would push away.
    difference = difference.clamp_max(MAX_LOG_RATIO)
    return bounded_exp(difference) - 1 - difference


def aggregate(
    values: Tensor,
    mask: Tensor,
    segment_ids: Tensor,
    num_segments: int,
    aggregation: Aggregation = "token",
) -> Tensor:
    """Sum of per-token values that :func:`denominator` turns into the step's mean.

    Args:
        values (Tensor): (N,); anything outside ``mask`` is ignored.
        mask (Tensor): (N,) bool, before any rejection: rejected tokens count too.
        segment_ids (Tensor): (N,) int64 in ``[0, num_segments)``.
        num_segments (int): number of sequences.
        aggregation: ``"token"`` and ``"fixed"`` weigh every token alike,
            ``"sequence"`` weighs every sequence alike (its tokens' mean).

    Returns:
        Tensor: scalar.

    Examples:
        >>> every = torch.ones(3, dtype=torch.bool)
        >>> ids = torch.tensor([0, 0, 1])
        >>> aggregate(torch.tensor([1.0, 2.0, 4.0]), every, ids, 2, "sequence")
        tensor(5.5000)
    """
    values = torch.where(mask, values, 0.0)
    if aggregation == "sequence":
        return segment_mean(values, mask, segment_ids, num_segments).sum()
    return values.sum()


def denominator(
    mask: Tensor,
    segment_ids: Tensor,
    num_segments: int,
    aggregation: Aggregation = "token",
    fixed_length: int | None = None,
) -> Tensor:
    """What the sums of :func:`aggregate` are to be divided by, for these tokens.

    Additive over micro-batches and ranks. ``"token"``: sampled tokens; ``"sequence"``:
    sequences with at least one of them; ``"fixed"``: those sequences times
    ``fixed_length``, which removes the bias of length (arXiv 2503.20783).

    Args:
        mask (Tensor): (N,) bool, before any rejection.
        segment_ids (Tensor): (N,) int64 in ``[0, num_segments)``.
        num_segments (int): number of sequences.
        aggregation: see above.
        fixed_length (int, optional): in tokens, for ``"fixed"`` only.

    Returns:
        Tensor: scalar int64.

    Examples:
        >>> mask, ids = torch.tensor([True, True, False]), torch.tensor([0, 0, 1])
        >>> denominator(mask, ids, 2), denominator(mask, ids, 2, "fixed", 100)
        (tensor(2), tensor(100))
    """
    if aggregation == "token":
        return mask.sum()
    sequences = (segment_sum(mask.long(), segment_ids, num_segments) > 0).sum()
    return sequences * fixed_length if aggregation == "fixed" else sequences


def preference_loss(
    margin: Tensor,
    kind: PreferenceLoss = "sigmoid",
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Tensor:
    r"""Loss of a preference pair from its margin of implicit rewards.

    With the margin :math:`h = \log\frac{\pi(y_c)}{\pi_\text{ref}(y_c)} -
    \log\frac{\pi(y_r)}{\pi_\text{ref}(y_r)}`: ``"sigmoid"`` is
    :math:`-\log\sigma(\beta h)` (DPO, arXiv 2305.18290), ``"hinge"`` is
    :math:`\max(0, 1 - \beta h)` (SLiC, arXiv 2305.10425), ``"ipo"`` is
    :math:`(h - \frac{1}{2\beta})^2` (arXiv 2310.12036). With label smoothing e the
    loss is :math:`(1-e)\,\ell(h) + e\,\ell(-h)`: the pair is taken to be the wrong way
    round with probability e.

    Args:
        margin (Tensor): (P,), h.
        kind: see above.
        beta (float): strength of the pull towards the reference, > 0.
        label_smoothing (float): e, in [0, 0.5).

    Returns:
        Tensor: (P,).

    Examples:
        >>> preference_loss(torch.zeros(1))
        tensor([0.6931])
    """

    def loss(value: Tensor) -> Tensor:
        if kind == "sigmoid":
            return -F.logsigmoid(beta * value)
        if kind == "hinge":
            return F.relu(1 - beta * value)
        return (value - 1 / (2 * beta)).square()

    if label_smoothing == 0.0:
        return loss(margin)
    return (1 - label_smoothing) * loss(margin) + label_smoothing * loss(-margin)
