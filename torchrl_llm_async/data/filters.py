"""Group filters: why a complete group is not worth training on.

A filter is any callable that takes the trajectories of a group and returns a reason, or None. The
collector rejects the group under that reason and admits another in its place. One filter sees all
groups of a collector, one after the other in the order in which they are complete, so it may have a
memory; a checkpoint does not hold it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from torchrl_llm_async.data.trajectory import Trajectory

GroupFilter = Callable[[Sequence[Trajectory]], str | None]


class RejectEqualRewards:
    """Rejects groups whose rewards are all equal: relative to their group none is better.

    The "dynamic sampling" of DAPO (arXiv:2503.14476, section 3.2), which keeps a batch full of
    groups with a gradient. It makes the training distribution depend on the policy: problems that
    are solved always, or never, leave it.

    Args:
        tolerance: rewards that differ by no more than this are equal.

    Examples:
        >>> from types import SimpleNamespace as Answer  # what the filter reads of a Trajectory
        >>> right, wrong = Answer(reward=1.0), Answer(reward=0.0)
        >>> reject = RejectEqualRewards()
        >>> reject([right, wrong]) is None, reject([wrong, wrong])
        (True, 'equal rewards')
    """

    def __init__(self, tolerance: float = 0.0):
        if tolerance < 0:
            raise ValueError(f"tolerance is {tolerance}; it must be 0 or more")
        self.tolerance = tolerance

    def __call__(self, trajectories: Sequence[Trajectory]) -> str | None:
        rewards = [trajectory.reward for trajectory in trajectories]
        return "equal rewards" if max(rewards) - min(rewards) <= self.tolerance else None


class RejectRepeatedPrompts:
    """Rejects groups whose prompt is that of one of the last groups that passed.

    For environments that draw problems with replacement. Prompts are compared as text, and only
    once a group is complete, so its tokens have been paid for. A group that is rejected is not
    remembered, but one that a later filter rejects is: of several filters, let this be the last.

    The memory is lost when a run is resumed: prompts from before the checkpoint pass once more.

    Args:
        window: groups it remembers. With no more different prompts than this every further group
            would be rejected, until the collector's ``max_rejections`` ends the run.

    Examples:
        >>> from types import SimpleNamespace as Answer  # what the filter reads of a Trajectory
        >>> reject = RejectRepeatedPrompts(window=1)
        >>> [reject([Answer(prompt=prompt)] * 2) for prompt in ("2+2", "2+2", "1+1", "2+2")]
        [None, 'repeated prompt', None, None]
    """

    def __init__(self, window: int):
        if window < 1:
            raise ValueError(f"window is {window}; it must be at least 1 group")
        self.window = window
        self._passed: deque[str] = deque(maxlen=window)

    def __call__(self, trajectories: Sequence[Trajectory]) -> str | None:
        prompt = trajectories[0].prompt
        if prompt in self._passed:
            return "repeated prompt"
        self._passed.append(prompt)
        return None


class FirstReason:
    """Several filters as one: asks them in order and gives the first reason one of them has.

    Those behind it are not asked, so a filter with a memory sees what passed all before it.

    Args:
        *filters: any group filters.

    Examples:
        >>> from types import SimpleNamespace as Answer  # what the filters read of a Trajectory
        >>> right, wrong = Answer(prompt="2+2", reward=1.0), Answer(prompt="2+2", reward=0.0)
        >>> reject = FirstReason(RejectEqualRewards(), RejectRepeatedPrompts(window=1000))
        >>> reject([wrong, wrong]), reject([right, wrong]), reject([right, wrong])
        ('equal rewards', None, 'repeated prompt')
    """

    def __init__(self, *filters: GroupFilter):
        for group_filter in filters:
            if not callable(group_filter):
                raise TypeError(
                    f"{group_filter!r} is no filter, which takes the trajectories of a group and "
                    "returns a reason or None; pass filters one by one: FirstReason(a, b)"
                )
        self.filters = filters

    def __call__(self, trajectories: Sequence[Trajectory]) -> str | None:
        reasons = (group_filter(trajectories) for group_filter in self.filters)
        return next((reason for reason in reasons if reason is not None), None)
