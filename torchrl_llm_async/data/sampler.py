"""Which rows of the replay buffer the next training step gets, and which slots are free again.

Owns the state of groups between announcement and consumption, and the lag of a batch. The rule of
consumption itself stands in :mod:`torchrl_llm_async.staleness`. Knows slots, not data; neither
locks nor waits, which is the business of :class:`.StalenessReplayBuffer`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import astuple, dataclass
from typing import Any, Literal

import torch
from torchrl.data import Storage
from torchrl.data.replay_buffers.samplers import ConsumingSampler

from torchrl_llm_async.data.lags import lag_figures
from torchrl_llm_async.deadlines import check_bounds, select_groups


@dataclass(frozen=True)
class StoredGroup:
    """A complete group: where its rows lie, and what its lag will be computed from."""

    start_version: int
    index: torch.Tensor  # [K] int64, slots in the storage
    token_versions: dict[int, int]  # number of sampled tokens by their version
    oldest: tuple[int, ...]  # [K], smallest token version of each row
    delivered_at: int  # the step that was to consume next when it was complete


class StalenessSampler(ConsumingSampler):
    """Chooses the groups of the next training step by :func:`~.staleness.select_groups`.

    Knows groups only by id, start version and slots. A batch is in the order start version, group
    id, row. Not thread-safe on its own: :class:`StalenessReplayBuffer` holds its lock around it.

    Args:
        groups_per_step: groups one step consumes, B.
        max_staleness: largest lag of a sample, in steps.
        on_stale: what happens to groups that are not complete at their deadline: the step waits for
            them, or they are dropped once B complete groups satisfy the rule without them.

    Attributes:
        consumer_version: the step that consumes next; also the version of the weights it trains.
        running: start version by id of the groups that are announced and not complete.
        finished: the complete groups by id.

    .. seealso:: :class:`~torchrl.data.replay_buffers.samplers.StalenessAwareSampler` weights or
        discards single rows by one version each; it neither keeps groups together nor orders.
    """

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_staleness: int,
        on_stale: Literal["wait", "drop"] = "wait",
    ) -> None:
        check_bounds(groups_per_step, max_staleness)
        if on_stale not in ("wait", "drop"):
            raise ValueError(f"on_stale is {on_stale!r}; it must be 'wait' or 'drop'")
        super().__init__()
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self.on_stale = on_stale
        self._forget_groups()

    def _forget_groups(self) -> None:
        self.consumer_version = 0
        self.running: dict[int, int] = {}
        self.finished: dict[int, StoredGroup] = {}
        self._last_announced: tuple[int, int] | None = None  # (start version, group id)

    def announce(self, group_id: int, start_version: int) -> None:
        """See :meth:`StalenessReplayBuffer.announce`."""
        if self._last_announced is not None and (
            start_version < self._last_announced[0] or group_id <= self._last_announced[1]
        ):
            raise ValueError(
                f"group {group_id} (start version {start_version}) was announced after group "
                f"{self._last_announced[1]} (start version {self._last_announced[0]}): announce "
                "each group once, in the order of admission"
            )
        limit = (self.max_staleness + 1) * self.groups_per_step
        if len(self.running) + len(self.finished) >= limit:
            raise RuntimeError(
                f"group {group_id} is one too many: {limit} groups are in flight, all that "
                f"max_staleness={self.max_staleness} and groups_per_step={self.groups_per_step} "
                "allow; admit groups by a StalenessController with the same values, and retract "
                "the rejected ones"
            )
        self._last_announced = (start_version, group_id)
        self.running[group_id] = start_version

    def deliver(self, group_id: int, group: StoredGroup) -> None:
        """Marks a running group complete."""
        del self.running[group_id]
        self.finished[group_id] = group

    def drop_overdue(self) -> list[int]:
        """Forgets the groups that should have been part of a step already; returns their ids."""
        overdue = [
            group_id
            for group_id, start in self.running.items()
            if start + self.max_staleness < self.consumer_version
        ]
        for group_id in overdue:
            del self.running[group_id]
        return overdue

    def select(self) -> list[int] | None:
        """Ids of the next step's groups, or None if the step has to wait."""
        running = self.running
        if self.on_stale == "drop":
            # Those due now that are still running will be dropped, so they claim no place.
            due = self.consumer_version - self.max_staleness
            running = {group_id: start for group_id, start in running.items() if start > due}
        return select_groups(
            self.consumer_version,
            groups_per_step=self.groups_per_step,
            max_staleness=self.max_staleness,
            finished={group_id: group.start_version for group_id, group in self.finished.items()},
            running=running,
        )

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Whether the next step's batch is there."""
        return self.select() is not None

    def sample(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Consumes the next step's groups and advances :attr:`consumer_version`.

        Returns:
            The slots of the rows, int64 [B * K], and an info dict with ``"step"``, ``"group_ids"``
            and lags in steps: :func:`.lag_figures` of ``"token"``, ``"sample"`` and its two parts
            ``"flight"`` and ``"queue"``, and ``"lag_histogram"``, tokens by their lag.

        Raises:
            RuntimeError: the batch is not there yet.
        """
        group_ids = self.select()
        if group_ids is None:
            raise RuntimeError(f"step {self.consumer_version} has to wait for more groups")
        groups = [self.finished.pop(group_id) for group_id in group_ids]
        index = torch.cat([group.index for group in groups])
        self._ensure_state(storage)
        self._sample_count[index] = self.max_sample_count
        self._live_mask[index] = False
        self._append_free_indices(index)
        step = self.consumer_version
        self.consumer_version += 1
        tokens: Counter[int] = Counter()
        for group in groups:
            tokens.update({step - v: count for v, count in group.token_versions.items()})
        rows = [(group.delivered_at, oldest) for group in groups for oldest in group.oldest]
        return index, {
            "step": step,
            "group_ids": group_ids,
            **lag_figures("token", tokens),
            **lag_figures("sample", Counter(step - oldest for _, oldest in rows)),
            # A sample's lag is what it has gathered while it was sampled, and then waiting here.
            **lag_figures("flight", Counter(delivered - oldest for delivered, oldest in rows)),
            **lag_figures("queue", Counter(step - delivered for delivered, _ in rows)),
            "lag_histogram": dict(sorted(tokens.items())),
        }

    def _empty(self) -> None:
        super()._empty()
        self._forget_groups()

    def state_dict(self) -> dict[str, Any]:
        """Everything but the bounds, which belong to the configuration."""
        return OrderedDict(
            super().state_dict(),
            consumer_version=self.consumer_version,
            running=dict(self.running),
            finished={group_id: astuple(group) for group_id, group in self.finished.items()},
            last_announced=self._last_announced,
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` gave."""
        super().load_state_dict(state_dict)
        self.consumer_version = state_dict["consumer_version"]
        self.running = dict(state_dict["running"])
        self.finished = {
            group_id: StoredGroup(*group) for group_id, group in state_dict["finished"].items()
        }
        self._last_announced = state_dict["last_announced"]

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(groups_per_step={self.groups_per_step}, "
            f"max_staleness={self.max_staleness}, on_stale={self.on_stale!r}, "
            f"consumer_version={self.consumer_version})"
        )
