"""Arithmetic of a critic as pure functions on flat tokens: returns, advantages, value loss.

Takes ``mask`` and ``segment_ids`` as :mod:`.functional` does; the tokens of a sequence
follow each other in the flat axis, with anything in between that ``mask`` leaves out (tool
outputs, other roles, padding). Such tokens are no steps of the decision process: the state
after a sampled token is the one before the next sampled token of its sequence.

Owns no value head (:mod:`torchrl_llm_async.modules` does), reads no tensordict, and knows
neither normalizers nor other ranks. TorchRL's
``vec_generalized_advantage_estimate`` does the same on dense, unmasked rows, but leaves out
whatever is weighted by less than 1e-7, and its shapes depend on the data, so that it doesn't
compile into one graph; this does, and is exact.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


def next_sampled(mask: Tensor, segment_ids: Tensor) -> Tensor:
    """Where each token's sequence goes on: the index of its next sampled token.

    Args:
        mask (Tensor): (N,) bool, True where the policy sampled the token.
        segment_ids (Tensor): (N,) int64; the tokens of a sequence follow each other.

    Returns:
        Tensor: (N,) int64, N for a token after which its sequence has none.

    Examples:
        >>> next_sampled(
        ...     torch.tensor([True, False, True, True]), torch.tensor([0, 0, 0, 1])
        ... )
        tensor([2, 2, 4, 4])
    """
    count = len(mask)
    here = torch.where(mask, torch.arange(count, device=mask.device), count)
    # The smallest sampled index from a token on, then from the one behind it on.
    from_here_on = here.flip(0).cummin(0).values.flip(0)
    following = F.pad(from_here_on[1:], (0, 1), value=count)
    same = F.pad(segment_ids, (0, 1), value=-1)[following] == segment_ids
    return torch.where(same, following, count)


def discounted_sum(values: Tensor, following: Tensor, discount: float) -> Tensor:
    r""":math:`S_i = x_i + d\,S_{f(i)}` for every token, along the links of its sequence.

    By pointer jumping: once each token holds the sum of :math:`2^k` links, adding that of
    the token as many links on, times :math:`d^{2^k}`, gives :math:`2^{k+1}`. It takes
    :math:`\lceil\log_2 N\rceil` gathers, exact but for rounding, whatever the lengths.

    Args:
        values (Tensor): (N,), x.
        following (Tensor): (N,) int64, f, from :func:`next_sampled`; N ends a sequence.
        discount (float): d.

    Returns:
        Tensor: (N,).

    Examples:
        >>> discounted_sum(torch.ones(3), torch.tensor([1, 2, 3]), 0.5)
        tensor([1.7500, 1.5000, 1.0000])
    """
    count = len(values)
    # One more entry, 0 and linked to itself, stands behind the end of every sequence.
    total = F.pad(values, (0, 1))
    jump = F.pad(following, (0, 1), value=count)
    span = 1
    while span < count:
        total = total + discount**span * total[jump]
        jump = jump[jump]
        span *= 2
    return total[:count]


def terminal_reward(reward: Tensor, mask: Tensor, segment_ids: Tensor) -> Tensor:
    """Keeps the reward of a sequence at its last sampled token only.

    Args:
        reward (Tensor): (N,), the sequence's reward at each of its tokens.
        mask (Tensor): (N,) bool.
        segment_ids (Tensor): (N,) int64.

    Returns:
        Tensor: (N,), 0 elsewhere.

    Examples:
        >>> mask = torch.tensor([False, True, True, False])
        >>> terminal_reward(torch.ones(4), mask, torch.zeros(4, dtype=torch.long))
        tensor([0., 0., 1., 0.])
    """
    last = mask & (next_sampled(mask, segment_ids) == len(mask))
    return torch.where(last, reward, 0.0)


def gae(
    reward: Tensor,
    value: Tensor,
    mask: Tensor,
    segment_ids: Tensor,
    *,
    gamma: float = 1.0,
    lmbda: float = 1.0,
) -> tuple[Tensor, Tensor]:
    r"""Generalised advantage estimates over the sampled tokens of each sequence.

    .. math:: A_i = \delta_i + \gamma\lambda\,A_{f(i)}, \qquad
        \delta_i = r_i + \gamma V_{f(i)} - V_i

    (arXiv 1506.02438), where f(i) is the next sampled token of the same sequence. Behind
    the last one V and A are 0: a sequence ends there, whether it was finished or cut.

    Args:
        reward (Tensor): (N,), received for token i; what lies outside ``mask`` is ignored.
        value (Tensor): (N,), V of the state before token i; detached here.
        mask (Tensor): (N,) bool, True where the policy sampled the token.
        segment_ids (Tensor): (N,) int64; the tokens of a sequence follow each other.
        gamma (float): discount per sampled token.
        lmbda (float): 1 gives the whole return minus the value, 0 the one-step error.

    Returns:
        tuple[Tensor, Tensor]: advantages A and value targets A + V, (N,) each, 0 outside
        ``mask``, without gradient.

    Examples:
        >>> advantage, target = gae(
        ...     torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.25, 9.0, 0.5]),
        ...     torch.tensor([True, False, True]), torch.zeros(3, dtype=torch.long),
        ... )
        >>> advantage, target
        (tensor([0.7500, 0.0000, 0.5000]), tensor([1., 0., 1.]))
    """
    value = torch.where(mask, value.detach(), 0.0)
    following = next_sampled(mask, segment_ids)
    error = reward.detach() + gamma * F.pad(value, (0, 1))[following] - value
    error = torch.where(mask, error, 0.0)
    advantage = torch.where(mask, discounted_sum(error, following, gamma * lmbda), 0.0)
    return advantage, advantage + value


class ValueLoss(NamedTuple):
    """What :func:`clipped_value_loss` returns; every entry has shape (N,)."""

    loss: Tensor
    clipped: Tensor


def clipped_value_loss(
    value: Tensor,
    old_value: Tensor,
    target: Tensor,
    mask: Tensor,
    clip: float | None = 0.5,
) -> ValueLoss:
    r"""Squared error of a value that is trusted only near the value before the update.

    .. math:: \tfrac12 \max\big((V - R)^2,\;
        (\mathrm{clip}(V, V_\text{old} - \epsilon, V_\text{old} + \epsilon) - R)^2\big)

    (the loss of PPO's reference implementation; arXiv 2005.12729, section 3). A value
    that has moved by more than epsilon towards its target, and not beyond it, gets no
    gradient any more; one that has moved away is drawn back in full.

    Args:
        value (Tensor): (N,), V, with gradient.
        old_value (Tensor): (N,), V before the step's first update; detached here.
        target (Tensor): (N,), R; detached here.
        mask (Tensor): (N,) bool; the loss is 0 elsewhere.
        clip (float, optional): epsilon, in units of the reward; None for no clipping.

    Returns:
        ValueLoss: the loss, and where clipping took the gradient away.

    Examples:
        >>> one = torch.ones(1, dtype=torch.bool)
        >>> clipped_value_loss(
        ...     torch.tensor([0.9]), torch.tensor([0.0]), torch.tensor([1.0]), one
        ... )
        ValueLoss(loss=tensor([0.1250]), clipped=tensor([True]))
    """
    value, old_value, target = (
        torch.where(mask, entry, 0.0) for entry in (value, old_value.detach(), target.detach())
    )
    plain = (value - target).square() / 2
    if clip is None:
        return ValueLoss(plain, torch.zeros_like(mask))
    # Clipping the difference keeps a value that has not moved exactly where it is.
    moved = (value - old_value).clamp(-clip, clip)
    clipped = (old_value + moved - target).square() / 2
    return ValueLoss(
        loss=torch.maximum(plain, clipped),
        clipped=((value - old_value).abs() > clip) & (clipped > plain),
    )


def explained_variance(
    target_mean: float, target_square: float, error_mean: float, error_square: float
) -> float:
    r"""Share of the targets' variance that the values explain, from means over all tokens.

    .. math:: 1 - \frac{\mathrm{Var}(R - V)}{\mathrm{Var}(R)}

    1 for a perfect critic, 0 for a constant one, below 0 for one that is worse than that.
    From moments, since these add over micro-batches and ranks where variances do not.

    Args:
        target_mean (float): mean of R.
        target_square (float): mean of R squared.
        error_mean (float): mean of R - V.
        error_square (float): mean of its square.

    Returns:
        float: NaN where all targets are equal (their variance is no more than the rounding
        of float32 sums): there is nothing to explain.

    Examples:
        >>> explained_variance(0.5, 0.5, 0.0, 0.0625)
        0.75
    """
    variance = target_square - target_mean**2
    if not variance > 1e-6 * target_square:
        return float("nan")
    return 1 - (error_square - error_mean**2) / variance
