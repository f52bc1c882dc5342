"""Online DPO: against the slow reference over all its options, its pairs, its identities."""

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
    TablePolicy,
    backward,
    flat,
    micro_batches,
    random_trajectories,
    to_batch,
)
from loss_references import best_against_worst, dpo

from torchrl_llm_async.objectives import OnlineDPOLoss, functional
from torchrl_llm_async.objectives.dpo import preference_pairs
from torchrl_llm_async.packing import pack_rows, pad_rows

TOLERANCE = 1e-6

OPTIONS = st.fixed_dictionaries(
    {
        "beta": st.sampled_from([0.1, 0.7]),
        "loss_type": st.sampled_from(["sigmoid", "ipo", "hinge"]),
        "label_smoothing": st.sampled_from([0.0, 0.2]),
        "importance_cap": st.sampled_from([None, 0.9, 2.0]),
    }
)


def all_pairs(trajectories) -> list[tuple[int, int]]:
    """Every (better, worse) of the same group."""
    return [
        (i, j)
        for i, better in enumerate(trajectories)
        for j, worse in enumerate(trajectories)
        if better.group == worse.group and better.reward > worse.reward
    ]


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    options=OPTIONS,
    form=st.sampled_from(FORMS),
    pairing=st.sampled_from(["best_worst", "all"]),
    outliers=st.sampled_from([0.0, 0.0, 0.1]),
)
def test_equals_the_reference_in_every_form(seed, options, form, pairing, outliers):
    trajectories = random_trajectories(seed, rows=9, group_size=3, empty=0.2, outliers=outliers)
    policy = TablePolicy(trajectories)
    loss = OnlineDPOLoss(policy, pairing=pairing, **options)
    rows = loss.select(to_batch(trajectories))
    pairs, ties = best_against_worst(trajectories)
    pairs = all_pairs(trajectories) if pairing == "all" else pairs
    assert (loss.groups_tied, len(rows)) == (ties, 2 * len(pairs))
    expected, by_log_prob, count = dpo(trajectories, pairs, options)
    normalizer = loss.denominator(rows)
    assert normalizer == count
    if not count:
        return
    micros = micro_batches(rows, form, seed, unit=2)
    assert sum(loss.denominator(micro) for micro in micros) == normalizer
    value = backward(loss, micros, normalizer)
    np.testing.assert_allclose(value, expected, rtol=1e-9, atol=TOLERANCE)
    np.testing.assert_allclose(
        flat(policy.gradients()), flat(by_log_prob), rtol=1e-9, atol=TOLERANCE
    )


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), cap=st.sampled_from([None, 1.1]), form=st.sampled_from(FORMS))
def test_diagnostics_in_every_form(seed, cap, form):
    trajectories = random_trajectories(seed, rows=9, group_size=3, empty=0.0)
    pairs, _ = best_against_worst(trajectories)
    if not pairs:
        return
    beta = 0.3
    loss = OnlineDPOLoss(TablePolicy(trajectories), beta=beta, importance_cap=cap)
    rows = loss.select(to_batch(trajectories))

    def answer_sum(i: int, of) -> float:
        return sum(of(trajectories[i], t) for t in trajectories[i].answer())

    log_prob = [answer_sum(i, lambda row, t: row.theta[t]) for i in range(9)]
    reward = [beta * answer_sum(i, lambda row, t: row.theta[t] - row.ref[t]) for i in range(9)]
    log_ratio = [answer_sum(i, lambda row, t: row.theta[t] - row.mu[t]) for i in range(9)]
    length = [len(row.answer()) for row in trajectories]
    expected = {
        "reward_margin": sum(reward[c] - reward[r] for c, r in pairs),
        "preference_accuracy": sum(reward[c] > reward[r] for c, r in pairs),
        "chosen_reward": sum(reward[c] for c, _ in pairs),
        "rejected_reward": sum(reward[r] for _, r in pairs),
        "chosen_log_prob": sum(log_prob[c] for c, _ in pairs),
        "rejected_log_prob": sum(log_prob[r] for _, r in pairs),
    }
    if cap is not None:
        expected["importance_weight"] = sum(
            min(cap, math.exp((log_ratio[c] + log_ratio[r]) / (length[c] + length[r])))
            for c, r in pairs
        )
    micros = micro_batches(rows, form, seed, unit=2)
    outputs = [loss(micro, normalizer=1.0).diagnostics() for micro in micros]
    assert set(outputs[0]) == set(expected)
    for name, total in expected.items():
        value = sum(output[name] for output in outputs)
        assert not value.requires_grad
        np.testing.assert_allclose(value, [total, len(pairs)], rtol=1e-5, atol=1e-5)


def as_pairs(batch):
    """Rows 2 i and 2 i + 1, whatever their rewards are."""
    return batch.exclude(("next", "reward"))


