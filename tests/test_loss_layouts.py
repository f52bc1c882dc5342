"""The same gradient whatever the form of the micro-batches, and over ranks, on a real decoder."""

from __future__ import annotations

import itertools
import multiprocessing
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from loss_batches import (
    FORMS,
    TARGET_VERSION,
    VOCABULARY,
    TablePolicy,
    backward,
    micro_batches,
    random_trajectories,
    to_batch,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchtune.models.qwen2 import qwen2

from torchrl_llm_async.modules import TorchtuneActor, add_value_head
from torchrl_llm_async.objectives import (
    BestOfNLoss,
    CriticPPOLoss,
    DecoupledPPOLoss,
    OnlineDPOLoss,
    ProximalRLOOLoss,
    TrajectoryBalanceLoss,
)
from torchrl_llm_async.packing import blank_rows, pack_rows, pad_rows

# torch tells that its fused RMS norm takes no float64.
pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")

LOSSES = {
    "ppo": partial(DecoupledPPOLoss, dual_clip=1.5, kl_to_ref_coeff=0.2, entropy_coeff=0.05),
    "ppo by sequences": partial(
        DecoupledPPOLoss,
        ratio_level="sequence",
        aggregation="sequence",
        prox="loglinear",
        correction="both",
        correction_level="sequence",
        kl_to_ref_coeff=0.2,
        kl_estimator="k3",
    ),
    "ppo by fixed length": partial(
        DecoupledPPOLoss,
        aggregation="fixed",
        fixed_length=8,
        correction="mask",
        correction_level="geometric",
        correction_cap=1.2,
    ),
    "dpo": OnlineDPOLoss,
    "dpo on stale pairs": partial(
        OnlineDPOLoss, loss_type="ipo", label_smoothing=0.1, importance_cap=1.1, pairing="all"
    ),
    "ppo with a critic": partial(CriticPPOLoss, gamma=0.9, lmbda=0.8, value_clip=0.01),
    "rloo": ProximalRLOOLoss,
    "best of n": BestOfNLoss,
    "trajectory balance": partial(TrajectoryBalanceLoss, beta=0.5),
}
GROUP_SIZE = 3
ROWS_PER_UNIT = {"sequence": 1, "pair": 2, "group": GROUP_SIZE}


def make_decoder(make) -> nn.Module:
    """In float64, so that what is compared is the order of sums and not their rounding."""
    torch.manual_seed(0)
    decoder = qwen2(
        vocab_size=VOCABULARY,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        embed_dim=16,
        intermediate_dim=24,
        max_seq_len=128,
        tie_word_embeddings=True,
    ).double()
    if getattr(make, "func", make).needs_value_head:
        add_value_head(decoder)
    for parameter in decoder.parameters():
        # torchtune's biases start at 0 and its norms at 1, which would hide mistakes.
        nn.init.normal_(parameter, std=0.3)
    return decoder


def make_rows(loss):
    """Rows as the loss selects them, their policies around that of the decoder."""
    trajectories = random_trajectories(3, rows=4 * GROUP_SIZE, group_size=GROUP_SIZE, longest=9)
    policy = loss.actor_network
    with torch.no_grad():
        scores = policy.score(pad_rows(to_batch(trajectories), pad_id=0)).log_probs
    moved = []
    for row, score in zip(trajectories, scores.tolist(), strict=True):
        shift = np.array(score[-len(row.theta) :]) - row.theta
        policies = {name: (getattr(row, name) + shift).tolist() for name in ("mu", "ref")}
        moved.append(replace(row, **policies))
    batch = to_batch(moved).exclude(("log_probs", "prox"))
    return loss.select(batch, target_version=TARGET_VERSION)


def train(loss, micros, normalizer, world_size: int = 1) -> tuple[float, list[Tensor]]:
    """One update's loss and gradients, after another update since the anchor was taken."""
    micros = [loss.anchor(micro) for micro in micros]
    with torch.no_grad():
        for parameter in loss.actor_network.parameters():
            parameter.mul_(1.05)  # The same on shards as on the whole.
    total = 0.0
    for micro in micros:
        value = loss(micro, normalizer=normalizer).total()
        (value * world_size).backward()  # FSDP averages over ranks.
        total += value.item()
    return total, [parameter.grad for parameter in loss.actor_network.parameters()]


def test_every_form_has_the_same_gradient_on_a_decoder():
    for name, make in LOSSES.items():
        results = {}
        for form in ("ragged", "padded", "packed", "mixed parts"):
            loss = make(TorchtuneActor(make_decoder(make), chunk_size=5))
            rows = make_rows(loss)
            micros = micro_batches(rows, form, unit=ROWS_PER_UNIT[loss.packing_unit])
            results[form] = train(loss, micros, loss.denominator(rows))
        assert_same(results, name)


def assert_same(results: dict[str, tuple[float, list[Tensor]]], name: str) -> None:
    expected, expected_gradients = results.pop("ragged")
    assert abs(expected) > 1e-3, name
    assert all(gradient.abs().max() > 1e-4 for gradient in expected_gradients), name
    for form, (value, gradients) in results.items():
        assert value == pytest.approx(expected, abs=1e-6), (name, form)
        for gradient, other in zip(gradients, expected_gradients, strict=True):
            assert (gradient - other).abs().max() <= 1e-6, (name, form)


def train_sharded(rank: int, world_size: int, store: str, results) -> None:
    """Each loss on ranks that differ in rows, forms and chunks; rank 1 has a blank one, too.

    In float64, and as it is on a GPU: weights in float32, computation in bfloat16.
    """
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (world_size,))
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for name, precision in itertools.product(LOSSES, ("float64", "mixed")):
        decoder = make_decoder(LOSSES[name])
        loss = LOSSES[name](TorchtuneActor(decoder, chunk_size=5))
        rows = make_rows(loss)
        if precision == "mixed":
            decoder.float()
        options = {"mp_policy": half} if precision == "mixed" else {}
        for layer in decoder.layers:
            fully_shard(layer, mesh=mesh, **options)
        fully_shard(decoder, mesh=mesh, **options)
        one, two = (units * ROWS_PER_UNIT[loss.packing_unit] for units in (1, 2))
        micros = (
            [pad_rows(rows[:one], pad_id=0), pack_rows(rows[one:two], pad_id=0)]
            if rank == 0
            else [pack_rows(rows[two:], pad_id=0), blank_rows(rows, pad_id=0)]
        )
        count = sum(loss.denominator(micro) for micro in micros)
        dist.all_reduce(count)
        value, gradients = train(loss, micros, count, world_size)
        total = torch.tensor(value)
        dist.all_reduce(total)
        whole = [gradient.full_tensor() for gradient in gradients]
        if rank == 0:
            results[name, precision] = (total.item(), whole)
    dist.destroy_process_group()


