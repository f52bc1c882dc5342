"""The trainer's state: exact, sharded, and copied before training goes on."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from full_disk import full_disk
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from torchrl_llm_async.checkpoint import TrainingState


def build(*, sharded: bool):
    """Sizes that no number of ranks divides; of the last layer the second rank holds nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(7, 13), nn.Dropout(0.3), nn.Linear(13, 5), nn.LayerNorm(5), nn.Linear(5, 1)
    )
    if sharded:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.9), fused=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    return model, optimizer, schedule


def train(model, optimizer, schedule, steps: int, *, noise: bool = True) -> None:
    model.train(noise)  # dropout draws from torch's generator
    for _ in range(steps):
        model(torch.ones(4, 7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def everything(model, optimizer) -> list[torch.Tensor]:
    values = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [*model.parameters(), *values]
    full = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]
    return [t.detach().clone() for t in full]


def rank_work(rank: int, world_size: int, meeting: Path, folder: Path, saves: bool) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size
    )
    parts = build(sharded=True)
    state = TrainingState(*parts)
    # The same draws on every rank, and as many ranks as one likes.
    noise = world_size == 2
    if saves:
        train(*parts, steps=3)
        snapshot = state.snapshot()
        writing = threading.Thread(target=snapshot.save, args=(folder,))
        writing.start()
        here = everything(*parts[:2])
        train(*parts, steps=3)
        writing.join()
        if rank == 0:
            torch.save((here, everything(*parts[:2])), folder / "expected.pt")
        else:
            everything(*parts[:2])
    else:
        torch.manual_seed(1)
        state.load(folder)
        then, later = torch.load(folder / "expected.pt")
        for value, expected in zip(everything(*parts[:2]), then, strict=True):
            assert torch.equal(value, expected)
        assert parts[2].get_last_lr() == [0.005]
        assert parts[1].param_groups[0]["betas"] == (0.8, 0.9)
        train(*parts, steps=3)
        same = [torch.equal(v, e) for v, e in zip(everything(*parts[:2]), later, strict=True)]
        assert all(same) if noise else not all(same)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def saved_by_two(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("training")
    mp.spawn(rank_work, (2, folder / "meeting", folder, True), nprocs=2)
    return folder


@pytest.mark.inv6
def test_as_many_ranks_go_on_to_the_bit(saved_by_two: Path, tmp_path: Path) -> None:
    """Training went on while it was written."""
    mp.spawn(rank_work, (2, tmp_path / "meeting", saved_by_two, False), nprocs=2)


def test_another_number_of_ranks_has_the_same_state(saved_by_two: Path, tmp_path: Path) -> None:
    mp.spawn(rank_work, (1, tmp_path / "meeting", saved_by_two, False), nprocs=1)


def test_a_rank_whose_file_is_missing_is_named(saved_by_two: Path, tmp_path: Path) -> None:
    parts = build(sharded=False)
    TrainingState(*parts).snapshot().save(tmp_path)
    (tmp_path / "training" / "rank-00000.safetensors").unlink()
    with pytest.raises(ValueError, match="written by 1 ranks, but has files of 0"):
        TrainingState(*parts).load(tmp_path)


def test_generators_are_restored(tmp_path: Path) -> None:
    def draw():
        return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random(), random.gauss()

    state = TrainingState(*build(sharded=False))
    random.gauss()  # leaves half a pair behind
    state.snapshot().save(tmp_path)
    expected = draw()
    state.load(tmp_path)
    assert draw() == expected


def test_bf16_weights_are_exact(tmp_path: Path) -> None:
    model = nn.Linear(5, 3, dtype=torch.bfloat16)
    before = model.weight.clone()
    state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    state.snapshot().save(tmp_path)
    nn.init.zeros_(model.weight)
    state.load(tmp_path)
    assert model.weight.dtype == torch.bfloat16 and torch.equal(model.weight, before)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_snapshot_before_the_first_step_changes_nothing(tmp_path: Path) -> None:
    """AdamW's correction depends on the number of steps, which upstream begins with a step."""
    trainers = []
    for _ in range(3):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        trainers.append((model, torch.optim.AdamW(model.parameters(), lr=0.1)))
    alone, saved, resumed = trainers
    TrainingState(*saved).snapshot().save(tmp_path)
    nn.init.zeros_(resumed[0].weight)
    TrainingState(*resumed).load(tmp_path)
    for trainer in trainers:
        plain_step(*trainer)
    assert torch.equal(saved[0].weight, alone[0].weight)
    assert torch.equal(resumed[0].weight, alone[0].weight)


def test_parameters_without_gradient_have_no_state_after_loading(tmp_path: Path) -> None:
    class Model(nn.Linear):
        def __init__(self):
            super().__init__(3, 2)
            self.unused = nn.Parameter(torch.zeros(4))

    def trainer():
        model = Model()
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    saved, resumed = trainer(), trainer()
    plain_step(*saved)
    TrainingState(*saved).snapshot().save(tmp_path)
    TrainingState(*resumed).load(tmp_path)
    assert set(resumed[1].state) == {resumed[0].weight, resumed[0].bias}
    for trainer in (saved, resumed):
        plain_step(*trainer)
    assert torch.equal(resumed[0].weight, saved[0].weight)


schedulers = torch.optim.lr_scheduler


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: schedulers.MultiStepLR(optimizer, [3, 5]),
        lambda optimizer: schedulers.SequentialLR(
            optimizer,
            [
                schedulers.LinearLR(optimizer, total_iters=3),
                schedulers.MultiStepLR(optimizer, [1, 3]),
            ],
            milestones=[3],
        ),
        lambda optimizer: schedulers.CosineAnnealingLR(optimizer, 10),
        lambda optimizer: schedulers.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    ],
    ids=["multi-step", "sequential", "cosine", "lambda"],
)
def test_schedules_go_on(schedule, tmp_path: Path) -> None:
    def trainer():
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, optimizer, schedule(optimizer)

    def rates(trainer, steps: int) -> list[float]:
        seen = []
        for _ in range(steps):
            plain_step(*trainer[:2])
            trainer[2].step()
            seen += trainer[2].get_last_lr()
        return seen

    saved, resumed = trainer(), trainer()
    rates(saved, 2)
    TrainingState(*saved).snapshot().save(tmp_path)
    TrainingState(*resumed).load(tmp_path)
    assert resumed[2].state_dict() == saved[2].state_dict()
    assert rates(resumed, 6) == rates(saved, 6)


