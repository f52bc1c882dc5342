"""Long runs against a simulated clock: engines with so many slots, answers of many lengths."""

from __future__ import annotations

import heapq
import random

import pytest
from schedules import Run

LENGTHS = {
    "equal": lambda rng: 1.0,
    "exponential": lambda rng: rng.expovariate(1.0),
    "lognormal": lambda rng: rng.lognormvariate(0.0, 1.5),
    "pareto": lambda rng: rng.paretovariate(1.1),  # its mean is 11, its variance infinite
    "a few are endless": lambda rng: 200.0 if rng.random() < 0.01 else 1.0,
}
# Lengths, max_staleness, groups per step, engines, slots of each, publications every so many steps.
RUNS = [
    ("equal", 0, 2, 1, 2, 1),
    ("equal", 4, 1, 2, 4, 5),
    ("exponential", 1, 4, 1, 6, 2),
    ("exponential", 8, 1, 4, 2, 3),
    ("lognormal", 0, 3, 2, 2, 1),
    ("lognormal", 2, 2, 3, 4, 3),
    ("pareto", 1, 1, 1, 3, 1),
    ("pareto", 3, 4, 2, 16, 2),
    ("a few are endless", 2, 2, 2, 3, 1),
    ("a few are endless", 16, 1, 1, 24, 4),
]


def simulate(lengths, max_staleness, groups_per_step, engines, slots, every, *, steps, seed, drop):
    """Runs until the last step; checks the bound and the ledger all along.

    An engine switches weights at some time after they are published, each for itself; what has been
    admitted counts from the oldest version that is served.
    """
    rng, draw = random.Random(seed), LENGTHS[lengths]
    run = Run(groups_per_step, max_staleness, steps, every, drop, max_reuse=1 + seed % 3)
    events: list[tuple[float, int, str, int]] = []
    serial, now, training = 0, 0.0, False
    served = [0] * engines
    published = 0

    def after(delay: float, what: str, which: int) -> None:
        nonlocal serial
        serial += 1
        heapq.heappush(events, (now + delay, serial, what, which))

    while run.step < steps or training:
        while run.controller.capacity() and len(run.running) < engines * slots:
            after(draw(rng), "ended", run.next_id)
            run.admit()
        if not training and run.step < steps and run.train() is not None:
            training = True
            after(rng.expovariate(2.0), "trained", 0)
            run.check()
        assert events, f"deadlock at step {run.step}"
        now, _, what, which = heapq.heappop(events)
        if what == "trained":
            training = False
            if run.step % every == 0 or run.step == steps:
                published = run.step
                for engine in range(engines):
                    after(rng.expovariate(20.0), "switched", engine)
        elif what == "switched":
            served[which] = published
            run.controller.serve(min(served))
        elif which in run.running:  # else it was dropped
            run.reject(which) if rng.random() < 0.02 else run.finish(which)
    run.check()
    return run


@pytest.mark.inv1
@pytest.mark.inv4
@pytest.mark.parametrize("drop", [False, True], ids=["wait", "drop"])
@pytest.mark.parametrize(
    "steps", [500, pytest.param(50_000, marks=pytest.mark.slow)], ids=["10k", "1M"]
)
def test_the_bound_holds_and_nothing_is_lost(steps: int, drop: bool) -> None:
    dropped = 0
    for seed, parameters in enumerate(RUNS):
        run = simulate(*parameters, steps=steps, seed=seed, drop=drop)
        counts = run.ledger.counts()
        assert counts["consumed"] == steps * run.bounds["groups_per_step"]
        assert counts["rejected"] > 0
        # What is left is what was begun in place of groups that were given up.
        left = counts["running"] + counts["accepted"] - counts["consumed"]
        assert left == 0 if not drop else left <= counts["dropped"]
        dropped += counts["dropped"]
    assert (dropped > 0) == drop