def test_two_fsdp_ranks_have_the_gradient_of_one_process(tmp_path):
    # Both ranks are forked off one process that has done the imports.
    multiprocessing.set_forkserver_preload(["torchrl_llm_async.modules", "torchtune.models.qwen2"])
    with multiprocessing.Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.start_processes(
            train_sharded,
            (2, str(tmp_path / "store"), results),
            nprocs=2,
            start_method="forkserver",
        )
        sharded = dict(results)
    assert {name for name, _ in sharded} == set(LOSSES)
    for name, make in LOSSES.items():
        loss = make(TorchtuneActor(make_decoder(make)))
        rows = make_rows(loss)
        whole = train(loss, [rows], loss.denominator(rows))
        assert_same({"ragged": whole, "two ranks": sharded[name, "float64"]}, name)
        value, gradients = sharded[name, "mixed"]
        # bfloat16 has 8 bits, and a loss near 0 is a sum of larger ones.
        assert value == pytest.approx(whole[0], rel=0.02, abs=0.005), name
        for gradient, exact in zip(gradients, whole[1], strict=True):
            assert gradient.dtype == torch.float32
            assert (gradient - exact).norm() < 0.08 * exact.norm(), name


@pytest.mark.inv7
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("form", [pad_rows, pack_rows])
def test_what_nobody_sampled_may_hold_anything(name, form):
    """Not only padding: prompts and environment tokens have no behaviour log-probs either."""
    trajectories = random_trajectories(4, group_size=GROUP_SIZE)
    policy = TablePolicy(trajectories)
    loss = LOSSES[name](policy)
    rows = loss.select(to_batch(trajectories), target_version=TARGET_VERSION)
    micro = form(rows, pad_id=0)
    outside = ~micro["masks", "all_assistant_mask"]
    results = []
    for garbage in (None, float("nan"), float("inf")):
        if garbage is not None:
            for key in (("log_probs", "full"), ("log_probs", "prox"), ("log_probs", "ref")):
                micro[key] = micro[key].masked_fill(outside, garbage)
        policy.zero_grad()
        total = backward(loss, [micro], 4.0)
        gradients = [policy.gradients(table) for table in ("log_probs", "entropy", "values")]
        results.append((total, gradients))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize(
    "name", ["ppo", "ppo by sequences", "dpo", "dpo on stale pairs", "trajectory balance"]
)
@pytest.mark.parametrize("form", FORMS)
def test_a_reference_network_equals_its_log_probs_in_the_batch(name, form):
    trajectories = random_trajectories(5, group_size=GROUP_SIZE)
    reference = TablePolicy([replace(row, theta=row.ref) for row in trajectories])
    totals = []
    for network in (None, reference):
        loss = LOSSES[name](TablePolicy(trajectories), reference_network=network)
        assert loss.needs_reference
        rows = loss.select(to_batch(trajectories), target_version=TARGET_VERSION)
        rows = rows if network is None else rows.exclude(("log_probs", "ref"))
        micros = micro_batches(rows, form, unit=ROWS_PER_UNIT[loss.packing_unit])
        totals.append(backward(loss, micros, 4.0))
    assert totals[0] == totals[1]
    assert reference.log_probs.grad is None


