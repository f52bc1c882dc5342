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
        RuntimeError: for some j more than (j - step + 1) * B groups are due by step j.
    """
    due = 0
    for start in sorted(waiting):
        due += waiting[start]
        steps = max(start + max_staleness - step + 1, 0)
        if due > steps * groups_per_step:
            raise RuntimeError(
                f"at step {step}, {due} groups are due by step {start + max_staleness}, but only "
                f"{steps * groups_per_step} can be consumed by then: more groups were admitted "
                f"than max_staleness={max_staleness} and groups_per_step={groups_per_step} allow; "
                "give the controller and the buffer the same values"
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

    Args:
        step: the consuming step, also the version of the weights it trains.
        groups_per_step: groups one step consumes, B.
        max_staleness: largest lag allowed, in steps.
        finished: number of groups that are complete and not yet consumed, by start version.
        running: number of groups that are admitted and not complete, by start version. Leave out
            those that are going to be dropped.

    Raises:
        RuntimeError: some deadline cannot be met whatever is chosen, because more groups were
            admitted than the staleness bound allows.

    Examples:
        >>> rule = dict(groups_per_step=2, max_staleness=1)
        >>> is_ready(0, **rule, finished={0: 2}, running={0: 2})
        True
        >>> is_ready(1, **rule, finished={0: 1, 1: 1}, running={0: 1})  # one of version 0 is due
        False
    """
    bounds = dict(groups_per_step=groups_per_step, max_staleness=max_staleness)
    left_over = Counter(running)
    left_over.update(finished)
    check_deadlines(step, **bounds, waiting=left_over)
    to_take = groups_per_step
    for start in sorted(finished):
        taken = min(finished[start], to_take)
        left_over[start] -= taken
        to_take -= taken
        if not to_take:
            break
    if to_take:
        return False
    due = 0
    for start in sorted(left_over):
        due += left_over[start]
        if due > max(start + max_staleness - step, 0) * groups_per_step:
            return False
    return True


def select_groups(
    step: int,
    *,
    groups_per_step: int,
    max_staleness: int,
    finished: Mapping[int, int],
    running: Mapping[int, int],
) -> list[int] | None:
    """Chooses the groups that step ``step`` consumes, or says that it has to wait.

    Finished groups go first in, first out: by start version, then by id.

    Args:
        step: the consuming step.
        groups_per_step: groups one step consumes, B.
        max_staleness: largest lag allowed, in steps.
        finished: start version by id of the groups that are complete and not yet consumed.
        running: start version by id of the groups that are admitted and not complete.

    Returns:
        The ids of B finished groups in their order, or None if :func:`is_ready` says no.

    Raises:
        RuntimeError: as :func:`is_ready`.

    Examples:
        >>> rule = dict(groups_per_step=2, max_staleness=1)
        >>> select_groups(0, **rule, finished={1: 0, 2: 0}, running={0: 0, 3: 0})
        [1, 2]
        >>> select_groups(1, **rule, finished={3: 0, 4: 1}, running={0: 0}) is None  # 0 is due now
        True
        >>> select_groups(1, **rule, finished={0: 0, 3: 0, 4: 1}, running={})
        [0, 3]
    """
    ready = is_ready(
        step,
        groups_per_step=groups_per_step,
        max_staleness=max_staleness,
        finished=Counter(finished.values()),
        running=Counter(running.values()),
    )
    if not ready:
        return None
    order = sorted(finished, key=lambda group_id: (finished[group_id], group_id))
    return order[:groups_per_step]
