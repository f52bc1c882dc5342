"""Scores token sequences with a torchtune decoder, for losses.

Owns the step from a padded or packed micro-batch to log-probs: attention mask, positions,
temperature and the memory the vocabulary takes; and the head that makes a critic of a
decoder. Generates nothing, tokenises nothing and never moves, shards or updates the
weights. Imports no torchtune.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchrl.modules.distributions.discrete import LLMMaskedCategorical
from torchrl.modules.llm import LLMWrapperBase

from torchrl_llm_async.modules.projection import project_and_score
from torchrl_llm_async.modules.scores import (
    EntropyMode,
    TokenScores,
    check_all_scored,
    read_sequences,
    score_logits,
)


def add_value_head(model: nn.Module) -> nn.Module:
    """Gives a torchtune decoder a critic's head: hidden state to value, zero at first.

    Call it before ``fully_shard`` on the decoder, which then shards the head with it.

    Args:
        model (nn.Module): the decoder; gets the submodule ``value_head``, an
            ``nn.Linear(D, 1)`` in the dtype and on the device of its output projection.

    Returns:
        nn.Module: the decoder itself.

    Examples:
        >>> from torchtune.models.qwen2 import qwen2
        >>> model = qwen2(vocab_size=11, num_layers=1, num_heads=2, num_kv_heads=1,
        ...               embed_dim=8, intermediate_dim=16, max_seq_len=16)
        >>> add_value_head(model).value_head
        Linear(in_features=8, out_features=1, bias=True)
    """
    embedding = model.tok_embeddings.weight
    model.value_head = nn.Linear(
        embedding.shape[1], 1, device=embedding.device, dtype=embedding.dtype
    )
    nn.init.zeros_(model.value_head.weight)
    nn.init.zeros_(model.value_head.bias)
    return model


class TorchtuneActor(LLMWrapperBase):
    """A torchtune ``TransformerDecoder`` as the ``actor_network`` of a loss.

    Takes any decoder with torchtune's call convention ``(tokens, *, mask, input_pos)``
    and shards, checkpoints or compiles nothing by itself; a decoder under FSDP2's
    ``fully_shard`` works as it is. Position i scores token i; a row's first token has
    nothing before it and scores 0.

    Rows may be padded, one sequence each, or packed, several one behind another, told
    apart by their ``segment_ids``: a token sees those of its own sequence only, and the
    scores are the same.

    :meth:`score` never holds a ``[tokens, vocab]`` tensor: only the asked-for
    positions are projected onto the vocabulary, ``chunk_size`` at a time, and again in
    the backward pass (:mod:`.projection`). For that the projection runs inside the
    decoder's own forward pass, where FSDP has its weights gathered. A decoder without
    torchtune's ``unembed``, whose output projection is an FSDP unit of its own (the number
    of chunks differs between ranks, the number of its collectives must not) or is no plain
    or tied linear layer without bias, is called as usual and its logits are scored chunk by
    chunk.

    Also offers TorchRL's ``get_dist`` family, so that e.g. ``GRPOLoss`` runs on it.

    Args:
        model (nn.Module): the decoder.
        temperature (float): that of sampling; logits are divided by it.
        chunk_size (int): positions per projection onto the vocabulary.
        tokens_key (NestedKey): token ids, [N, T] int64.
        attention_mask_key (NestedKey): True for tokens, False for padding, [N, T] bool.
        assistant_mask_key (NestedKey): True for sampled tokens, [N, T] bool.
        segment_ids_key (NestedKey): the sequence of each token where rows are packed,
            ascending along a row, -1 for padding, [N, T] int64; need not be there.
        log_probs_key (NestedKey): where ``forward`` writes, [N, T] float32.

    Raises:
        ValueError: ``temperature`` or ``chunk_size`` is not positive.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchtune.models.qwen2 import qwen2
        >>> actor = TorchtuneActor(
        ...     qwen2(vocab_size=11, num_layers=1, num_heads=2, num_kv_heads=1,
        ...           embed_dim=8, intermediate_dim=16, max_seq_len=16)
        ... )
        >>> rows = TensorDict(
        ...     {
        ...         "tokens": {"full": torch.tensor([[0, 3, 4], [5, 6, 7]])},
        ...         "masks": {"all_attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]]) > 0},
        ...     },
        ...     batch_size=(2,),
        ... )
        >>> actor.score(rows, entropy="detached").log_probs < 0
        tensor([[False, False,  True],
                [False,  True,  True]])
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 1.0,
        chunk_size: int = 512,
        tokens_key: NestedKey = ("tokens", "full"),
        attention_mask_key: NestedKey = ("masks", "all_attention_mask"),
        assistant_mask_key: NestedKey = ("masks", "all_assistant_mask"),
        segment_ids_key: NestedKey = ("packing", "segment_ids"),
        log_probs_key: NestedKey = ("log_probs", "full"),
    ) -> None:
        for name, value in (("temperature", temperature), ("chunk_size", chunk_size)):
            if not value > 0:
                raise ValueError(f"{name}={value} must be above 0.")
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.chunk_size = chunk_size
        self.tokens_key = tokens_key
        self.attention_mask_key = attention_mask_key
        self.assistant_mask_key = assistant_mask_key
        self.segment_ids_key = segment_ids_key
        self.log_probs_key = log_probs_key
        self.in_keys = [tokens_key, attention_mask_key]
        self.out_keys = [log_probs_key]
        # What LLMWrapperBase's methods look at; its constructor sets nothing.
        self.generate = False
        self.pad_output = True
        self.input_mode = "tokens"
        self._min_batch_size = self._max_batch_size = None

    def score(
        self,
        micro: TensorDictBase,
        *,
        mask: Tensor | None = None,
        entropy: EntropyMode = "off",
        values: bool = False,
    ) -> TokenScores:
        """Log-probs of the tokens under the policy at its temperature, and what goes with them.

        Args:
            micro (TensorDictBase): ``(N,)`` rows, dense with any padding, packed or ragged.
            mask (Tensor, optional): [N, T] bool, the positions to score; all tokens by
                default. Positions left out cost no projection onto the vocabulary.
            entropy: whether to return the entropy of the distribution each scored token
                was drawn from: ``"off"``, ``"detached"`` or ``"differentiable"``.
            values (bool): whether to return the critic's values, which takes a decoder
                with a ``value_head`` (:func:`add_value_head`).

        Returns:
            TokenScores: [N, T] each, in float32 at least; 0 at positions not scored. All
            are connected to the graph even if no position is scored.

        Raises:
            ValueError: values asked of a decoder that has no head, or whose hidden states
                cannot be had.
        """
        tokens, segments = self._read(micro)
        scored = segments >= 0 if mask is None else mask & (segments >= 0)
        scored = scored & (segments == F.pad(segments, (1, -1), value=-1))
        if mask is not None:
            check_all_scored(mask, scored)
        previous, targets = scored[:, 1:], tokens[:, 1:]
        if values:
            self._check_value_head()

        if self._projection() is not None:

            def score_hidden(hidden: Tensor) -> tuple[Tensor, ...]:
                hidden = self.model.norm(hidden[:, :-1][previous])
                scores = project_and_score(
                    hidden,
                    self._projection().weight,
                    targets[previous],
                    temperature=self.temperature,
                    chunk_size=self.chunk_size,
                    entropy=entropy,
                )
                if values:
                    # In bf16, values near 1 would be 0.004 apart.
                    head = (_at_least_float32(p) for p in self.model.value_head.parameters())
                    value = F.linear(_at_least_float32(hidden), *head)
                    scores += (value.squeeze(-1),)
                return scores

            with self._unembed_as(score_hidden):
                scores = self._call_model(tokens, segments)
            dense = [
                score.new_zeros(tokens.shape).masked_scatter(scored, score) for score in scores
            ]
        else:
            logits = self._call_model(tokens, segments)[:, :-1]
            scores = self._score_logits(logits.flatten(0, 1), targets.flatten(), entropy)
            dense = [
                torch.where(scored, F.pad(score.view_as(targets), (1, 0)), 0.0) for score in scores
            ]
        return TokenScores(
            log_probs=dense[0],
            entropy=None if entropy == "off" else dense[1],
            values=dense[-1] if values else None,
        )

    def forward(
        self, tensordict: TensorDictBase, *, logits_only: bool = False, **kwargs
    ) -> TensorDictBase:
        """Writes the log-probs of all tokens; ragged rows get ragged log-probs.

        Args:
            tensordict (TensorDictBase): ``(N,)`` rows.
            logits_only (bool): return dense ``"logits"`` [N, T, vocab] instead, position i
                predicting token i, and the masks; TorchRL's ``get_dist`` asks for this.
            **kwargs: none is used; the signature is ``LLMWrapperBase``'s.

        Returns:
            TensorDictBase: a shallow copy of the input with ``log_probs_key``, or the
            logits and masks.
        """
        if logits_only:
            return self._logits(tensordict)
        log_probs = self.score(tensordict).log_probs
        out = tensordict.copy()
        if not isinstance(out, LazyStackedTensorDict):
            return out.set(self.log_probs_key, log_probs)
        for row, value in zip(out.tensordicts, log_probs, strict=True):
            row.set(self.log_probs_key, value[-row.get(self.tokens_key).shape[-1] :])
        return out

    def _read(self, rows: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Token ids and the sequence of each, -1 for padding, [N, T]."""
        return read_sequences(
            rows,
            tokens_key=self.tokens_key,
            attention_mask_key=self.attention_mask_key,
            segment_ids_key=self.segment_ids_key,
        )

    def _check_value_head(self) -> None:
        if not hasattr(self.model, "value_head"):
            raise ValueError(
                "Values were asked of a decoder without a value head: call "
                "torchrl_llm_async.modules.add_value_head(model) before sharding it."
            )
        if self._projection() is None:
            raise ValueError(
                "Values need the decoder's hidden states, which only a torchtune decoder with "
                "unembed() gives whose output projection is a plain or tied linear layer and no "
                "FSDP unit of its own: leave fully_shard(model.output) out."
            )

    def _call_model(self, tokens: Tensor, segments: Tensor):
        """The decoder's output; a token attends to those of its sequence up to itself."""
        length = tokens.shape[1]
        place = torch.arange(length, device=tokens.device)
        same = segments[:, :, None] == segments[:, None, :]
        # Padding is a sequence, too: a softmax over nothing is NaN.
        mask = same & (place[:, None] >= place)
        so_far = segments.cummax(-1).values
        first = so_far > F.pad(so_far, (1, -1), value=-1)
        count = (segments >= 0).long().cumsum(-1) - 1
        positions = (count - torch.where(first, count, 0).cummax(-1).values).clamp_min(0)
        output = self.model(tokens, mask=mask, input_pos=positions)
        if not torch.is_grad_enabled():
            # Only a backward pass reshards an FSDP root. Left gathered, the weights of
            # this pass would serve the next one, blind to an optimizer step in between.
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        return output

    def _projection(self) -> nn.Module | None:
        """The module whose weight projects hidden states, if that is all the projection is."""
        if not hasattr(type(self.model), "unembed"):
            return None
        output = self.model.output
        # torchtune's TiedLinear is no module: it has the one whose weight it uses, without bias.
        tied = getattr(output, "tied_module", None)
        if tied is not None:
            return tied
        # No subclass, which may project otherwise; FSDP makes its units such.
        return output if type(output) is nn.Linear and output.bias is None else None

    @contextmanager
    def _unembed_as(self, function: Callable[[Tensor], tuple[Tensor, ...]]) -> Iterator[None]:
        """Replaces what the decoder does with its last hidden states [N, T, D]."""
        self.model.unembed = function
        try:
            yield
        finally:
            del self.model.unembed

    def _score_logits(
        self, logits: Tensor, targets: Tensor, entropy: EntropyMode
    ) -> tuple[Tensor, ...]:
        """(M,) log-probs, and entropies if asked for, of (M, vocab) logits' targets."""
        chunks = [
            checkpoint(
                score_logits,
                *chunk,
                self.temperature,
                entropy,
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for chunk in zip(
                logits.split(self.chunk_size), targets.split(self.chunk_size), strict=True
            )
        ]
        return tuple(torch.cat(parts) for parts in zip(*chunks, strict=True))

    def _logits(self, rows: TensorDictBase) -> TensorDictBase:
        tokens, segments = self._read(rows)
        logits = self._call_model(tokens, segments) / self.temperature
        assistant = rows.get(
            self.assistant_mask_key,
            None,
            as_padded_tensor=True,
            padding_side="left",
            padding_value=False,
        )
        out = TensorDict(batch_size=[len(tokens)], device=rows.device)
        # Shifted so that position i predicts token i; the first position predicts nothing.
        out.set("logits", F.pad(logits[:, :-1], (0, 0, 1, 0)))
        out.set(self.tokens_key, tokens)
        out.set(self.attention_mask_key, segments >= 0)
        if assistant is not None:
            out.set(self.assistant_mask_key, assistant.bool())
        return out

    def _masked_dist(self, tensordict: TensorDictBase, mask_key: NestedKey) -> LLMMaskedCategorical:
        out = self._logits(tensordict)
        return LLMMaskedCategorical(logits=out.get("logits"), mask=out.get(mask_key))

    def _get_sft_dist(self, tensordict: TensorDictBase, **kwargs) -> LLMMaskedCategorical:
        # TorchRL cuts the prompt off here; the sampled tokens are known exactly instead.
        return self._masked_dist(tensordict, self.assistant_mask_key)

    def _get_rlhf_dist(self, tensordict: TensorDictBase, **kwargs) -> LLMMaskedCategorical:
        return self._masked_dist(tensordict, self.assistant_mask_key)

    def _get_generic_dist(self, tensordict: TensorDictBase, **kwargs) -> LLMMaskedCategorical:
        return self._masked_dist(tensordict, self.attention_mask_key)


def _at_least_float32(values: Tensor) -> Tensor:
    """bf16 log-probs are too coarse for importance ratios."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
