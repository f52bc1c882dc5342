"""Best of N: against a slow reference, which rows it takes, and what it equals."""

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
from loss_references import best_against_worst, gradient

from torchrl_llm_async.objectives import BestOfNLoss
from torchrl_llm_async.packing import pack_rows

TOLERANCE = 1e-6

OPTIONS = st.sampled_from(
    [
        {"aggregation": "token"},
        {"aggregation": "sequence"},
        {"aggregation": "fixed", "fixed_length": 1},
        {"aggregation": "fixed", "fixed_length": 20},
    ]
)


def best_of_n(trajectories, chosen, options) -> tuple[float, list, int]:
    """The step's loss, its gradients by log-probs, and what it was divided by."""
    answers = {i: trajectories[i].answer() for i in chosen if trajectories[i].answer()}
    count = {
        "token": sum(map(len, answers.values())),
        "sequence": len(answers),
        "fixed": len(answers) * options.get("fixed_length", 0),
    }[options["aggregation"]]

    def of_row(i: int, theta) -> complex:
        total = -sum((theta[t] for t in answers.get(i, [])), 0j)
        if i in answers and options["aggregation"] == "sequence":
            total /= len(answers[i])
        return total / (count or 1)

    loss = sum(of_row(i, trajectories[i].theta).real for i in answers)
    slopes = [gradient(lambda x, i=i: of_row(i, x), r.theta) for i, r in enumerate(trajectories)]
    return loss, slopes, count


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    options=OPTIONS,
    group_size=st.sampled_from([2, 3, 4]),
    form=st.sampled_from(FORMS),
)
def test_equals_the_reference_in_every_form(seed, options, group_size, form):
    trajectories = random_trajectories(seed, rows=12, group_size=group_size, empty=0.2)
    pairs, ties = best_against_worst(trajectories)
    chosen = [best for best, _ in pairs]
    policy = TablePolicy(trajectories)
    loss = BestOfNLoss(policy, **options)
    rows = loss.select(to_batch(trajectories))
    assert (loss.groups_tied, len(rows)) == (ties, len(chosen))
    expected, by_log_prob, count = best_of_n(trajectories, chosen, options)
    normalizer = loss.denominator(rows)
    assert normalizer == count
    if not count:
        return
    micros = micro_batches(rows, form, seed)
    assert sum(loss.denominator(micro) for micro in micros) == normalizer
    assert backward(loss, micros, normalizer) == pytest.approx(expected, abs=TOLERANCE)
    np.testing.assert_allclose(flat(policy.gradients()), flat(by_log_prob), atol=TOLERANCE)

    outputs = [loss(micro, normalizer=1.0).diagnostics() for micro in micros]
    log_probs = [[trajectories[i].theta[t] for t in trajectories[i].answer()] for i in chosen]
    sums = [sum(answer) for answer in log_probs if answer]
    figures = {"token_log_prob": flat(log_probs), "chosen_log_prob": sums}
    assert set(outputs[0]) == set(figures)
    for name, values in figures.items():
        total = sum(output[name] for output in outputs)
        np.testing.assert_allclose(total, [sum(values), len(values)], rtol=1e-5, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(
    rewards=st.integers(2, 5).flatmap(
        lambda size: st.lists(
            st.lists(st.integers(0, 2), min_size=size, max_size=size), min_size=1, max_size=5
        )
    )
)
def test_takes_the_first_of_the_best(rewards):
    row = random_trajectories(0, rows=1)[0]
    trajectories = [
        replace(row, reward=float(reward), group=group, index=index)
        for group, members in enumerate(rewards)
        for index, reward in enumerate(members)
    ]
    loss = BestOfNLoss(TablePolicy([]))
    rows = loss.select(to_batch(trajectories))
    told = {
        g: members.index(max(members)) for g, members in enumerate(rewards) if len({*members}) > 1
    }
    assert loss.groups_tied == len(rewards) - len(told)
    assert len(rows) == len(told)
    if told:
        assert rows["group", "id"].tolist() == list(told)
        assert rows["group", "index"].tolist() == list(told.values())


@pytest.mark.inv7
def test_equal_rewards_leave_nothing():
    trajectories = [replace(row, reward=1.0) for row in random_trajectories(1)]
    loss = BestOfNLoss(TablePolicy(trajectories))
    for _ in range(2):  # The count is of one call.
        rows = loss.select(to_batch(trajectories))
        assert len(rows) == 0 and loss.groups_tied == 3
    assert loss.denominator(rows) == 0


def test_one_token_answers_are_weighed_alike_by_every_aggregation():
    trajectories = [
        replace(row, sampled=[False] * (len(row.theta) - 1) + [True], reward=float(row.index))
        for row in random_trajectories(2)
    ]
    results = []
    for options in ({}, {"aggregation": "sequence"}, {"aggregation": "fixed", "fixed_length": 1}):
        policy = TablePolicy(trajectories)
        loss = BestOfNLoss(policy, **options)
        rows = loss.select(to_batch(trajectories))
        value = backward(loss, [pack_rows(rows, pad_id=0)], loss.denominator(rows))
        results.append([value, *flat(policy.gradients())])
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aggregation": "mean"}, "aggregation='mean'"),
        ({"aggregation": "fixed"}, "fixed_length=None"),
        ({"fixed_length": 3}, "fixed_length=3"),
    ],
)
def test_options_out_of_range_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        BestOfNLoss(TablePolicy([]), **options)


def test_documented_defaults():
    loss = BestOfNLoss(TablePolicy([]))
    assert (loss.aggregation, loss.fixed_length) == ("token", None)
    assert loss.packing_unit == "sequence" and not loss.needs_reference
