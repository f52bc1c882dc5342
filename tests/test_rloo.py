"""Proximal RLOO: against a slow reference, its advantages, and the losses it turns into."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
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
from loss_references import exp, gradient, larger, smaller

from torchrl_llm_async.objectives import (
    DecoupledPPOLoss,
    ProximalRLOOLoss,
    ProximalRLOOLossOutput,
)
from torchrl_llm_async.packing import pack_rows, pad_rows

TOLERANCE = 1e-6


def leave_one_out(trajectories) -> list[float]:
    """Each row's reward over the mean reward of the others of its group."""
    out = []
    for i, row in enumerate(trajectories):
        others = [
            other.reward
            for j, other in enumerate(trajectories)
            if other.group == row.group and i != j
        ]
        out.append(row.reward - sum(others) / len(others))
    return out


def log_ratio(row, theta) -> complex:
    """Of the whole answer: log theta - log mu."""
    return sum((theta[t] - row.mu[t] for t in row.answer()), 0j)


def rloo(trajectories, low: float, high: float) -> tuple[float, list, int]:
    """The step's loss, its gradients by log-probs, and how many sequences counted."""
    advantages = leave_one_out(trajectories)
    count = sum(bool(row.answer()) for row in trajectories)

    def of_row(i: int, theta) -> complex:
        row, a = trajectories[i], advantages[i]
        if not row.answer():
            return 0j
        r = exp(log_ratio(row, theta))
        return larger(-a * r, -a * smaller(larger(r, 1 - low), 1 + high)) / count

    loss = sum(complex(of_row(i, row.theta)).real for i, row in enumerate(trajectories))
    slopes = [gradient(lambda x, i=i: of_row(i, x), r.theta) for i, r in enumerate(trajectories)]
    return loss, slopes, count


@settings(max_examples=70, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    clip=st.sampled_from([0.2, (0.1, 0.5)]),
    group_size=st.sampled_from([2, 3, 4]),
    form=st.sampled_from(FORMS),
    outliers=st.sampled_from([0.0, 0.0, 0.1]),
)
def test_equals_the_reference_in_every_form(seed, clip, group_size, form, outliers):
    trajectories = random_trajectories(
        seed, rows=12, group_size=group_size, empty=0.2, outliers=outliers
    )
    policy = TablePolicy(trajectories)
    loss = ProximalRLOOLoss(policy, clip_epsilon=clip)
    expected, by_log_prob, count = rloo(trajectories, loss.clip_low, loss.clip_high)
    rows = loss.select(to_batch(trajectories))
    normalizer = loss.denominator(rows)
    assert normalizer == count
    micros = micro_batches(rows, form, seed)
    assert sum(loss.denominator(micro) for micro in micros) == normalizer
    value = backward(loss, micros, normalizer)
    np.testing.assert_allclose(value, expected, rtol=1e-9, atol=TOLERANCE)
    np.testing.assert_allclose(
        flat(policy.gradients()), flat(by_log_prob), rtol=1e-9, atol=TOLERANCE
    )


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), form=st.sampled_from(FORMS))
def test_diagnostics_in_every_form(seed, form):
    trajectories = random_trajectories(seed, rows=9, group_size=3, empty=0.2)
    loss = ProximalRLOOLoss(TablePolicy(trajectories), clip_epsilon=(0.2, 0.4))
    micros = micro_batches(loss.select(to_batch(trajectories)), form, seed)
    answers = [
        (log_ratio(row, row.theta).real, advantage)
        for row, advantage in zip(trajectories, leave_one_out(trajectories), strict=True)
        if row.answer()
    ]
    ratios = np.exp([log for log, _ in answers])
    expected = {
        "ratio": ratios.sum(),
        "ratio_squared": (ratios**2).sum(),
        "clip_fraction_low": sum(a < 0 and np.exp(log) < 0.8 for log, a in answers),
        "clip_fraction_high": sum(a > 0 and np.exp(log) > 1.4 for log, a in answers),
        "kl_behavior_to_policy": -sum(log for log, _ in answers),
    }
    outputs = [loss(micro, normalizer=1.0).diagnostics() for micro in micros]
    totals = {name: sum(output[name] for output in outputs) for name in outputs[0]}
    assert set(totals) == set(expected)
    for name, value in totals.items():
        assert not value.requires_grad
        np.testing.assert_allclose(value, [expected[name], len(answers)], rtol=1e-5, atol=1e-5)
    figures = ProximalRLOOLossOutput.figures({k: v.tolist() for k, v in totals.items()})
    assert set(figures) == {*expected, "effective_sample_size"} - {"ratio_squared"}
    assert figures["effective_sample_size"] == pytest.approx(
        ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum()), rel=1e-5
    )


def test_figures_of_nothing():
    assert ProximalRLOOLossOutput.figures({"ratio": (0.0, 0), "ratio_squared": (0.0, 0)}) == {}


