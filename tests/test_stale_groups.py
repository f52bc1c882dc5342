"""Waiting for stale groups trains on what was sampled, cohort by cohort; dropping them does not."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

PATH = Path(__file__).parents[1] / "benchmarks" / "stale_groups.py"
spec = importlib.util.spec_from_file_location("stale_groups", PATH)
stale_groups = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stale_groups)

SETTINGS = [dict(max_staleness=1, groups_per_step=4), dict(max_staleness=3, groups_per_step=5)]


def lengths(groups, ids):
    return sorted(length for group_id in ids for length in groups[group_id])


@pytest.mark.inv1
@pytest.mark.inv4
@pytest.mark.parametrize("setting", SETTINGS, ids=["eta1", "eta3"])
def test_waiting_trains_on_the_lengths_that_were_sampled(setting):
    """After every step, in the cohorts (groups begun under one version) that are due by then."""
    run = stale_groups.simulate("wait", **setting, seed=0)
    assert len(run.steps) == 100 and not run.dropped
    overtaken = 0
    for step in range(max(run.steps.values()) + 1):
        begun = [g for g, start in run.starts.items() if start + setting["max_staleness"] <= step]
        trained = [g for g, consumed_at in run.steps.items() if consumed_at <= step]
        overtaken += len(set(trained) - set(begun))
        trained = [g for g in trained if g in set(begun)]
        assert lengths(run.trained, trained) == lengths(run.sampled, begun)
    assert overtaken  # nor does it wait for all of them at every step
    assert lengths(run.trained, run.steps) == lengths(run.sampled, run.starts)


@pytest.mark.inv1
@pytest.mark.parametrize("setting", SETTINGS, ids=["eta1", "eta3"])
def test_dropping_favours_short_answers(setting):
    runs = [stale_groups.simulate("drop", **setting, seed=seed) for seed in range(3)]
    for run in runs:
        assert len(run.steps) == 100 and run.dropped
        assert not set(run.dropped) & set(run.steps)
        lags = [step - run.starts[group_id] for group_id, step in run.steps.items()]
        assert min(lags) >= 0 and max(lags) <= setting["max_staleness"]

    def mean(name):
        return np.mean([n for run in runs for group in getattr(run, name).values() for n in group])

    assert mean("trained") < 0.9 * mean("sampled")
