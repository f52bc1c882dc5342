"""Log-probs and entropies from hidden states, without the logits ever being whole.

Owns the projection onto the vocabulary by chunks and its backward pass, written by hand. Knows
nothing of decoders, masks or losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from torchrl_llm_async.modules.scores import EntropyMode


def project_and_score(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    chunk_size: int,
    entropy: EntropyMode,
) -> tuple[Tensor, ...]:
    r"""Scores of tokens from the hidden states before them and the output projection's weight.

    With logits :math:`z = W h / \tau` and :math:`p = \mathrm{softmax}(z)`, a token t has the
    log-prob and the entropy

    .. math:: \ell = \log p_t, \qquad H = -\sum_v p_v \log p_v.

    Logits are computed for ``chunk_size`` tokens at a time in buffers that all chunks share, once
    on the way forward and once backward; in between, only what was given is kept. Tokens without a
    gradient (clipped, rejected, of no advantage) are left out of the backward pass. The gradient of
    the weight is summed over chunks in float32 at least.

    Args:
        hidden (Tensor): (M, D), normed.
        weight (Tensor): (V, D).
        targets (Tensor): (M,) int64, t.
        temperature (float): tau.
        chunk_size (int): tokens per chunk.
        entropy: ``"off"``, ``"detached"`` or ``"differentiable"``.

    Returns:
        tuple[Tensor, ...]: log-probs (M,) in float32 at least, and entropies unless they are off.

    Examples:
        >>> hidden, weight = torch.zeros(2, 3), torch.ones(4, 3)
        >>> log_probs, entropy = project_and_score(
        ...     hidden, weight, torch.tensor([0, 3]), temperature=1.0, chunk_size=1,
        ...     entropy="detached",
        ... )
        >>> log_probs, entropy.exp()
        (tensor([-1.3863, -1.3863]), tensor([4., 4.]))
    """
    scores = _ProjectedScores.apply(hidden, weight, targets, temperature, chunk_size, entropy)
    return scores[:1] if entropy == "off" else scores


class _ProjectedScores(torch.autograd.Function):
    r"""See :func:`project_and_score`.

    With the gradients g and e of a loss by log-prob and entropy of a token, that by its logits is

    .. math:: \tau\,\frac{\partial L}{\partial z_v} =
        g\,\mathbb 1[v = t] - p_v\,\big(g + e\,(\log p_v + H)\big).
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        entropy_mode: EntropyMode,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, targets)
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        ctx.differentiable = entropy_mode == "differentiable"
        count = len(hidden)
        chosen = hidden.new_empty(count, dtype=_wide(hidden))
        entropy = chosen.new_empty(0 if entropy_mode == "off" else count)
        if not ctx.differentiable:
            ctx.mark_non_differentiable(entropy)
        for at, logits, first, second in _logits_by_chunks(hidden, weight, temperature, chunk_size):
            log_probs = torch.log_softmax(logits, -1, dtype=first.dtype, out=first)
            chosen[at] = log_probs.gather(-1, targets[at, None]).squeeze(-1)
            if entropy_mode != "off":
                probs = torch.exp(log_probs, out=second)
                entropy[at] = -torch.linalg.vecdot(probs, log_probs)
        return chosen, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx, grad_chosen: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, targets = ctx.saved_tensors
        keep = grad_chosen != 0
        if ctx.differentiable:
            keep |= grad_entropy != 0
            e = grad_entropy[keep, None]
        kept, targets, g = hidden[keep], targets[keep], grad_chosen[keep, None]
        grad_kept = torch.empty_like(kept)
        # A frozen projection has none.
        grad_weight = (
            torch.zeros_like(weight, dtype=_wide(weight)) if ctx.needs_input_grad[1] else None
        )
        for at, logits, first, second in _logits_by_chunks(
            kept, weight, ctx.temperature, ctx.chunk_size
        ):
            if not ctx.differentiable:
                # g is a factor of the whole row: it goes to the narrow side of both products.
                negative = torch.softmax(logits, -1, dtype=first.dtype, out=first)
                at_target, factor = torch.ones_like(g[at]), -g[at]
            else:
                log_probs = torch.log_softmax(logits, -1, dtype=first.dtype, out=first)
                probs = torch.exp(log_probs, out=second)
                minus_entropy = torch.linalg.vecdot(probs, log_probs)[:, None]
                weights = log_probs.sub_(minus_entropy).mul_(e[at]).add_(g[at])
                negative, at_target, factor = probs.mul_(weights), g[at], -torch.ones_like(g[at])
            # The gradient by the logits is `factor` times this.
            by_logits = negative.scatter_add_(-1, targets[at, None], -at_target).to(weight.dtype)
            factor = (factor / ctx.temperature).to(weight.dtype)
            torch.mm(by_logits, weight, out=grad_kept[at]).mul_(factor)
            if grad_weight is None:
                continue
            scaled = kept[at] * factor
            if grad_weight.dtype == weight.dtype:
                grad_weight.addmm_(by_logits.t(), scaled)
            else:
                grad_weight += by_logits.t() @ scaled
        grad_hidden = torch.zeros_like(hidden).masked_scatter_(keep[:, None], grad_kept)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None


class _Chunk(NamedTuple):
    """Logits of some tokens over the temperature, (m, V), and two float buffers of that shape.

    The second may hold the logits: it is free once they have been read.
    """

    at: slice
    logits: Tensor
    first: Tensor
    second: Tensor


def _logits_by_chunks(
    hidden: Tensor, weight: Tensor, temperature: float, chunk_size: int
) -> Iterator[_Chunk]:
    count, wide = len(hidden), _wide(hidden)
    shape = (min(chunk_size, count), len(weight))
    logits, first = hidden.new_empty(shape), hidden.new_empty(shape, dtype=wide)
    second = logits if logits.dtype == wide else torch.empty_like(first)
    for start in range(0, count, chunk_size):
        at = slice(start, min(start + chunk_size, count))
        size = at.stop - at.start
        chunk = torch.mm(hidden[at], weight.t(), out=logits[:size])
        if temperature != 1:
            # As engines do it: logits in the model's type, then divided in float32.
            chunk = chunk.to(wide).div_(temperature)
        yield _Chunk(at, chunk, first[:size], second[:size])


def _wide(values: Tensor) -> torch.dtype:
    """bf16 log-probs are too coarse for importance ratios."""
    return torch.promote_types(values.dtype, torch.float32)
