"""Every entry a loss reads may lie anywhere: each accepted key, moved deep, changes nothing."""

from __future__ import annotations

from dataclasses import fields
from functools import partial

import pytest
import torch
from loss_batches import TARGET_VERSION, TablePolicy, backward, random_trajectories, to_batch

from torchrl_llm_async.objectives import (
    BestOfNLoss,
    CriticPPOLoss,
    DecoupledPPOLoss,
    OnlineDPOLoss,
    ProximalRLOOLoss,
    TrajectoryBalanceLoss,
)
from torchrl_llm_async.packing import pack_rows, pad_rows

BY_LAG = ["sample_log_prob", "token_version", "target_version"]
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
    "critic": (
        partial(CriticPPOLoss, kl_to_ref_coeff=0.2),
        [
            *("assistant_mask", "segment_ids", "ref_log_prob", "prox_log_prob", *BY_LAG),
            *("reward", "token_reward", "old_value", "advantage", "value_target"),
        ],
    ),
    "dpo": (
        OnlineDPOLoss,
        ["assistant_mask", "segment_ids", "ref_log_prob", "reward", "group_id", *BY_LAG],
    ),
    "dpo on stale pairs": (partial(OnlineDPOLoss, importance_cap=1.1), ["sample_log_prob"]),
    "rloo": (
        ProximalRLOOLoss,
        ["assistant_mask", "segment_ids", "reward", "group_id", "advantage", *BY_LAG],
    ),
    "best of n": (
        BestOfNLoss,
        ["assistant_mask", "segment_ids", "reward", "group_id", "is_best", *BY_LAG],
    ),
    "trajectory balance": (
        TrajectoryBalanceLoss,
        [
            *("assistant_mask", "segment_ids", "ref_log_prob", "reward", "group_id", "group_size"),
            *BY_LAG,
        ],
    ),
}
# Every loss has this key; these have no use for it.
WITHOUT_REFERENCE = (ProximalRLOOLoss, BestOfNLoss)
CASES = [(loss, key) for loss, (_, keys) in READS.items() for key in keys]
# Not there, these are done without: one sequence per row, the current policy as the anchor, no
# diagnostics by lag, no rewards of single tokens. The critic makes what it writes.
OPTIONAL = {"segment_ids", "prox_log_prob", "token_version", "target_version", "token_reward"}
WRITTEN = {"critic": {"old_value", "advantage", "value_target"}}


def to_rows(trajectories):
    """With rewards at single tokens, which the critic's loss reads if they are there."""
    batch = to_batch(trajectories)
    for row, trajectory in zip(batch.unbind(0), trajectories, strict=True):
        row["next", "token_reward"] = torch.tensor(trajectory.value, dtype=torch.float64)
    return batch


def is_needed(name: str, key: str) -> bool:
    if key == "sample_log_prob":  # The others read it for diagnostics.
        return name.split()[0] in ("ppo", "critic", "rloo") or name == "dpo on stale pairs"
    if key in ("token_version", "target_version"):
        return name == "ppo loglinear"
    return key not in OPTIONAL | WRITTEN.get(name, set())


def run(loss, batch, pack) -> list:
    """Loss, gradient and diagnostics of a whole step on one micro-batch."""
    policy = loss.actor_network
    policy.zero_grad()
    micro = pack(loss.select(batch, target_version=TARGET_VERSION), pad_id=0)
    if isinstance(loss, CriticPPOLoss):
        micro = loss.anchor(micro)
    total = backward(loss, [micro], loss.denominator(micro))
    diagnostics = loss(micro, normalizer=1.0).diagnostics()
    return [total, policy.gradients(), {k: v.tolist() for k, v in diagnostics.items()}]


def test_every_key_of_every_loss_has_a_case():
    for loss_class in (
        DecoupledPPOLoss,
        CriticPPOLoss,
        OnlineDPOLoss,
        ProximalRLOOLoss,
        BestOfNLoss,
        TrajectoryBalanceLoss,
    ):
        unused = {"ref_log_prob"} if loss_class in WITHOUT_REFERENCE else set()
        names = {
            key
            for make, keys in READS.values()
            if type(make(TablePolicy([]))) is loss_class
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
    expected = run(loss, to_rows(trajectories), pack)

    loss.set_keys(**{key: moved})
    batch = to_rows(trajectories)
    for row in batch.unbind(0):
        if default in row.keys(True):
            row.rename_key_(default, moved)
    if key == "segment_ids" and form == "packed":
        pack = partial(pack_rows, segment_ids_key=moved)
    assert run(loss, batch, pack) == expected
    assert moved in loss.in_keys and default not in loss.in_keys


@pytest.mark.parametrize(("name", "key"), [case for case in CASES if is_needed(*case)])
def test_a_missing_entry_is_named(name, key):
    make, _ = READS[name]
    trajectories = random_trajectories(0, empty=0.0)
    loss = make(TablePolicy(trajectories))
    rows = loss.select(to_batch(trajectories), target_version=TARGET_VERSION)
    loss.set_keys(**{key: ("nowhere", key)})
    remedy = r"select\(\) writes it" if key in loss.written_by_select else rf"set_keys\({key}="
    with pytest.raises(KeyError, match=rf"no {key} at .*{remedy}"):
        if name == "critic" and key == "reward":
            loss.anchor(pad_rows(rows, pad_id=0))
        elif key in ("reward", "group_id"):
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
