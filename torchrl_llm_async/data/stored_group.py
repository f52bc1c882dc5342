"""A complete group as the sampler knows it, and the figures of a batch of such groups.

Owns arithmetic on what was noted when a group was delivered, and how that is written down. Which
groups make a batch is the sampler's affair (:mod:`.sampler`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchrl_llm_async.data.lags import lag_figures


@dataclass(frozen=True)
class StoredGroup:
    """A complete group: where its rows lie, and what its figures will be computed from."""

    start_version: int
    index: torch.Tensor  # [K] int64, slots in the storage
    token_versions: dict[int, int]  # number of sampled tokens by their version
    oldest: tuple[int, ...]  # [K], smallest token version of each row
    delivered_at: int  # the step that was to consume next when it was complete
    reward: float = 0.0  # mean over its rows, where reuse asks for it
    flight_s: float = 0.0  # from announcement to completion
    arrived: float = 0.0  # when that was, on this process's monotonic clock
    uses: int = 0  # steps that have trained on it

    def pack(self, group_id: int, now: float) -> dict[str, Any]:
        """As a tree of plain values; times as ages."""
        return {
            "id": group_id,
            **vars(self),
            "token_versions": list(map(list, self.token_versions.items())),
            "arrived": now - self.arrived,
        }

    @classmethod
    def unpack(
        cls, packed: dict[str, Any], now: float, store: Callable[[int], torch.Tensor] | None
    ) -> StoredGroup:
        """From what :meth:`pack` gave; ``store`` tells the slots of a group, if they are others."""
        values = {name: value for name, value in packed.items() if name != "id"}
        values["index"] = values["index"] if store is None else store(packed["id"])
        values["token_versions"] = dict(map(tuple, packed["token_versions"]))
        values["oldest"] = tuple(packed["oldest"])
        values["arrived"] = now - packed["arrived"]
        return cls(**values)


def lags_of(step: int, groups: Sequence[StoredGroup]) -> dict[str, Any]:
    """Lags in steps of a batch that ``step`` trains on, by token and by sample, as figures."""
    tokens: Counter[int] = Counter()
    for group in groups:
        for version, count in group.token_versions.items():
            tokens[step - version] += count
    rows = [(group.delivered_at, oldest) for group in groups for oldest in group.oldest]
    return {
        **lag_figures("token", tokens),
        **lag_figures("sample", Counter(step - oldest for _, oldest in rows)),
        # A sample's lag is what it has gathered while it was sampled, and then waiting here.
        **lag_figures("flight", Counter(delivered - oldest for delivered, oldest in rows)),
        **lag_figures("queue", Counter(step - delivered for delivered, _ in rows)),
        "lag_histogram": dict(sorted(tokens.items())),
    }


def seconds_of(groups: Iterable[StoredGroup]) -> dict[str, float]:
    """Mean and longest time in flight, and from there until now."""
    now = time.monotonic()
    figures = {}
    for name, seconds in (
        ("flight_s", [group.flight_s for group in groups]),
        ("queue_s", [now - group.arrived for group in groups]),
    ):
        figures[f"{name}_mean"] = sum(seconds) / len(seconds)
        figures[f"{name}_max"] = max(seconds)
    return figures
