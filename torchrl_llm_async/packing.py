"""Micro-batches of a step: which rows go to which rank, and how they become dense.

Owns the plan (balanced over ranks, bounded by a token budget) and the two dense forms: one
sequence per row, padded, or several one behind another, packed. Knows no loss: what must not
be split is given as a number of adjacent rows. Sends nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

Form = Literal["padded", "packed"]


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    world_size: int,
    token_budget: int,
    unit: int = 1,
    form: Form = "padded",
) -> list[list[list[int]]]:
    """Assigns rows to the micro-batches of each rank.

    Units of ``unit`` adjacent rows are dealt longest first to the rank with the fewest
    tokens, then each into the rank's first micro-batch with room for it, so that little is
    padded. All ranks get the same number of micro-batches, since every forward pass under
    FSDP is a collective.

    Args:
        lengths (Sequence[int]): tokens of each row.
        world_size (int): number of ranks.
        token_budget (int): most tokens of a micro-batch, padding included.
        unit (int): rows that must stay together: 1, 2 for pairs, the group size for groups.
        form: what micro-batches are made of these rows: ``"padded"``, by :func:`pad_rows`, or
            ``"packed"``, by :func:`pack_rows` with ``row_tokens=max(lengths)``, so that short
            ones share a dense row, or fill up that of a long one.

    Returns:
        list[list[list[int]]]: row indices by rank and micro-batch. Each row is in exactly
        one; a micro-batch may be empty where a rank has too few units
        (see :func:`blank_rows`).

    Raises:
        ValueError: a unit over the budget, or rows that are no whole number of units.

    Examples:
        >>> plan_micro_batches([5, 2, 4, 3], world_size=2, token_budget=10)
        [[[0, 1]], [[2, 3]]]
    """
    if len(lengths) % unit:
        raise ValueError(f"{len(lengths)} rows are no whole number of units of {unit} rows.")
    units = [range(start, start + unit) for start in range(0, len(lengths), unit)]
    longest = [max(lengths[row] for row in rows) for rows in units]
    tokens = [sum(lengths[row] for row in rows) for rows in units]
    for rows, length in zip(units, longest, strict=True):
        if unit * length > token_budget:
            raise ValueError(
                f"Rows {list(rows)} take {unit} x {length} = {unit * length} tokens, over "
                f"token_budget={token_budget}. They cannot be split: raise the budget to at "
                "least that, or sample fewer tokens."
            )
    order = sorted(range(len(units)), key=lambda index: (-longest[index], index))
    shares: list[list[int]] = [[] for _ in range(world_size)]
    load = [(0, rank) for rank in range(world_size)]
    for index in order:
        total, rank = heapq.heappop(load)
        shares[rank].append(index)
        heapq.heappush(load, (total + tokens[index], rank))

    def has_room(batch: list[int], index: int) -> bool:
        if form == "padded":  # Longest first: the first unit sets the width of all.
            return (len(batch) + 1) * unit * longest[batch[0]] <= token_budget
        rows = [lengths[row] for member in (*batch, index) for row in units[member]]
        return len(_first_fit(rows, max(lengths))) * max(lengths) <= token_budget

    def fill(share: list[int]) -> list[list[int]]:
        batches: list[list[int]] = []
        for index in share:
            batch = next((batch for batch in batches if has_room(batch, index)), None)
            if batch is None:
                batches.append([index])
            else:
                batch.append(index)
        return batches

    plan = [fill(share) for share in shares]
    count = max(len(batches) for batches in plan)
    for batches in plan:
        while len(batches) < count:
            largest = max(batches, key=len, default=[])
            if len(largest) < 2:
                batches.append([])
                continue
            position = batches.index(largest)
            half = (len(largest) + 1) // 2
            batches[position : position + 1] = [largest[:half], largest[half:]]
    return [
        [[row for index in batch for row in units[index]] for batch in batches] for batches in plan
    ]


def pad_rows(
    rows: TensorDictBase,
    pad_id: int,
    *,
    tokens_key: NestedKey = ("tokens", "full"),
) -> TensorDictBase:
    """Ragged rows as one dense micro-batch, padded on the left.

    An entry with one value per token is padded: token ids with ``pad_id``, other
    integers (versions) with -1, floats with 0, bools with False. An entry of the same
    shape in all rows is stacked. The rest (text) is left out, and so are the neighbours of
    ``tokens_key``: prompt and response, which it already holds.

    Args:
        rows (TensorDictBase): ``(N,)`` rows, N >= 1.
        pad_id (int): token id that fills up.
        tokens_key (NestedKey): token ids, 1-D; its length is the row's.

    Returns:
        TensorDictBase: batch size ``(N,)``, per-token entries [N, T].

    Raises:
        ValueError: there are no rows.

    Examples:
        >>> from tensordict import lazy_stack
        >>> rows = lazy_stack(
        ...     [TensorDict({"tokens": {"full": torch.arange(1, n)}}) for n in (3, 4)]
        ... )
        >>> pad_rows(rows, pad_id=0)["tokens", "full"]
        tensor([[0, 1, 2],
                [1, 2, 3]])
    """
    _check_any(rows)
    out = TensorDict(batch_size=[len(rows)], device=rows.device)
    for key, values, per_token in _numeric_entries(rows, tokens_key):
        if per_token:
            fill = pad_id if key == tokens_key else _fill_value(values[0].dtype)
            out.set(
                key,
                pad_sequence(values, batch_first=True, padding_value=fill, padding_side="left"),
            )
        elif len({value.shape for value in values}) == 1:
            out.set(key, torch.stack(values))
    return out


def pack_rows(
    rows: TensorDictBase,
    pad_id: int,
    *,
    row_tokens: int | None = None,
    tokens_key: NestedKey = ("tokens", "full"),
    segment_ids_key: NestedKey = ("packing", "segment_ids"),
) -> TensorDictBase:
    """Ragged rows as one dense micro-batch, several sequences one behind another in a row.

    Each sequence goes, longest first, into the first row with room for it. Entries with one
    value per token follow; an entry of one number per row (a reward, an advantage) becomes
    one per token; the rest is left out. Rows are filled up on the right like in padding.

    Args:
        rows (TensorDictBase): ``(N,)`` rows, N >= 1.
        pad_id (int): token id that fills up.
        row_tokens (int, optional): tokens of a packed row, at least those of the longest
            sequence, which is the default. Attention takes memory with its square.
        tokens_key (NestedKey): token ids, 1-D; its length is the row's.
        segment_ids_key (NestedKey): where the place of each token's sequence in ``rows``
            goes, int64, -1 for padding. The place, so that pairs stay pairs.

    Returns:
        TensorDictBase: batch size ``(R,)``, entries [R, T].

    Raises:
        ValueError: a sequence is longer than ``row_tokens``, or there are no rows.

    Examples:
        >>> from tensordict import lazy_stack
        >>> rows = lazy_stack(
        ...     [TensorDict({"tokens": {"full": torch.arange(1, n)}}) for n in (3, 5, 2)]
        ... )
        >>> packed = pack_rows(rows, pad_id=0)
        >>> packed["tokens", "full"], packed["packing", "segment_ids"]
        (tensor([[1, 2, 3, 4],
                [1, 2, 1, 0]]), tensor([[ 1,  1,  1,  1],
                [ 0,  0,  2, -1]]))
    """
    _check_any(rows)
    lengths = [len(row.get(tokens_key)) for row in rows.unbind(0)]
    size = max(lengths) if row_tokens is None else row_tokens
    if max(lengths) > size:
        raise ValueError(
            f"Row {lengths.index(max(lengths))} has {max(lengths)} tokens, over row_tokens={size}. "
            "It cannot be split: raise row_tokens to at least that."
        )
    bins = _first_fit(lengths, size)

    def packed(values: Sequence[Tensor], fill: int | float | bool) -> Tensor:
        joined = [torch.cat([values[index] for index in sorted(members)]) for members in bins]
        dense = values[0].new_full((len(bins), size), fill)
        for row, value in zip(dense, joined, strict=True):
            row[: len(value)] = value
        return dense

    out = TensorDict(batch_size=[len(bins)], device=rows.device)
    for key, values, per_token in _numeric_entries(rows, tokens_key):
        if not per_token and any(value.numel() != 1 for value in values):
            continue
        if not per_token:
            values = [v.reshape(1).expand(n) for v, n in zip(values, lengths, strict=True)]
        if per_token:  # [T, 1], as TorchRL writes rewards and advantages, is one per token, too.
            values = [v.squeeze(-1) if v.ndim == 2 and v.shape[1] == 1 else v for v in values]
        if any(value.ndim > 1 for value in values):
            continue
        out.set(key, packed(values, pad_id if key == tokens_key else _fill_value(values[0].dtype)))
    places = [torch.full((n,), i, device=rows.device) for i, n in enumerate(lengths)]
    return out.set(segment_ids_key, packed(places, -1))


def blank_rows(
    rows: TensorDictBase,
    pad_id: int,
    *,
    tokens_key: NestedKey = ("tokens", "full"),
) -> TensorDictBase:
    """A micro-batch without a single valid token, for a rank that has nothing to train.

    It still goes through forward and backward, whose collectives every rank must join.

    Args:
        rows (TensorDictBase): any rows of the step, whose entries are imitated.
        pad_id (int): token id that fills up.
        tokens_key (NestedKey): token ids.

    Returns:
        TensorDictBase: batch size ``(2,)`` (so that it is whole pairs, too); per-token
        entries as in padding, the others 0.

    Examples:
        >>> from tensordict import lazy_stack
        >>> rows = lazy_stack(
        ...     [TensorDict({"masks": {"all_attention_mask": torch.ones(3) > 0},
        ...                  "tokens": {"full": torch.arange(3)}})]
        ... )
        >>> blank_rows(rows, pad_id=0)["masks", "all_attention_mask"].any()
        tensor(False)
    """
    example = pad_rows(rows[:1], pad_id, tokens_key=tokens_key)
    per_token = example.get(tokens_key).shape
    out = TensorDict(batch_size=[2], device=rows.device)
    for key, value in example.items(include_nested=True, leaves_only=True):
        if key == tokens_key:
            fill = pad_id
        else:
            fill = _fill_value(value.dtype) if value.shape == per_token else 0
        out.set(key, value.new_full((2, *value.shape[1:]), fill))
    return out


def _first_fit(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Bins of ``size`` tokens; each index, longest first, in the first one with room for it."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        place = next((i for i, left in enumerate(room) if left >= lengths[index]), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(size)
        bins[place].append(index)
        room[place] -= lengths[index]
    return bins


def _check_any(rows: TensorDictBase) -> None:
    if len(rows) == 0:
        raise ValueError(
            "There are no rows to make a micro-batch of, e.g. since the rewards of all groups were "
            "equal: make no update, or, where other ranks have rows, take blank_rows() of any."
        )


def _numeric_entries(
    rows: TensorDictBase, tokens_key: NestedKey
) -> Iterator[tuple[NestedKey, list[Tensor], bool]]:
    """Key, value of each row, and whether those are per token, of what is numbers in all rows."""
    singles = list(rows.unbind(0))
    lengths = [len(row.get(tokens_key)) for row in singles]
    for key in singles[0].keys(include_nested=True, leaves_only=True):
        if isinstance(key, tuple) and key != tokens_key and key[:-1] == tokens_key[:-1]:
            continue
        values = [row.get(key, None) for row in singles]
        if all(isinstance(value, Tensor) for value in values):
            per_token = all(
                v.ndim > 0 and len(v) == n for v, n in zip(values, lengths, strict=True)
            )
            yield key, values, per_token


def _fill_value(dtype: torch.dtype) -> int | float | bool:
    """What stands for "no value" in a per-token entry of this type."""
    if dtype == torch.bool:
        return False
    return 0.0 if dtype.is_floating_point else -1
