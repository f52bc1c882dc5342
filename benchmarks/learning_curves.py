"""Plots held-out accuracy against training steps, and prints a table, from finished demo runs.

Usage::

    python benchmarks/learning_curves.py --plot docs/learning_curves.png runs/arithmetic_*_seed*

Reads what torchtune's DiskLogger wrote into each run's ``logs`` folder; runs whose folders differ
only in ``_seedN`` share a colour.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def read_metrics(run: Path) -> dict[int, dict[str, float]]:
    """Metrics of a run by step."""
    (log,) = (run / "logs").glob("*.txt")
    steps: dict[int, dict[str, float]] = {}
    for line in log.read_text().splitlines():
        if found := re.match(r"Step (\d+) \| (.*)", line):
            pairs = (pair.split(":") for pair in found[2].split())
            steps.setdefault(int(found[1]), {}).update((k, float(v)) for k, v in pairs)
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--plot", type=Path, required=True)
    args = parser.parse_args()

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    colours: dict[str, str] = {}
    print("| run | accuracy before | after | best | mean lag | max lag | s/step |")
    print("|---|---|---|---|---|---|---|")
    for run in sorted(args.runs):
        steps = read_metrics(run)
        curve = {s: m["held_out_accuracy"] for s, m in steps.items() if "held_out_accuracy" in m}
        trained = [m for m in steps.values() if "train_s" in m]
        kind = re.sub(r"_seed\d+$", "", run.name)
        label = kind.removeprefix("arithmetic_") if kind not in colours else None
        colour = colours.setdefault(kind, f"C{len(colours)}")
        axes.plot(curve.keys(), curve.values(), marker="o", color=colour, label=label, alpha=0.8)
        lag = sum(m["lag_sample_mean"] for m in trained) / len(trained)
        seconds = sum(m["train_s"] + m["trainer_waited_s"] for m in trained) / len(trained)
        print(
            f"| {run.name} | {curve[min(curve)]:.3f} | {curve[max(curve)]:.3f} "
            f"| {max(curve.values()):.3f} | {lag:.2f} "
            f"| {max(m['lag_sample_max'] for m in trained):.0f} | {seconds:.2f} |"
        )
    axes.set(xlabel="training step", ylabel="held-out accuracy (greedy)", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(args.plot, dpi=120)


if __name__ == "__main__":
    main()
