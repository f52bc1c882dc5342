"""Saving a whole run while it goes on, and finding where to go on.

Owns what belongs to a checkpoint of a run and on which rank, when it is whole, which runs may be
resumed from it, and the records that a resumed run continues. How the trainer's state, the buffer
and the collector are written is their own affair, and how files become a checkpoint that is whole
or not there at all :class:`~torchrl_llm_async.checkpoint.CheckpointStore`'s.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from torchrl_llm_async.checkpoint import (
    CheckpointStore,
    TrainingSnapshot,
    TrainingState,
    load_tree,
    save_tree,
)
from torchrl_llm_async.collectors import Cut
from torchrl_llm_async.data import StalenessReplayBuffer
from torchrl_llm_async.staleness import StalenessController

# What the data of a run in flight depend on; another value would make two runs of one.
_SAME_KEYS = ("seed", "group_size", "env", "model")


class RunCheckpoints:
    """Writes checkpoints of a run beside its training. All ranks call each method together.

    Training stands still while states are copied; files are written by a thread of each rank, and
    rank 0 makes them a checkpoint once all ranks have said, at a later step, that theirs are there.

    Args:
        folder: where the checkpoints lie, one folder each.
        state: the trainer's.
        cfg: the run's config, for whoever resumes it.
        group: a process group that carries CPU objects.
    """

    def __init__(
        self, folder: Path, state: TrainingState, cfg: DictConfig, group: dist.ProcessGroup
    ):
        self._store = CheckpointStore(folder, keep=cfg.keep_checkpoints)
        self._state = state
        self._cfg = cfg
        self._group = group
        self._is_rank_zero = dist.get_rank() == 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._written: tuple[int, Future] | None = None
        self._committed: Future | None = None

    def begin(self, version: int, cut: Cut | None) -> None:
        """Copies everything and has it written; ``cut`` is rank 0's, of this very moment."""
        self.finish()
        folder = [str(self._store.begin(version))] if self._is_rank_zero else [None]
        dist.broadcast_object_list(folder, src=0, group=self._group)
        writing = self._thread.submit(
            self._write, Path(folder[0]), version, self._state.snapshot(), cut
        )
        self._written = (version, writing)

    def _write(
        self, folder: Path, version: int, snapshot: TrainingSnapshot, cut: Cut | None
    ) -> None:
        snapshot.save(folder)
        if cut is not None:
            save_tree(folder / "collector", cut.collector)
            cut.buffer.save(folder)
            run = {"version": version, "config": OmegaConf.to_container(self._cfg, resolve=True)}
            (folder / "run.json").write_text(json.dumps(run, indent=1))

    def advance(self) -> None:
        """Commits what is under way if every rank has written its part.

        Raises:
            OSError: a rank, or the commit before, could not write.
        """
        if self._written is None:
            return
        if self._on_all_ranks(self._written[1].done()):
            self._commit()

    def finish(self) -> None:
        """Waits until what is under way is whole."""
        if self._written is not None:
            wait([self._written[1]])
            self._commit()
        if self._committed is not None:
            self._committed.result()
            self._committed = None

    def _commit(self) -> None:
        version, writing = self._written
        # Without a rank's files it must not become the newest, and the ones before be removed.
        if not self._on_all_ranks(writing.exception() is None):
            writing.result()
            raise OSError(f"another rank could not write checkpoint {version}; its error says why")
        if self._committed is not None:
            self._committed.result()
        if self._is_rank_zero:
            self._committed = self._thread.submit(self._store.commit, version)
        self._written = None

    def _on_all_ranks(self, here: bool) -> bool:
        everywhere = torch.tensor(here)
        dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=self._group)
        return bool(everywhere)


class Records:
    """A file of JSON lines, each of some version, which a resumed run continues.

    Args:
        path: the file.
        up_to: the version resumed at; records of later ones, and a last line that was torn, are
            removed. None keeps nothing.
    """

    def __init__(self, path: Path, up_to: int | None):
        self.kept: list[dict[str, Any]] = []
        if up_to is not None and path.exists():
            whole = [line for line in path.read_text().splitlines(True) if line.endswith("\n")]
            records = [json.loads(line) for line in whole]
            self.kept = [record for record in records if record["version"] <= up_to]
        part = path.with_name(path.name + ".part")
        part.write_text("".join(json.dumps(record) + "\n" for record in self.kept))
        os.replace(part, path)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115

    def append(self, version: int, **values: Any) -> None:
        """Adds a record."""
        self._file.write(json.dumps({"version": version, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def find_checkpoint(cfg: DictConfig) -> Path | None:
    """The checkpoint that ``cfg.resume`` names; None if there is nothing to resume.

    Everything that needs no model is tried here: whether the checkpoint is whole, is of the same
    run and fits the staleness bound of ``cfg``.

    Raises:
        ValueError: it can't be resumed, and why.
    """
    if cfg.resume is None:
        return None
    if cfg.resume == "auto":
        folder = CheckpointStore(resume_folder(cfg), keep=cfg.keep_checkpoints).newest()
        if folder is None:
            return None
    else:
        folder = CheckpointStore.verified(Path(cfg.resume))
    run = json.loads((folder / "run.json").read_text())
    given = OmegaConf.to_container(cfg, resolve=True)
    for key in _SAME_KEYS:
        if given[key] != run["config"][key]:
            raise ValueError(
                f"{key} is {given[key]}, but {folder} was written with {run['config'][key]}; "
                f"resume with the same {key}, or start a new run (resume: null, another output_dir)"
            )
    if run["version"] >= cfg.total_steps:
        raise ValueError(
            f"total_steps is {cfg.total_steps}, and {folder} has them behind it; nothing is left "
            "to do, unless you raise total_steps"
        )
    bounds = dict(groups_per_step=cfg.groups_per_step, max_staleness=cfg.max_staleness)
    StalenessReplayBuffer(**bounds, group_size=cfg.group_size).loads(folder)
    controller = StalenessController(**bounds, total_steps=cfg.total_steps)
    controller.load_state_dict(load_tree(folder / "collector")["controller"], step=run["version"])
    return folder


def version_of(folder: Path) -> int:
    """Training steps behind a checkpoint."""
    return json.loads((folder / "run.json").read_text())["version"]


def resume_folder(cfg: DictConfig) -> Path:
    """Where a run's checkpoints lie."""
    return Path(cfg.output_dir) / "resume"