@pytest.mark.inv7
def test_a_reference_network_that_is_broken_is_named():
    trajectories = random_trajectories(6, empty=0.0)
    broken = TablePolicy([replace(row, theta=[float("nan")] * 9) for row in trajectories])
    loss = OnlineDPOLoss(TablePolicy(trajectories), reference_network=broken)
    rows = to_batch(trajectories).exclude(("log_probs", "ref"), ("next", "reward"))
    micro = pad_rows(rows, pad_id=0)
    with pytest.raises(ValueError, match=r"(?s)reference.*not finite"):
        loss(micro, normalizer=1.0)


@pytest.mark.inv7
@pytest.mark.parametrize("name", LOSSES)
def test_no_sequence_at_all_is_a_loss_of_0(name):
    """By the very denominator of the rows, which is 0; padded, or packed and padding alone."""
    loss = LOSSES[name](TorchtuneActor(make_decoder(LOSSES[name])))
    blank = blank_rows(make_rows(loss), pad_id=0)
    packed = blank.clone()
    packed["packing", "segment_ids"] = torch.full_like(blank["tokens", "full"], -1)
    for micro in (blank, packed):
        output = loss(micro, normalizer=loss.denominator(micro))
        output.total().backward()
        assert output.total().item() == 0.0
        assert all(p.grad.eq(0).all() for p in loss.actor_network.parameters())


@pytest.mark.inv7
def test_an_actor_that_looks_elsewhere_for_sequences_is_refused():
    """It would take a packed row for one sequence."""
    micro = pack_rows(to_batch(random_trajectories(4)), pad_id=0, segment_ids_key=("a", "ids"))
    model = make_decoder(DecoupledPPOLoss)
    loss = DecoupledPPOLoss(TorchtuneActor(model))
    loss.set_keys(segment_ids=("a", "ids"))
    with pytest.raises(ValueError, match=r"reads segment_ids at \('a', 'ids'\), but Torchtune"):
        loss(micro, normalizer=1.0)
    loss = DecoupledPPOLoss(TorchtuneActor(model, segment_ids_key=("a", "ids")))
    loss.set_keys(segment_ids=("a", "ids"))
    assert loss(micro, normalizer=1.0).total().isfinite()


