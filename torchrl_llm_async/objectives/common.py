"""What the losses share: how they read a micro-batch, and what they return.

Owns :class:`AsyncLLMLoss`, the interface between a loss and the loop that trains
with it, :class:`Layout`, which makes padded and packed micro-batches alike, and
:class:`LossOutput`. Holds no loss arithmetic (see :mod:`.functional`), does no packing,
and never talks to another rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from tensordict import (
    NestedKey,
    TensorClass,
    TensorDictBase,
    is_tensor_collection,
    is_tensorclass,
    lazy_stack,
    unravel_key,
)
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.objectives.common import LossModule

from torchrl_llm_async.modules.scores import SEGMENT_IDS, EntropyMode, TokenScores, score_tokens
from torchrl_llm_async.objectives import functional
from torchrl_llm_async.objectives.options import require


class Layout(NamedTuple):
    """Which tokens of a flattened micro-batch count, and the sequence each is of.

    Attributes:
        mask (Tensor): (N,) bool, True where the policy sampled the token.
        segment_ids (Tensor): (N,) int64 in ``[0, num_segments)``.
        num_segments (int): S, the number of sequences.
    """

    mask: Tensor
    segment_ids: Tensor
    num_segments: int

    def sum(self, values: Tensor) -> Tensor:
        """Sums of ``values`` (N,) over the sampled tokens of each sequence, (S,)."""
        kept = torch.where(self.mask, values, 0.0)
        return functional.segment_sum(kept, self.segment_ids, self.num_segments)

    def lengths(self) -> Tensor:
        """Sampled tokens of each sequence, (S,) int64."""
        return functional.segment_sum(self.mask.long(), self.segment_ids, self.num_segments)

    def per_segment(self, values: Tensor) -> Tensor:
        """The one value that all sampled tokens of a sequence share, (S,); 0 without any."""
        lowest = values.new_zeros(self.num_segments)
        index = torch.where(self.mask, self.segment_ids, self.num_segments)
        return torch.cat([lowest, lowest[:1]]).scatter(0, index, values)[:-1]


class LossOutput(TensorClass["nocast"]):
    r"""Base of what a loss returns: ``loss_*`` entries and detached diagnostics.

    A ``loss_*`` entry is a scalar, already divided by the step's normalizer. Every
    other entry is a diagnostic of shape ``(2,)``, a sum and how many values it is over,
    so that diagnostics add over micro-batches and ranks, or ``(L, 2)`` for one by lag
    (:data:`LAG_BUCKETS`). Entries that are switched off are None.

    Attributes:
        ratio_by_lag: theta / mu by the token's lag, 1 in expectation; None where the rows
            do not bring mu and the versions.
        log_ratio_size_by_lag: \|log theta - log mu\| by the token's lag; None like the former.
        mismatch_lag_0: \|log theta - log mu\| of tokens sampled by the weights the step
            starts from: before its first update, what engine and trainer disagree by. Where
            those weights' log-probs are known, theirs in place of theta. None like the former.
    """

    ratio_by_lag: Tensor | None = field(default=None, kw_only=True)
    log_ratio_size_by_lag: Tensor | None = field(default=None, kw_only=True)
    mismatch_lag_0: Tensor | None = field(default=None, kw_only=True)

    def total(self) -> Tensor:
        """Sum of the ``loss_*`` entries, the scalar to call ``backward`` on."""
        return sum(
            value for name, value in self.items() if name.startswith("loss_") and value is not None
        )

    def diagnostics(self) -> dict[str, Tensor]:
        """The ``(sum, count)`` entries by name, each of shape ``(2,)``, detached.

        One by lag is as many as there are buckets, e.g. ``"ratio_by_lag/3-4"``.
        """
        out: dict[str, Tensor] = {}
        for name, value in self.items():
            if name.startswith("loss_") or value is None:
                continue
            if value.ndim == 1:
                out[name] = value
            else:
                names = (f"{name}/{bucket}" for bucket in LAG_BUCKETS)
                out |= dict(zip(names, value, strict=True))
        return out

    @classmethod
    def figures(cls, totals: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """What to log of diagnostics summed over a step: their means, if over anything.

        Args:
            totals: ``(sum, count)`` by name, as :meth:`diagnostics` names them, summed over
                micro-batches and ranks.

        Returns:
            dict[str, float]: those whose count is above 0.
        """
        return {name: total / count for name, (total, count) in totals.items() if count > 0}


_PER_TOKEN = {
    *("sample_log_prob", "prox_log_prob", "ref_log_prob", "token_version"),
    *("old_value", "value_target", "token_reward"),
}
LAG_BUCKETS = ("0", "1", "2", "3-4", "5-8", "9+")
_LAST_LAG = (0, 1, 2, 4, 8)


def by_lag(values: Tensor, lag: Tensor, mask: Tensor) -> Tensor:
    """``(sum, count)`` of the values for each of :data:`LAG_BUCKETS`: shape ``(L, 2)``.

    Args:
        values (Tensor): (N,); detached here.
        lag (Tensor): (N,) int64, in versions; a negative one is put to 0.
        mask (Tensor): (N,) bool.
    """
    bucket = torch.bucketize(lag, torch.tensor(_LAST_LAG, device=lag.device))
    kept = torch.where(mask, values.detach().to(torch.float32), 0.0)
    both = torch.stack([kept, mask.to(torch.float32)], -1)
    return both.new_zeros(len(LAG_BUCKETS), 2).index_add(0, bucket, both)


def sum_and_count(values: Tensor, mask: Tensor) -> Tensor:
    """``(sum, count)`` of the values where ``mask`` holds: shape ``(2,)``, detached."""
    kept = torch.where(mask, values.detach().to(torch.float32), 0.0)
    return torch.stack([kept.sum(), mask.sum().to(torch.float32)])


class AsyncLLMLoss(LossModule):
    """A loss as the asynchronous training loop uses it.

    In each training step the loop calls, in this order,

    1. :meth:`select` on the sampled batch: the rows to train on;
    2. :meth:`denominator` on the rows each optimizer update will see, summed over ranks;
    3. :meth:`anchor` on each micro-batch, before the step's first optimizer update; it
       may be left out where the step makes one update only;
    4. the loss itself on each micro-batch. Its ``loss_*`` entries are sums divided by
       the normalizer, so the gradients of a step's micro-batches and ranks add up to
       that of one large batch, whatever the packing. FSDP averages gradients over
       ranks: multiply by their number before ``backward``.

    Args:
        actor_network (TensorDictModuleBase): the policy being trained, a
            :class:`~torchrl_llm_async.modules.TorchtuneActor` or whatever else
            :func:`~torchrl_llm_async.modules.score_tokens` can ask.
        reference_network (TensorDictModuleBase, optional): a frozen policy of the same
            interface. Its log-probs are computed, without gradient, where the
            micro-batch does not bring them. It is frozen here, and no submodule: move it to
            its device yourself.

    Attributes:
        output_type (type[LossOutput]): what ``forward`` returns.
        packing_unit: what packing must not split: a ``"sequence"``, a ``"pair"`` of
            adjacent rows, or a ``"group"`` of adjacent rows.
        needs_value_head (bool): whether the actor's decoder must have a critic's head
            (:func:`~torchrl_llm_async.modules.add_value_head`); known before there is one.
        needs_advantages (bool): whether it reads advantages that it does not make itself.
        least_group_size (int): how many answers to a prompt it must have.
        written_by_select (tuple[str]): accepted keys that :meth:`select` writes.
        groups_tied (int): groups that the last call of :meth:`select` skipped, since their
            rewards tell nothing.
    """

    output_type: ClassVar[type[LossOutput]] = LossOutput
    packing_unit: Literal["sequence", "pair", "group"] = "sequence"
    needs_value_head: bool = False
    needs_advantages: bool = False
    least_group_size: int = 1
    written_by_select: ClassVar[tuple[str, ...]] = ("target_version",)
    groups_tied: int = 0

    @dataclass
    class _AcceptedKeys:
        """Keys every loss reads; see ``set_keys``.

        Attributes:
            assistant_mask (NestedKey): True where the policy sampled the token.
                Defaults to ``("masks", "all_assistant_mask")``.
            segment_ids (NestedKey): the sequence of each token where rows are packed
                (:func:`~torchrl_llm_async.packing.pack_rows`); need not be there.
                Defaults to ``("packing", "segment_ids")``.
            ref_log_prob (NestedKey): log-probs of the reference.
                Defaults to ``("log_probs", "ref")``.
            sample_log_prob (NestedKey): log mu. Defaults to ``("log_probs", "full")``.
            token_version (NestedKey): the version that sampled the token, -1 if unknown;
                need not be there, then there are no diagnostics by lag.
                Defaults to ``("policy_version", "full")``.
            target_version (NestedKey): the version trained towards, one number per row;
                written by ``select``. Defaults to ``("policy_version", "target")``.
        """

        assistant_mask: NestedKey = ("masks", "all_assistant_mask")
        segment_ids: NestedKey = ("packing", "segment_ids")
        ref_log_prob: NestedKey = ("log_probs", "ref")
        sample_log_prob: NestedKey = ("log_probs", "full")
        token_version: NestedKey = ("policy_version", "full")
        target_version: NestedKey = ("policy_version", "target")

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        *,
        reference_network: TensorDictModuleBase | None = None,
    ) -> None:
        super().__init__()
        self.actor_network = actor_network
        self.reference_network = reference_network

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "reference_network":
            # No submodule: frozen, it has no place in parameters(), state_dict() and train().
            if value is not None:
                trained = {id(parameter) for parameter in self.actor_network.parameters()}
                require(
                    not any(id(parameter) in trained for parameter in value.parameters()),
                    "reference_network shares parameters with actor_network, and would freeze "
                    "them: give it a copy of its own (copy.deepcopy, or load the weights again).",
                )
                value.requires_grad_(False).eval()
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def _forward_value_estimator_keys(self, **kwargs) -> None:
        """No value estimator; ``in_keys`` follow ``tensor_keys`` by themselves."""

    @property
    def in_keys(self) -> list[NestedKey]:
        """What the actor reads, then every key of ``tensor_keys`` without repeats.

        Not all of them need be there: ``rows.select(*loss.in_keys, strict=False)`` is what
        a loss can make use of.
        """
        own = vars(self.tensor_keys).values()
        return list(dict.fromkeys([*self.actor_network.in_keys, *own]))

    @property
    def out_keys(self) -> list[str]:
        """The entries of what ``forward`` returns; one that options switch off is None."""
        fields = dict.fromkeys(field.name for field in self.output_type.fields())
        return sorted(fields, key=lambda name: not name.startswith("loss_"))

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads the reference's log-probs."""
        return False

    def select(self, batch: TensorDictBase, *, target_version: int | None = None) -> TensorDictBase:
        """The rows to train on, with whatever else ``forward`` needs of the whole batch.

        Here all rows, each with the version trained towards, if that is given.

        Args:
            batch (TensorDictBase): ``(B * K,)``, the rows of a group adjacent.
            target_version (int, optional): the version this step trains towards, one
                more than that of the weights it starts from.

        Returns:
            TensorDictBase: rows that share their tensors with ``batch``; may be empty.
        """
        if target_version is None:
            return batch
        versions = torch.full(batch.batch_size, target_version, device=batch.device)
        return self._with(batch, target_version=versions)

    def anchor(self, micro: TensorDictBase) -> TensorDictBase:
        """The micro-batch with what must be computed before the step's first update."""
        return micro

    def denominator(self, rows: TensorDictBase) -> Tensor:
        """What these rows contribute to the normalizer of ``forward``, scalar int64."""
        raise NotImplementedError

    def forward(self, micro: TensorDictBase, *, normalizer: Tensor | float) -> LossOutput:
        """The loss of one micro-batch.

        Args:
            micro (TensorDictBase): ``(N,)`` rows: dense and padded on the left,
                packed, or ragged.
            normalizer (Tensor or float): :meth:`denominator` of everything the current
                optimizer update sees, summed over micro-batches and ranks.

        Returns:
            LossOutput: connected to the actor's graph even if no token counts.
        """
        raise NotImplementedError

    def _has(self, rows: TensorDictBase, name: str) -> bool:
        """Whether there is an entry at the accepted key ``name``."""
        return unravel_key(getattr(self.tensor_keys, name)) in rows.keys(include_nested=True)

    def _read(
        self, rows: TensorDictBase, name: str, fill: float | int | bool | None = None
    ) -> Tensor:
        """The entry at the accepted key ``name``; with ``fill``, ragged rows are padded."""
        if not self._has(rows, name):
            raise KeyError(
                f"{type(self).__name__} found no {name} at {getattr(self.tensor_keys, name)!r} "
                f"among {sorted(map(str, rows.keys(True, True)))}. "
                + (
                    "select() writes it: train on the rows that it returns."
                    if name in self.written_by_select
                    else f"Write it there, or point the loss to it with set_keys({name}=...)."
                )
            )
        key = getattr(self.tensor_keys, name)
        if fill is None or rows[0].get(key).ndim == 0:
            return rows.get(key)
        padded = {"as_padded_tensor": True, "padding_side": "left", "padding_value": fill}
        value = rows.get(key, **padded)
        # Tokenizers write masks of 0 and 1, which padding fills up with -1.
        return value > 0 if isinstance(fill, bool) else value

    def _with(self, rows: TensorDictBase, **entries: Tensor) -> TensorDictBase:
        """A copy of the rows with entries at the accepted keys of these names."""
        out = rows.copy()
        for name, value in entries.items():
            key = getattr(self.tensor_keys, name)
            *above, _ = (key,) if isinstance(key, str) else unravel_key(key)
            parent = out.get(tuple(above), None) if above else None
            require(
                parent is None or is_tensor_collection(parent),
                f"{type(self).__name__} can't write {name} at {key!r}, since there is no "
                f"tensordict at {tuple(above)!r} but {type(parent).__name__}: have it written "
                f"elsewhere with set_keys({name}=...).",
            )
            if is_tensorclass(parent):  # TorchRL's wrappers write some, which take no new entry.
                plain = lazy_stack([part.to_tensordict() for part in parent.unbind(0)])
                out.set(tuple(above), plain)
            out.set(key, value)
        return out

    def _layout(self, rows: TensorDictBase) -> Layout:
        """Sampled tokens and sequences of padded, packed or ragged rows."""
        if len(rows) == 0:
            none = torch.zeros(0, dtype=torch.int64, device=rows.device)
            return Layout(none.bool(), none, 0)
        mask = self._read(rows, "assistant_mask", False)
        if not self._has(rows, "segment_ids"):
            number, length = mask.shape
            ids = torch.arange(number, device=mask.device).repeat_interleave(length)
            return Layout(mask.flatten(), ids, number)
        self._check_actors_segments()
        segment_ids = self._read(rows, "segment_ids")
        # Of padding alone: a pair of sequences without a token, as of padded rows.
        number = int(segment_ids.max()) + 1 or 2
        # Padding is not sampled; whichever sequence it is counted with.
        return Layout(mask.flatten(), segment_ids.flatten().clamp_min(0), number)

    def _check_actors_segments(self) -> None:
        """An actor that looks for them elsewhere would take a packed row for one sequence."""
        ours = unravel_key(self.tensor_keys.segment_ids)
        for actor in (self.actor_network, self.reference_network):
            # One with score() may know sequences by other means.
            default = None if hasattr(actor, "score") else SEGMENT_IDS
            theirs = getattr(actor, "segment_ids_key", default)
            if actor is not None and theirs is not None and unravel_key(theirs) != ours:
                raise ValueError(
                    f"{type(self).__name__} reads segment_ids at {ours!r}, but "
                    f"{type(actor).__name__} at {theirs!r}: give TorchtuneActor "
                    f"segment_ids_key={ours!r}, or the loss set_keys(segment_ids={theirs!r})."
                )

    def _tokens(self, rows: TensorDictBase, name: str, fill: float | int = 0.0) -> Tensor:
        """(N,) the entry at the accepted key ``name``, one per token or one per row.

        Half precision is taken to float32, in which the losses compute.

        Raises:
            KeyError: there is none.
            ValueError: it is not finite at a sampled token, or of another number of tokens.
        """
        mask = self._read(rows, "assistant_mask", False)
        value = self._read(rows, name, fill)
        value = value.reshape(len(mask), -1)
        # Of the whole answer, there may be one advantage or reward, but never one log-prob.
        one_per_row = value.shape[1] == 1 and name not in _PER_TOKEN
        require(
            one_per_row or value.shape == mask.shape,
            f"{name} at {getattr(self.tensor_keys, name)!r} has {value.shape[1]} numbers per row, "
            f"but there are {mask.shape[1]} tokens. Write one for each token of tokens.full, with "
            f"0 where none was sampled, or point the loss to them with set_keys({name}=...).",
        )
        if value.dtype in (torch.float16, torch.bfloat16):
            value = value.float()
        value = value.expand_as(mask)
        self._check_finite(value, mask, f"{name} at {getattr(self.tensor_keys, name)!r}")
        return value.flatten()

    def _policy(
        self, rows: TensorDictBase, entropy: EntropyMode = "off", *, values: bool = False
    ) -> TokenScores:
        """Scores (N,) of the sampled tokens by the policy.

        Raises:
            ValueError: a log-prob or a value is not finite at a sampled token.
        """
        mask = self._read(rows, "assistant_mask", False)
        scores = score_tokens(self.actor_network, rows, mask=mask, entropy=entropy, values=values)
        self._check_finite(scores.log_probs, mask, "log-probs of the policy")
        if entropy != "off":
            self._check_finite(scores.entropy, mask, "entropies of the policy")
        if values:
            self._check_finite(scores.values, mask, "values of the critic")
        return TokenScores(*(None if score is None else score.flatten() for score in scores))

    def _reference(self, rows: TensorDictBase) -> Tensor:
        """Log-probs (N,) of the reference, from the rows or else by the reference network."""
        if self._has(rows, "ref_log_prob") or self.reference_network is None:
            return self._tokens(rows, "ref_log_prob")
        mask = self._read(rows, "assistant_mask", False)
        with torch.no_grad():
            scores = score_tokens(self.reference_network, rows, mask=mask)
        self._check_finite(scores.log_probs, mask, "log-probs of the reference network")
        return scores.log_probs.flatten()

    def _lags(
        self, rows: TensorDictBase, log_prob: Tensor, start: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Diagnostics by lag, if the rows say which version sampled which token, and how likely.

        Args:
            rows (TensorDictBase): the micro-batch.
            log_prob (Tensor): (N,) of the current policy.
            start (Tensor, optional): (N,) of the weights the step starts from, where they are
                known; the current policy's by default.
        """
        names = ("sample_log_prob", "token_version", "target_version")
        if not all(self._has(rows, name) for name in names):
            return {}
        current = log_prob.detach()
        behavior = self._tokens(rows, "sample_log_prob")
        version = self._tokens(rows, "token_version", -1)
        lag = (self._tokens(rows, "target_version", -1) - 1 - version).clamp_min(0)
        known = self._read(rows, "assistant_mask", False).flatten() & (version >= 0)
        difference = current - behavior
        mismatch = ((current if start is None else start) - behavior).abs()
        return {
            "ratio_by_lag": by_lag(functional.bounded_exp(difference), lag, known),
            "log_ratio_size_by_lag": by_lag(difference.abs(), lag, known),
            "mismatch_lag_0": sum_and_count(mismatch, known & (lag == 0)),
        }

    @staticmethod
    def _check_finite(values: Tensor, mask: Tensor, what: str) -> None:
        """One NaN in a loss is NaN in every weight: better no step at all."""
        wrong = mask & ~values.isfinite()
        if wrong.any():
            row, token = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"The {what} are not finite for {int(wrong.sum())} sampled tokens, e.g. "
                f"{values[row, token].item()} in row {row}, token {token}. Leave such rows out "
                "of the buffer; if they come of the weights, those are broken already."
            )


def per_unit(total: Tensor, normalizer: Tensor | float) -> Tensor:
    """The sum by the normalizer; where that is 0 there was nothing to sum, and it stays 0."""
    if isinstance(normalizer, Tensor):
        return total / torch.where(normalizer == 0, torch.ones_like(normalizer), normalizer)
    return total / (normalizer or 1.0)
