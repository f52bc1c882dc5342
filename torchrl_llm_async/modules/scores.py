"""What a policy says of given tokens, and how any actor is asked for it.

Owns :class:`TokenScores`, how a micro-batch of any form is read, and the way to get scores from
TorchRL's own wrappers. Holds no model, and saves no memory: what a wrapper returns is whole logits;
:class:`~torchrl_llm_async.modules.TorchtuneActor` is for that.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torch.nn import functional as F

EntropyMode = Literal["off", "detached", "differentiable"]


def check_all_scored(mask: Tensor, scored: Tensor) -> None:
    """Raises ``ValueError`` if a token is asked for that nothing can be said of.

    Args:
        mask (Tensor): [N, T] bool, what is asked for.
        scored (Tensor): [N, T] bool, what there is to score of it.
    """
    left_out = mask & ~scored
    if left_out.any():
        row, token = left_out.nonzero()[0].tolist()
        raise ValueError(
            f"{int(left_out.sum())} tokens marked as sampled are padding or have nothing before "
            f"them, e.g. token {token} of row {row}: right before an answer there is a prompt, if "
            "only of one token. Correct the mask of sampled tokens."
        )


ATTENTION_MASK: NestedKey = ("masks", "all_attention_mask")
SEGMENT_IDS: NestedKey = ("packing", "segment_ids")

# What a wrapper must be like to score given tokens.
WRAPPER_OPTIONS = {
    "generate": (False,),
    # Text and history are tokenised anew, into other tokens than were sampled.
    "input_mode": ("tokens",),
    # torchrl 0.14.1 lets packed tokens see those behind them.
    "pad_model_input": (True,),
    # torchrl 0.14.1 looks for log-probs among what has none.
    "inplace": (True, "empty"),
    "num_samples": (None,),
}


class TokenScores(NamedTuple):
    """Scores of tokens, each of shape [N, T]; 0 at positions not asked for.

    Attributes:
        log_probs (Tensor): log-prob of token i given those before it, float32 at least.
        entropy (Tensor, optional): of the distribution token i was drawn from, in nats.
        values (Tensor, optional): the critic's value of the state before token i.
    """

    log_probs: Tensor
    entropy: Tensor | None = None
    values: Tensor | None = None


def score_tokens(
    actor: TensorDictModuleBase,
    micro: TensorDictBase,
    *,
    mask: Tensor,
    entropy: EntropyMode = "off",
    values: bool = False,
) -> TokenScores:
    """Scores of tokens under an actor of this package or one of TorchRL's wrappers.

    An actor with a method ``score`` (:class:`~torchrl_llm_async.modules.TorchtuneActor`) is asked
    by it. Any other has to be a TorchRL ``LLMWrapperBase`` that has logits, e.g. a
    ``TransformersWrapper(..., input_mode="tokens", generate=False)``: its ``get_dist`` is called
    with one sequence per row, padded on the left, whatever the form of the micro-batch. Logits are
    divided by the temperature in its ``generate_kwargs`` (1 where there is none), as when it
    samples; filters (top-k, top-p, penalties) take no part.

    What ``TransformersWrapper`` and ``vLLMWrapper`` record while they generate are log-probs
    before the temperature, the first of ``TransformersWrapper`` being 0 instead of its value
    (torchrl 0.14.1). At another temperature than 1 they are no behaviour log-probs: score the
    tokens with this function under the weights that sampled them.

    Args:
        actor (TensorDictModuleBase): the policy.
        micro (TensorDictBase): padded, packed or ragged rows, with the token ids where the actor
            reads them (``actor.in_keys``) and ``("masks", "all_attention_mask")``.
        mask (Tensor): [N, T] bool, the positions to score; a sequence's first token scores 0.
        entropy: ``"off"``, ``"detached"`` or ``"differentiable"``.
        values (bool): whether to return a critic's values, which takes an actor that has one.

    Returns:
        TokenScores: [N, T] each, connected to the graph even if no position is scored.

    Raises:
        ValueError: the actor cannot do what is asked: values of a wrapper, or a wrapper that
            generates, or reads other things than tokens.
        TypeError: the actor is neither.
        KeyError: the micro-batch lacks tokens or attention mask.
        NotImplementedError: from a wrapper without logits, as vLLM's is.

    Examples:
        A wrapper that generates becomes an actor, which shares its weights and temperature, by

        >>> as_actor = {"generate": False, "input_mode": "tokens", "input_key": ("tokens", "full")}
        >>> loss = DecoupledPPOLoss(wrapper.get_new_version(**as_actor))  # doctest: +SKIP
    """
    if hasattr(actor, "score"):
        return actor.score(micro, mask=mask, entropy=entropy, values=values)
    temperature = _check_wrapper(actor, values)
    tokens, segments = read_sequences(micro, tokens_key=actor.in_keys[0])
    scored = mask & (segments >= 0) & (segments == F.pad(segments, (1, -1), value=-1))
    check_all_scored(mask, scored)
    rows, place = _one_sequence_per_row(tokens, segments, actor.in_keys[0])
    # The default padding side of TransformersWrapper.get_dist is not that of its own rows.
    logits = actor.get_dist(rows, mask_key=ATTENTION_MASK, padding_side="left").logits
    scores = score_logits(logits.flatten(0, 1)[place[scored]], tokens[scored], temperature, entropy)
    return TokenScores(
        *(score.new_zeros(tokens.shape).masked_scatter(scored, score) for score in scores)
    )


def score_logits(
    logits: Tensor, targets: Tensor, temperature: float, entropy: EntropyMode
) -> tuple[Tensor, ...]:
    """Log-probs of targets (M,), and entropies if they are asked for, from logits (M, vocab).

    In float32 at least: log-probs in bfloat16 are too coarse for importance ratios.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_probs = (logits / temperature).log_softmax(-1)
    chosen = log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    if entropy == "off":
        return (chosen,)
    if entropy == "detached":
        log_probs = log_probs.detach()
    return chosen, -(log_probs.exp() * log_probs).sum(-1)


