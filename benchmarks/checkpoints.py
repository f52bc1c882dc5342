"""What the checkpoints of a run have cost it.

::

    make demo
    OMP_NUM_THREADS=1 python benchmarks/checkpoints.py runs/arithmetic_ppo_seed0

From the run's logs: how long training stood still for each checkpoint. And, since the files are
written by a thread beside the training, how much processor time that takes: the run's checkpoint
that holds most is read, written once more, and timed.
"""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
import time
from pathlib import Path

from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from torchrl_llm_async.checkpoint import CheckpointStore, load_tree, save_tree
from torchrl_llm_async.data.snapshot import BufferSnapshot


def steps_of(run: Path) -> list[dict[str, float]]:
    """What torchtune's DiskLogger wrote for each step."""
    steps = []
    for log in sorted((run / "logs").glob("*.txt")):
        for line in log.read_text().splitlines():
            values = dict(pair.split(":") for pair in re.findall(r"\S+:\S+", line))
            if "checkpoint_s" in values:
                steps.append({name: float(value) for name, value in values.items()})
    return steps


def seconds_to_write(checkpoint: Path) -> float:
    """Processor time of writing the checkpoint's parts of rank 0 once more, and committing them."""
    buffer = BufferSnapshot.load(checkpoint)
    collector = load_tree(checkpoint / "collector")
    shards = load_file(checkpoint / "training" / "rank-00000.safetensors")
    with tempfile.TemporaryDirectory(dir=checkpoint.parent) as folder:
        store = CheckpointStore(folder)
        part = store.begin(0)
        begin = time.process_time()
        buffer.save(part)
        save_tree(part / "collector", collector)
        save_file(shards, part / "shards.safetensors")
        store.commit(0)
        return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    run = parser.parse_args().run
    steps = steps_of(run)
    step_s = [
        s["train_s"] + s["publish_s"] + s["trainer_waited_s"] + s["checkpoint_s"] for s in steps
    ]
    stalls = [s["checkpoint_s"] for s in steps]
    every = OmegaConf.load(run / "config.yaml").checkpoint_every
    count = -(-len(steps) // every)  # There is one after the last step, too.
    fullest = max(
        (run / "resume").glob("step_*"),
        key=lambda folder: (folder / "replay_buffer.safetensors").stat().st_size,
    )
    written = statistics.median(seconds_to_write(fullest) for _ in range(5))
    print(f"{len(steps)} steps in {sum(step_s):.0f} s, {count} checkpoints")
    share = 100 * sum(stalls) / sum(step_s)
    print(f"training stood still {sum(stalls):.3f} s, {share:.2f} % of the time")
    print(
        f"at most {max(stalls):.3f} s at once, {max(stalls) / statistics.median(step_s):.3f} of a "
        "median step"
    )
    share = 100 * written * count / sum(step_s)
    print(
        f"writing takes up to {written:.3f} s of a processor each time, {share:.2f} % of the time"
    )


if __name__ == "__main__":
    main()
