"""Which rows of the replay buffer the next training step gets, and which slots are free again.

Owns the state of groups from announcement to consumption, and reuse, and the lag of a batch. The
rule of consumption itself stands in :mod:`torchrl_llm_async.deadlines`. Knows slots, not data;
neither locks nor waits, which is the business of :class:`.StalenessReplayBuffer`.
"""

from __future__ import annotations

import bisect
import heapq
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torchrl.data import Storage
from torchrl.data.replay_buffers.samplers import ConsumingSampler

from torchrl_llm_async.data.reuse import Reuse, choose_reused
from torchrl_llm_async.data.stored_group import StoredGroup, lags_of, seconds_of
from torchrl_llm_async.deadlines import (
    check_bounds,
    check_deadlines,
    is_ready,
    least_staleness,
)
from torchrl_llm_async.ledger import Ledger


class StalenessSampler(ConsumingSampler):
    """Chooses the groups of the next training step by :func:`~.deadlines.is_ready`.

    Knows groups only by id, start version and slots. A batch is in the order start version, group
    id, row; groups that are reused come last, in the order of their ids. Not thread-safe on its
    own: :class:`StalenessReplayBuffer` holds its lock around it.

    Args:
        groups_per_step: groups one step consumes, B.
        max_staleness: largest lag of a sample, in steps.
        on_stale: what happens to groups that are not complete at their deadline: the step waits for
            them, or they are dropped once B complete groups satisfy the rule without them.
        max_reuse: steps that may train on a group.
        reuse: how groups that are reused are chosen, see :func:`~.reuse.choose_reused`.
        reuse_groups: reused groups of a step, beside the B it consumes.

    Attributes:
        consumer_version: the step that consumes next; also the version of the weights it trains.
        running: start version by id of the groups that are announced and not complete.
        finished: the complete groups by id.
        reusable: by id, the groups that were consumed and may be trained on once more.
        late: the groups that were dropped and whose rows, or retraction, may still come.
        untold: by id, why a group was dropped, until whoever refunds it has been told.
        totals: further figures since the start of the run, of which the buffer counts its own.
        ledger: what became of each group.

    .. seealso:: :class:`~torchrl.data.replay_buffers.samplers.StalenessAwareSampler` weights or
        discards single rows by one version each; it neither keeps groups together nor orders.
    """

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_staleness: int,
        on_stale: Literal["wait", "drop"] = "wait",
        max_reuse: int = 1,
        reuse: Reuse = "recency",
        reuse_groups: int = 0,
    ) -> None:
        check_bounds(groups_per_step, max_staleness)
        if max_reuse < 1:
            raise ValueError(f"max_reuse is {max_reuse}; it must be at least 1 (no reuse)")
        if max_reuse > 1 and max_staleness == 0:
            raise ValueError(
                f"max_reuse is {max_reuse} and max_staleness 0: at the next step a group would lag "
                "by 1; set max_staleness to 1 or more"
            )
        if (max_reuse > 1) != (reuse_groups > 0):
            raise ValueError(
                f"max_reuse is {max_reuse} and reuse_groups {reuse_groups}; groups are reused if "
                "max_reuse is above 1 and reuse_groups above 0"
            )
        if on_stale not in ("wait", "drop"):
            raise ValueError(f"on_stale is {on_stale!r}; it must be 'wait' or 'drop'")
        if reuse not in get_args(Reuse):
            raise ValueError(f"reuse is {reuse!r}; it must be one of {get_args(Reuse)}")
        super().__init__()
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self.on_stale = on_stale
        self.max_reuse = max_reuse
        self.reuse = reuse
        self.reuse_groups = reuse_groups
        self._forget_groups()

    def _forget_groups(self) -> None:
        self.consumer_version = 0
        self.running: dict[int, int] = {}
        self.finished: dict[int, StoredGroup] = {}
        self.reusable: dict[int, StoredGroup] = {}
        self.late: set[int] = set()
        self.untold: dict[int, str] = {}
        self.totals = {"groups_reused": 0, "discarded_tokens": 0, "wait_s": 0.0}
        self.ledger = Ledger()
        self._last_announced: tuple[int, int] | None = None  # (start version, group id)
        self._announced: dict[int, float] = {}  # when, on the monotonic clock
        self._count_groups()

    def _count_groups(self) -> None:
        """What the rule of consumption looks at, so that it need not look at each group."""
        starts = [group.start_version for group in self.finished.values()]
        self._running_starts = Counter(self.running.values())
        self._finished_starts = Counter(starts)
        self._order = sorted(zip(starts, self.finished, strict=True))
        self._must_check = True  # whether the deadlines can be met

    # ------------------------------------------------------------------ what happens to groups
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
        self._running_starts[start_version] += 1
        self._announced[group_id] = time.monotonic()
        # Only here can deadlines come into danger, and only that of the newest, as all others come
        # before it: consuming by the rule, delivery and retraction leave them as safe as they were.
        in_flight = {start_version: len(self.running) + len(self.finished)}
        least = least_staleness(
            self.consumer_version, groups_per_step=self.groups_per_step, waiting=in_flight
        )
        self._must_check |= least > self.max_staleness
        self.ledger.submit(group_id, start_version)

    def deliver(self, group_id: int, group: StoredGroup) -> None:
        """Marks a running group complete."""
        self.ledger.accept(group_id)
        now = time.monotonic()
        flight_s = now - self._leave_running(group_id)
        self.finished[group_id] = replace(group, flight_s=flight_s, arrived=now)
        self._finished_starts[group.start_version] += 1
        bisect.insort(self._order, (group.start_version, group_id))

    def retract(self, group_id: int, reason: str) -> None:
        """Marks a running group rejected."""
        self.ledger.reject(group_id, reason)
        self._leave_running(group_id)

    def check_announced(self, group_id: int, start_version: int | None = None) -> None:
        """Checks that a group is running, or dropped and not heard of since.

        Raises:
            ValueError: it is not, or was announced with another start version.
        """
        announced = self.running.get(group_id)
        if announced is None and group_id not in self.late:
            raise ValueError(
                f"group {group_id} is not running: it was never announced, or was delivered, "
                "retracted or dropped before; announce() a group when it is admitted and deliver "
                "it once"
            )
        if announced is not None and start_version not in (None, announced):
            raise ValueError(
                f"rows of group {group_id} have start version {start_version}; {announced} was "
                "announced"
            )

    def discard_late(self, group_id: int, tokens: Mapping[int, int] | None = None) -> bool:
        """Whether a group was dropped; then its rows (tokens by version) or retraction came now."""
        if group_id not in self.late:
            return False
        self.late.remove(group_id)
        self.totals["discarded_tokens"] += sum((tokens or {}).values())
        return True

    def drop_overdue(self) -> list[int]:
        """Drops the groups that should have been part of a step already; returns their ids."""
        overdue = []
        for group_id, start in self.running.items():  # in the order of start versions
            if start + self.max_staleness >= self.consumer_version:
                break
            overdue.append(group_id)
        for group_id in overdue:
            self.ledger.drop(group_id, "stale")
            self._leave_running(group_id)
            self.late.add(group_id)
            self.untold[group_id] = "stale"
        return overdue

    def _leave_running(self, group_id: int) -> float:
        """When it was announced."""
        start = self.running.pop(group_id)
        _decrease(self._running_starts, start)
        return self._announced.pop(group_id)

    # ------------------------------------------------------------------ sampling
    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Whether the next step's batch is there.

        Raises:
            RuntimeError: as :func:`~torchrl_llm_async.deadlines.check_deadlines`.
        """
        running: Mapping[int, int] = self._running_starts
        if self.on_stale == "drop":
            # Those due now that are still running will be dropped, so they claim no place.
            due = self.consumer_version - self.max_staleness
            running = {start: count for start, count in running.items() if start > due}
        bounds = {"groups_per_step": self.groups_per_step, "max_staleness": self.max_staleness}
        # One that claims no place now may be delivered and claim one.
        if self._must_check or self.on_stale == "drop":
            waiting = self._finished_starts + Counter(running)
            check_deadlines(self.consumer_version, **bounds, waiting=waiting)
            self._must_check = False
        return is_ready(
            self.consumer_version, **bounds, finished=self._finished_starts, running=running
        )

    def describe_wait(self) -> str:
        """What the next step waits for, as part of a message."""
        text = (
            f"it takes {self.groups_per_step} groups, {len(self.finished)} are complete and "
            f"{len(self.running)} running"
        )
        if not self.running:
            return text + "; is a producer at work, and does it announce its groups?"
        group_id, start = next(iter(self.running.items()))
        due = start + self.max_staleness
        return f"{text}, the oldest of them group {group_id}, due at step {due}"

    def sample(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Consumes the next step's groups and advances :attr:`consumer_version`.

        Returns:
            The slots of the rows, int64 [(B + reused groups) * K], and an info dict with
            ``"step"``, ``"group_ids"``, ``"reused_ids"``, lags in steps (:func:`.lag_figures` of
            ``"token"``, ``"sample"`` and its two parts ``"flight"`` and ``"queue"``),
            ``"lag_histogram"``, tokens by their lag, and of the groups consumed the mean and the
            longest time in seconds, ``"flight_s_mean"`` and so on.

        Raises:
            RuntimeError: the batch is not there yet.
        """
        if not self.can_sample(storage, batch_size):
            raise RuntimeError(f"step {self.consumer_version} has to wait for more groups")
        step = self.consumer_version
        self.ledger.begin_step()
        chosen = self._order[: self.groups_per_step]
        del self._order[: self.groups_per_step]
        fresh: dict[int, StoredGroup] = {}
        for start, group_id in chosen:
            fresh[group_id] = self.finished.pop(group_id)
            _decrease(self._finished_starts, start)
            self.ledger.consume(group_id)
        reused = self._choose_reused()
        groups = [*fresh.values(), *reused.values()]
        self.totals["groups_reused"] += len(reused)
        self.consumer_version += 1
        self._free_used({**self.reusable, **fresh}, used={*fresh, *reused}, storage=storage)
        return torch.cat([group.index for group in groups]), {
            "step": step,
            "group_ids": list(fresh),
            "reused_ids": list(reused),
            **lags_of(step, groups),
            **seconds_of(fresh.values()),
        }

    def _choose_reused(self) -> dict[int, StoredGroup]:
        if not self.reuse_groups:
            return {}
        candidates = [
            (group_id, group.start_version, group.reward)
            for group_id, group in self.reusable.items()
        ]
        generator = getattr(self, "_rng", None)  # TorchRL's buffer sets it
        ids = choose_reused(candidates, self.reuse_groups, by=self.reuse, generator=generator)
        return {group_id: self.reusable[group_id] for group_id in ids}

    def _free_used(
        self, groups: dict[int, StoredGroup], *, used: set[int], storage: Storage
    ) -> None:
        """Keeps what the next step may reuse; the slots of the others are free."""
        groups = {i: replace(group, uses=group.uses + (i in used)) for i, group in groups.items()}
        keep = self._reusable_ids(
            (group.start_version, group_id)
            for group_id, group in groups.items()
            if self._may_be_reused(group.uses, group.oldest)
        )
        self.reusable = {i: group for i, group in groups.items() if i in keep}
        for group_id in groups.keys() - keep:
            self.free(groups[group_id].index, storage)

    def _may_be_reused(self, uses: int, oldest: Sequence[int]) -> bool:
        is_young = min(oldest) >= self.consumer_version - self.max_staleness
        return uses < self.max_reuse and is_young

    def _reusable_ids(self, candidates: Iterable[tuple[int, int]]) -> set[int]:
        """Of pairs (start version, id) the newest, as many as there is room for."""
        # Steps of this size leave no more, but those of a run resumed with fewer groups may have.
        room = self.max_staleness * self.groups_per_step
        return {group_id for _, group_id in heapq.nlargest(room, candidates)}

    # ------------------------------------------------------------------ slots
    def free(self, index: torch.Tensor, storage: Storage) -> None:
        """Gives slots back, to be written to again."""
        self._ensure_state(storage)
        self._sample_count[index] = self.max_sample_count
        self._live_mask[index] = False
        self._append_free_indices(index)

    def _pop_consumed_indices(
        self, storage: Storage | None = None, max_count: int | None = None
    ) -> torch.Tensor:
        # TorchRL 0.14.1 asks for free slots here before it writes, and where there are too few its
        # writer goes round and takes what is in use.
        index = super()._pop_consumed_indices(storage, max_count)
        missing = max_count - index.numel()
        if len(storage) + missing > storage.max_size:
            self._append_free_indices(index)
            raise RuntimeError(
                f"the storage of {storage.max_size} rows has no {max_count} free slots: "
                f"{len(self.finished)} groups wait to be consumed and {len(self.reusable)} may be "
                "reused; nothing was overwritten"
            )
        return index

    def _ensure_state(self, storage: Storage | None = None, *, min_capacity: int = 0) -> None:
        # TorchRL 0.14.1 goes through all slots here, several times for each group that enters. What
        # it brings in line there is so already, unless the storage has grown or shrunk.
        length = self._known_storage_len if storage is None else len(storage)
        capacity = -1 if self._sample_count is None else self._sample_count.numel()
        if length != self._known_storage_len or max(length, min_capacity) > capacity:
            super()._ensure_state(storage, min_capacity=min_capacity)

    def _empty(self) -> None:
        super()._empty()
        self._forget_groups()

    # ------------------------------------------------------------------ state
    def groups_state(self) -> dict[str, Any]:
        """All groups and their accounts, as a tree of plain values; clock times as ages."""
        now = time.monotonic()
        return {
            "groups_per_step": self.groups_per_step,
            "max_staleness": self.max_staleness,
            "consumer_version": self.consumer_version,
            "last_announced": self._last_announced,
            "running": [
                [group_id, start, now - self._announced[group_id]]
                for group_id, start in self.running.items()
            ],
            "finished": [group.pack(i, now) for i, group in self.finished.items()],
            "reusable": [group.pack(i, now) for i, group in self.reusable.items()],
            "late": sorted(self.late),
            "untold": list(map(list, self.untold.items())),
            "totals": dict(self.totals),
            "ledger": self.ledger.state_dict(),
        }

    def load_groups_state(
        self, state: dict[str, Any], store: Callable[[int], torch.Tensor] | None = None
    ) -> None:
        """Restores what :meth:`groups_state` gave.

        ``store`` is called once with the id of each group that stays, stores its rows and returns
        their slots; without it, they lie where they lay. Groups that the bounds no longer allow to
        be reused do not stay.

        Raises:
            ValueError: with these bounds some deadline can't be met any more.
        """
        running = {group_id: start for group_id, start, _ in state["running"]}
        self._check_bounds_of(state, in_flight=Counter(running.values()))
        self.consumer_version = state["consumer_version"]
        last = state["last_announced"]
        self._last_announced = None if last is None else tuple(last)
        now = time.monotonic()
        self.running = running
        self._announced = {group_id: now - age for group_id, _, age in state["running"]}
        keep = self._reusable_ids(
            (packed["start_version"], packed["id"])
            for packed in state["reusable"]
            if self._may_be_reused(packed["uses"], packed["oldest"])
        )
        reusable = [packed for packed in state["reusable"] if packed["id"] in keep]
        self.finished, self.reusable = (
            {packed["id"]: StoredGroup.unpack(packed, now, store) for packed in groups}
            for groups in (state["finished"], reusable)
        )
        self.late = set(state["late"])
        self.untold = {}  # With the controller's state go those that it has to be told of.
        self.totals = dict(state["totals"])
        self.ledger.load_state_dict(state["ledger"])
        self._count_groups()

    def _check_bounds_of(self, state: dict[str, Any], in_flight: Counter[int]) -> None:
        step = state["consumer_version"]
        in_flight.update(packed["start_version"] for packed in state["finished"])
        least = least_staleness(step, groups_per_step=self.groups_per_step, waiting=in_flight)
        if least > self.max_staleness:
            raise ValueError(
                f"{in_flight.total()} groups are in flight before step {step}, admitted with "
                f"groups_per_step={state['groups_per_step']} and max_staleness="
                f"{state['max_staleness']}; not all of them can be trained on in time with "
                f"groups_per_step={self.groups_per_step} and max_staleness={self.max_staleness}. "
                f"Go on with the former values, or with a max_staleness of at least {least}"
            )

    def state_dict(self) -> dict[str, Any]:
        """Everything but the bounds, which belong to the configuration."""
        return OrderedDict(super().state_dict(), groups=self.groups_state())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` gave, as :meth:`load_groups_state`."""
        self.load_groups_state(state_dict["groups"])
        super().load_state_dict(state_dict)
        if self._sample_count is None:
            return  # Nothing was ever stored.
        used = [group.index for group in (*self.finished.values(), *self.reusable.values())]
        self._live_mask[:] = False
        self._live_mask[torch.cat([torch.empty(0, dtype=torch.int64), *used])] = True
        self._sample_count[~self._live_mask] = self.max_sample_count
        self._rebuild_free_indices()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(groups_per_step={self.groups_per_step}, "
            f"max_staleness={self.max_staleness}, on_stale={self.on_stale!r}, "
            f"consumer_version={self.consumer_version})"
        )


def _decrease(counter: Counter[int], key: int) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