def read_sequences(
    micro: TensorDictBase,
    *,
    tokens_key: NestedKey = ("tokens", "full"),
    attention_mask_key: NestedKey = ATTENTION_MASK,
    segment_ids_key: NestedKey = SEGMENT_IDS,
) -> tuple[Tensor, Tensor]:
    """The token ids of a micro-batch of any form, and which sequence each belongs to.

    Args:
        micro (TensorDictBase): padded, packed or ragged rows.
        tokens_key (NestedKey): token ids.
        attention_mask_key (NestedKey): True for tokens, False for padding.
        segment_ids_key (NestedKey): the sequence of each token, if rows are packed.

    Returns:
        tuple[Tensor, Tensor]: token ids, 0 where there is padding, and the number of the
        sequence, -1 there; [N, T] int64.

    Raises:
        KeyError: one of the first two is not there.
    """
    tokens, attention = (
        micro.get(key, None, as_padded_tensor=True, padding_side="left", padding_value=0)
        for key in (tokens_key, attention_mask_key)
    )
    if tokens is None or attention is None:
        raise KeyError(
            f"The actor needs {tokens_key!r} and {attention_mask_key!r}, got "
            f"{sorted(map(str, micro.keys(True, True)))}. Write them there, or give TorchtuneActor "
            "tokens_key= and attention_mask_key=."
        )
    padding = ~(attention > 0)  # One of 0 and 1 is filled up with -1.
    segments = micro.get(segment_ids_key, None)
    if segments is None:
        segments = torch.arange(len(tokens), device=tokens.device)[:, None].expand_as(tokens)
    return tokens.masked_fill(padding, 0), segments.masked_fill(padding, -1)


def _check_wrapper(actor: TensorDictModuleBase, values: bool) -> float:
    """The temperature of a wrapper that can score tokens."""
    name = type(actor).__name__
    if not hasattr(actor, "get_dist"):
        raise TypeError(
            f"{name} is no actor: it has neither score() as TorchtuneActor has, nor get_dist() "
            "as TorchRL's TransformersWrapper has."
        )
    if values:
        raise ValueError(
            f"{name} has no critic: values take a TorchtuneActor whose decoder has a value head "
            "(torchrl_llm_async.modules.add_value_head)."
        )
    wrong = [
        f"{option}={value!r}"
        for option, accepted in WRAPPER_OPTIONS.items()
        if (value := getattr(actor, option, accepted[0])) not in accepted
    ]
    if wrong:
        raise ValueError(
            f"{name} has {', '.join(wrong)}; a loss needs one that scores the very tokens that "
            "were sampled: wrapper.get_new_version(generate=False, input_mode='tokens', "
            "input_key=('tokens', 'full'), inplace=True, num_samples=None)."
        )
    if getattr(actor, "tokenizer", actor) is None:
        raise ValueError(f"{name} has tokenizer=None; it takes one to know what padding is.")
    temperature = getattr(actor, "generate_kwargs", {}).get("temperature", 1.0)
    if not temperature > 0:
        raise ValueError(
            f"{name} has generate_kwargs['temperature']={temperature}; a policy to be trained "
            "samples, at a temperature above 0."
        )
    return temperature


def _one_sequence_per_row(
    tokens: Tensor, segments: Tensor, tokens_key: NestedKey
) -> tuple[TensorDictBase, Tensor]:
    """Rows [S, L] padded on the left, and where in them, flat, each token [N, T] went."""
    there = segments >= 0
    sequence = segments[there]
    lengths = sequence.bincount(minlength=int(segments.max()) + 1 or 1)
    # torchrl 0.14.1 loses a lone token's logits where it shifts them by one.
    width = max(int(lengths.max()), 2)
    order = sequence.argsort(stable=True)
    column = (
        width - lengths.cumsum(0)[sequence[order]] + torch.arange(len(order), device=order.device)
    )
    flat = torch.empty_like(sequence)
    flat[order] = sequence[order] * width + column
    place = torch.zeros_like(segments).masked_scatter(there, flat)

    dense = tokens.new_zeros(len(lengths) * width)
    attention = torch.zeros_like(dense, dtype=torch.bool)
    dense[flat], attention[flat] = tokens[there], True
    attention = attention.view(-1, width)
    # A row without a token attends to something all the same: a softmax over nothing is NaN.
    attention[lengths == 0] = True
    rows = TensorDict(batch_size=[len(lengths)])
    rows[tokens_key] = dense.view(-1, width)
    rows[ATTENTION_MASK] = attention
    # Wrappers write their output, which may be ragged, into what they are given.
    return rows.to_lazystack(0), place
