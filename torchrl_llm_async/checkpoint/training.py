"""The trainer's state on all ranks: model, optimizer, learning rate schedule, random generators.

Owns the copy that training may go on beside, and how it is laid out: every rank writes the shards
it holds, as safetensors under their global names and offsets, so that another number of ranks can
read them. When to save, and when all ranks have written, is the recipe's affair.

Shards are written and read by :mod:`torch.distributed.checkpoint`; only its metadata files, which
are pickles, are left out.
"""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import LRScheduler
from torchrl._utils import logger as torchrl_logger

from torchrl_llm_async.checkpoint.tree import Tree, load_tree, save_tree

# torch 2.13 warns at every save and load that no collective takes part, which is what is meant.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or unin")

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_MODEL, _OPTIMIZER = "model.", "optimizer."
_SHARDS = "training"  # a folder with nothing else in it, as the reader takes all there is


@dataclass
class TrainingSnapshot:
    """One rank's copy of the state, which later updates leave as it is.

    Args:
        shards: this rank's tensors by their global name.
        values: what is equal on all ranks.
        generators: state of this rank's random generators.
        rank: which one it is.
    """

    shards: dict[str, torch.Tensor]
    values: dict[str, Any]
    generators: Tree
    rank: int

    def save(self, folder: Path) -> None:
        """Writes this rank's files; no collective, so that a thread may do it.

        Raises:
            OSError: the disk is full.
            TypeError: an optimizer or a schedule has a state that is not JSON.
        """
        own = folder / f"rank-{self.rank}.part"
        writer = HuggingFaceStorageWriter(str(own), save_distributed=True)
        dcp.save(self.shards, storage_writer=writer, no_dist=True)
        # Every rank is alone in the writer's eyes, and calls its file the first.
        (file,) = own.iterdir()
        (folder / _SHARDS).mkdir(exist_ok=True)
        file.rename(folder / _SHARDS / f"rank-{self.rank:05d}.safetensors")
        own.rmdir()
        save_tree(_generators_path(folder, self.rank), self.generators)
        if self.rank == 0:
            (folder / "training.json").write_text(json.dumps(self.values, indent=1))


class TrainingState:
    """What is saved and restored of a trainer. Every rank has one, and calls its methods.

    Args:
        model: plain, or sharded by FSDP2.
        optimizer: of the model's parameters.
        lr_scheduler: if there is one.

    Examples:
        >>> import tempfile
        >>> model = nn.Linear(2, 2)
        >>> state = TrainingState(model, torch.optim.AdamW(model.parameters()))
        >>> folder = Path(tempfile.mkdtemp())
        >>> state.snapshot().save(folder)
        >>> before = model.weight.clone()
        >>> _ = nn.init.zeros_(model.weight)
        >>> state.load(folder)
        >>> torch.equal(model.weight, before)
        True
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: LRScheduler | None = None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._lr_scheduler = lr_scheduler
        is_distributed = dist.is_initialized()
        self._rank = dist.get_rank() if is_distributed else 0
        self._world_size = dist.get_world_size() if is_distributed else 1

    def snapshot(self) -> TrainingSnapshot:
        """Copies this rank's shards; training may go on when it returns."""
        tensors, values = self._state()
        scheduler = self._lr_scheduler
        return TrainingSnapshot(
            shards={name: tensor.detach().clone() for name, tensor in tensors.items()},
            values={
                "world_size": self._world_size,
                "shapes": _shapes(tensors),
                "optimizer": values,
                "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
            },
            generators=_generators(),
            rank=self._rank,
        )

    def load(self, folder: Path) -> None:
        """Restores what all ranks saved; a collective.

        With as many ranks as then, everything is as it was. With another number the shards are cut
        anew and each rank's generators keep the seed they have: there is none to restore for each.

        Raises:
            ValueError: it is the state of another model or optimizer, or a rank's file is missing.
        """
        saved = json.loads((folder / "training.json").read_text())
        tensors, values = self._state()
        _check_same(folder, saved["shapes"], _shapes(tensors))
        files = len(list((folder / _SHARDS).iterdir()))
        if files != saved["world_size"]:
            raise ValueError(
                f"{folder} was written by {saved['world_size']} ranks, but has files of {files}"
            )
        if (self._lr_scheduler is None) != (saved["lr_scheduler"] is None):
            raise ValueError(
                f"lr_scheduler is {self._lr_scheduler}, and its state in {folder} is "
                f"{saved['lr_scheduler']}; resume with the lr_scheduler of the run, or again none"
            )
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder / _SHARDS)))
        set_model_state_dict(self._model, _part(tensors, _MODEL))
        state = _part(tensors, _OPTIMIZER) | _tuples_again(saved["optimizer"], values)
        set_optimizer_state_dict(self._model, self._optimizer, state, options=_FLAT)
        if self._lr_scheduler is not None:
            self._lr_scheduler.load_state_dict(saved["lr_scheduler"])
        if saved["world_size"] == self._world_size:
            _restore_generators(load_tree(_generators_path(folder, self._rank)))
        else:
            torchrl_logger.warning(
                f"{folder} was written by {saved['world_size']} ranks and is read by "
                f"{self._world_size}: random generators start from this run's seed"
            )

    def _state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Tensors by global name, and the optimizer's other values."""
        model = get_model_state_dict(self._model)
        optimizer = get_optimizer_state_dict(self._model, self._optimizer, options=_FLAT)
        tensors = {_MODEL + name: value for name, value in model.items()}
        values = {}
        for name, value in optimizer.items():
            if isinstance(value, torch.Tensor):
                tensors[_OPTIMIZER + name] = value
            else:
                values[name] = value
        return tensors, values


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


def _part(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def _check_same(folder: Path, saved: dict[str, list[int]], here: dict[str, list[int]]) -> None:
    names = [name for name in {**saved, **here} if saved.get(name) != here.get(name)]
    if names:
        name = names[0]
        raise ValueError(
            f"{folder} is of another model or optimizer: {name} has shape {saved.get(name)} there "
            f"and {here.get(name)} here ({len(names)} such differences); resume with the model and "
            "the optimizer of the run"
        )


def _tuples_again(saved: dict[str, Any], here: dict[str, Any]) -> dict[str, Any]:
    """JSON knows lists only."""
    return {
        name: tuple(value) if isinstance(here.get(name), tuple) else value
        for name, value in saved.items()
    }


def _generators_path(folder: Path, rank: int) -> Path:
    return folder / f"generators-rank-{rank:05d}"


def _generators() -> Tree:
    kind, keys, *rest = np.random.get_state()
    version, internal, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [kind, keys.astype(np.int64), *rest],
        "python": [version, np.array(internal), gauss],
    }


def _restore_generators(state: Tree) -> None:
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal.tolist()), gauss))