@settings(max_examples=30, deadline=None)
@given(
    rewards=st.integers(2, 6).flatmap(
        lambda size: st.lists(
            st.lists(st.floats(-1e3, 1e3), min_size=size, max_size=size), min_size=1, max_size=4
        )
    )
)
def test_advantages_of_a_group_sum_to_zero(rewards):
    size = len(rewards[0])
    row = random_trajectories(0, rows=1)[0]
    trajectories = [
        replace(row, reward=reward, group=group, index=index)
        for group, members in enumerate(rewards)
        for index, reward in enumerate(members)
    ]
    batch = to_batch(trajectories)
    rows = ProximalRLOOLoss(TablePolicy(trajectories)).select(batch)
    advantage = rows["group", "advantage"]
    assert advantage.shape == batch["next", "reward"].shape
    np.testing.assert_allclose(advantage.flatten(), leave_one_out(trajectories), atol=1e-9)
    assert advantage.view(-1, size).sum(-1).abs().max() < 1e-9


def test_fresh_data_has_the_gradient_of_reinforce():
    trajectories = [replace(r, theta=r.mu) for r in random_trajectories(1, group_size=3)]
    policy = TablePolicy(trajectories)
    loss = ProximalRLOOLoss(policy)
    rows = loss.select(to_batch(trajectories))
    backward(loss, [pack_rows(rows, pad_id=0)], loss.denominator(rows))
    count = sum(bool(row.answer()) for row in trajectories)
    for row, slopes, advantage in zip(
        trajectories, policy.gradients(), leave_one_out(trajectories), strict=True
    ):
        expected = [-advantage / count if sampled else 0.0 for sampled in row.sampled]
        np.testing.assert_allclose(slopes, expected, atol=1e-12)


def test_answers_of_one_token_make_it_coupled_ppo():
    trajectories = [
        replace(row, sampled=[False] * (len(row.theta) - 1) + [True])
        for row in random_trajectories(2, rows=12, group_size=4)
    ]
    results = []
    for make, options in (
        (ProximalRLOOLoss, {}),
        (DecoupledPPOLoss, {"prox": "behavior"}),
    ):
        policy = TablePolicy(trajectories)
        rows = ProximalRLOOLoss(policy).select(to_batch(trajectories))
        rows = rows.set("advantage", rows["group", "advantage"])
        loss = make(policy, clip_epsilon=(0.1, 0.3), **options)
        value = backward(loss, [pad_rows(rows, pad_id=0)], loss.denominator(rows))
        results.append([value, *flat(policy.gradients())])
    np.testing.assert_allclose(results[0], results[1], rtol=1e-12, atol=1e-15)


def test_equal_rewards_have_no_gradient():
    trajectories = [replace(row, reward=0.1) for row in random_trajectories(3, group_size=3)]
    policy = TablePolicy(trajectories)
    loss = ProximalRLOOLoss(policy)
    rows = loss.select(to_batch(trajectories))
    assert len(rows) == len(trajectories) and loss.groups_tied == 0
    assert abs(backward(loss, [pad_rows(rows, pad_id=0)], loss.denominator(rows))) < 1e-12
    assert policy.log_probs.grad.abs().max() < 1e-12


def test_an_answer_without_a_token_is_part_of_the_baseline():
    """Its reward was the policy's, too; there is only nothing of it to train."""
    first, second = random_trajectories(4, rows=2, empty=0.0)
    silent = replace(second, sampled=[False] * len(second.theta), reward=3.0)
    policy = TablePolicy([first, silent])
    loss = ProximalRLOOLoss(policy)
    rows = loss.select(to_batch([first, silent]))
    assert rows["group", "advantage"].flatten().tolist() == [first.reward - 3.0, 3.0 - first.reward]
    assert loss.denominator(rows) == 1


@pytest.mark.parametrize("form", [pad_rows, pack_rows])
@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_ratios_stay_finite(form, shift):
    trajectories = [
        replace(row, theta=[x + shift for x in row.theta]) for row in random_trajectories(5)
    ]
    policy = TablePolicy(trajectories)
    loss = ProximalRLOOLoss(policy)
    micro = form(loss.select(to_batch(trajectories)), pad_id=0)
    assert np.isfinite(backward(loss, [micro], 1.0))
    assert policy.log_probs.grad.isfinite().all()


@pytest.mark.parametrize("clip", [0.0, 1.0, (0.2, 0.0), (1.5, 0.2), -0.1])
def test_options_out_of_range_are_named(clip):
    with pytest.raises(ValueError, match="clip_epsilon="):
        ProximalRLOOLoss(TablePolicy([]), clip_epsilon=clip)


def test_documented_defaults():
    loss = ProximalRLOOLoss(TablePolicy([]))
    assert (loss.clip_low, loss.clip_high) == (0.2, 0.2)
    assert loss.packing_unit == "sequence" and not loss.needs_reference
