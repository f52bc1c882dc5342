"""Every entry a loss reads may lie anywhere: each accepted key, moved deep, changes nothing."""

from __future__ import annotations

from dataclasses import fields
from functools import partial

import pytest
from loss_batches import TARGET_VERSION, TablePolicy, backward, random_trajectories, to_batch

from torchrl_llm_async.objectives import (
    BestOfNLoss,
    DecoupledPPOLoss,
    OnlineDPOLoss,
    ProximalRLOOLoss,
    TrajectoryBalanceLoss,
)
from torchrl_llm_async.packing import pack_rows, pad_rows

# Each with the options under which it reads the keys named, so that together they read all.
READS = {
    "ppo": (
        partial(DecoupledPPOLoss, kl_to_ref_coeff=0.2),
        ["assistant_mask", "ref_log_prob", "advantage", "sample_log_prob", "prox_log_prob"],
    ),
    "ppo loglinear": (
        partial(DecoupledPPOLoss, prox="loglinear"),
        ["token_version", "target_version", "sample_log_prob"],
    ),
    "ppo behavior": (partial(DecoupledPPOLoss, prox="behavior"), ["sample_log_prob"]),
    "ppo by sequences": (
        partial(DecoupledPPOLoss, ratio_level="sequence", aggregation="sequence"),
        ["segment_ids", "assistant_mask"],
    ),
    "dpo": (
        OnlineDPOLoss,
        ["assistant_mask", "segment_ids", "ref_log_prob", "reward", "group_id"],
    ),
    "dpo on stale pairs": (partial(OnlineDPOLoss, importance_cap=1.1), ["sample_log_prob"]),
    "rloo": (
        ProximalRLOOLoss,
        [
            "assistant_mask",
            "segment_ids",
            "reward",
            "group_id",
            "advantage",
            "sample_log_prob",
        ],
    ),
    "best of n": (BestOfNLoss, ["assistant_mask", "segment_ids", "reward", "group_id"]),
    "trajectory balance": (
        TrajectoryBalanceLoss,
        ["assistant_mask", "segment_ids", "ref_log_prob", "reward", "group_id", "group_size"],
    ),
}
# Every loss has this key; these have no use for it.
WITHOUT_REFERENCE = (ProximalRLOOLoss, BestOfNLoss)
CASES = [(loss, key) for loss, (_, keys) in READS.items() for key in keys]
# Not there, these are done without: one sequence per row, the current policy as the anchor.
OPTIONAL = {"segment_ids", "prox_log_prob"}


def run(loss, batch, pack) -> list:
    """Loss, gradient and diagnostics of a whole step on one micro-batch."""
    policy = loss.actor_network
    policy.zero_grad()
    micro = pack(loss.select(batch, target_version=TARGET_VERSION), pad_id=0)
    total = backward(loss, [micro], loss.denominator(micro))
    diagnostics = loss(micro, normalizer=1.0).diagnostics()
    return [total, policy.gradients(), {k: v.tolist() for k, v in diagnostics.items()}]


def test_every_key_of_every_loss_has_a_case():
    for loss_class in (
        DecoupledPPOLoss,
        OnlineDPOLoss,
        ProximalRLOOLoss,
        BestOfNLoss,
        TrajectoryBalanceLoss,
    ):
        unused = {"ref_log_prob"} if loss_class in WITHOUT_REFERENCE else set()
        names = {
            key
            for make, keys in READS.values()
            if isinstance(make(TablePolicy([])), loss_class)
            for key in keys
        }
        assert names | unused == {field.name for field in fields(loss_class.default_keys)}


@pytest.mark.parametrize(("name", "key"), CASES)
@pytest.mark.parametrize("form", ["padded", "packed"])
def test_nested_key(name, key, form):
    make, _ = READS[name]
    trajectories = random_trajectories(0, empty=0.0)
    loss = make(TablePolicy(trajectories))
    default, moved = getattr(loss.tensor_keys, key), ("moved", "very", "deep", key)
    pack = {"padded": pad_rows, "packed": pack_rows}[form]
    expected = run(loss, to_batch(trajectories), pack)

    loss.set_keys(**{key: moved})
    batch = to_batch(trajectories)
    for row in batch.unbind(0):
        if default in row.keys(True):
            row.rename_key_(default, moved)
    if key == "segment_ids" and form == "packed":
        pack = partial(pack_rows, segment_ids_key=moved)
    assert run(loss, batch, pack) == expected
    assert moved in loss.in_keys and default not in loss.in_keys


@pytest.mark.parametrize(("name", "key"), [case for case in CASES if case[1] not in OPTIONAL])
def test_a_missing_entry_is_named(name, key):
    make, _ = READS[name]
    trajectories = random_trajectories(0, empty=0.0)
    loss = make(TablePolicy(trajectories))
    rows = loss.select(to_batch(trajectories), target_version=TARGET_VERSION)
    loss.set_keys(**{key: ("nowhere", key)})
    with pytest.raises(KeyError, match=rf"no {key} at .*set_keys\({key}=\.\.\.\)"):
        if key in ("reward", "group_id"):
            loss.select(rows)
        else:
            loss(pad_rows(rows, pad_id=0), normalizer=1.0)


def test_keys_of_many_at_once_and_back():
    for make in (partial(DecoupledPPOLoss, prox="loglinear", kl_to_ref_coeff=0.1), OnlineDPOLoss):
        loss = make(TablePolicy([]))
        defaults = vars(loss.tensor_keys).copy()
        loss.set_keys(**{name: ("moved", name) for name in defaults})
        assert set(loss.in_keys) == {("table", "place"), *(("moved", name) for name in defaults)}
        loss.set_keys(**dict.fromkeys(defaults))
        assert vars(loss.tensor_keys) == defaults
        with pytest.raises(ValueError, match="not an accepted tensordict key"):
            loss.set_keys(nonsense="x")
