"""Saving a whole run while it goes on, and finding where to go on.

Owns what belongs to a checkpoint of a run and on which rank, when it is whole, which runs may be
resumed from it, and the records that a resumed run continues. How the trainer's state, the buffer
and the collector are written is their own affair, and how files become a checkpoint that is whole
or not there at all :class:`~torchrl_llm_async.checkpoint.CheckpointStore`'s.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import socket
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torchrl._utils import logger as torchrl_logger

from torchrl_llm_async.checkpoint import (
    CheckpointStore,
    TrainingSnapshot,
    TrainingState,
    save_tree,
)
from torchrl_llm_async.collectors import Cut
from torchrl_llm_async.data.sampler import StalenessSampler
from torchrl_llm_async.data.snapshot import BufferSnapshot

# What the data in flight depend on, and the held-out accuracies, which are compared problem by
# problem; another value would make two runs of one. The weights it starts from are held apart.
_SAME_KEYS = ("seed", "group_size", "env", "model", "eval_env", "eval_problems")


class RunFolderError(ValueError):
    """A folder that a run can't be in; the message is one line for a person."""


class RunCheckpoints:
    """Writes checkpoints of a run beside its training. All ranks call each method together.

    Training stands still while states are copied; files are written by a thread of each rank, and
    rank 0 makes them a checkpoint once all ranks have said, at a later step, that theirs are there.

    Args:
        folder: where the checkpoints lie, one folder each; within the run's own.
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
        self._start_weights = start_weights(cfg) if self._is_rank_zero else None
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
            run = {
                "version": version,
                "config": OmegaConf.to_container(self._cfg, resolve=True),
                "start_weights": self._start_weights,
            }
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
            self._committed = self._thread.submit(self._commit_durably, version)
        self._written = None

    def _commit_durably(self, version: int) -> None:
        """What a resumed run finds beside the checkpoint must not be older than it."""
        run = self._store.root.parent
        for file in (*run.glob("*.jsonl"), *run.glob("checkpoints/step_*/*")):
            with contextlib.suppress(FileNotFoundError):  # Another version was better meanwhile.
                _sync(file)
        self._store.commit(version)

    def _on_all_ranks(self, here: bool) -> bool:
        everywhere = torch.tensor(here)
        dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=self._group)
        return bool(everywhere)


class Records:
    """A file of JSON lines, each of some version, which a resumed run continues.

    Args:
        path: the file.
        up_to: the version resumed at; records of later ones are removed, and all from the first
            line on that is torn or damaged. None keeps nothing.
    """

    def __init__(self, path: Path, up_to: int | None):
        self.kept: list[dict[str, Any]] = []
        if up_to is not None and path.exists():
            self.kept = [record for record in _read_records(path) if record["version"] <= up_to]
        part = path.with_name(path.name + ".part")
        part.write_text("".join(json.dumps(record) + "\n" for record in self.kept))
        _sync(part)
        os.replace(part, path)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115

    def append(self, version: int, **values: Any) -> None:
        """Adds a record."""
        self._file.write(json.dumps({"version": version, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _read_records(path: Path) -> list[dict[str, Any]]:
    lines = path.read_bytes().splitlines(keepends=True)
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        is_whole = isinstance(record, dict) and isinstance(record.get("version"), int)
        if not is_whole or not line.endswith(b"\n"):
            # The last is torn when a run is killed; it takes a machine's failure to damage others.
            if number < len(lines):
                torchrl_logger.warning(
                    f"{path} is damaged at line {number}; what follows is removed"
                )
            break
        records.append(record)
    return records


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
            _check_nothing_is_lost(cfg)
            return None
    else:
        folder = CheckpointStore.verified(Path(cfg.resume))
    run = json.loads((folder / "run.json").read_text())
    _check_same_run(cfg, run, folder)
    if run["version"] > cfg.total_steps:
        raise ValueError(
            f"total_steps is {cfg.total_steps}, and {folder} has {run['version']} behind it; raise "
            "total_steps to at least that, or name an earlier checkpoint"
        )
    # Not the whole buffer: its transform may have a state, and is made with the run.
    StalenessSampler(
        groups_per_step=cfg.groups_per_step, max_staleness=cfg.max_staleness
    ).load_groups_state(BufferSnapshot.load(folder).state["groups"])
    return folder


def _check_nothing_is_lost(cfg: DictConfig) -> None:
    """A run that begins anew where one had checkpoints would wipe the records of that one."""
    damaged = sorted(path.name for path in resume_folder(cfg).glob("step_*[0-9]"))
    ledger = Path(cfg.output_dir) / "ledger.jsonl"
    steps = len(_read_records(ledger)) if ledger.exists() else 0
    # A checkpoint is there before the next one is begun.
    missing = cfg.checkpoint_every is not None and steps >= 2 * cfg.checkpoint_every
    if damaged or missing:
        found = f"of {', '.join(damaged)} none is whole" if damaged else "there is no checkpoint"
        raise ValueError(
            f"{found} in {resume_folder(cfg)}, and {ledger} has {steps} steps; put a copy of a "
            "checkpoint there, or begin anew in another output_dir"
        )


def is_own_checkpoint(cfg: DictConfig, folder: str | None) -> bool:
    """Whether a checkpoint is of the run in ``output_dir``, and not of one it branches off from."""
    return folder is not None and Path(folder).resolve().parent == resume_folder(cfg).resolve()


def begin_in(cfg: DictConfig) -> TextIO:
    """Takes the run's folder for this process, and makes it ready to go on in.

    Returns:
        TextIO: other runs are kept out while it is open; it does not outlive this process.

    Raises:
        RunFolderError: it can't be written into, or another run is at work there.
    """
    folder = Path(cfg.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "a+", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise RunFolderError(
            f"output_dir is {cfg.output_dir!r}, which can't be written into: {error}"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip()
        lock.close()
        raise RunFolderError(
            f"output_dir is {cfg.output_dir!r}, where another run is at work ({holder}); wait for "
            "its end, end it, or choose another output_dir"
        ) from None
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()
    if is_own_checkpoint(cfg, cfg.resume):
        # Before any record is cut back to it: a run killed until the next checkpoint goes on here.
        store = CheckpointStore(resume_folder(cfg), keep=cfg.keep_checkpoints)
        store.make_newest(store.root / Path(cfg.resume).name)
    return lock


def _check_same_run(cfg: DictConfig, run: dict[str, Any], folder: Path) -> None:
    # As it is read again: JSON's keys are strings.
    given = json.loads(json.dumps(OmegaConf.to_container(cfg, resolve=True)))
    for key in _SAME_KEYS:
        here, there = given[key], run["config"][key]
        if here != there and json.dumps(here) != json.dumps(there):  # NaN is not equal to itself.
            raise ValueError(
                f"{key} is {here}, but {folder} was written with {there}; "
                f"resume with the same {key}, or start a new run (resume: null, another output_dir)"
            )
    if start_weights(cfg) != run["start_weights"]:
        raise ValueError(
            f"model_dir is {cfg.model_dir}, but {folder} is of a run that began with other weights "
            f"(those of {run['config']['model_dir']}, which may have been moved); resume with that "
            "model, or start a new run (resume: null, another output_dir)"
        )


def start_weights(cfg: DictConfig, *, samples: int = 512, sample_bytes: int = 8192) -> str:
    """A digest that tells the weights a run starts from, and its frozen reference has.

    Of each file the name, the size and ``samples`` pieces, evenly spread from its header to its
    end: 4 MiB, however large it is. Weights of the same shape that were trained differ all over.
    """
    folder = Path(cfg.checkpointer.get("checkpoint_dir", cfg.model_dir))
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(cfg.checkpointer.get("checkpoint_files", [])):
        with open(folder / name, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            digest.update(f"{name} {size}\n".encode())
            for index in range(samples):
                file.seek(max(size - sample_bytes, 0) * index // (samples - 1))
                digest.update(file.read(sample_bytes))
    return digest.hexdigest()


def _sync(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def version_of(folder: Path) -> int:
    """Training steps behind a checkpoint."""
    return json.loads((folder / "run.json").read_text())["version"]


def resume_folder(cfg: DictConfig) -> Path:
    """Where a run's checkpoints lie."""
    return Path(cfg.output_dir) / "resume"
