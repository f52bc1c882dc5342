"""Scores token sequences with a torchtune decoder, for losses.

Owns the step from a padded micro-batch to log-probs: attention mask, positions,
temperature and the memory the vocabulary takes. Generates nothing, tokenises nothing
and never moves, shards or updates the weights. Imports no torchtune.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchrl.modules.distributions.discrete import LLMMaskedCategorical
from torchrl.modules.llm import LLMWrapperBase

EntropyMode = Literal["off", "detached", "differentiable"]


class TorchtuneActor(LLMWrapperBase):
    """A torchtune ``TransformerDecoder`` as the ``actor_network`` of a loss.

    Takes any decoder with torchtune's call convention ``(tokens, *, mask, input_pos)``
    and shards, checkpoints or compiles nothing by itself; a decoder under FSDP2's
    ``fully_shard`` works as it is. Position i scores token i; a row's first token has
    nothing before it and scores 0.

    :meth:`log_probs` never holds a ``[tokens, vocab]`` tensor: only the asked-for
    positions are projected onto the vocabulary, ``chunk_size`` at a time, and again in
    the backward pass. For that the projection runs inside the decoder's own forward
    pass, where FSDP has its weights gathered. A decoder without torchtune's ``unembed``,
    or whose output projection is an FSDP unit of its own (the number of chunks differs
    between ranks, the number of its collectives must not), is called as usual and its
    logits are scored chunk by chunk.

    Also offers TorchRL's ``get_dist`` family, so that e.g. ``GRPOLoss`` runs on it.

    Args:
        model (nn.Module): the decoder.
        temperature (float): that of sampling; logits are divided by it.
        chunk_size (int): positions per projection onto the vocabulary.
        tokens_key (NestedKey): token ids, [N, T] int64.
        attention_mask_key (NestedKey): True for tokens, False for padding, [N, T] bool.
        assistant_mask_key (NestedKey): True for sampled tokens, [N, T] bool.
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
        >>> log_probs, _ = actor.log_probs(rows, entropy="detached")
        >>> log_probs < 0
        tensor([[False, False,  True],
                [False,  True,  True]])
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 1.0,
        chunk_size: int = 1024,
        tokens_key: NestedKey = ("tokens", "full"),
        attention_mask_key: NestedKey = ("masks", "all_attention_mask"),
        assistant_mask_key: NestedKey = ("masks", "all_assistant_mask"),
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
        self.log_probs_key = log_probs_key
        self.in_keys = [tokens_key, attention_mask_key]
        self.out_keys = [log_probs_key]
        # What LLMWrapperBase's methods look at; its constructor sets nothing.
        self.generate = False
        self.pad_output = True
        self.input_mode = "tokens"
        self._min_batch_size = self._max_batch_size = None

    def log_probs(
        self,
        micro: TensorDictBase,
        *,
        mask: Tensor | None = None,
        entropy: EntropyMode = "off",
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs of the tokens under the policy at its temperature.

        Args:
            micro (TensorDictBase): ``(N,)`` rows, dense with any padding, or ragged.
            mask (Tensor, optional): [N, T] bool, the positions to score; all tokens by
                default. Positions left out cost no projection onto the vocabulary.
            entropy: whether to return the entropy of the distribution each scored token
                was drawn from: ``"off"``, ``"detached"``, or ``"differentiable"``, which
                takes about twice the memory per chunk.

        Returns:
            tuple[Tensor, Tensor | None]: log-probs and entropy in nats, [N, T], in
            float32 at least; 0 at positions not scored. Both are connected to the graph
            even if no position is scored.
        """
        tokens, attention = self._read(micro)
        scored = attention if mask is None else mask & attention
        scored = scored & F.pad(attention, (1, -1), value=False)
        previous, targets = scored[:, 1:], tokens[:, 1:]

        if self._projects_inside():
            with self._unembed_as(
                lambda hidden: self._score(
                    self.model.norm(hidden[:, :-1][previous]),
                    targets[previous],
                    self.model.output,
                    entropy,
                )
            ):
                scores = self._call_model(tokens, attention)
            values = [
                score.new_zeros(tokens.shape).masked_scatter(scored, score) for score in scores
            ]
        else:
            logits = self._call_model(tokens, attention)[:, :-1]
            scores = self._score(logits.flatten(0, 1), targets.flatten(), _identity, entropy)
            values = [
                torch.where(scored, F.pad(score.view_as(targets), (1, 0)), 0.0) for score in scores
            ]
        return values[0], values[1] if entropy != "off" else None

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
        log_probs, _ = self.log_probs(tensordict)
        out = tensordict.copy()
        if not isinstance(out, LazyStackedTensorDict):
            return out.set(self.log_probs_key, log_probs)
        for row, value in zip(out.tensordicts, log_probs, strict=True):
            row.set(self.log_probs_key, value[-row.get(self.tokens_key).shape[-1] :])
        return out

    def _read(self, rows: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Token ids, 0 where there is padding, and attention mask, [N, T]."""
        tokens, attention = (
            rows.get(key, None, as_padded_tensor=True, padding_side="left", padding_value=0)
            for key in (self.tokens_key, self.attention_mask_key)
        )
        if tokens is None or attention is None:
            raise KeyError(
                f"TorchtuneActor needs {self.tokens_key!r} and {self.attention_mask_key!r}, "
                f"got {sorted(map(str, rows.keys(True, True)))}. Write them there, or give "
                "the actor tokens_key= and attention_mask_key=."
            )
        attention = attention.bool()
        return tokens.masked_fill(~attention, 0), attention

    def _call_model(self, tokens: Tensor, attention: Tensor):
        """The decoder's output under a causal mask that leaves out padding."""
        length = tokens.shape[1]
        square = torch.ones(length, length, dtype=torch.bool, device=tokens.device)
        # A padding token attends to itself: a softmax over nothing is NaN.
        mask = (square.tril() & attention[:, None, :]) | torch.eye(
            length, dtype=torch.bool, device=tokens.device
        )
        positions = (attention.long().cumsum(-1) - 1).clamp_min(0)
        output = self.model(tokens, mask=mask, input_pos=positions)
        if not torch.is_grad_enabled():
            # Only a backward pass reshards an FSDP root. Left gathered, the weights of
            # this pass would serve the next one, blind to an optimizer step in between.
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        return output

    def _projects_inside(self) -> bool:
        return hasattr(type(self.model), "unembed") and not isinstance(
            self.model.output, FSDPModule
        )

    @contextmanager
    def _unembed_as(self, function: Callable[[Tensor], tuple[Tensor, ...]]) -> Iterator[None]:
        """Replaces what the decoder does with its last hidden states [N, T, D]."""
        self.model.unembed = function
        try:
            yield
        finally:
            del self.model.unembed

    def _score(
        self,
        hidden: Tensor,
        targets: Tensor,
        project: Callable[[Tensor], Tensor],
        entropy: EntropyMode,
    ) -> tuple[Tensor, ...]:
        """(M,) log-probs, and entropies if asked for, of (M, D) hidden states' targets."""
        chunks = [
            checkpoint(
                self._score_chunk,
                *chunk,
                project,
                entropy,
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for chunk in zip(
                hidden.split(self.chunk_size), targets.split(self.chunk_size), strict=True
            )
        ]
        return tuple(torch.cat(parts) for parts in zip(*chunks, strict=True))

    def _score_chunk(
        self,
        hidden: Tensor,
        targets: Tensor,
        project: Callable[[Tensor], Tensor],
        entropy: EntropyMode,
    ) -> tuple[Tensor, ...]:
        logits = project(hidden)
        # float32 at least: bf16 log-probs are too coarse for importance ratios.
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        log_probs = (logits / self.temperature).log_softmax(-1)
        chosen = log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        if entropy == "off":
            return (chosen,)
        if entropy == "detached":
            log_probs = log_probs.detach()
        return chosen, -(log_probs.exp() * log_probs).sum(-1)

    def _logits(self, rows: TensorDictBase) -> TensorDictBase:
        tokens, attention = self._read(rows)
        logits = self._call_model(tokens, attention) / self.temperature
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
        out.set(self.attention_mask_key, attention)
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


def _identity(logits: Tensor) -> Tensor:
    return logits