@pytest.mark.inv7
@pytest.mark.parametrize("where", ["first", "padding"])
def test_a_sampled_token_that_can_not_be_scored_is_refused(where):
    micro = pad_rows(to_batch(random_trajectories(4)), pad_id=0)
    attention, sampled = micro["masks", "all_attention_mask"], micro["masks", "all_assistant_mask"]
    first = int(attention[0].int().argmax())
    if where == "first":
        sampled[0, first] = True
    else:
        attention[0, sampled[0].nonzero()[-1]] = False
    with pytest.raises(ValueError, match=r"tokens marked as sampled are padding or have nothing"):
        DecoupledPPOLoss(TorchtuneActor(make_decoder(DecoupledPPOLoss)))(micro, normalizer=1.0)


def test_a_reference_network_that_shares_parameters_is_refused():
    actor, reference = (TorchtuneActor(make_decoder(OnlineDPOLoss)) for _ in range(2))
    reference.model.tok_embeddings = actor.model.tok_embeddings
    for shared in (actor, TorchtuneActor(actor.model), reference):
        with pytest.raises(ValueError, match=r"shares parameters with actor_network.*a copy"):
            OnlineDPOLoss(actor, reference_network=shared)
    assert actor.training and all(p.requires_grad for p in actor.parameters())


def test_a_reference_network_is_frozen_and_no_part_of_the_loss():
    actor, reference = (TorchtuneActor(make_decoder(OnlineDPOLoss)) for _ in range(2))
    loss = OnlineDPOLoss(actor, reference_network=reference)
    loss.train()
    assert {id(p) for p in loss.parameters()} == {id(p) for p in actor.parameters()}
    assert not any("reference" in key for key in loss.state_dict())
    assert not reference.training and not any(p.requires_grad for p in reference.parameters())


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("form", ["ragged", "padded", "packed"])
def test_a_mask_of_integers_is_that_mask(name, form):
    """As tokenizers write it."""
    trajectories = random_trajectories(13, group_size=GROUP_SIZE, empty=0.0)
    totals = []
    for dtype in (torch.bool, torch.int64):
        loss = LOSSES[name](TablePolicy(trajectories))
        batch = to_batch(trajectories)
        for row in batch.unbind(0):
            row["masks", "all_assistant_mask"] = row["masks", "all_assistant_mask"].to(dtype)
        rows = loss.select(batch, target_version=TARGET_VERSION)
        micros = micro_batches(rows, form, unit=ROWS_PER_UNIT[loss.packing_unit])
        totals.append(backward(loss, micros, loss.denominator(rows)))
    assert totals[0] == totals[1] != 0


def test_an_attention_mask_of_integers_is_that_mask():
    totals = []
    for dtype in (torch.bool, torch.int64):
        loss = DecoupledPPOLoss(TorchtuneActor(make_decoder(DecoupledPPOLoss)))
        batch = to_batch(random_trajectories(13, empty=0.0))
        for row in batch.unbind(0):
            row["masks", "all_attention_mask"] = row["masks", "all_attention_mask"].to(dtype)
        for form in (pad_rows, pack_rows):
            totals.append(loss(form(batch, pad_id=0), normalizer=1.0).total())
    assert totals[:2] == totals[2:]


@pytest.mark.inv7
def test_one_log_prob_for_all_tokens_is_refused():
    trajectories = random_trajectories(14, empty=0.0)
    batch = to_batch(trajectories)
    for row in batch.unbind(0):
        row["log_probs", "full"] = row["log_probs", "full"].sum()[None]
    for rows in (batch, pad_rows(batch, pad_id=0)):
        with pytest.raises(ValueError, match=r"sample_log_prob .* has 1 numbers per row, but "):
            DecoupledPPOLoss(TablePolicy(trajectories))(rows, normalizer=1.0)


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_in_the_way_of_an_entry_is_named(name):
    """TorchRL's PolicyVersion writes one number, or a string, where we have a tensordict."""
    loss = LOSSES[name](TablePolicy([]))
    batch = to_batch(random_trajectories(15, group_size=GROUP_SIZE, empty=0.0))
    batch = batch.exclude("policy_version").set("policy_version", torch.zeros(len(batch)))
    with pytest.raises(ValueError, match=r"can't write target_version .*set_keys\(target_version="):
        loss.select(batch, target_version=TARGET_VERSION)


@pytest.mark.parametrize("name", LOSSES)
def test_no_rows_count_nothing(name):
    assert LOSSES[name](TablePolicy([])).denominator(to_batch(random_trajectories(16))[:0]) == 0
