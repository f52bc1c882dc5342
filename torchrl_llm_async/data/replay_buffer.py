"""A replay buffer of whole groups, consumed once each and never later than the staleness bound.

Owns what lies between a producer of finished groups and the training step: which groups are
expected, complete or due, the wait for a batch, and the accounts of all groups. What the rule of
consumption *is* stands in :mod:`torchrl_llm_async.deadlines`, what rows may enter in
:mod:`.row_checks`; how many groups may be started is the controller's business, not the buffer's.
Knows no engine, no policy and no loss; an advantage is computed by whatever transform is given.

Storage, reuse of slots and the hooks for transforms are TorchRL's: rows lie in a
:class:`~torchrl.data.LazyStackStorage`, and the sampler is a
:class:`~torchrl.data.replay_buffers.samplers.ConsumingSampler`, whose consumed slots the buffer
writes to first. Memory is thus bounded by the groups in flight, (max_staleness + 1) * B, and those
that may be used again, max_staleness * B.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDictBase, lazy_stack
from torchrl._utils import logger as torchrl_logger
from torchrl.data import LazyStackStorage, ReplayBuffer, Storage
from torchrl.envs.transforms import Transform

from torchrl_llm_async.data.reuse import Reuse
from torchrl_llm_async.data.row_checks import RowChecks
from torchrl_llm_async.data.sampler import StalenessSampler
from torchrl_llm_async.data.snapshot import BufferSnapshot
from torchrl_llm_async.data.stored_group import StoredGroup


class StalenessReplayBuffer(ReplayBuffer):
    """A replay buffer whose :meth:`sample` blocks until the next step's groups are complete.

    Producers :meth:`announce` a group when it is admitted and :meth:`extend` the buffer with its
    rows when all of them are done; between the two it is *running*. Each call of :meth:`sample`
    serves one training step, in the order of steps, and consumes B whole groups, each exactly once.
    No sampled token in a batch lags behind by more than ``max_staleness`` steps.

    The transform is applied as in any TorchRL buffer, its inverse on the way in and its forward on
    the way out, with one guarantee on the way in: it sees one whole group at a time, of batch size
    (K,), once. So it is the place to shape rewards, too. Of a
    :class:`~torchrl.envs.transforms.Compose` the last transform comes first on the way in:
    ``Compose(GroupAdvantage(...), shaping)`` computes advantages from shaped rewards.

    Args:
        groups_per_step: groups one step consumes, B.
        max_staleness: largest lag of a sample, in steps; 0 is on-policy training. Use the
            controller's values for both.
        group_size: rows of a group, K.

    Keyword Args:
        on_stale: at a deadline, ``"wait"`` for groups that are still running (nothing is lost, and
            long answers are not disfavoured), or ``"drop"`` them once B complete groups satisfy the
            rule of consumption without them.
        on_drop: called as ``on_drop(group_id, "stale")`` for each dropped group, so that it is
            refunded; usually :meth:`.StalenessController.drop`, or a message to it. Required by
            ``on_stale="drop"``.
        max_reuse: steps that may train on a group, the one that consumes it included. With more
            than 1, each step trains on up to ``reuse_groups`` groups consumed before, beside its B
            fresh ones: none of them twice, and none with a token older than ``max_staleness``.
            They are outside admission, deadlines and the ledger.
        reuse: how they are chosen, see :func:`~torchrl_llm_async.data.reuse.choose_reused`.
        reuse_groups: how many of them a step has, if there are so many; by default
            ``(max_reuse - 1) * B``.
        storage: defaults to a :class:`~torchrl.data.LazyStackStorage` of the least size,
            ``(max_staleness + 1) * B * K`` rows and, with reuse, ``max_staleness * B * K`` more.
        transform: e.g. :class:`~torchrl_llm_async.objectives.GroupAdvantage`.
        group_id_key: int64 [], the group of a row. Defaults to ``("group", "id")``.
        group_index_key: int64 [], its place in the group, 0 to K - 1. Defaults to
            ``("group", "index")``.
        start_version_key: int64 [], the group's start version. Defaults to
            ``("group", "start_version")``.
        version_key: int64 [T], the version that sampled each token, -1 for others. Defaults to
            ``("policy_version", "full")``.
        reward_key: float32 [1] or [], read for ``reuse="reward"``. Defaults to
            ``("next", "reward")``.
        **kwargs: passed to :class:`~torchrl.data.ReplayBuffer`.

    Raises:
        ValueError: a bound or the group size is too small, the storage cannot hold the groups in
            flight, or ``on_stale="drop"`` without ``on_drop``.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict, lazy_stack
        >>> buffer = StalenessReplayBuffer(groups_per_step=1, max_staleness=1, group_size=2)
        >>> def row(group_id, index, version):
        ...     return TensorDict({
        ...         "group": {"id": torch.tensor(group_id), "index": torch.tensor(index),
        ...                   "start_version": torch.tensor(version)},
        ...         "policy_version": {"full": torch.tensor([-1, version, version])}})
        >>> buffer.announce(0, start_version=0)
        >>> buffer.extend(lazy_stack([row(0, 0, 0), row(0, 1, 0)]))
        tensor([0, 1])
        >>> batch = buffer.sample(timeout=60.0)
        >>> batch["group", "index"], buffer.consumer_version, len(buffer)
        (tensor([0, 1]), 1, 0)
    """

    _copy_rows = False  # whether the storage's rows will be needed after the batch was taken

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_staleness: int,
        group_size: int,
        on_stale: Literal["wait", "drop"] = "wait",
        on_drop: Callable[[int, str], object] | None = None,
        max_reuse: int = 1,
        reuse: Reuse = "recency",
        reuse_groups: int | None = None,
        storage: Storage | Callable[[], Storage] | None = None,
        transform: Transform | Callable | None = None,
        group_id_key: NestedKey = ("group", "id"),
        group_index_key: NestedKey = ("group", "index"),
        start_version_key: NestedKey = ("group", "start_version"),
        version_key: NestedKey = ("policy_version", "full"),
        reward_key: NestedKey = ("next", "reward"),
        **kwargs: Any,
    ) -> None:
        if reuse_groups is None:
            reuse_groups = (max_reuse - 1) * groups_per_step
        sampler = StalenessSampler(
            groups_per_step=groups_per_step,
            max_staleness=max_staleness,
            on_stale=on_stale,
            max_reuse=max_reuse,
            reuse=reuse,
            reuse_groups=reuse_groups,
        )
        if group_size < 1:
            raise ValueError(f"group_size is {group_size}; it must be at least 1")
        if (on_stale == "drop") != (on_drop is not None):
            raise ValueError(
                f"on_stale={on_stale!r} with on_drop={on_drop}: on_stale='drop' needs an on_drop, "
                "such as StalenessController.drop, or dropped groups would never be replaced; "
                "on_stale='wait' drops nothing"
            )
        kept = max_staleness if max_reuse > 1 else 0
        rows_in_flight = (max_staleness + 1 + kept) * groups_per_step * group_size
        super().__init__(
            storage=LazyStackStorage(rows_in_flight) if storage is None else storage,
            sampler=sampler,
            batch_size=groups_per_step * group_size,
            transform=transform,
            **kwargs,
        )
        if self.storage.max_size < rows_in_flight:
            raise ValueError(
                f"the storage holds {self.storage.max_size} rows; up to {rows_in_flight} are in "
                f"flight, (max_staleness + 1) * groups_per_step * group_size, or may be reused, "
                "max_staleness * groups_per_step * group_size; pass a storage of at least that "
                "max_size, or none"
            )
        self.group_size = group_size
        self._on_drop = on_drop
        self._checks = RowChecks(
            group_size=group_size,
            group_id_key=group_id_key,
            group_index_key=group_index_key,
            start_version_key=start_version_key,
            version_key=version_key,
            reward_key=reward_key if max_reuse > 1 and reuse == "reward" else None,
        )
        # The base class reads and writes under this lock too, so a wait releases all of it.
        self._changed = threading.Condition(self._replay_lock)
        self._failure: BaseException | None = None
        self._in_snapshot: set[int] = set()  # groups that may not have been consumed since
        self._last_batch: dict[str, float] = {}

    @property
    def consumer_version(self) -> int:
        """The step that consumes next; also the version of the weights it trains."""
        return self.sampler.consumer_version

    # ------------------------------------------------------------------ producers
    def announce(self, group_id: int, start_version: int) -> None:
        """Tells that a group was admitted and will come.

        Args:
            group_id: larger than that of every group announced before.
            start_version: version served when the group was admitted.

        Raises:
            ValueError: the group comes out of order. A fresher group must not become known before
                an older one, which it could then overtake unchecked.
            RuntimeError: more groups are in flight than the bound allows, or the buffer is closed.
        """
        with self._changed:
            self._raise_if_over()
            self.sampler.announce(group_id, start_version)
            self._changed.notify_all()

    def retract(self, group_id: int, reason: str) -> None:
        """Tells that an announced group will not come.

        Call it before the group's refund by :meth:`.StalenessController.reject` lets another group
        be announced in its place. A group that was dropped in the meantime is no error.

        Raises:
            ValueError: the group is not running.
        """
        with self._changed:
            self._raise_if_over()
            self.sampler.check_announced(group_id)
            if self.sampler.discard_late(group_id):
                return
            self.sampler.retract(group_id, reason)
            torchrl_logger.debug(f"group {group_id} retracted: {reason}")
            self._changed.notify_all()

    def extend(self, data: TensorDictBase, *, update_priority: bool | None = None) -> torch.Tensor:
        """Adds one or several whole groups.

        Rows of groups that were dropped in the meantime are discarded and counted.

        Args:
            data: batch size (G * K,), rows of a group adjacent. Without a transform the rows
                are kept, not copied.

        Returns:
            The slots of the rows kept, int64 [<= G * K].

        Raises:
            ValueError: the rows are not whole groups with indices 0 to K - 1, a group is not
                running, its start version is not the announced one, or a row holds no sampled
                token, one older than its start version or one newer than the trainer. Nothing is
                stored then, of any group.
            RuntimeError: the buffer is closed, the transform returned other than K rows, or, before
                anything is overwritten, the storage is full.
            Exception: whatever the transform raises. Groups that came before it are stored.
        """
        slots = [torch.empty(0, dtype=torch.int64)]
        with self._changed:
            self._raise_if_over()
            groups = self._checks.split(data, newest_version=self.consumer_version)
            for _, group_id, summary in groups:
                self.sampler.check_announced(group_id, summary["start_version"])
            try:
                for rows, group_id, summary in groups:
                    if not self.sampler.discard_late(group_id, summary["token_versions"]):
                        slots.append(self._store(rows, group_id, summary, update_priority))
            finally:  # Where a group fails, those before it are there.
                self._changed.notify_all()
        return torch.cat(slots)

    def _store(
        self, rows: TensorDictBase, group_id: int, summary: dict[str, Any], priority: bool | None
    ) -> torch.Tensor:
        index = super().extend(rows, update_priority=priority)
        if index.numel() != self.group_size:
            self.sampler.free(index, self.storage)
            raise RuntimeError(
                f"the transform turned the {self.group_size} rows of group {group_id} into "
                f"{index.numel()}; reject groups where they are produced, not here"
            )
        group = StoredGroup(index=index, delivered_at=self.consumer_version, **summary)
        self.sampler.deliver(group_id, group)
        return index

    def add(self, data: TensorDictBase) -> torch.Tensor:
        """Adds one row; only a group of size 1 is whole."""
        return self.extend(lazy_stack([data]))

    def fail(self, error: BaseException) -> None:
        """Tells that production is over; everybody who waits or comes later gets ``error``.

        The first failure counts: those after it are usually its consequence.
        """
        with self._changed:
            if self._failure is None:
                self._failure = error
            self._changed.notify_all()

    # ------------------------------------------------------------------ the consumer
    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        *,
        timeout: float | None = None,
    ) -> TensorDictBase | tuple[TensorDictBase, dict[str, Any]]:
        """Waits for the next step's batch, consumes it and advances :attr:`consumer_version`.

        Args:
            batch_size: None or B * K, there for the interface's sake.
            return_info: also return a dict with ``"step"``, ``"group_ids"``, ``"reused_ids"``, the
                slots as ``"index"``, and the lags.
            timeout: seconds to wait; None for ever.

        Returns:
            B * K rows, lazily stacked, in the order of start version, group id and index; then
            those of groups that are reused, in the order of their ids.

        Raises:
            TimeoutError: the batch is not complete after ``timeout`` seconds. Nothing is consumed.
            RuntimeError: the buffer is closed, or more groups were admitted than the bound allows.
            BaseException: whatever :meth:`fail` was given.
        """
        if batch_size not in (None, self.batch_size):
            raise ValueError(
                f"batch_size is {batch_size}; a step consumes groups_per_step * group_size = "
                f"{self.batch_size} rows (to limit the wait, pass timeout= by name)"
            )
        begin = time.monotonic()
        with self._changed:
            ready = self._changed.wait_for(lambda: self._is_over() or self.can_sample(), timeout)
            waited = time.monotonic() - begin
            self.sampler.totals["wait_s"] += waited
            self._raise_if_over()
            if not ready:
                raise TimeoutError(
                    f"step {self.consumer_version} has no batch after {waited:.1f} s: "
                    f"{self.sampler.describe_wait()}"
                )
            depth = len(self.sampler.finished)
            shared = not self._in_snapshot.isdisjoint(self.sampler.finished)
            self._copy_rows = shared or self.sampler.reuse_groups > 0
            batch, info = super().sample(return_info=True)
            self._last_batch = {k: v for k, v in info.items() if isinstance(v, int | float)}
            del self._last_batch["step"]
            for lag, tokens in info["lag_histogram"].items():
                self._last_batch[f"lag_tokens/{lag}"] = tokens
            self._last_batch |= {"last_wait_s": waited, "queue_depth": depth}
            # With on_stale="wait" there are none: the step has waited for them.
            dropped = self.sampler.drop_overdue()
        # Not under the lock: whoever is told may hold a lock of its own and call the buffer.
        for group_id in dropped:
            self._on_drop(group_id, "stale")
            with self._changed:
                self.sampler.untold.pop(group_id, None)
        return (batch, info) if return_info else batch

    def shutdown(self, timeout: float | None = None) -> None:
        """Ends the buffer; whoever waits gets a RuntimeError. Idempotent."""
        super().shutdown(timeout)
        with self._changed:
            self._changed.notify_all()

    close = shutdown

    def ledger(self) -> dict[str, Any]:
        """What became of all groups, and by start version: :meth:`.Ledger.counts` and ``news``.

        Returns:
            ``"submitted"``, ``"running"``, ``"accepted"``, ``"rejected"``, ``"dropped"`` and
            ``"consumed"`` of the whole run; under ``"by_version"`` the same, without zeros, for the
            versions that have groups under way or changed in the last two steps.

        Raises:
            RuntimeError: it does not add up, or is not what the buffer holds.
        """
        with self._changed:
            return {**self._counts(), "by_version": self.sampler.ledger.news()}

    def _counts(self) -> dict[str, int]:
        counts = self.sampler.ledger.counts()
        held = len(self.sampler.running), len(self.sampler.finished)
        if held != (counts["running"], counts["accepted"] - counts["consumed"]):
            raise RuntimeError(f"the buffer holds {held} groups, its ledger says {counts}")
        return counts

    def stats(self) -> dict[str, int | float | bool]:
        """TorchRL's figures and, beside them:

        - ``consumer_version``, the step that is next; ``groups_ready``, complete and not consumed;
        - the ledger since the start of the run, as ``groups_submitted``, ``groups_running``,
          ``groups_accepted``, ``groups_rejected``, ``groups_dropped`` and ``groups_consumed``, with
          ``rejected/<reason>`` and ``dropped/<reason>``;
        - ``groups_reused``; ``discarded_tokens``, of groups dropped before they came; ``wait_s``,
          spent in :meth:`sample`;
        - of the last batch ``last_wait_s``; ``queue_depth``, groups complete when it was taken; its
          lags in steps (mean, max, p10, p50, p90 of ``lag_token_...``, of ``lag_sample_...`` and
          of what a sample's lag is made of, ``lag_flight_...`` and ``lag_queue_...``);
          ``lag_tokens/<lag>``, sampled tokens by lag; and seconds between a fresh group's admission
          and completion, ``flight_s_mean`` and ``flight_s_max``, and from there to the batch,
          ``queue_s_mean`` and ``queue_s_max``.
        """
        with self._changed:
            reasons = self.sampler.ledger.reasons()
            return {
                **super().stats(),
                "consumer_version": self.consumer_version,
                "groups_ready": len(self.sampler.finished),
                **{f"groups_{name}": count for name, count in self._counts().items()},
                **{f"{end}/{reason}": count for (end, reason), count in reasons.items()},
                **self.sampler.totals,
                **self._last_batch,
            }

    # ------------------------------------------------------------------ checkpoints
    def snapshot(self) -> BufferSnapshot:
        """Everything as it is now, for :meth:`BufferSnapshot.save` to write whenever it likes.

        ``state["groups"]["untold"]`` lists the groups that are dropped, with the reasons, of which
        ``on_drop`` has not been told to the end. That is for whoever restores the controller.
        """
        with self._changed:
            sampler = self.sampler
            groups = [*sampler.finished.values(), *sampler.reusable.values()]
            # One by one; a stack of them would take longer than all the rest.
            rows = [self.storage.get(slot) for group in groups for slot in group.index.tolist()]
            self._in_snapshot = set(sampler.finished)
            generator = getattr(self, "_rng", None)
            state = {
                "group_size": self.group_size,
                "groups": sampler.groups_state(),
                "order": [*sampler.finished, *sampler.reusable],
                "transform": dict(self.transform.state_dict()),
                "generator": None if generator is None else generator.get_state(),
            }
        return BufferSnapshot(rows, state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` gave, which some storages have.

        Raises:
            ValueError: with these bounds some deadline can't be met any more.
        """
        with self._changed:
            super().load_state_dict(state_dict)
            self._changed.notify_all()

    def empty(self, empty_write_count: bool = True) -> None:
        """Forgets all groups, those expected included, and the figures; the next step is step 0."""
        with self._changed:
            super().empty(empty_write_count)
            self._last_batch = {}

    def dumps(self, path: str | Path) -> None:
        """Saves the buffer into a folder, as JSON and safetensors."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        self.snapshot().save(folder)

    def loads(self, path: str | Path) -> None:
        """Restores into a new buffer what :meth:`dumps`, or a snapshot's ``save``, wrote.

        The bounds may be others, if every group in flight can still be trained on by its deadline,
        its start version plus ``max_staleness``, at ``groups_per_step`` a step.

        Raises:
            ValueError: they can't, or ``group_size`` is another one.
            RuntimeError: the buffer has been used already.
        """
        saved = BufferSnapshot.load(path)
        state = saved.state
        if state["group_size"] != self.group_size:
            raise ValueError(
                f"group_size is {self.group_size}, but {path} holds groups of "
                f"{state['group_size']}; keep that"
            )
        with self._changed:
            if self.sampler.running or self.sampler.finished or self.consumer_version:
                raise RuntimeError("load into a new buffer: this one has been used already")
            size = self.group_size
            begins = range(0, len(saved.rows), size)
            begin = dict(zip(state["order"], begins, strict=True))
            self.sampler.load_groups_state(
                state["groups"],
                store=lambda i: self._extend(lazy_stack(saved.rows[begin[i] : begin[i] + size])),
            )
            self.transform.load_state_dict(state["transform"])
            if state["generator"] is not None and getattr(self, "_rng", None) is not None:
                self._rng.set_state(state["generator"])
            self._changed.notify_all()

    # ------------------------------------------------------------------ inside, under the lock
    def _get_collate_fn(self, collate_fn: Callable | None) -> None:
        super()._get_collate_fn(collate_fn)
        collate = self._collate_fn

        def collate_own(data: Any) -> TensorDictBase:
            rows = collate(data)
            if not self._copy_rows:
                return rows
            # What the transform and the trainer write must be neither in a snapshot that is being
            # saved, nor there when the row is used again.
            return lazy_stack([row.copy() for row in rows.unbind(0)])

        self._collate_fn = collate_own

    def _is_over(self) -> bool:
        return self._failure is not None or not self.is_alive

    def _raise_if_over(self) -> None:
        if self._failure is not None:
            raise self._failure
        if not self.is_alive:
            raise RuntimeError("the replay buffer is closed")
