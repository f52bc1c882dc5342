"""What a person sees of a run: the progress bar, the held-out accuracy, the closing table.

Owns words and numbers for people, and which checkpoint was best. Metrics for machines go through
torchtune's metric loggers; nothing here trains or generates.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torchrl._utils import logger as torchrl_logger
from tqdm import tqdm

from torchrl_llm_async.collectors import Evaluation

# Mean |log-prob of the trainer - of the engine| of fresh tokens; rounding in bf16 makes some 0.01.
TOLERATED_MISMATCH = 0.05


@dataclass(frozen=True)
class PairedGain:
    """Difference of two accuracies on the same problems, with its 95 % interval.

    The interval is the normal one for paired differences d_1..d_n in {-1, 0, 1}:
    mean(d) +- 1.96 sd(d) / sqrt(n).

    Examples:
        >>> PairedGain.of([0, 0, 1, 1], [1, 1, 1, 0]).points
        25.0
    """

    points: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.points:+.1f} points, paired 95 % interval [{self.low:.1f}, {self.high:.1f}]"

    @classmethod
    def of(cls, before: list[float], after: list[float]) -> PairedGain:
        """From the rewards of the same problems before and after; reward 1 counts as right."""
        right = [np.asarray(rewards) >= 1.0 for rewards in (after, before)]
        difference = right[0].astype(float) - right[1].astype(float)
        mean = 100 * float(difference.mean())
        margin = 100 * 1.96 * float(difference.std(ddof=1)) / math.sqrt(len(difference))
        return cls(mean, mean - margin, mean + margin)


class CheckpointKeeper:
    """Keeps the checkpoint of the best evaluated version and the last one, deletes the others.

    ``best.json`` says which was best; step 0 is the model that the run started from, which has no
    folder here. A folder is there as a whole or not at all, whenever the run is killed.

    Args:
        folder: where checkpoints are written, one folder each.
    """

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.best: tuple[float, int] | None = None

    def path(self, version: int) -> Path:
        """The folder of a version's checkpoint."""
        return self.folder / f"step_{version:05d}"

    def save(self, version: int, weights: Path, model_dir: Path) -> None:
        """Writes a Hugging Face folder.

        Args:
            version: of the weights.
            weights: a file of all of them, under Hugging Face names.
            model_dir: the folder whose config and tokenizer go with them.
        """
        part = self.path(version).with_suffix(".part")
        part.mkdir()
        for file in model_dir.iterdir():
            # Not the index of a checkpoint in several files: this one is whole.
            if file.suffix in (".json", ".jinja", ".txt", ".model") and ".index." not in file.name:
                shutil.copy(file, part)
        shutil.copy(weights, part / "model.safetensors")
        if self.path(version).exists():  # A resumed run comes by again.
            self._remove(version)
        part.rename(self.path(version))

    def _remove(self, version: int) -> None:
        gone = self.path(version).rename(self.path(version).with_suffix(".gone"))
        shutil.rmtree(gone)

    def go_on(self, version: int) -> list[int]:
        """Removes what a run had come to that is resumed at an earlier version.

        Returns:
            The versions before ``version`` that have a folder, ascending.
        """
        for unfinished in (*self.folder.glob("step_*.part"), *self.folder.glob("step_*.gone")):
            shutil.rmtree(unfinished)
        # It may name one of those; the first to be judged brings it back.
        (self.folder / "best.json").unlink(missing_ok=True)
        earlier = []
        for path in sorted(self.folder.glob("step_*")):
            found = int(path.name.removeprefix("step_"))
            if found > version:
                self._remove(found)
            elif found < version:
                earlier.append(found)
        return sorted(earlier)

    def judge(self, evaluation: Evaluation, last_version: int) -> None:
        """Keeps or deletes the evaluated version's checkpoint.

        One that is no longer there can't be the best: a resumed run judges once more, and what was
        better then, and had it deleted, may not come again.
        """
        current = (evaluation.accuracy, evaluation.version)
        is_there = evaluation.version == 0 or self.path(evaluation.version).exists()
        if is_there and (self.best is None or current[0] > self.best[0]):
            loser, self.best = self.best, current
            self._tell_best()
        else:
            loser = current
        is_old = loser is not None and loser[1] not in (0, last_version)
        if is_old and self.path(loser[1]).exists():
            self._remove(loser[1])

    def _tell_best(self) -> None:
        accuracy, version = self.best
        part = self.folder / "best.json.part"
        part.write_text(json.dumps({"step": version, "held_out_accuracy": accuracy}) + "\n")
        part.replace(self.folder / "best.json")


