"""The rule of admission: how many groups may be started, so that no sample grows too stale.

Owns :class:`StalenessController`. With the rule of consumption (:mod:`.deadlines`) it keeps the lag
of every training sample within ``max_staleness``: the consuming step minus the oldest version among
the sample's tokens, none of which is older than the version served when its group was admitted.
Knows no clock, no data and no engine; who waits is the affair of collector and replay buffer.

The rule is that of AReaL (arXiv:2505.24298, section 5.1): with N_r trajectories submitted so far,
floor((N_r - 1) / B) <= i + eta. On its own it bounds the lag only if data are consumed in order of
submission, which would make every step wait for the slowest group.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from torchrl_llm_async.deadlines import check_bounds


class StalenessController:
    """Admits groups within the staleness bound and keeps the ledger of what became of them.

    Step i consumes B groups and turns weights of version i into i + 1. While version v is served,
    at most ``min(v + max_staleness + 1, total_steps) * B`` groups may have been submitted, rejected
    and dropped ones not counted: what the steps up to v + max_staleness consume.

    Every group is exactly one of *running*, *accepted* (complete, handed on), *rejected* (failed
    before that) or *dropped* (given up by the consumer). The last two are refunded: others may be
    admitted in their place. All methods may be called from any thread. Consumer and producer may
    both end a group, in messages that cross: the later call returns False and changes nothing.
    A drop by the step of a group's deadline has to come before the version that this step makes.

    Args:
        groups_per_step: groups one training step consumes, B.
        max_staleness: largest lag of a training sample, in steps; 0 is on-policy training.
        total_steps: training steps of the whole run, beyond which nothing is admitted (0: nothing
            but evaluation); None for an endless run.

    Raises:
        ValueError: ``groups_per_step`` < 1, ``max_staleness`` < 0 or ``total_steps`` < 0.

    .. note:: If weights are published every k steps only, ``k <= max_staleness + 1`` is required:
        the last step before a publication could otherwise never be filled.

    Examples:
        >>> controller = StalenessController(groups_per_step=2, max_staleness=1)
        >>> controller.capacity()
        4
        >>> controller.admit(0), controller.admit(1)
        (0, 0)
        >>> controller.finish(0), controller.reject(1, "reward timeout")
        (True, True)
        >>> controller.capacity()  # group 1 is refunded
        3
        >>> controller.ledger()
        {'submitted': 2, 'running': 0, 'accepted': 1, 'rejected': 1, 'dropped': 0}
    """

    def __init__(
        self, *, groups_per_step: int, max_staleness: int, total_steps: int | None = None
    ) -> None:
        check_bounds(groups_per_step, max_staleness)
        if total_steps is not None and total_steps < 0:
            raise ValueError(f"total_steps is {total_steps}; it must be at least 0, or None")
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self.total_steps = total_steps
        self._lock = threading.Lock()
        self._served_version = 0
        self._last_admitted = -1
        self._running: dict[int, int] = {}  # start version by id
        self._dropped: set[int] = set()  # whose producer has not told of their end yet
        self._droppable: dict[int, int] = {}  # accepted; start version by id
        self._submitted = self._accepted = 0
        self._rebased = 0  # added to the groups counted, as B was another before a resume
        self._reasons: Counter[tuple[str, str]] = Counter()  # of refunds, by (state, reason)

    @property
    def served_version(self) -> int:
        """Smallest version that any live engine serves."""
        return self._served_version

    def serve(self, version: int) -> None:
        """Records, after the switch, that every live engine serves ``version`` or a newer one.

        Raises:
            ValueError: ``version`` is older than the one served.
        """
        with self._lock:
            if version < self._served_version:
                raise ValueError(f"version {version} cannot be served after {self._served_version}")
            self._served_version = version
            # The others were consumed: the step of their deadline is behind this version.
            due = version - self.max_staleness
            self._droppable = {i: start for i, start in self._droppable.items() if start >= due}

    def capacity(self) -> int:
        """Number of groups that may be admitted now."""
        with self._lock:
            return self._capacity()

    def admit(self, group_id: int) -> int:
        """Admits a group.

        Args:
            group_id: 0 or more, and larger than that of every group admitted before.

        Returns:
            The group's start version: the version served now.

        Raises:
            RuntimeError: there is no capacity; ask :meth:`capacity` first.
            ValueError: the id is not larger than the last one.
        """
        with self._lock:
            if self._capacity() < 1:
                raise RuntimeError(
                    f"no group may be admitted while version {self._served_version} is served: "
                    f"max_staleness={self.max_staleness}, total_steps={self.total_steps}; wait "
                    "until capacity() is positive"
                )
            if group_id <= self._last_admitted:
                raise ValueError(
                    f"group id {group_id} is a duplicate or out of order: the last one was "
                    f"{self._last_admitted}; take ids from one increasing counter"
                )
            self._last_admitted = group_id
            self._running[group_id] = self._served_version
            self._submitted += 1
            return self._served_version

    def finish(self, group_id: int) -> bool:
        """Records that a running group is complete: running -> accepted.

        Raises:
            ValueError: the group is not running.
        """
        with self._lock:
            if self._was_dropped(group_id):
                return False
            self._droppable[group_id] = self._leave_running(group_id, "finished")
            self._accepted += 1
            return True

    def reject(self, group_id: int, reason: str) -> bool:
        """Records that a running group failed, and refunds it: running -> rejected.

        Refunds are counted by ``reason``; use few, fixed names.

        Raises:
            ValueError: the group is not running.
        """
        with self._lock:
            if self._was_dropped(group_id):
                return False
            self._leave_running(group_id, "rejected")
            self._reasons["rejected", reason] += 1
            return True

    def drop(self, group_id: int, reason: str) -> bool:
        """Records that the consumer gave up a running or accepted group, and refunds it.

        False if it was refunded before, or was accepted and its deadline is past.

        Raises:
            ValueError: the group was never admitted.
        """
        with self._lock:
            if group_id in self._droppable:
                del self._droppable[group_id]
                self._accepted -= 1
            elif group_id in self._running or group_id > self._last_admitted:
                self._leave_running(group_id, "dropped")
                self._dropped.add(group_id)
            else:
                return False
            self._reasons["dropped", reason] += 1
            return True

    def ledger(self) -> dict[str, int]:
        """Number of groups submitted, and in each state; a RuntimeError if they do not add up."""
        with self._lock:
            states = {"running": len(self._running), "accepted": self._accepted}
            for end in ("rejected", "dropped"):
                states[end] = sum(n for (kind, _), n in self._reasons.items() if kind == end)
            if sum(states.values()) != self._submitted:
                raise RuntimeError(f"{self._submitted} groups were submitted, but {states}")
            return {"submitted": self._submitted, **states}

    def reasons(self) -> dict[tuple[str, str], int]:
        """Number of refunded groups by state (``"rejected"`` or ``"dropped"``) and reason."""
        with self._lock:
            return dict(self._reasons)

    def state_dict(self) -> dict[str, Any]:
        """Everything but ``max_staleness`` and ``total_steps``, as JSON has it."""
        with self._lock:
            return {
                "groups_per_step": self.groups_per_step,
                "served_version": self._served_version,
                "last_admitted": self._last_admitted,
                "running": list(map(list, self._running.items())),
                "droppable": list(map(list, self._droppable.items())),
                "dropped": sorted(self._dropped),
                "submitted": self._submitted,
                "accepted": self._accepted,
                "rebased": self._rebased,
                "reasons": [[*key, count] for key, count in self._reasons.items()],
            }

    def load_state_dict(self, state: dict[str, Any], *, step: int) -> None:
        """Restores what :meth:`state_dict` gave, in a run that goes on with step ``step``.

        With another ``groups_per_step`` B', the groups consumed count as ``step * B'``: those in
        flight take the same room as before. Whether their deadlines, start version + the new
        ``max_staleness``, can be met is the consumer's to say (:func:`.check_deadlines`).
        """
        with self._lock:
            self._served_version = state["served_version"]
            self._last_admitted = state["last_admitted"]
            self._running = dict(map(tuple, state["running"]))
            self._droppable = dict(map(tuple, state["droppable"]))
            self._dropped = set(state["dropped"])
            self._submitted, self._accepted = state["submitted"], state["accepted"]
            self._rebased = state["rebased"]
            self._rebased += step * (self.groups_per_step - state["groups_per_step"])
            self._reasons = Counter({(kind, why): n for kind, why, n in state["reasons"]})

    def _capacity(self) -> int:
        steps = self._served_version + self.max_staleness + 1
        if self.total_steps is not None:
            steps = min(steps, self.total_steps)
        counted = len(self._running) + self._accepted + self._rebased
        return max(steps * self.groups_per_step - counted, 0)  # less, if bounds have shrunk

    def _was_dropped(self, group_id: int) -> bool:
        was_dropped = group_id in self._dropped
        self._dropped.discard(group_id)  # a producer ends a group once
        return was_dropped

    def _leave_running(self, group_id: int, verb: str) -> int:
        if group_id not in self._running:
            raise ValueError(
                f"group {group_id} cannot be {verb}: it is not running; finish or reject it once"
            )
        return self._running.pop(group_id)
