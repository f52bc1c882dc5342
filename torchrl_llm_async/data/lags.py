"""Figures of a histogram of lags.

Pure arithmetic: what a lag is counted from, and when, is the sampler's affair.
"""

from __future__ import annotations

from collections.abc import Mapping

_PERCENTILES = (10, 50, 90)


def lag_figures(name: str, histogram: Mapping[int, int]) -> dict[str, float]:
    """Mean, largest and 10th, 50th and 90th percentile of lags in steps.

    A percentile is the smallest lag that so many per cent do not exceed (the nearest rank), so it
    is a lag that occurs.

    Args:
        name: what was counted, for the keys.
        histogram: count by lag, at least one.

    Returns:
        ``"lag_<name>_mean"``, ``"..._max"``, ``"..._p10"``, ``"..._p50"`` and ``"..._p90"``.

    Examples:
        >>> lag_figures("token", {0: 8, 1: 1, 2: 1})["lag_token_p90"]
        1
    """
    total = sum(histogram.values())
    figures: dict[str, float] = {
        f"lag_{name}_mean": sum(lag * count for lag, count in histogram.items()) / total,
        f"lag_{name}_max": max(histogram),
    }
    covered, wanted = 0, list(_PERCENTILES)
    for lag in sorted(histogram):
        covered += histogram[lag]
        while wanted and covered * 100 >= wanted[0] * total:
            figures[f"lag_{name}_p{wanted.pop(0)}"] = lag
    return figures