class Report:
    """Shows a run to a person; on rank 0 only.

    Args:
        total_steps: length of the progress bar.
        first_step: where a resumed run begins.
    """

    def __init__(self, total_steps: int, first_step: int = 0):
        self._bar = tqdm(
            total=total_steps, initial=first_step, desc="train", unit="step", dynamic_ncols=True
        )
        self._start = time.perf_counter()
        self._told_mismatch = TOLERATED_MISMATCH
        self.evaluations: list[Evaluation] = []

    def step(self, metrics: dict[str, float]) -> None:
        """One step further."""
        self._bar.set_postfix_str(
            f"reward {metrics['reward']:.2f} acc {metrics['accuracy']:.2f} "
            f"lag {metrics['lag_sample_mean']:.1f}/{metrics['lag_sample_max']:.0f} "
            f"gen {metrics['generation_tokens_per_s']:.0f} tok/s "
            f"train {metrics['training_tokens_per_s']:.0f} tok/s "
            f"waited: trainer {metrics['trainer_waited_s']:.1f} s, "
            f"generation {metrics['generation_waited_s']:.1f} s"
        )
        self._bar.update()
        self._warn_of_mismatch(metrics.get("mismatch_lag_0", 0.0))

    def _warn_of_mismatch(self, mismatch: float) -> None:
        """Says so when engine and trainer disagree on fresh tokens; again when it doubles."""
        if mismatch > self._told_mismatch:
            self._told_mismatch = 2 * mismatch
            torchrl_logger.warning(
                f"The log-probs of engine and trainer differ by {mismatch:.3f} on average for "
                "tokens sampled by the very weights that were trained. No loss can mend that: "
                "compare sampling.temperature (and top_p, top_k: the trainer knows neither) with "
                "the actor's, engine.dtype with dtype, and the model's config in model_dir with "
                "the model in the config."
            )

    def evaluated(self, evaluation: Evaluation) -> None:
        """A held-out accuracy has come in."""
        self.evaluations.append(evaluation)
        self._bar.write(
            f"held-out accuracy after {evaluation.version} steps: {evaluation.accuracy:.3f} "
            f"({len(evaluation.rewards)} problems, greedy, {evaluation.seconds:.1f} s)"
        )

    def close(self) -> None:
        """Ends the progress bar."""
        self._bar.close()

    def table(self, *, tokens: int, checkpoint: Path, best: tuple[float, int], log: Path) -> str:
        """The closing table, its last line the accuracy before and after."""
        # In a resumed run the first may come late.
        *_, last = evaluations = sorted(self.evaluations, key=lambda found: found.version)
        first = evaluations[0]
        gain = PairedGain.of(first.rewards, last.rewards)
        rows = [
            ("held-out problems", f"{len(first.rewards)}, greedy"),
            ("accuracy before", f"{first.accuracy:.3f}"),
            ("accuracy after", f"{last.accuracy:.3f} (step {last.version})"),
            (
                "gain",
                str(gain),
            ),
            ("best", f"{best[0]:.3f} (step {best[1]})"),
            ("training time", f"{time.perf_counter() - self._start:.0f} s"),
            ("sampled tokens", f"{tokens:,}"),
            ("checkpoint", str(checkpoint)),
            ("logs", str(log)),
        ]
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {value}" for name, value in rows]
        lines.append(f"held-out accuracy: {first.accuracy:.2f} -> {last.accuracy:.2f}")
        return "\n".join(lines)


def finished(futures: list[Future[Evaluation]]) -> list[Evaluation]:
    """Takes the evaluations that have come in out of ``futures``, in order."""
    done = []
    while futures and futures[0].done():
        done.append(futures.pop(0).result())
    return done
