"""LoRA adapters: how they begin, what is trained, what the engine is sent, the policy without."""

from __future__ import annotations

import functools
import multiprocessing

import pytest
import torch
import torch.distributed as dist
from loss_batches import TARGET_VERSION, VOCABULARY, random_trajectories, to_batch
from safetensors.torch import load_file
from torchtune.models.qwen2 import lora_qwen2, qwen2
from torchtune.modules.peft import get_merged_lora_ckpt

from torchrl_llm_async.checkpoint import TrainingState
from torchrl_llm_async.modules import TorchtuneActor, add_value_head
from torchrl_llm_async.modules.adapters import (
    WithoutAdapters,
    initial_adapters,
    train_adapters_only,
)
from torchrl_llm_async.objectives import DecoupledPPOLoss
from torchrl_llm_async.packing import pad_rows
from torchrl_llm_async.recipes.sharding import build_sharded_model
from torchrl_llm_async.recipes.updates import Updates
from torchrl_llm_async.weight_update import WeightStore
from torchrl_llm_async.weight_update.publisher import WeightPublisher

SIZES = dict(
    vocab_size=VOCABULARY,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    embed_dim=32,
    intermediate_dim=48,
    max_seq_len=64,
    tie_word_embeddings=True,
)
LORA = dict(
    lora_attn_modules=["q_proj", "v_proj"], apply_lora_to_mlp=True, lora_rank=4, lora_alpha=8
)
make_base = functools.partial(qwen2, **SIZES)
make_adapted = functools.partial(lora_qwen2, **LORA, **SIZES)
CPU = torch.device("cpu")
# A pure renaming that renames nothing, so that published tensors have torchtune's names.
SAME_NAMES = {
    name.replace("layers.0", "layers.{}"): name.replace("layers.0", "layers.{}")
    for name in make_base().state_dict()
}


def base_weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = make_base()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.state_dict()


def batch(loss):
    trajectories = random_trajectories(3, rows=8, group_size=2, longest=20)
    rows = to_batch(trajectories).exclude(("log_probs", "ref"))
    return loss.select(rows, target_version=TARGET_VERSION)


def train(rank: int, world_size: int, folder: str, results) -> None:
    """Two updates, published after the second."""
    store = f"file://{folder}/store-{world_size}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    torch.set_num_threads(1)
    model = build_sharded_model(
        make_adapted, base_weights(), device=CPU, dtype=torch.float32, seed=7
    )
    loss = DecoupledPPOLoss(TorchtuneActor(model), kl_to_ref_coeff=0.1)
    loss.reference_network = WithoutAdapters(loss.actor_network)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    updates = Updates(model, torch.optim.SGD(trained, lr=0.5), clip_grad_norm=1.0)
    rows = batch(loss)
    half = len(rows) // world_size
    micro = pad_rows(rows[rank * half : (rank + 1) * half], 0)
    normalizer = loss.denominator(rows) / world_size
    kl = []
    for _ in range(2):
        output = loss(micro, normalizer=normalizer)
        output.total().backward()
        kl.append(float(output.loss_kl_to_ref.detach()))
        updates.step()
    path = WeightPublisher(
        model, WeightStore(f"{folder}/weights-{world_size}"), SAME_NAMES
    ).publish(1)
    state = {name: shard.full_tensor() for name, shard in model.state_dict().items()}
    if rank == 0:
        results["state"], results["kl"], results["published"] = state, kl, load_file(path)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    multiprocessing.set_forkserver_preload(["torchrl_llm_async.recipes.sharding"])

    @functools.cache
    def start(ranks: int) -> dict:
        folder = tmp_path_factory.mktemp("ranks")
        with multiprocessing.Manager() as manager:
            results = manager.dict()
            torch.multiprocessing.start_processes(
                train, (ranks, str(folder), results), nprocs=ranks, start_method="forkserver"
            )
            return dict(results)

    return start


@pytest.mark.parametrize("ranks", [1, 2])
def test_adapters_alone_are_trained(run, ranks):
    before = base_weights() | initial_adapters(make_adapted(), seed=7)
    state = run(ranks)["state"]
    assert state.keys() == before.keys()
    moved = {name for name, value in state.items() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if "lora_" in name}


def test_a_step_is_the_same_on_two_ranks(run):
    one, two = run(1)["state"], run(2)["state"]
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_merged_weights_are_published(run, ranks):
    state, published = run(ranks)["state"], run(ranks)["published"]
    copies = {name: value.clone() for name, value in state.items()}  # it adds in place
    expected = get_merged_lora_ckpt(copies, rank=4, alpha=8)
    assert published.keys() == base_weights().keys() == expected.keys()
    for name, value in published.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)
    adapted = {name.replace("lora_a.weight", "weight") for name in state if "lora_a" in name}
    frozen = published.keys() - adapted
    assert frozen and all(torch.equal(published[name], base_weights()[name]) for name in frozen)


def test_published_weights_score_like_the_adapted_policy(run):
    adapted, merged = make_adapted(), make_base()
    adapted.load_state_dict(run(1)["state"])
    merged.load_state_dict(run(1)["published"])
    rows = pad_rows(batch(DecoupledPPOLoss(TorchtuneActor(merged))), 0)
    scores = [TorchtuneActor(model).score(rows).log_probs for model in (adapted, merged)]
    torch.testing.assert_close(*scores, rtol=0, atol=1e-5)


def test_the_reference_is_the_policy_without_adapters(run):
    adapted, base = make_adapted(), make_base()
    adapted.load_state_dict(run(1)["state"])
    base.load_state_dict(base_weights())
    actor = TorchtuneActor(adapted)
    rows = pad_rows(batch(DecoupledPPOLoss(actor)), 0)
    expected = TorchtuneActor(base).score(rows).log_probs
    assert torch.equal(WithoutAdapters(actor).score(rows).log_probs, expected)
    assert not torch.allclose(actor.score(rows).log_probs, expected, atol=1e-3)


def test_the_kl_penalty_begins_at_zero(run):
    before, after = run(1)["kl"]
    assert before == 0 < after


def test_a_value_head_is_trained_as_well():
    model = add_value_head(make_adapted())
    assert train_adapters_only(model)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {"value_head.weight", "value_head.bias"} < trained
    assert all("lora_" in name or "value_head" in name for name in trained)


def test_without_adapters_everything_is_trained():
    model = make_base()
    assert not train_adapters_only(model)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_checkpoint_holds_what_is_trained(tmp_path):
    model = make_adapted()
    model.load_state_dict(base_weights() | initial_adapters(model, seed=1))
    train_adapters_only(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1)

    def step():
        model(torch.arange(8)[None]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    snapshot = TrainingState(model, optimizer).snapshot()
    names = {name for name in snapshot.shards if name.startswith("model.")}
    assert names and all("lora_" in name for name in names)
    snapshot.save(tmp_path)
    step()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for parameter in trained:
        torch.nn.init.zeros_(parameter)
    TrainingState(model, optimizer).load(tmp_path)
    step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name
