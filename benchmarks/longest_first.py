"""Does it pay to begin the problems with the longest answers first?

    python benchmarks/longest_first.py              # simulated, half a minute
    python benchmarks/longest_first.py --engine     # vLLM on the demo's problems, minutes

The simulation keeps to the package's own rules of admission and consumption; a problem's expected
length is known exactly, which is the best a predictor can do. With an engine the lengths are
learnt, training takes no time, and the weights stay the same.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack

from torchrl_llm_async.data import StalenessReplayBuffer
from torchrl_llm_async.staleness import StalenessController

GROUPS_PER_STEP, GROUP_SIZE, SLOTS, STEPS = 16, 8, 64, 25
MEAN_LOG, SIGMA, LONGEST = 5.0, 1.0, 2500  # of lognormal lengths, in tokens


class Problems:
    """Lognormal answers; ``shared`` is the share of the variance that lies between problems."""

    def __init__(self, seed: int, shared: float, longest_first: bool):
        self._random = np.random.default_rng(seed)
        self._shared, self._longest_first = shared, longest_first
        self._window: list[tuple[float, np.ndarray]] = []

    def next(self) -> np.ndarray:
        """The lengths of the next group's answers."""
        if not self._window:
            window = [self._draw() for _ in range(GROUPS_PER_STEP)]
            if self._longest_first:
                window.sort(key=lambda problem: -problem[0])
            self._window = window[::-1]
        return self._window.pop()[1]

    def _draw(self) -> tuple[float, np.ndarray]:
        mean = MEAN_LOG + np.sqrt(self._shared) * SIGMA * self._random.standard_normal()
        spread = np.sqrt(1 - self._shared) * SIGMA * self._random.standard_normal(GROUP_SIZE)
        return mean, np.exp(mean + spread).clip(8, LONGEST)


def simulated_time(seed: int, *, eta: int, shared: float, longest_first: bool) -> float:
    """Token times until ``STEPS`` steps are trained, training as fast as generation on average."""
    problems = Problems(seed, shared, longest_first)
    training_time = GROUPS_PER_STEP * GROUP_SIZE * np.exp(MEAN_LOG + SIGMA**2 / 2) / SLOTS
    bounds = dict(groups_per_step=GROUPS_PER_STEP, max_staleness=eta)
    controller = StalenessController(**bounds, total_steps=STEPS)
    buffer = StalenessReplayBuffer(**bounds, group_size=1)  # a group is one row, without contents
    now, step, admitted, trained_at = 0.0, 0, 0, None
    queue: list[tuple[int, float]] = []
    decoding: list[tuple[float, int]] = []
    missing: dict[int, int] = {}
    start: dict[int, int] = {}
    while step < STEPS:
        while controller.capacity() and len(queue) + len(decoding) < SLOTS:
            start[admitted] = controller.admit(admitted)
            buffer.announce(admitted, start[admitted])
            lengths = problems.next()
            missing[admitted] = len(lengths)
            queue += [(admitted, length) for length in lengths]
            admitted += 1
        while queue and len(decoding) < SLOTS:
            group, length = queue.pop(0)
            heapq.heappush(decoding, (now + length, group))
        if trained_at is None and buffer.can_sample():
            buffer.sample()
            trained_at = now + training_time
        now = min([time for time, _ in decoding[:1]] + ([] if trained_at is None else [trained_at]))
        if now == trained_at:
            trained_at, step = None, step + 1
            controller.serve(step)
        while decoding and decoding[0][0] <= now:
            _, group = heapq.heappop(decoding)
            missing[group] -= 1
            if not missing[group]:
                del missing[group]
                controller.finish(group)
                buffer.extend(_empty_group(group, start[group]))
    return now


def _empty_group(group_id: int, start_version: int) -> TensorDictBase:
    group = {"id": group_id, "index": 0, "start_version": start_version}
    row = TensorDict({"group": group, "policy_version": {"full": torch.tensor([start_version])}})
    return lazy_stack([row])


def simulate(seeds: int) -> None:
    print("| max_staleness | variance between problems | speed-up, median (least, most) |")
    print("|---|---|---|")
    for shared in (0.3, 0.7):
        for eta in (0, 1, 2, 4, 8):
            case = dict(eta=eta, shared=shared)
            gains = [
                simulated_time(seed, **case, longest_first=False)
                / simulated_time(seed, **case, longest_first=True)
                for seed in range(seeds)
            ]
            spread = f"{statistics.median(gains):.3f} ({min(gains):.3f}, {max(gains):.3f})"
            print(f"| {eta} | {shared:.0%} | {spread} |")


def measured_times(eta: int, repeats: int, steps: int = 6) -> dict[bool, list[float]]:
    """Seconds from the second step to the last, in turns."""
    from safetensors.torch import load_file

    from torchrl_llm_async.collectors import AsyncLLMCollector
    from torchrl_llm_async.data import StalenessReplayBuffer
    from torchrl_llm_async.engines import SamplingConfig, VLLMEngine
    from torchrl_llm_async.envs import WrittenSumsEnv
    from torchrl_llm_async.weight_update import WeightStore

    model = Path(__file__).parents[1] / "assets" / "written-sums-qwen2"
    weights = load_file(model / "model.safetensors")
    times: dict[bool, list[float]] = {False: [], True: []}
    for seed in range(repeats):
        for longest_first in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                store = WeightStore(Path(folder) / "weights", keep=eta + 2)
                bounds = dict(groups_per_step=64, group_size=GROUP_SIZE, max_staleness=eta)
                buffer = StalenessReplayBuffer(**bounds)
                collector = AsyncLLMCollector(
                    WrittenSumsEnv,
                    VLLMEngine(model, max_model_len=128, max_num_seqs=128),
                    tokenizer=str(model),
                    sampling=SamplingConfig(max_new_tokens=64, stop_token_ids=(1,)),
                    replay_buffer=buffer,
                    longest_first=longest_first,
                    total_steps=steps,
                    seed=seed,
                    log_path=Path(folder) / "collector.log",
                    **bounds,
                )
                collector.start()
                try:
                    for step in range(steps):
                        buffer.sample(timeout=300)
                        if step == 0:  # by now there is something to predict from
                            begin = time.perf_counter()
                        collector.serve_weights(
                            store.write(step + 1, weights.items()), version=step + 1
                        )
                    times[longest_first].append(time.perf_counter() - begin)
                finally:
                    collector.shutdown()
    return times


def measure(repeats: int) -> None:
    print("| max_staleness | in order, s | longest first, s | speed-up |")
    print("|---|---|---|---|")
    for eta in (0, 2):
        times = measured_times(eta, repeats)
        in_order, longest = (statistics.median(times[order]) for order in (False, True))
        print(f"| {eta} | {in_order:.1f} | {longest:.1f} | {in_order / longest:.3f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", action="store_true", help="measure on vLLM, don't simulate")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    measure(options.repeats) if options.engine else simulate(options.repeats)
