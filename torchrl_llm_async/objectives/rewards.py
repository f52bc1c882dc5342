"""Arithmetic of rewards, and of advantages over a batch, as pure functions on trajectories.

One number per trajectory, (N,), where :mod:`.functional` has tokens. Everything is computed in
float64: the values are few, and a spread of rounding errors must not pass for one of rewards.

Owns no keys and no groups; :class:`~.advantage.GroupAdvantage` does. Of other ranks it knows the
sums of :func:`batch_normalize`, over a process group it is given.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def overlong_penalty(
    lengths: Tensor, max_new_tokens: int, buffer: int, factor: float = 1.0
) -> Tensor:
    r"""What an answer near the limit of its length loses: DAPO's soft overlong punishment.

    .. math:: f \,\mathrm{clip}\Big(\frac{L - b - |y|}{b}, -1, 0\Big)

    for the limit L, a buffer of the last b tokens before it and the factor f (arXiv 2503.14476,
    equation 13, where f is 1). Answers longer than L lose f, as there.

    Args:
        lengths (Tensor): (N,), :math:`|y|` in sampled tokens.
        max_new_tokens (int): L.
        buffer (int): b, in [1, L].
        factor (float): f, in units of the reward.

    Returns:
        Tensor: (N,) float64, in [-f, 0].

    Examples:
        >>> overlong_penalty(torch.tensor([70, 80, 90, 100]), max_new_tokens=100, buffer=20)
        tensor([ 0.0000,  0.0000, -0.5000, -1.0000], dtype=torch.float64)
    """
    return factor * ((max_new_tokens - buffer - lengths.double()) / buffer).clamp(-1, 0)


def shape_reward(
    reward: Tensor,
    penalty: Tensor | float = 0.0,
    *,
    scale: float = 1.0,
    bias: float = 0.0,
    clip: tuple[float, float] | None = None,
) -> Tensor:
    r""":math:`\mathrm{clip}(s\,(r + p) + b)`: penalty, scale, bias and clip in this order.

    Args:
        reward (Tensor): (N,), r.
        penalty (Tensor or float): p, (N,) or one for all, in units of the unscaled reward.
        scale (float): s.
        bias (float): b, in units of the scaled reward.
        clip (pair of float, optional): bounds of the result; None for none.

    Returns:
        Tensor: (N,) float64.

    Examples:
        >>> shape_reward(torch.tensor([1.0, 0.0]), scale=10.0, bias=-5.0, clip=(-4.0, 4.0))
        tensor([ 4., -4.], dtype=torch.float64)
    """
    value = scale * (reward.double() + penalty) + bias
    return value if clip is None else value.clamp(*clip)


def batch_normalize(
    values: Tensor,
    weights: Tensor,
    *,
    eps: float = 1e-6,
    process_group: dist.ProcessGroup | None = None,
) -> Tensor:
    r"""Values less their mean, over their standard deviation, both over the whole batch.

    .. math:: \frac{x_i - m}{\sigma + \epsilon}, \qquad m = \frac{\sum_j n_j x_j}{n},
        \qquad \sigma^2 = \frac{\sum_j n_j (x_j - m)^2}{n - 1}, \qquad n = \sum_j n_j

    With as many tokens as weights n, these are the mean and the sample variance over tokens that
    all have the value of their trajectory.

    Args:
        values (Tensor): (N,).
        weights (Tensor): (N,), counts.
        eps (float): in units of the values.
        process_group (dist.ProcessGroup, optional): sums are over the ranks of this group, all of
            which call this together, each with rows of its own; None for this process only.

    Returns:
        Tensor: (N,) float64. A value of weight 0 is normalised like the others. If the weights
        sum to 1 there is no deviation to divide by, and only the mean is taken off; if they sum
        to 0 the values stay as they are.

    Examples:
        >>> batch_normalize(torch.tensor([1.0, 0.0]), torch.tensor([1, 3]))
        tensor([ 1.5000, -0.5000], dtype=torch.float64)
    """
    values, weights = values.double(), weights.double()
    sums = torch.stack([weights.sum(), (weights * values).sum()])
    if process_group is not None:
        dist.all_reduce(sums, group=process_group)
    total, weighted = sums.unbind()
    centred = values - weighted / total.clamp_min(1)
    # In a second pass: the mean of squares less the squared mean would cancel its digits.
    squares = (weights * centred.square()).sum()
    if process_group is not None:
        dist.all_reduce(squares, group=process_group)
    deviation = (squares / (total - 1).clamp_min(1)).sqrt()
    return torch.where(total > 1, centred / (deviation + eps), centred)
