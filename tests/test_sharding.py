"""A training step on 1, 2 and 4 ranks, in one and in many micro-batches: one and the same."""

from __future__ import annotations

import functools
import multiprocessing

import pytest
import torch
import torch.distributed as dist
from loss_batches import TARGET_VERSION, VOCABULARY, random_trajectories, to_batch
from torch.distributed.fsdp import FSDPModule
from torchtune.models.qwen2 import qwen2

from torchrl_llm_async.modules import TorchtuneActor
from torchrl_llm_async.objectives import DecoupledPPOLoss, OnlineDPOLoss
from torchrl_llm_async.packing import blank_rows, pack_rows, pad_rows, plan_micro_batches
from torchrl_llm_async.recipes.sharding import build_sharded_model
from torchrl_llm_async.recipes.updates import Updates

make_decoder = functools.partial(
    qwen2,
    vocab_size=VOCABULARY,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    embed_dim=32,
    intermediate_dim=48,
    max_seq_len=64,
    tie_word_embeddings=True,
)
# Ranks, tokens of a micro-batch, and how the model is built.
CASES = {
    "one rank, one micro-batch": (1, 10**6, {}),
    "one rank, many": (1, 40, {}),
    "two ranks": (2, 40, {}),
    "four ranks": (4, 40, {}),
    "activations computed again": (2, 40, {"activation_checkpointing": True}),
    "compiled": (2, 40, {"compile_layers": True}),
    "compiled, activations computed again": (
        *(1, 40),
        {"compile_layers": True, "activation_checkpointing": True},
    ),
}
LOSSES = {
    "ppo": (functools.partial(DecoupledPPOLoss, kl_to_ref_coeff=0.1), 1, "packed"),
    "dpo": (OnlineDPOLoss, 2, "padded"),
}


def initial_weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = make_decoder()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.state_dict()


def train(rank: int, world_size: int, store: str, budget: int, options: dict, results) -> None:
    """Two updates of each loss, the second after the first has changed the weights."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    for name, (make_loss, unit, form) in LOSSES.items():
        model = build_sharded_model(
            make_decoder, initial_weights(), device=cpu, dtype=torch.float32, **options
        )
        assert len([m for m in model.modules() if isinstance(m, FSDPModule)]) == 3
        loss = make_loss(TorchtuneActor(model))
        loss.float()
        # Not Adam: keys' biases have no gradient but rounding, of which it makes whole steps.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        updates = Updates(model, optimizer, clip_grad_norm=1.0)
        trajectories = random_trajectories(3, rows=16, group_size=2, longest=20)
        rows = loss.select(to_batch(trajectories), target_version=TARGET_VERSION)
        lengths = [len(row["tokens", "full"]) for row in rows.unbind(0)]
        plan = plan_micro_batches(
            lengths, world_size=world_size, token_budget=budget, unit=unit, form=form
        )
        micros = [
            blank_rows(rows, 0)
            if not indices
            else pad_rows(rows[indices], 0)
            if form == "padded"
            else pack_rows(rows[indices], 0, row_tokens=max(lengths))
            for indices in plan[rank]
        ]
        normalizer = loss.denominator(rows) / world_size
        losses, norms = [], []
        for _ in range(2):
            total = torch.zeros(())
            for index, micro in enumerate(micros):
                model.set_requires_gradient_sync(index + 1 == len(micros))
                output = loss(micro, normalizer=normalizer)
                output.total().backward()
                total += output.total().detach().float()
            dist.all_reduce(total)
            losses.append(total.item() / world_size)
            norms.append(updates.step())
        state = {name: shard.full_tensor() for name, shard in model.state_dict().items()}
        if rank == 0:
            results[name] = (losses, norms, state, len(micros))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    multiprocessing.set_forkserver_preload(["torchrl_llm_async.recipes.sharding"])

    def start(ranks: int, budget: int, options: dict):
        store = tmp_path_factory.mktemp("ranks") / "store"
        with multiprocessing.Manager() as manager:
            results = manager.dict()
            torch.multiprocessing.start_processes(
                train,
                (ranks, str(store), budget, options, results),
                nprocs=ranks,
                start_method="forkserver",
            )
            return dict(results)

    return start


@pytest.fixture(scope="module")
def whole(run):
    return run(*CASES["one rank, one micro-batch"])


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.slow] if "compiled" in case else [])
        for case in list(CASES)[1:]
    ],
)
def test_a_step_is_the_same_however_it_is_cut(run, whole, case):
    found = run(*CASES[case])
    for name in LOSSES:
        losses, norms, weights, _ = whole[name]
        other_losses, other_norms, other_weights, micro_batches = found[name]
        assert micro_batches > 1 or CASES[case][0] == 4
        assert other_losses == pytest.approx(losses, abs=1e-5) and losses[0] != losses[1]
        assert other_norms == pytest.approx(norms, rel=1e-4)
        assert other_weights.keys() == weights.keys() == initial_weights().keys()
        for key, weight in weights.items():
            assert (other_weights[key] - weight).abs().max() <= 1e-5, (name, key)
            moved = (weight - initial_weights()[key]).abs().max()
            assert moved > 5e-5 or key.endswith("k_proj.bias"), (name, key)
