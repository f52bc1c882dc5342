"""The trainer's state on all ranks: model, optimizer, learning rate schedule, random generators.

Owns the copy that training may go on beside, and how it is laid out: every rank writes the shards
it holds, as safetensors under their global names and offsets, so that another number of ranks can
read them. When to save, and when all ranks have written, is the recipe's affair.

Shards are cut and read by :mod:`torch.distributed.checkpoint`, in the files of its
``HuggingFaceStorageWriter``. They are written here instead, because that writer of torch 2.13 makes
each file a bytes object first: other threads stand still for as long (1.8 s for 100M parameters
under AdamW, on a CPU), and it takes the memory twice more.
"""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultSavePlanner,
    HuggingFaceStorageReader,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import LRScheduler
from torchrl._utils import logger as torchrl_logger

from torchrl_llm_async.checkpoint.tree import Tree, load_tree, save_tree, write_tensors

# What is frozen is of the checkpoint that the run began with, and no step changes it.
_TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True, ignore_frozen_params=True)
_MODEL, _OPTIMIZER = "model.", "optimizer."
_OPTIMIZER_STATE = "optimizer.state."
_SHARDS = "training"  # a folder with nothing else in it, as the reader takes all there is


@dataclass
class TrainingSnapshot:
    """One rank's copy of the state, which later updates leave as it is.

    Args:
        shards: the parts of all tensors that this rank holds, in host memory, by global name.
        offsets: where in the whole tensor each of them begins.
        values: what is equal on all ranks, as JSON.
        generators: state of this rank's random generators.
        rank: which one it is.
    """

    shards: dict[str, torch.Tensor]
    offsets: dict[str, list[int]]
    values: str
    generators: Tree
    rank: int

    def save(self, folder: Path) -> None:
        """Writes this rank's files; no collective, so that a thread may do it.

        Raises:
            OSError: the disk is full or gone.
        """
        (folder / _SHARDS).mkdir(exist_ok=True)
        # The key by which HuggingFaceStorageReader knows a file of shards.
        sharding = {name: {"saved_offsets": offset} for name, offset in self.offsets.items()}
        write_tensors(
            folder / _SHARDS / f"rank-{self.rank:05d}.safetensors",
            self.shards,
            metadata={"format": "pt", "DCP_SHARDING_INFO": json.dumps(sharding)},
        )
        save_tree(_generators_path(folder, self.rank), self.generators)
        if self.rank == 0:
            (folder / "training.json").write_text(self.values)


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
        """Copies this rank's shards to host memory; training may go on when it returns.

        Raises:
            TypeError: the optimizer or the schedule has a state that is not JSON.
        """
        is_untouched = not self._optimizer.state
        tensors, values = self._state()
        if is_untouched:
            # torch 2.13 has made up a state, by a step that counts as the first.
            self._optimizer.state.clear()
            tensors = {k: v for k, v in tensors.items() if not k.startswith(_OPTIMIZER_STATE)}
        scheduler = self._lr_scheduler
        values = {
            "world_size": self._world_size,
            "optimizer": values,
            "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
        }
        planner = DefaultSavePlanner()
        planner.set_up_planner(tensors)
        parts = {part.index.fqn: part for part in planner.create_local_plan().items}
        return TrainingSnapshot(
            shards={
                name: planner.resolve_data(part).detach().to("cpu", copy=True).contiguous()
                for name, part in parts.items()
            },
            offsets={name: list(part.tensor_data.chunk.offsets) for name, part in parts.items()},
            values=json.dumps(values, indent=1),
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
        tensors, values = self._state()
        stored = _stored_kinds(folder / _SHARDS)
        made_up = _of_untouched_parameters(tensors, stored)
        there = stored | dict.fromkeys(saved["optimizer"], "a value")
        here = _kinds(tensors) | dict.fromkeys(values, "a value")
        _check_same(folder, there, {k: v for k, v in here.items() if k not in made_up})
        ids = {id(tensors[name]) for name in made_up}
        untouched = [
            parameter
            for parameter, state in self._optimizer.state.items()
            if ids & {id(value) for value in state.values()}
        ]
        _read(folder / _SHARDS, {k: v for k, v in tensors.items() if k not in made_up})
        set_model_state_dict(self._model, _part(tensors, _MODEL), options=_TRAINED)
        state = _part(tensors, _OPTIMIZER) | _like(saved["optimizer"], values)
        set_optimizer_state_dict(self._model, self._optimizer, state, options=_FLAT)
        for parameter in untouched:
            del self._optimizer.state[parameter]
        if self._lr_scheduler is not None:
            here = self._lr_scheduler.state_dict()
            self._lr_scheduler.load_state_dict(_like(saved["lr_scheduler"], here))
        if saved["world_size"] == self._world_size:
            _restore_generators(load_tree(_generators_path(folder, self._rank)))
        else:
            torchrl_logger.warning(
                f"{folder} was written by {saved['world_size']} ranks and is read by "
                f"{self._world_size}: random generators start from this run's seed"
            )

    def _state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Tensors by global name, and the optimizer's other values."""
        model = get_model_state_dict(self._model, options=_TRAINED)
        optimizer = get_optimizer_state_dict(self._model, self._optimizer, options=_FLAT)
        tensors = {_MODEL + name: value for name, value in model.items()}
        values = {}
        for name, value in optimizer.items():
            if isinstance(value, torch.Tensor):
                tensors[_OPTIMIZER + name] = value
            else:
                values[name] = value
        return tensors, values


def _kind(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _kinds(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: _kind(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def _stored_kinds(shards: Path) -> dict[str, str]:
    try:
        stored = HuggingFaceStorageReader(str(shards)).read_metadata().state_dict_metadata
    except SafetensorError as error:
        raise ValueError(f"{shards} can't be read: {error}") from error
    for name, tensor in stored.items():
        # torch 2.13 would leave what no shard holds as it is.
        parts = {(part.offsets, part.sizes) for part in tensor.chunks}
        held = sum(sizes.numel() for _, sizes in parts)
        if held != tensor.size.numel():
            raise ValueError(
                f"{shards} can't be read: it has {held} of the {tensor.size.numel()} values of "
                f"{name}; are the files of one checkpoint?"
            )
    return {name: _kind(tensor.properties.dtype, tensor.size) for name, tensor in stored.items()}


def _of_untouched_parameters(tensors: Iterable[str], stored: Iterable[str]) -> set[str]:
    """Optimizer state that only is here, of parameters that no step had updated when saved.

    torch 2.13 makes up a state for every parameter before it loads any.
    """
    updated = {name.rpartition(".")[0] for name in stored}
    return {
        name
        for name in tensors
        if name.startswith(_OPTIMIZER_STATE) and name.rpartition(".")[0] not in updated
    }


def _read(shards: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Fills the tensors; a collective."""
    try:
        with warnings.catch_warnings():
            # torch 2.13 warns a single process that it is one.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(shards)))
    except CheckpointException as error:  # It is no Exception, in torch 2.13.
        raise ValueError(f"{shards} can't be read: {error}") from error


def _part(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def _check_same(folder: Path, there: dict[str, str], here: dict[str, str]) -> None:
    names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    if names:
        name = names[0]
        raise ValueError(
            f"{folder} is of another model or optimizer: {name} is {there.get(name, 'missing')} "
            f"there and {here.get(name, 'missing')} here ({len(names)} such differences); resume "
            "with the model, dtype and optimizer of the run"
        )


def _like(saved: Any, here: Any) -> Any:
    """Tuples, counters and keys that are numbers, as they are here; JSON has none of them."""
    if isinstance(here, tuple) and isinstance(saved, list):
        return tuple(saved)
    if isinstance(here, list) and isinstance(saved, list) and len(here) == len(saved):
        return [_like(*pair) for pair in zip(saved, here, strict=True)]
    if isinstance(here, dict) and isinstance(saved, dict):
        key_type = type(next(iter(here), ""))
        return type(here)(
            {key_type(key): _like(value, here.get(key_type(key))) for key, value in saved.items()}
        )
    return saved


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
