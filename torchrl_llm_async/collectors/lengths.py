"""Which problems will take long: their answers' length, learnt while collecting.

Owns the prediction alone; the order in which problems are begun is :mod:`.rollouts`' affair.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchrl_llm_async.data.trajectory import Trajectory

_LINE = ("_count", "_mean_x", "_mean_y", "_spread_x", "_spread_xy")


class LengthPredictor:
    """Expected number of sampled tokens of a problem's answers.

    A problem seen before takes what its last group took on average. For others it is the
    least-squares line through (prompt tokens, mean answer tokens) of all groups seen.

    Examples:
        >>> predictor = LengthPredictor()
        >>> for prompt_tokens, answer_tokens in ((10, 20.0), (20, 40.0)):
        ...     predictor.learn(f"{prompt_tokens}", prompt_tokens, answer_tokens)
        >>> predictor.expect("new", 30), predictor.expect("10", 10)
        (60.0, 20.0)
    """

    def __init__(self) -> None:
        self._seen: dict[int, float] = {}
        self._count = 0
        self._mean_x = self._mean_y = self._spread_x = self._spread_xy = 0.0

    def expect(self, prompt: str, prompt_tokens: int) -> float:
        """The expected length in tokens; 0 before anything was learnt."""
        known = self._seen.get(hash(prompt))
        if known is not None:
            return known
        slope = self._spread_xy / self._spread_x if self._spread_x else 0.0
        return self._mean_y + slope * (prompt_tokens - self._mean_x)

    def learn(self, prompt: str, prompt_tokens: int, answer_tokens: float) -> None:
        """Takes note of how long a group's answers were on average."""
        self._seen[hash(prompt)] = answer_tokens
        self._count += 1
        # Welford's update, which stays exact over millions of groups.
        from_old_mean = prompt_tokens - self._mean_x
        self._mean_x += from_old_mean / self._count
        self._mean_y += (answer_tokens - self._mean_y) / self._count
        self._spread_x += from_old_mean * (prompt_tokens - self._mean_x)
        self._spread_xy += from_old_mean * (answer_tokens - self._mean_y)

    def state(self) -> dict[str, float]:
        """The line, for a checkpoint; the problems seen are too many for that."""
        return {name: getattr(self, name) for name in _LINE}

    def restore(self, state: dict[str, float]) -> None:
        """Goes on with the line that :meth:`state` gave."""
        vars(self).update(state)

    def learn_group(self, trajectories: Sequence[Trajectory]) -> None:
        """Takes note of a finished group."""
        first = trajectories[0]
        tokens = sum(int(t.sampled.sum()) for t in trajectories) / len(trajectories)
        self.learn(first.prompt, first.prompt_length, tokens)
