"""The rule of consumption: when a training step may go ahead, and with which groups.

Owns arithmetic on numbers of groups and their start versions. A group's *deadline* is its start
version + ``max_staleness``: consumed by then, no token of it lags by more. How many groups may be
in flight is the rule of admission (:mod:`.staleness`), which keeps this one from running into a
wall; who waits for a step to become ready is the replay buffer's affair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


def check_bounds(groups_per_step: int, max_staleness: int) -> None:
    """Refuses bounds that make no sense.

    Raises:
        ValueError: ``groups_per_step`` < 1 or ``max_staleness`` < 0.
    """
    if groups_per_step < 1:
        raise ValueError(f"groups_per_step is {groups_per_step}; it must be at least 1")
    if max_staleness < 0:
        raise ValueError(f"max_staleness is {max_staleness}; it must be 0 (on-policy) or more")


def least_staleness(step: int, *, groups_per_step: int, waiting: Mapping[int, int]) -> int:
    """The smallest ``max_staleness`` with which consuming from ``step`` on meets every deadline.

    In the order of start versions n groups take ceil(n / B) steps; no other order is better.

    Args:
        step: the step that consumes next.
        groups_per_step: groups one step consumes, B.
        waiting: number of groups not yet consumed, by start version.

    Examples:
        >>> least_staleness(5, groups_per_step=2, waiting={4: 3, 5: 1})  # 4, 4 at 5; 4, 5 at 6
        2
    """
    least, due = 0, 0
    for start in sorted(waiting):
        due += waiting[start]
        if due:
            last_step = step - 1 + -(-due // groups_per_step)  # rounded up
            if last_step - start > least:
                least = last_step - start
    return least


def check_deadlines(
    step: int, *, groups_per_step: int, max_staleness: int, waiting: Mapping[int, int]
) -> None:
    """Checks that every deadline can be met by consuming from ``step`` on.

    Args:
        step: the step that consumes next.
        groups_per_step: groups one step consumes, B.
        max_staleness: largest lag allowed, in steps.
        waiting: number of groups not yet consumed, by start version.

    Raises:
        RuntimeError: they can't; and what ``max_staleness`` would do.
    """
    least = least_staleness(step, groups_per_step=groups_per_step, waiting=waiting)
    if least > max_staleness:
        raise RuntimeError(
            f"more groups were admitted than step {step} and those after it can consume in time "
            f"with max_staleness={max_staleness} and groups_per_step={groups_per_step}: "
            f"{dict(sorted(waiting.items()))} by start version; they take a max_staleness of at "
            f"least {least}. Give the controller and the buffer the same values"
        )


def is_ready(
    step: int,
    *,
    groups_per_step: int,
    max_staleness: int,
    finished: Mapping[int, int],
    running: Mapping[int, int],
) -> bool:
    """Whether training step ``step`` may consume the B oldest finished groups now.

    They may overtake running groups with an older start version only if every deadline can still be
    met afterwards: for every step j >= ``step``, the groups with deadline <= j that are left over
    number at most ``(j - step) * groups_per_step``, what the steps after ``step`` up to j consume.
    If the oldest finished groups do not satisfy this, no other choice does.

    All deadlines have to be within reach, as :func:`check_deadlines` says. Then it is enough to
    look at versions up to that of the last group taken: up to any later one, B groups less are
    left, and there is a step less to consume them.

    Args:
        step: the consuming step, also the version of the weights it trains.
        groups_per_step: groups one step consumes, B.
        max_staleness: largest lag allowed, in steps.
        finished: number of groups that are complete and not yet consumed, by start version.
        running: number of groups that are admitted and not complete, by start version. Leave out
            those that are going to be dropped.

    Examples:
        >>> rule = dict(groups_per_step=2, max_staleness=1)
        >>> is_ready(0, **rule, finished={0: 2}, running={0: 2})
        True
        >>> is_ready(1, **rule, finished={0: 1, 1: 1}, running={0: 1})  # one of version 0 is due
        False
    """
    waiting = Counter(finished)
    waiting.update(running)
    due = taken = 0
    for start in sorted(waiting):
        due += waiting[start]
        taken += finished.get(start, 0)
        if taken >= groups_per_step:
            return True
        left_over = due - taken
        # None is allowed to be due by now, B by the next step, and so on.
        if left_over and left_over > (start + max_staleness - step) * groups_per_step:
            return False
    return False  # fewer than B are finished
