"""Bounded staleness as arithmetic: which groups may be started, and which may be trained on.

Owns the two rules that keep the lag of every training sample within ``max_staleness``: admission
(:class:`StalenessController`) and consumption (:func:`select_groups`). The words:

- A *step* consumes one batch of B *groups* (``groups_per_step``). Step i turns weights of *version*
  i into version i + 1; the initial weights are version 0.
- The *lag* of a sample is the consuming step minus the oldest version among its sampled tokens. No
  token of a group is older than its *start version*, the version served when the group was
  admitted, so a group consumed at its *deadline*, start version + ``max_staleness``, or earlier
  keeps the bound.

Deliberately knows no clock, no data, no engine and no transport. Nothing here blocks: who waits,
and on what, is the business of the collector and of the replay buffer.

The admission rule is that of AReaL (arXiv:2505.24298, section 5.1): with N_r trajectories submitted
so far, floor((N_r - 1) / B) <= i + eta. On its own it bounds the lag only if data are consumed in
order of submission, which would make every step wait for the slowest group; the consumption rule
says by how much a group may be overtaken without breaking a deadline later.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping


class StalenessController:
    """Admits groups within the staleness bound and keeps the ledger of what became of them.

    While version v is served, at most ``min(v + max_staleness + 1, total_steps) * groups_per_step``
    groups may have been submitted, rejected and dropped ones not counted: what the steps up to
    v + max_staleness consume.

    Every group is, at any time, exactly one of *running*, *accepted* (complete, handed on),
    *rejected* (failed before it was complete) or *dropped* (given up by the consumer). Rejected and
    dropped groups are refunded: others may be admitted in their place.

    All methods may be called from any thread. :meth:`finish`, :meth:`reject` and :meth:`drop`
    return False, and change nothing, if the group was refunded before: the consumer may drop a
    group while its last answer is on the way, and the two messages cross.

    Args:
        groups_per_step: groups one training step consumes, B.
        max_staleness: largest lag of a training sample, in steps; 0 is on-policy training.
        total_steps: training steps of the whole run, beyond which nothing is admitted (0: nothing
            but evaluation); None for an endless run.

    Raises:
        ValueError: ``groups_per_step`` < 1, ``max_staleness`` < 0 or ``total_steps`` < 0.

    .. note:: If weights are published every k steps only, ``k <= max_staleness + 1`` is required:
        otherwise the last step before a publication could never be filled.

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
        >>> controller.serve(1)
        >>> controller.capacity()
        5
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
        self._last_admitted: int | None = None
        self._running: set[int] = set()
        self._refunded: set[int] = set()
        self._submitted = self._accepted = 0
        self._reasons: Counter[tuple[str, str]] = Counter()  # of refunds, by (state, reason)

    @property
    def served_version(self) -> int:
        """Smallest version that any live engine serves."""
        return self._served_version

    def serve(self, version: int) -> None:
        """Records that every live engine serves ``version`` or a newer one.

        Call it after the switch, never before: an older reading is safe, a newer one is not.

        Raises:
            ValueError: ``version`` is older than the one served.
        """
        with self._lock:
            if version < self._served_version:
                raise ValueError(
                    f"version {version} cannot be served after {self._served_version}: an engine "
                    "joins the pool only once it serves the pool's version"
                )
            self._served_version = version

    def capacity(self) -> int:
        """Number of groups that may be admitted now."""
        with self._lock:
            return self._capacity()

    def admit(self, group_id: int) -> int:
        """Admits a group.

        Args:
            group_id: larger than that of every group admitted before, so that no id occurs twice
                and order by id is order of admission.

        Returns:
            The group's start version: the version served now.

        Raises:
            RuntimeError: there is no capacity; ask :meth:`capacity` first.
            ValueError: the id is not larger than the last one.
        """
        with self._lock:
            if self._capacity() < 1:
                raise RuntimeError(
                    f"group {group_id} cannot be admitted: while version {self._served_version} is "
                    f"served, max_staleness={self.max_staleness} and total_steps="
                    f"{self.total_steps} allow no more groups; wait until capacity() is positive"
                )
            if self._last_admitted is not None and group_id <= self._last_admitted:
                raise ValueError(
                    f"group id {group_id} is a duplicate or out of order: the last one was "
                    f"{self._last_admitted}; take ids from one increasing counter"
                )
            self._last_admitted = group_id
            self._running.add(group_id)
            self._submitted += 1
            return self._served_version

    def finish(self, group_id: int) -> bool:
        """Records that a running group is complete: running -> accepted.

        Raises:
            ValueError: the group is not running.
        """
        with self._lock:
            if group_id in self._refunded:
                return False
            self._leave_running(group_id, "finished")
            self._accepted += 1
            return True

    def reject(self, group_id: int, reason: str) -> bool:
        """Records that a running group failed, and refunds it: running -> rejected.

        The refund is counted under ``reason``; use few, fixed names.

        Raises:
            ValueError: the group is not running.
        """
        with self._lock:
            if group_id in self._refunded:
                return False
            self._leave_running(group_id, "rejected")
            self._refund(group_id, "rejected", reason)
            return True

    def drop(self, group_id: int, reason: str) -> bool:
        """Records that the consumer gave up a running or accepted group, and refunds it.

        The refund is counted under ``reason``. Accepted groups are not told apart: dropping one
        that was consumed is the caller's error.

        Raises:
            ValueError: the group is not running, and none is accepted.
        """
        with self._lock:
            if group_id in self._refunded:
                return False
            if group_id not in self._running and self._accepted:
                self._accepted -= 1
            else:
                self._leave_running(group_id, "dropped")
            self._refund(group_id, "dropped", reason)
            return True

    def ledger(self) -> dict[str, int]:
        """Number of groups submitted, and how many of them are in each state.

        Raises:
            RuntimeError: the states do not add up to the groups submitted.
        """
        with self._lock:
            states = {
                "running": len(self._running),
                "accepted": self._accepted,
                "rejected": self._refunds("rejected"),
                "dropped": self._refunds("dropped"),
            }
            if sum(states.values()) != self._submitted:
                raise RuntimeError(f"{self._submitted} groups were submitted, but {states}")
            return {"submitted": self._submitted, **states}

    def reasons(self) -> dict[tuple[str, str], int]:
        """Number of refunded groups by state (``"rejected"`` or ``"dropped"``) and reason."""
        with self._lock:
            return dict(self._reasons)

    def _capacity(self) -> int:
        steps = self._served_version + self.max_staleness + 1
        if self.total_steps is not None:
            steps = min(steps, self.total_steps)
        return steps * self.groups_per_step - (self._submitted - len(self._refunded))

    def _refunds(self, state: str) -> int:
        return sum(count for (kind, _), count in self._reasons.items() if kind == state)

    def _refund(self, group_id: int, state: str, reason: str) -> None:
        self._refunded.add(group_id)
        self._reasons[state, reason] += 1

    def _leave_running(self, group_id: int, verb: str) -> None:
        if group_id not in self._running:
            raise ValueError(
                f"group {group_id} cannot be {verb}: it is not running; admit a group first, and "
                "finish or reject it once"
            )
        self._running.remove(group_id)