@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge", "ipo"])
@pytest.mark.parametrize("form", [pad_rows, pack_rows])
def test_a_pair_of_equals_has_no_gradient(loss_type, form):
    """Up for the one is down for the other, token by token."""
    trajectories = random_trajectories(0, empty=0.0)
    policy = TablePolicy(trajectories)
    loss = OnlineDPOLoss(policy, loss_type=loss_type)
    micro = form(as_pairs(to_batch(trajectories)[[0, 0]]), pad_id=0)
    backward(loss, [micro], 1.0)
    assert policy.log_probs.grad.abs().max() < 1e-12
    assert loss(micro, normalizer=1.0).preference_accuracy[0] == 0  # Neither is preferred.


@pytest.mark.parametrize("beta", [0.1, 0.25])
def test_ipo_is_zero_at_its_target(beta):
    """At h = 1 / (2 beta) both the loss and its gradient are."""
    trajectories = random_trajectories(1, rows=2, empty=0.0)
    for row, share in zip(trajectories, (0.75, -0.25), strict=True):
        row.theta = [
            ref + share / (2 * beta) / len(row.answer()) if sampled else ref
            for ref, sampled in zip(row.ref, row.sampled, strict=True)
        ]
    policy = TablePolicy(trajectories)
    loss = OnlineDPOLoss(policy, loss_type="ipo", beta=beta)
    value = backward(loss, [pack_rows(as_pairs(to_batch(trajectories)), pad_id=0)], 1.0)
    assert value == pytest.approx(0.0, abs=1e-20)
    assert policy.log_probs.grad.abs().max() < 1e-12


def test_fresh_pairs_weigh_one():
    trajectories = [replace(row, theta=row.mu) for row in random_trajectories(2, empty=0.0)]
    values = [
        backward(OnlineDPOLoss(TablePolicy(trajectories), importance_cap=cap), [micro], 3.0)
        for micro in [pad_rows(as_pairs(to_batch(trajectories)), pad_id=0)]
        for cap in (None, 1.0, 2.0)
    ]
    np.testing.assert_allclose(values, values[0], rtol=1e-12)


def test_ratios_stay_finite():
    trajectories = [
        replace(row, theta=[x + 1e4 for x in row.theta]) for row in random_trajectories(3)
    ]
    for loss_type in ("sigmoid", "hinge", "ipo"):
        policy = TablePolicy(trajectories)
        loss = OnlineDPOLoss(policy, loss_type=loss_type, importance_cap=math.inf)
        assert np.isfinite(
            backward(loss, [pad_rows(as_pairs(to_batch(trajectories)), pad_id=0)], 1.0)
        )
        assert policy.log_probs.grad.isfinite().all()


@settings(max_examples=100, deadline=None)
@given(
    rewards=st.lists(st.integers(0, 3).map(float), min_size=2, max_size=8),
    limit=st.none() | st.integers(1, 5),
)
def test_all_pairs(rewards, limit):
    pairs = preference_pairs(rewards, "all", limit)
    assert len(set(pairs)) == len(pairs)
    assert all(rewards[chosen] > rewards[rejected] for chosen, rejected in pairs)
    possible = sum(a > b for a in rewards for b in rewards)
    assert len(pairs) == min(possible, limit or possible)
    uses = [0] * len(rewards)
    left = {(i, j) for i, a in enumerate(rewards) for j, b in enumerate(rewards) if a > b}
    for chosen, rejected in pairs:
        used, margin = uses[chosen] + uses[rejected], rewards[chosen] - rewards[rejected]
        assert all(uses[i] + uses[j] >= used for i, j in left)
        assert all(rewards[i] - rewards[j] <= margin for i, j in left if uses[i] + uses[j] == used)
        left.remove((chosen, rejected))
        uses[chosen] += 1
        uses[rejected] += 1


def test_limited_pairs_use_no_trajectory_twice():
    pairs = preference_pairs([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0], "all", 4)
    assert sorted(sum(pairs, ())) == list(range(8))


@pytest.mark.parametrize("limit", [1, 2])
def test_select_takes_as_many_pairs_of_a_group_as_allowed(limit):
    trajectories = [
        replace(row, reward=float(row.index)) for row in random_trajectories(4, group_size=3)
    ]
    loss = OnlineDPOLoss(TablePolicy([]), pairing="all", max_pairs_per_group=limit)
    rows = loss.select(to_batch(trajectories))
    picked = rows["group", "id"].tolist(), rows["group", "index"].tolist()
    # Of indices 0, 1, 2: best against worst, then the first of the others with the middle.
    order = [2, 0, 1, 0][: 2 * limit]
    assert picked == ([0] * len(order) + [1] * len(order), order * 2)


@pytest.mark.inv7
@pytest.mark.parametrize("pairing", ["best_worst", "all"])
def test_equal_rewards_make_no_pair(pairing):
    trajectories = [replace(row, reward=1.0) for row in random_trajectories(5)]
    loss = OnlineDPOLoss(TablePolicy(trajectories), pairing=pairing)
    rows = loss.select(to_batch(trajectories))
    assert len(rows) == 0 and loss.denominator(rows) == 0
    assert loss.groups_tied == 3


