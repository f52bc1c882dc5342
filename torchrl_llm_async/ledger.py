"""What became of every group: accounts that always add up.

Owns the counts, in all and by start version, and the check of them. Knows neither rows nor rules:
whoever decides about a group enters it here. Not thread-safe on its own.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

_ENDS = ("consumed", "rejected", "dropped")
_ROWS = 100  # so many versions have a row of their own


class Ledger:
    """Accounts of groups, from their admission to their end.

    A group is submitted and *running*; then *accepted*, and some time *consumed*; or *rejected*
    from running, or *dropped* from running or accepted, for a reason. Accepted groups that are
    consumed remain accepted: submitted = running + accepted + rejected + dropped.

    Groups are known by id as long as they are running, or accepted and not consumed. Of the others
    a row of counts remains for each of the last 100 start versions, and one for all before, under
    version -1.

    Examples:
        >>> ledger = Ledger()
        >>> for group_id in range(3):
        ...     ledger.submit(group_id, start_version=0)
        >>> ledger.accept(0), ledger.consume(0), ledger.reject(1, "timeout")
        (None, None, None)
        >>> ledger.counts()
        {'submitted': 3, 'running': 1, 'accepted': 1, 'rejected': 1, 'dropped': 0, 'consumed': 1}
    """

    def __init__(self) -> None:
        self._running: dict[int, int] = {}  # start version by id
        self._waiting: dict[int, int] = {}  # the same, of those accepted and not consumed
        self._submitted: Counter[int] = Counter()  # by start version
        self._ended: dict[str, Counter[int]] = {end: Counter() for end in _ENDS}
        self._reasons: Counter[tuple[str, str]] = Counter()
        # Start versions of entries made since the last step began, and in the step before.
        self._touched: set[int] = set()
        self._touched_before: set[int] = set()

    def submit(self, group_id: int, start_version: int) -> None:
        """Enters a group that was admitted."""
        if group_id in self._running or group_id in self._waiting:
            raise ValueError(f"group {group_id} is entered already")
        self._running[group_id] = start_version
        if start_version not in self._submitted:
            self._fold(start_version - _ROWS)
        self._submitted[start_version] += 1
        self._touched.add(start_version)

    def accept(self, group_id: int) -> None:
        """running -> accepted."""
        self._waiting[group_id] = self._take(group_id, self._running)

    def consume(self, group_id: int) -> None:
        """accepted -> accepted and consumed."""
        self._ended["consumed"][self._take(group_id, self._waiting)] += 1

    def reject(self, group_id: int, reason: str) -> None:
        """running -> rejected."""
        self._ended["rejected"][self._take(group_id, self._running)] += 1
        self._reasons["rejected", reason] += 1

    def drop(self, group_id: int, reason: str) -> None:
        """running, or accepted and not consumed -> dropped."""
        source = self._waiting if group_id in self._waiting else self._running
        self._ended["dropped"][self._take(group_id, source)] += 1
        self._reasons["dropped", reason] += 1

    def begin_step(self) -> None:
        """Tells that the entries that follow are of another step."""
        self._touched_before, self._touched = self._touched, set()

    def counts(self) -> dict[str, int]:
        """Number of groups submitted, in each state, and consumed.

        Raises:
            RuntimeError: as :meth:`check`.
        """
        self.check()
        ended = {end: self._ended[end].total() for end in _ENDS}
        return {
            "submitted": self._submitted.total(),
            "running": len(self._running),
            "accepted": len(self._waiting) + ended["consumed"],
            "rejected": ended["rejected"],
            "dropped": ended["dropped"],
            "consumed": ended["consumed"],
        }

    def check(self) -> None:
        """Compares the groups submitted with those under way and those ended, which are kept apart.

        Raises:
            RuntimeError: they do not add up for some version, or the ended ones by reason.
        """
        found = Counter(self._running.values())
        found.update(self._waiting.values())
        for ended in self._ended.values():
            found.update(ended)
        if found != self._submitted:
            off = sorted(v for v in {*found, *self._submitted} if found[v] != self._submitted[v])
            raise RuntimeError(
                "the ledger does not add up for groups of "
                + ", ".join(f"version {v}: {found[v]} of {self._submitted[v]}" for v in off)
            )
        for end in ("rejected", "dropped"):
            count = sum(n for (kind, _), n in self._reasons.items() if kind == end)
            if count != self._ended[end].total():
                raise RuntimeError(
                    f"{self._ended[end].total()} groups were {end}, but by reason {count}: "
                    f"{dict(self._reasons)}"
                )

    def by_version(self) -> dict[int, dict[str, int]]:
        """The same counts for each start version; -1 stands for all that have no row any more."""
        running = Counter(self._running.values())
        waiting = Counter(self._waiting.values())
        consumed = self._ended["consumed"]
        return {
            version: {
                "submitted": submitted,
                "running": running[version],
                "accepted": waiting[version] + consumed[version],
                **{end: self._ended[end][version] for end in _ENDS},
            }
            for version, submitted in sorted(self._submitted.items())
        }

    def news(self) -> dict[int, dict[str, int]]:
        """The rows of :meth:`by_version` that matter now, without zeros.

        Those with groups under way, and those that have changed since the step before the last one
        began: so whoever reads them once a step gets the last state of each.

        Examples:
            >>> ledger = Ledger()
            >>> ledger.submit(0, start_version=0), ledger.submit(1, start_version=1)
            (None, None)
            >>> ledger.reject(0, "timeout")
            >>> ledger.news()
            {0: {'submitted': 1, 'rejected': 1}, 1: {'submitted': 1, 'running': 1}}
            >>> ledger.begin_step(), ledger.begin_step()
            (None, None)
            >>> ledger.news()
            {1: {'submitted': 1, 'running': 1}}
        """
        under_way = {*self._running.values(), *self._waiting.values()}
        wanted = under_way | self._touched | self._touched_before
        return {
            version: {name: count for name, count in row.items() if count}
            for version, row in self.by_version().items()
            if version in wanted
        }

    def reasons(self) -> dict[tuple[str, str], int]:
        """Number of groups by ``"rejected"`` or ``"dropped"``, and reason."""
        return dict(self._reasons)

    def state_dict(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        return {
            "running": _pairs(self._running),
            "waiting": _pairs(self._waiting),
            "submitted": _pairs(self._submitted),
            **{end: _pairs(self._ended[end]) for end in _ENDS},
            "reasons": [[*key, count] for key, count in self._reasons.items()],
            "touched": sorted(self._touched),
            "touched_before": sorted(self._touched_before),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` gave."""
        self._running = dict(map(tuple, state["running"]))
        self._waiting = dict(map(tuple, state["waiting"]))
        self._submitted = Counter(dict(map(tuple, state["submitted"])))
        self._ended = {end: Counter(dict(map(tuple, state[end]))) for end in _ENDS}
        self._reasons = Counter({(kind, why): count for kind, why, count in state["reasons"]})
        self._touched = set(state["touched"])
        self._touched_before = set(state["touched_before"])

    def _fold(self, before: int) -> None:
        """Adds up the rows of old versions none of whose groups is under way."""
        under_way = {*self._running.values(), *self._waiting.values()}
        old = {v for v in self._submitted if 0 <= v < before and v not in under_way}
        self._touched -= old
        self._touched_before -= old
        for version in old:
            for counter in (self._submitted, *self._ended.values()):
                counter[-1] += counter.pop(version, 0)

    def _take(self, group_id: int, groups: dict[int, int]) -> int:
        if group_id not in groups:
            raise ValueError(
                f"group {group_id} is not in that state: it was never announced, or was delivered, "
                "retracted or dropped before; announce() a group when it is admitted and deliver "
                "it once"
            )
        start_version = groups.pop(group_id)
        self._touched.add(start_version)
        return start_version


def _pairs(mapping: dict[int, int]) -> list[list[int]]:
    return [list(pair) for pair in mapping.items()]