def test_a_full_disk_is_an_os_error(tmp_path: Path) -> None:
    model = nn.Linear(50, 50)
    snapshot = TrainingState(model, torch.optim.SGD(model.parameters())).snapshot()
    with full_disk(1_000), pytest.raises(OSError, match="can't be written"):
        snapshot.save(tmp_path)


def test_what_the_disk_holds_wrongly_is_a_value_error(tmp_path: Path) -> None:
    """Upstream leaves what no shard holds as it is, and raises what is no Exception."""
    parts = build(sharded=False)
    TrainingState(*parts).snapshot().save(tmp_path)
    file = tmp_path / "training" / "rank-00000.safetensors"
    tensors = load_file(file)
    name = "model.0.weight"
    offsets = {key: {"saved_offsets": [0] * value.ndim} for key, value in tensors.items()}
    offsets[name]["saved_offsets"] = [1, 0]
    tensors[name] = tensors[name][1:].contiguous()
    save_file(tensors, file, metadata={"DCP_SHARDING_INFO": json.dumps(offsets)})
    with pytest.raises(ValueError, match="can't be read"):
        TrainingState(*parts).load(tmp_path)
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ValueError, match="can't be read"):
        TrainingState(*parts).load(tmp_path)


@pytest.mark.parametrize("what", ["shape", "dtype", "optimizer", "alike", "schedule"])
def test_another_trainer_is_refused_and_left_alone(what: str, tmp_path: Path) -> None:
    TrainingState(*build(sharded=False)).snapshot().save(tmp_path)
    model, optimizer, schedule = build(sharded=False)
    if what == "shape":
        model[4] = nn.Linear(5, 2)
        optimizer = torch.optim.AdamW(model.parameters())
    elif what == "dtype":
        model.bfloat16()
    elif what == "optimizer":
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    elif what == "alike":  # It keeps the same state, and other settings.
        optimizer = torch.optim.RAdam(model.parameters())
    else:
        schedule = None
    before = model[0].weight.clone()
    message = "lr_scheduler is None" if what == "schedule" else "another model or optimizer"
    with pytest.raises(ValueError, match=message):
        TrainingState(model, optimizer, schedule).load(tmp_path)
    assert torch.equal(model[0].weight, before)