def select_groups(
    step: int,
    *,
    groups_per_step: int,
    max_staleness: int,
    finished: Mapping[int, int],
    running: Mapping[int, int],
) -> list[int] | None:
    """Chooses the groups that training step ``step`` consumes, or says that it has to wait.

    Finished groups go first in, first out: by start version, then by id. A finished group may
    overtake a running one with an older start version only if every deadline can still be met
    afterwards: for every step j >= ``step``, the groups with deadline <= j that are left over
    number at most ``(j - step) * groups_per_step``, what the steps after ``step`` up to j consume.
    If the oldest finished groups do not satisfy this, no other choice does.

    Args:
        step: the consuming step, also the version of the weights it trains.
        groups_per_step: groups one step consumes, B.
        max_staleness: largest lag allowed, in steps.
        finished: start version by id of the groups that are complete and not yet consumed.
        running: start version by id of the groups that are admitted and not complete. Leave out
            those that are going to be dropped.

    Returns:
        The ids of B finished groups in their order, or None if the step has to wait until more
        groups are finished.

    Raises:
        RuntimeError: some deadline cannot be met whatever is chosen, because more groups were
            admitted than the staleness bound allows.

    Examples:
        >>> rule = dict(groups_per_step=2, max_staleness=1)
        >>> select_groups(0, **rule, finished={1: 0, 2: 0}, running={0: 0, 3: 0})
        [1, 2]
        >>> select_groups(1, **rule, finished={3: 0, 4: 1}, running={0: 0}) is None  # 0 is due now
        True
        >>> select_groups(1, **rule, finished={0: 0, 3: 0, 4: 1}, running={})
        [0, 3]
    """

    def steps_left(start_version: int) -> int:
        return start_version + max_staleness - step

    # In order of deadline, the rank of a group is the number of groups due by its deadline (for
    # the last of those that share it), so one pass checks the rule for every j.
    places = sorted(steps_left(start) for start in (*finished.values(), *running.values()))
    for rank, left in enumerate(places, start=1):
        if rank > (left + 1) * groups_per_step:
            raise RuntimeError(
                f"at step {step}, {rank} groups are due by step {step + left}, but only "
                f"{max(left + 1, 0) * groups_per_step} can be consumed by then: more groups were "
                f"admitted than max_staleness={max_staleness} and groups_per_step="
                f"{groups_per_step} allow; give the controller and the buffer the same values"
            )
    if len(finished) < groups_per_step:
        return None
    order = sorted(finished, key=lambda group_id: (finished[group_id], group_id))
    chosen, rest = order[:groups_per_step], order[groups_per_step:]
    left_over = sorted(steps_left(start) for start in (*map(finished.get, rest), *running.values()))
    if any(rank > left * groups_per_step for rank, left in enumerate(left_over, start=1)):
        return None
    return chosen


def check_bounds(groups_per_step: int, max_staleness: int) -> None:
    """Refuses bounds that make no sense.

    Raises:
        ValueError: ``groups_per_step`` < 1 or ``max_staleness`` < 0.
    """
    if groups_per_step < 1:
        raise ValueError(f"groups_per_step is {groups_per_step}; it must be at least 1")
    if max_staleness < 0:
        raise ValueError(f"max_staleness is {max_staleness}; it must be 0 (on-policy) or more")
