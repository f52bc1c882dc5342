"""What the replay buffer costs beside TorchRL's own, and as it fills.

::

    OMP_NUM_THREADS=1 python benchmarks/buffer.py

Rows enter by groups of 4 and leave by batches of 8 groups: through this package's
``StalenessReplayBuffer`` with ``GroupAdvantage``, and through TorchRL's ``ReplayBuffer`` over a
``LazyStackStorage`` with ``MCAdvantage``, which computes advantages as groups enter, too. Rows are
the same; what enters and leaves in a turn is one batch, so that the fill stays what it is. The
groups in the buffer are as old as they'd be after many steps: a batch of each version. Theirs
draws without replacement; it knows no versions, deadlines or accounts. The two take turns, and only
what the buffers do is timed, not what brings the rows into their form.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDictBase, lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.objectives.llm import MCAdvantage

from torchrl_llm_async.data import StalenessReplayBuffer
from torchrl_llm_async.data.trajectory import Trajectory, stack_group
from torchrl_llm_async.objectives import GroupAdvantage

GROUP_SIZE, GROUPS_PER_STEP = 4, 8


def make_group(group_id: int, version: int, tokens: int = 128) -> TensorDictBase:
    """Rows as the collector hands them on."""
    rng = np.random.default_rng(group_id % 97)
    rows = []
    for index in range(GROUP_SIZE):
        size = int(rng.integers(tokens // 2, tokens))
        sampled = np.arange(size) >= 16
        rows.append(
            Trajectory(
                token_ids=rng.integers(0, 1000, size),
                sampled=sampled,
                log_probs=np.where(sampled, -1.0, 0.0).astype(np.float32),
                versions=np.where(sampled, version, -1),
                prompt_length=16,
                reward=float(rng.random()),
                terminated=True,
                truncated=False,
                ended_by="environment",
                group_id=group_id,
                index=index,
                start_version=version,
                prompt=f"problem {group_id}",
                response="an answer",
            )
        )
    return stack_group(rows)


class Ours:
    """This package's buffer, at the step where so many groups have entered a batch a step."""

    def __init__(self, fill: int):
        self.buffer = StalenessReplayBuffer(
            groups_per_step=GROUPS_PER_STEP,
            max_staleness=fill // GROUPS_PER_STEP + 2,
            group_size=GROUP_SIZE,
            transform=GroupAdvantage(group_size=GROUP_SIZE, divide_by_std=True),  # as theirs
        )
        self.buffer.sampler.consumer_version = fill // GROUPS_PER_STEP

    @staticmethod
    def form(group: TensorDictBase) -> TensorDictBase:
        # Fresh objects, since TorchRL's transform writes into the rows.
        return lazy_stack([row.copy() for row in group.unbind(0)])

    def extend(self, group_id: int, version: int, group: TensorDictBase) -> None:
        self.buffer.announce(group_id, version)
        self.buffer.extend(group)

    def sample(self) -> None:
        self.buffer.sample(timeout=0)


class TorchRLs:
    """TorchRL's buffer over the same storage."""

    def __init__(self, fill: int):
        self.buffer = ReplayBuffer(
            storage=LazyStackStorage((fill + GROUPS_PER_STEP) * GROUP_SIZE),
            sampler=SamplerWithoutReplacement(),
            transform=MCAdvantage(grpo_size=GROUP_SIZE, prompt_key=("text", "prompt")),
            batch_size=GROUPS_PER_STEP * GROUP_SIZE,
        )

    @staticmethod
    def form(group: TensorDictBase) -> TensorDictBase:
        # Each row is a trajectory of one step; so is it fastest.
        return lazy_stack([row.copy().unsqueeze(0) for row in group.unbind(0)])

    def extend(self, group_id: int, version: int, group: TensorDictBase) -> None:
        self.buffer.extend(group)

    def sample(self) -> None:
        self.buffer.sample()


def timed(call: Callable[[], None]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def measure(fill: int, turns: int) -> dict[str, float]:
    """Median microseconds per group, of extend and of sample, for both."""
    buffers = {"ours": Ours(fill), "torchrl": TorchRLs(fill)}
    times: dict[str, list[float]] = {f"{n}/{w}": [] for n in buffers for w in ("extend", "sample")}
    ids = itertools.count()

    def enter(versions: Iterable[int]) -> None:
        groups = [
            (i, version, make_group(i, version)) for version, i in zip(versions, ids, strict=False)
        ]
        for name, buffer in buffers.items():
            for group_id, version, group in groups:
                extend = partial(buffer.extend, group_id, version, buffer.form(group))
                times[f"{name}/extend"].append(timed(extend))

    step = fill // GROUPS_PER_STEP
    for begin in range(0, fill, GROUPS_PER_STEP):
        enter([begin // GROUPS_PER_STEP] * min(GROUPS_PER_STEP, fill - begin))
    for values in times.values():
        values.clear()
    for turn in range(turns):
        enter([step + turn] * GROUPS_PER_STEP)
        for name in sorted(buffers, reverse=turn % 2 == 0):
            times[f"{name}/sample"].append(timed(buffers[name].sample) / GROUPS_PER_STEP)
    return {name: 1e6 * statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--fills", type=int, nargs="+", default=[10, 100, 1000, 10_000])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print("| groups in the buffer | extend, ours / TorchRL's (us) | sample | together | ratio |")
    print("|---|---|---|---|---|")
    results = {}
    for fill in arguments.fills:
        found = measure(fill, arguments.turns)
        both = {n: found[f"{n}/extend"] + found[f"{n}/sample"] for n in ("ours", "torchrl")}
        ratio = both["ours"] / both["torchrl"]
        results[f"buffer/cost_ratio_{fill}"] = ratio
        cells = [
            f"{found[f'ours/{what}']:.0f} / {found[f'torchrl/{what}']:.0f}"
            for what in ("extend", "sample")
        ]
        print(
            f"| {fill:,} | {cells[0]} | {cells[1]} | {both['ours']:.0f} / {both['torchrl']:.0f} | "
            f"{ratio:.2f} |",
            flush=True,
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