@pytest.mark.inv7
@pytest.mark.parametrize("form", [pad_rows, pack_rows])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_pairs_without_sampled_tokens_count_for_nothing(form, cap):
    """One silent member leaves a pair: its log-prob is that of the empty answer, 0."""
    trajectories = random_trajectories(6, empty=0.0)
    silent = [replace(row, sampled=[False] * len(row.theta)) for row in trajectories]
    policy = TablePolicy(trajectories)
    for loss_type in ("sigmoid", "hinge", "ipo"):
        loss = OnlineDPOLoss(policy, loss_type=loss_type, importance_cap=cap)
        micro = form(as_pairs(to_batch(silent)), pad_id=0)
        policy.zero_grad()
        assert loss.denominator(micro) == 0
        assert backward(loss, [micro], 5.0) == 0.0
        assert policy.log_probs.grad.eq(0).all()  # Connected to the graph, all the same.
        half = [trajectories[0], silent[1]]
        micro = form(as_pairs(to_batch(half)), pad_id=0)
        assert loss.denominator(micro) == 1
        policy.zero_grad()
        options = {"loss_type": loss_type, "importance_cap": cap}
        expected, by_log_prob, _ = dpo(half, [(0, 1)], options)
        assert backward(loss, [micro], 1.0) == pytest.approx(expected, abs=TOLERANCE)
        np.testing.assert_allclose(flat(policy.gradients()[:2]), flat(by_log_prob), atol=TOLERANCE)


@pytest.mark.inv7
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("form", [pad_rows, pack_rows])
@pytest.mark.parametrize(
    ("field", "named"),
    [
        ("theta", "policy"),
        ("mu", r"sample_log_prob.*\('log_probs', 'full'\)"),
        ("ref", r"ref_log_prob.*\('log_probs', 'ref'\)"),
    ],
)
def test_numbers_that_are_not_finite_are_named(form, field, named, bad):
    """Of equal lengths, so that row 1 is row 1 in both forms."""
    same = random_trajectories(7, empty=0.0)[0]
    values = [*getattr(same, field)]
    values[same.answer()[0]] = bad
    trajectories = [same, replace(same, **{field: values})]
    loss = OnlineDPOLoss(TablePolicy(trajectories), importance_cap=2.0)
    with pytest.raises(ValueError, match=f"(?s){named}.*row 1"):
        loss(form(as_pairs(to_batch(trajectories)), pad_id=0), normalizer=1.0)


@pytest.mark.inv7
def test_groups_that_make_no_pairs_are_refused():
    trajectories = random_trajectories(8)
    loss = OnlineDPOLoss(TablePolicy(trajectories))
    batch = to_batch(trajectories)
    with pytest.raises(ValueError, match=r"Groups \[0, 1\] have \[2, 1\] adjacent rows"):
        loss.select(batch[:3])
    with pytest.raises(ValueError, match=r"Groups \[0, 1, 0, 1\] have .*their rows adjacent"):
        loss.select(batch[[0, 2, 1, 3]])
    for form in (pad_rows, pack_rows):
        with pytest.raises(ValueError, match=r"3 .* are no whole pairs"):
            loss(form(batch[:3], pad_id=0), normalizer=1.0)
    for bad in (math.nan, math.inf, -math.inf):
        batch[4]["next", "reward"] = torch.tensor([bad])
        with pytest.raises(ValueError, match=r"(?s)Groups \[2\] .* must be finite"):
            loss.select(batch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0.0}, r"beta=0\.0"),
        ({"beta": "1e-1"}, r"beta='1e-1' is no number"),
        ({"loss_type": "kto"}, "loss_type='kto'"),
        ({"pairing": "first"}, "pairing='first'"),
        ({"label_smoothing": 0.5}, r"label_smoothing=0\.5"),
        ({"label_smoothing": -0.1}, r"label_smoothing=-0\.1"),
        ({"max_pairs_per_group": 2}, "max_pairs_per_group=2"),
        ({"max_pairs_per_group": 0, "pairing": "all"}, "max_pairs_per_group=0"),
        ({"importance_cap": 0.0}, r"importance_cap=0\.0"),
    ],
)
def test_options_out_of_range_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        OnlineDPOLoss(TablePolicy([]), **options)


def test_documented_defaults():
    loss = OnlineDPOLoss(TablePolicy([]))
    assert (loss.beta, loss.loss_type, loss.label_smoothing) == (0.1, "sigmoid", 0.0)
    assert (loss.pairing, loss.max_pairs_per_group) == ("best_worst", None)
    assert loss.importance_cap is None and loss.needs_reference
    assert loss.groups_tied == 0
    assert functional.preference_loss(torch.zeros(1)).item() == pytest.approx(math.log(2))
