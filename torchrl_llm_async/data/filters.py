"""Group filters: why a complete group is not worth training on.

A filter is any callable that takes the trajectories of a group and returns a reason, or None. The
collector rejects the group under that reason and admits another in its place.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchrl_llm_async.data.trajectory import Trajectory


class RejectEqualRewards:
    """Rejects groups whose rewards are all equal: relative to their group none is better.

    The "dynamic sampling" of DAPO (arXiv:2503.14476, section 3.2), which keeps a batch full of
    groups with a gradient. It makes the training distribution depend on the policy: problems that
    are solved always, or never, leave it.

    Args:
        tolerance: rewards that differ by no more than this are equal.

    Examples:
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
