"""What the losses over groups have in common: whole groups only, and nothing that is not finite."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_batches import (
    FORMS,
    TARGET_VERSION,
    TablePolicy,
    backward,
    micro_batches,
    random_trajectories,
    to_batch,
)
from loss_references import best_against_worst, lag_diagnostics

from torchrl_llm_async.objectives import (
    BestOfNLoss,
    OnlineDPOLoss,
    ProximalRLOOLoss,
    TrajectoryBalanceLoss,
)
from torchrl_llm_async.packing import blank_rows, pack_rows, pad_rows

LOSSES = (ProximalRLOOLoss, BestOfNLoss, TrajectoryBalanceLoss)
SELECT = (*LOSSES, OnlineDPOLoss)


@pytest.mark.inv7
@pytest.mark.parametrize("make", SELECT)
@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([0], r"Groups \[0\] have \[1\] adjacent rows"),
        ([0, 2, 4], r"Groups \[0, 1, 2\] have \[1, 1, 1\]"),
        ([0, 2, 1, 3], r"Groups \[0, 1, 0, 1\] have \[1, 1, 1, 1\]"),
        ([0, 1, 2], r"Groups \[0, 1\] have \[2, 1\]"),
        ([0, 1, 2, 3, 0, 1], r"Groups \[0, 1, 0\] have \[2, 2, 2\]"),
    ],
    ids=["one member", "one each", "not adjacent", "one missing", "twice"],
)
def test_groups_that_are_not_whole_are_refused(make, rows, told):
    loss = make(TablePolicy([]))
    with pytest.raises(ValueError, match=rf"{told}.*whole groups.*group_size >= 2"):
        loss.select(to_batch(random_trajectories(0))[rows])


@pytest.mark.inv7
@pytest.mark.parametrize("make", SELECT)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rewards_that_are_not_finite_are_refused(make, bad):
    batch = to_batch(random_trajectories(1))
    batch[3]["next", "reward"] = torch.tensor([bad])
    with pytest.raises(ValueError, match=r"Groups \[1\] have the rewards .* must be finite"):
        make(TablePolicy([])).select(batch)


@pytest.mark.inv7
@pytest.mark.parametrize("make", SELECT)
def test_a_reward_per_token_is_refused(make):
    batch = to_batch([random_trajectories(2)[0]] * 2)
    for row in batch.unbind(0):
        row["next", "reward"] = torch.zeros(len(row["tokens", "full"]))
    with pytest.raises(ValueError, match=r"2 rows have 2 group ids and \d+ rewards"):
        make(TablePolicy([])).select(batch)


@pytest.mark.parametrize("make", SELECT)
def test_select_leaves_the_batch_as_it_was(make):
    batch = to_batch(random_trajectories(3))
    before = batch.clone()
    rows = make(TablePolicy([])).select(batch)
    assert set(batch.keys(True, True)) == set(before.keys(True, True))
    assert (batch["advantage"] == before["advantage"]).all()
    row = rows[0]["group", "id"].item() * 2 + rows[0]["group", "index"].item()
    tokens = rows[0]["tokens", "full"], batch[row]["tokens", "full"]
    assert tokens[0].data_ptr() == tokens[1].data_ptr()


@pytest.mark.inv7
@pytest.mark.parametrize("make", LOSSES)
@pytest.mark.parametrize("form", [pad_rows, pack_rows])
def test_answers_without_a_token_train_nothing(make, form):
    trajectories = [
        replace(row, sampled=[False] * len(row.theta), reward=float(row.index))
        for row in random_trajectories(4)
    ]
    policy = TablePolicy(trajectories)
    loss = make(policy)
    rows = loss.select(to_batch(trajectories))
    for micro in (form(rows, pad_id=0), blank_rows(rows, pad_id=0)):
        assert loss.denominator(micro) == 0
        assert backward(loss, [micro], 5.0) == 0.0
        assert policy.log_probs.grad.eq(0).all()  # Connected to the graph, all the same.


@pytest.mark.inv7
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("form", [pad_rows, pack_rows])
@pytest.mark.parametrize(
    ("make", "field", "named"),
    [
        *((make, "theta", "policy") for make in LOSSES),
        (ProximalRLOOLoss, "mu", r"sample_log_prob.*\('log_probs', 'full'\)"),
        (TrajectoryBalanceLoss, "ref", r"ref_log_prob.*\('log_probs', 'ref'\)"),
    ],
)
def test_log_probs_that_are_not_finite_are_named(make, field, named, form, bad):
    trajectories = [
        replace(row, reward=float(row.index)) for row in random_trajectories(5, empty=0.0)
    ]
    row = trajectories[1]
    values = [*getattr(row, field)]
    values[row.answer()[-1]] = bad
    trajectories[1] = replace(row, **{field: values})
    loss = make(TablePolicy(trajectories))
    rows = loss.select(to_batch(trajectories))
    with pytest.raises(ValueError, match=f"(?s){named}.*not finite for 1 sampled tokens"):
        loss(form(rows, pad_id=0), normalizer=1.0)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), make=st.sampled_from(SELECT), form=st.sampled_from(FORMS))
def test_diagnostics_by_lag(seed, make, form):
    trajectories = random_trajectories(seed, oldest=-1)
    loss = make(TablePolicy(trajectories))
    rows = loss.select(to_batch(trajectories), target_version=TARGET_VERSION)
    pairs, _ = best_against_worst(trajectories)
    trained = {
        OnlineDPOLoss: [trajectories[i] for pair in pairs for i in pair],
        BestOfNLoss: [trajectories[chosen] for chosen, _ in pairs],
    }.get(make, trajectories)
    assert len(rows) == len(trained)
    if not trained:
        return
    unit = {"sequence": 1, "pair": 2, "group": 2}[loss.packing_unit]
    micros = micro_batches(rows, form, seed, unit=unit)
    found = [loss(micro, normalizer=1.0).diagnostics() for micro in micros]
    expected = lag_diagnostics(trained, anchored=False)
    if expected:
        assert {name for name in found[0] if "lag" in name} == set(expected)
    for name, pair in expected.items():
        total = sum(diagnostics[name] for diagnostics in found)
        np.testing.assert_allclose(total, pair, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", SELECT)
def test_without_versions_there_are_no_diagnostics_by_lag(make):
    trajectories = random_trajectories(10)
    loss = make(TablePolicy(trajectories))
    rows = loss.select(to_batch(trajectories))
    names = set(loss(pad_rows(rows, pad_id=0), normalizer=1.0).diagnostics())
    assert names and not any("lag" in name for name in names)


@pytest.mark.inv7
@pytest.mark.parametrize("make", SELECT)
@pytest.mark.parametrize("form", [pad_rows, pack_rows])
def test_rows_that_select_has_not_seen_are_refused(make, form):
    trajectories = random_trajectories(3, empty=0.0)
    for row in trajectories:
        row.reward = float(row.index)  # The second of each group is the better one.
    loss = make(TablePolicy(trajectories))
    with pytest.raises((KeyError, ValueError), match=r"select\(\)"):
        loss(form(to_batch(trajectories), pad_id=0), normalizer=1.0)


def test_pairs_cut_out_of_phase_are_refused():
    trajectories = random_trajectories(3, empty=0.0)
    loss = OnlineDPOLoss(TablePolicy(trajectories))
    rows = loss.select(to_batch([replace(row, reward=float(row.index)) for row in trajectories]))
    with pytest.raises(ValueError, match=r"no pairs of a better and a worse answer.*unit=2"):
        loss(pad_rows(rows[1:3], pad_id=0), normalizer=1.0)


@pytest.mark.inv7
@pytest.mark.parametrize("make", SELECT)
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16])
def test_rewards_of_other_types_are_the_same_rewards(make, dtype):
    """0, 1, 1, 0, 0, 1: nothing is cut down to an integer, and nothing overflows."""
    trajectories = random_trajectories(11, group_size=3, empty=0.0)
    for row, reward in zip(trajectories, [0.0, 1.0, 1.0, 0.0, 0.0, 1.0], strict=True):
        row.reward = reward
    results = []
    for kind in (torch.float32, dtype):
        policy = TablePolicy(trajectories)
        loss = make(policy)
        batch = to_batch(trajectories)
        for row in batch.unbind(0):
            row["next", "reward"] = row["next", "reward"].to(kind)
        rows = loss.select(batch)
        results.append(backward(loss, [pad_rows(rows, pad_id=0)], loss.denominator(rows)))
        results.append(policy.gradients())
    assert results[:2] == results[2:] and results[0] != 0


@pytest.mark.inv7
def test_large_rewards_in_half_precision_do_not_overflow():
    trajectories = random_trajectories(12, empty=0.0)
    loss = TrajectoryBalanceLoss(TablePolicy(trajectories), beta=0.004)
    batch = to_batch(trajectories)
    for row in batch.unbind(0):
        row["next", "reward"] = 300 * row["next", "reward"].half()
    rows = loss.select(batch)
    assert math.isfinite(backward(loss, [pad_rows(rows, pad_id=0)], loss.denominator(rows)))


def test_pairs_of_almost_equal_rewards_and_of_large_group_ids_are_pairs():
    """No number of them is one of float32."""
    trajectories = [
        replace(row, reward=1.0 + 1e-12 * row.index, group=2**40 + row.group)
        for row in random_trajectories(3, empty=0.0)
    ]
    loss = OnlineDPOLoss(TablePolicy(trajectories))
    rows = loss.select(to_batch(trajectories))
    assert loss.groups_tied == 0
    for form in (pad_rows, pack_rows):
        assert math.isfinite(backward(loss, [form(rows, pad_id=0)], loss.denominator(rows)))
    mixed = rows[[0, 3, 2, 1]]
    with pytest.raises(ValueError, match=r"no pairs of a better"):
        loss(pad_rows(mixed, pad_id=0), normalizer=1.0)
