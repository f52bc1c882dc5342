"""What does dropping stale groups do to the lengths that are trained on, and what does it save?

    python benchmarks/stale_groups.py               # a minute and a half

Groups of answers, their lengths drawn from one of three distributions of much the same mean, pass
through the package's own controller and replay buffer. The clock is simulated: an answer grows by a
token per unit of time, all groups in flight at once, and a step trains for as long as its groups
take to generate on average, or some multiple of that.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack

from torchrl_llm_async.data import StalenessReplayBuffer
from torchrl_llm_async.staleness import StalenessController

GROUPS, GROUP_SIZE = 100, 4
LONGEST = 4000
Draw = Callable[[np.random.Generator, int], np.ndarray]
LENGTHS: dict[str, Draw] = {  # in tokens
    "exponential": lambda rng, n: rng.exponential(109.0, n),
    "lognormal": lambda rng, n: rng.lognormal(4.0, 1.2, n),
    "one in 100 endless": lambda rng, n: np.where(
        rng.random(n) < 0.01, LONGEST, rng.exponential(70.0, n)
    ),
}
# Lengths, max_staleness, groups_per_step, and how long training takes, relative to generation.
SETTINGS = (
    ("exponential", 1, 4, 1.0),
    ("exponential", 4, 4, 1.0),
    ("lognormal", 1, 4, 1.0),
    ("lognormal", 1, 4, 3.0),
    ("lognormal", 4, 4, 1.0),
    ("lognormal", 4, 4, 3.0),
    ("lognormal", 2, 20, 1.0),
    ("one in 100 endless", 1, 4, 1.0),
    ("one in 100 endless", 4, 4, 1.0),
)


class Outcome(NamedTuple):
    """A run, all by group id."""

    starts: dict[int, int]  # start versions
    sampled: dict[int, list[int]]  # lengths of the answers of all groups that were begun
    trained: dict[int, list[int]]  # and of those trained on, as read from the batches
    steps: dict[int, int]  # which step trained on it
    dropped: list[int]
    time: float  # until the last step was trained, in units of a token


def simulate(
    on_stale: str,
    *,
    lengths: str = "lognormal",
    max_staleness: int,
    groups_per_step: int,
    slowness: float = 1.0,
    seed: int,
) -> Outcome:
    """Trains until ``GROUPS`` groups are consumed, ``slowness`` times as long as it generates."""
    draw = LENGTHS[lengths]
    rng = np.random.default_rng(seed)
    bounds = dict(groups_per_step=groups_per_step, max_staleness=max_staleness)
    steps = GROUPS // groups_per_step
    controller = StalenessController(**bounds, total_steps=steps)
    run = Outcome({}, {}, {}, {}, [], 0.0)

    def on_drop(group_id: int, reason: str) -> None:
        controller.drop(group_id, reason)
        run.dropped.append(group_id)

    buffer = StalenessReplayBuffer(
        **bounds,
        group_size=GROUP_SIZE,
        on_stale=on_stale,
        on_drop=on_drop if on_stale == "drop" else None,
    )
    training_time = slowness * _mean_group_time(draw) / (max_staleness + 1)
    now, trained_at = 0.0, None
    ends: list[tuple[float, int]] = []
    while controller.served_version < steps:
        while controller.capacity():
            group_id = len(run.starts)
            run.starts[group_id] = controller.admit(group_id)
            buffer.announce(group_id, run.starts[group_id])
            run.sampled[group_id] = _lengths(draw, rng, GROUP_SIZE)
            heapq.heappush(ends, (now + max(run.sampled[group_id]), group_id))
        if trained_at is None and buffer.can_sample():
            _record(run, buffer.consumer_version, buffer.sample())
            trained_at = now + training_time
            continue  # to begin others in place of those it dropped
        if trained_at is not None and (not ends or trained_at <= ends[0][0]):
            now, trained_at = trained_at, None
            controller.serve(buffer.consumer_version)
            continue
        now, group_id = heapq.heappop(ends)
        if controller.finish(group_id):
            buffer.extend(_rows(group_id, run.starts[group_id], run.sampled[group_id]))
        else:
            buffer.retract(group_id, "stale")
    return run._replace(time=now)


def _lengths(draw: Draw, rng: np.random.Generator, count: int) -> list[int]:
    return draw(rng, count).clip(1, LONGEST).astype(int).tolist()


def _mean_group_time(draw: Draw) -> float:
    answers = _lengths(draw, np.random.default_rng(0), 20_000 * GROUP_SIZE)
    return float(np.reshape(answers, (-1, GROUP_SIZE)).max(1).mean())


def _rows(group_id: int, start_version: int, lengths: list[int]) -> TensorDictBase:
    """A group without contents, all tokens as old as the bound allows, behind a prompt of one."""
    return lazy_stack(
        [
            TensorDict(
                {
                    "group": {
                        "id": torch.tensor(group_id),
                        "index": torch.tensor(index),
                        "start_version": torch.tensor(start_version),
                    },
                    "policy_version": {"full": torch.tensor([-1] + [start_version] * length)},
                }
            )
            for index, length in enumerate(lengths)
        ]
    )


def _record(run: Outcome, step: int, batch: TensorDictBase) -> None:
    for row in batch.unbind(0):
        group_id = int(row["group", "id"])
        run.steps[group_id] = step
        length = int((row["policy_version", "full"] >= 0).sum())
        run.trained.setdefault(group_id, []).append(length)


def compare(repeats: int) -> None:
    print(
        "| lengths | max_staleness | groups per step | training / generation | on_stale | dropped "
        "| mean length sampled | trained on | ratio | of the longest tenth, trained on "
        "| time of a step, median |"
    )
    print("|" + "---|" * 11)
    names = ("lengths", "max_staleness", "groups_per_step", "slowness")
    for setting in SETTINGS:
        for on_stale in ("wait", "drop"):
            case = dict(zip(names, setting, strict=True))
            runs = [simulate(on_stale, **case, seed=seed) for seed in range(repeats)]
            print("|", " | ".join([*map(str, setting), on_stale, *_figures(runs)]), "|")


def _figures(runs: list[Outcome]) -> list[str]:
    dropped = sum(len(run.dropped) for run in runs) / sum(len(run.sampled) for run in runs)
    sampled, trained = (
        np.mean(
            [length for run in runs for group in getattr(run, name).values() for length in group]
        )
        for name in ("sampled", "trained")
    )
    # Groups that were begun in place of dropped ones may be left over after the last step.
    over = [
        (max(run.sampled[group_id]), group_id in run.trained)
        for run in runs
        for group_id in (*run.trained, *run.dropped)
    ]
    longest = sorted(over, reverse=True)[: len(over) // 10]
    time = statistics.median(run.time / len({*run.steps.values()}) for run in runs)
    return [
        f"{dropped:.1%}",
        f"{sampled:.1f}",
        f"{trained:.1f}",
        f"{trained / sampled:.2f}",
        f"{np.mean([was_trained for _, was_trained in longest]):.0%}",
        f"{time:.0f}",
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=40, help="runs of 100 groups each")
    compare(parser.parse_args().repeats)
