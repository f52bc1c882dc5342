"""Decoupled PPO: against the slow reference over all its options, and what it must equal."""

from __future__ import annotations

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
    flat,
    micro_batches,
    random_trajectories,
    to_batch,
)
from loss_references import ppo, ppo_diagnostics, ppo_tokens

from torchrl_llm_async.objectives import DecoupledPPOLoss, DecoupledPPOLossOutput, functional
from torchrl_llm_async.packing import pack_rows, pad_rows

TOLERANCE = 1e-6

EVERY_OPTION = st.fixed_dictionaries(
    {
        "clip_epsilon": st.sampled_from([(0.2, 0.2), (0.1, 0.3)]),
        "dual_clip": st.sampled_from([None, 1.5]),
        "ratio_level": st.sampled_from(["token", "sequence"]),
        "prox": st.sampled_from(["recompute", "loglinear", "behavior"]),
        "correction": st.sampled_from(["truncate", "mask", "both", "off"]),
        "correction_level": st.sampled_from(["token", "sequence", "geometric"]),
        "correction_cap": st.sampled_from([1.5, 5.0, float("inf")]),
        "correction_floor": st.sampled_from([None, 0.5]),
        "aggregation": st.sampled_from(["token", "sequence", "fixed"]),
        "entropy_coeff": st.sampled_from([0.0, 0.02]),
        "kl_to_ref_coeff": st.sampled_from([0.0, 0.3]),
        "kl_estimator": st.sampled_from(["k2", "k3"]),
    }
)


def with_effect(options: dict) -> dict:
    """Without those that have no effect beside the others, which are refused."""
    correction = [name for name in options if name.startswith("correction")]
    if options["correction"] == "off":
        options = {k: v for k, v in options.items() if k not in {*correction} - {"correction"}}
    elif options["prox"] == "behavior":
        options = {k: v for k, v in options.items() if k not in correction}
    if options.get("kl_to_ref_coeff") == 0:
        options = {k: v for k, v in options.items() if k != "kl_estimator"}
    if options.get("correction") != "both":
        options = {k: v for k, v in options.items() if k != "correction_floor"}
    return options | ({"fixed_length": 20} if options["aggregation"] == "fixed" else {})


OPTIONS = EVERY_OPTION.map(with_effect)


def assert_close(value, expected) -> None:
    """Within 1e-6; of what is large (ratios reach 4.9e8), within 1e-9 of itself."""
    np.testing.assert_allclose(value, expected, rtol=1e-9, atol=TOLERANCE)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    options=OPTIONS,
    form=st.sampled_from(FORMS),
    per_token=st.booleans(),
    outliers=st.sampled_from([0.0, 0.0, 0.1]),
)
def test_equals_the_reference_in_every_form(seed, options, form, per_token, outliers):
    trajectories = random_trajectories(seed, per_token_advantage=per_token, outliers=outliers)
    policy = TablePolicy(trajectories)
    loss = DecoupledPPOLoss(policy, **options)
    batch = to_batch(trajectories, per_token_advantage=per_token)
    rows = loss.select(batch, target_version=TARGET_VERSION)
    normalizer = loss.denominator(rows)
    expected, by_log_prob, by_entropy = ppo(trajectories, options)
    if normalizer == 0:
        assert not any(row.answer() for row in trajectories)
        return
    micros = micro_batches(rows, form, seed)
    assert sum(loss.denominator(micro) for micro in micros) == normalizer
    assert_close(backward(loss, micros, normalizer), expected)
    assert_close(flat(policy.gradients()), flat(by_log_prob))
    assert_close(flat(policy.gradients("entropy")), flat(by_entropy))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), options=OPTIONS, form=st.sampled_from(FORMS))
def test_diagnostics_equal_the_reference_in_every_form(seed, options, form):
    options = options | {"kl_to_ref_coeff": 0.3, "entropy_coeff": 0.1}
    oldest = 1 if options["prox"] == "loglinear" else -1
    trajectories = random_trajectories(seed, empty=0.0, oldest=oldest)
    loss = DecoupledPPOLoss(TablePolicy(trajectories), **options)
    rows = loss.select(to_batch(trajectories), target_version=TARGET_VERSION)
    totals: dict[str, torch.Tensor] = {}
    for micro in micro_batches(rows, form, seed):
        for name, value in loss(micro, normalizer=1.0).diagnostics().items():
            assert value.shape == (2,) and not value.requires_grad
            totals[name] = totals.get(name, 0.0) + value
    expected = ppo_diagnostics(trajectories, options)
    assert set(totals) == set(expected)
    for name, sum_and_count in expected.items():
        np.testing.assert_allclose(totals[name], sum_and_count, rtol=1e-5, atol=1e-5)

    figures = DecoupledPPOLossOutput.figures({k: v.tolist() for k, v in totals.items()})
    tokens = [token for row in trajectories for token in ppo_tokens(row, options)]
    weights = [token.weight * token.ratio for token in tokens]
    size = sum(weights) ** 2 / len(weights) / sum(w * w for w in weights)
    if any(weights):
        assert figures.pop("effective_sample_size") == pytest.approx(size, rel=1e-4)
    assert all(
        figures[name] == pytest.approx(total / count, rel=1e-4, abs=1e-5)
        for name, (total, count) in expected.items()
        if count and not name.startswith("importance")
    )


def test_without_versions_there_are_no_diagnostics_by_lag():
    batch = to_batch(random_trajectories(10))
    loss = DecoupledPPOLoss(TablePolicy(random_trajectories(10)))
    assert loss.select(batch) is batch
    names = set(loss(pad_rows(batch, pad_id=0), normalizer=1.0).diagnostics())
    assert "ratio" in names and not any("lag" in name for name in names)


def fresh(seed: int, **options):
    """Trajectories of the current weights: theta = mu = prox, one version behind the target."""
    return [
        replace(
            row,
            theta=row.mu,
            prox=row.mu,
            version=[TARGET_VERSION - 1 if s else -1 for s in row.sampled],
        )
        for row in random_trajectories(seed, **options)
    ]


@pytest.mark.inv6
@pytest.mark.parametrize("prox", ["recompute", "loglinear", "behavior"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("correction", ["truncate", "mask", "both", "off"])
def test_fresh_data_gives_the_reinforce_gradient(prox, level, correction):
    """Staleness 0 and one minibatch: decoupled = coupled = -A / tokens for every log-prob."""
    trajectories = fresh(0)
    policy = TablePolicy(trajectories)
    options = {"prox": prox, "correction": correction, "correction_level": level}
    loss = DecoupledPPOLoss(policy, **with_effect({"aggregation": "token"} | options))
    rows = to_batch(trajectories).exclude(("log_probs", "prox"))
    micro = loss.anchor(pad_rows(loss.select(rows, target_version=TARGET_VERSION), pad_id=0))
    count = sum(len(row.answer()) for row in trajectories)
    assert backward(loss, [micro], loss.denominator(micro)) == pytest.approx(
        -sum(row.advantage[t] for row in trajectories for t in row.answer()) / count, abs=1e-12
    )
    reinforce = [
        [-a * s / count for a, s in zip(row.advantage, row.sampled, strict=True)]
        for row in trajectories
    ]
    np.testing.assert_allclose(flat(policy.gradients()), flat(reinforce), rtol=0, atol=1e-12)


@pytest.mark.inv6
def test_fresh_data_gives_the_reinforce_gradient_of_whole_sequences():
    """GSPO's ratio is a geometric mean: each token carries its sequence's mean advantage."""
    trajectories = fresh(1)
    policy = TablePolicy(trajectories)
    loss = DecoupledPPOLoss(policy, ratio_level="sequence", aggregation="sequence")
    micro = pack_rows(to_batch(trajectories).exclude(("log_probs", "prox")), pad_id=0)
    backward(loss, [micro], loss.denominator(micro))
    answered = [row for row in trajectories if row.answer()]
    reinforce = [
        [
            -a * s / len(row.answer() or [0]) / len(answered)
            for a, s in zip(row.advantage, row.sampled, strict=True)
        ]
        for row in trajectories
    ]
    np.testing.assert_allclose(flat(policy.gradients()), flat(reinforce), rtol=0, atol=1e-12)


@pytest.mark.inv6
def test_loglinear_anchor_at_lag_0_is_the_behavior_policy():
    trajectories = [
        replace(row, version=[TARGET_VERSION - 1 if s else -1 for s in row.sampled])
        for row in random_trajectories(2)
    ]
    totals, gradients = [], []
    for prox in ("loglinear", "behavior"):
        policy = TablePolicy(trajectories)
        loss = DecoupledPPOLoss(policy, prox=prox)
        rows = loss.select(to_batch(trajectories), target_version=TARGET_VERSION)
        totals.append(backward(loss, [pack_rows(rows, pad_id=0)], 3.0))
        gradients.append(flat(policy.gradients()))
    assert totals[0] == totals[1] and gradients[0] == gradients[1]


def test_loglinear_anchor_between_the_policies():
    theta, mu = torch.randn(2, 6, dtype=torch.float64)
    version = torch.tensor([7, 6, 5, 4, 3, 2])  # Two newer than any weights there are yet.
    prox = functional.loglinear_log_prob(theta.requires_grad_(), mu, version, 6)
    assert not prox.requires_grad
    share = (prox - mu) / (theta.detach() - mu)
    expected = torch.tensor([0, 0, 0, 1 / 2, 2 / 3, 3 / 4], dtype=torch.float64)
    torch.testing.assert_close(share, expected)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_sequence_ratios_of_one_token_answers_are_token_ratios(aggregation):
    trajectories = [
        replace(row, sampled=[t == 1 for t in range(len(row.theta))])
        for row in random_trajectories(3)
    ]
    results = []
    for level in ("token", "sequence"):
        policy = TablePolicy(trajectories)
        loss = DecoupledPPOLoss(
            policy, ratio_level=level, aggregation=aggregation, kl_to_ref_coeff=0.1
        )
        total = backward(loss, [pad_rows(to_batch(trajectories), pad_id=0)], 6.0)
        results.append([total, *flat(policy.gradients())])
    np.testing.assert_allclose(*results, rtol=1e-12)


def test_recompute_without_anchor_uses_the_current_policy():
    trajectories = random_trajectories(4)
    loss = DecoupledPPOLoss(TablePolicy(trajectories))
    micro = pad_rows(to_batch(trajectories).exclude(("log_probs", "prox")), pad_id=0)
    anchored = loss.anchor(micro)
    assert ("log_probs", "prox") not in micro.keys(True)
    assert not anchored["log_probs", "prox"].requires_grad
    assert loss(micro, normalizer=1.0).total() == loss(anchored, normalizer=1.0).total()


@pytest.mark.parametrize("prox", ["loglinear", "behavior"])
def test_other_anchors_cost_no_forward_pass(prox):
    micro = pad_rows(to_batch(random_trajectories(4)), pad_id=0)
    assert DecoupledPPOLoss(TablePolicy([]), prox=prox).anchor(micro) is micro


@pytest.mark.parametrize("ratio_level", ["token", "sequence"])
@pytest.mark.parametrize("shift", [1e4, -1e4])
@pytest.mark.parametrize("prox", ["recompute", "loglinear", "behavior"])
def test_ratios_stay_finite(prox, shift, ratio_level):
    trajectories = [
        replace(row, theta=[x + shift for x in row.theta]) for row in random_trajectories(5)
    ]
    policy = TablePolicy(trajectories)
    loss = DecoupledPPOLoss(
        policy, prox=prox, ratio_level=ratio_level, kl_to_ref_coeff=0.1, kl_estimator="k3"
    )
    rows = loss.select(to_batch(trajectories), target_version=TARGET_VERSION)
    assert np.isfinite(backward(loss, [pad_rows(rows, pad_id=0)], 1.0))
    assert np.isfinite(flat(policy.gradients())).all()


def test_weights_at_the_ends_of_the_range_are_in_it():
    weights = torch.tensor([2.0, 2.0 + 1e-6, 0.5, 0.5 - 1e-6], dtype=torch.float64)
    # exp and log are not exact inverses: the range's ends are what the function itself makes.
    cap, floor = weights.log().exp()[[0, 2]].tolist()
    layout = (torch.ones(4, dtype=torch.bool), torch.arange(4), 4)
    for correction, kept in (("mask", [1, 0, 1, 1]), ("both", [1, 0, 1, 0])):
        weight, hit = functional.correction_weight(
            weights.log(), *layout, correction=correction, cap=cap, floor=floor
        )
        assert (weight > 0).tolist() == [bool(k) for k in kept]
        assert hit.tolist() == [not k for k in kept]


@pytest.mark.inv7
@pytest.mark.parametrize("aggregation", ["token", "sequence", "fixed"])
def test_rows_without_sampled_tokens_count_for_nothing(aggregation):
    trajectories = random_trajectories(6, empty=0.0)
    silent = [replace(row, sampled=[False] * len(row.theta)) for row in trajectories]
    fixed_length = 9 if aggregation == "fixed" else None
    policy = TablePolicy(trajectories)
    loss = DecoupledPPOLoss(
        policy, aggregation=aggregation, fixed_length=fixed_length, ratio_level="sequence"
    )
    for form in (pad_rows, pack_rows):
        micro = form(to_batch(silent), pad_id=0)
        policy.zero_grad()
        assert loss.denominator(micro) == 0
        assert backward(loss, [micro], 5.0) == 0.0
        assert policy.log_probs.grad.eq(0).all()  # Connected to the graph, all the same.
        whole = form(to_batch([*trajectories, *silent]), pad_id=0)
        assert loss.denominator(whole) == loss.denominator(form(to_batch(trajectories), pad_id=0))


@pytest.mark.inv7
def test_equal_rewards_train_nothing():
    trajectories = [
        replace(row, advantage=[0.0] * len(row.theta)) for row in random_trajectories(7)
    ]
    policy = TablePolicy(trajectories)
    micro = pad_rows(to_batch(trajectories), pad_id=0)
    for level in ("token", "sequence"):
        loss = DecoupledPPOLoss(policy, ratio_level=level, dual_clip=3.0)
        backward(loss, [micro], 1.0)
        assert policy.log_probs.grad.eq(0).all()
        output = loss(micro, normalizer=1.0)
        assert output.clip_fraction_low[0] == output.clip_fraction_high[0] == 0


@pytest.mark.inv7
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("form", [pad_rows, pack_rows])
@pytest.mark.parametrize(
    ("prox", "field", "named"),
    [
        ("recompute", "theta", "policy"),
        ("recompute", "mu", r"sample_log_prob.*\('log_probs', 'full'\)"),
        ("recompute", "prox", r"prox_log_prob.*\('log_probs', 'prox'\)"),
        ("behavior", "mu", r"sample_log_prob.*\('log_probs', 'full'\)"),
        ("behavior", "ref", r"ref_log_prob.*\('log_probs', 'ref'\)"),
        ("loglinear", "advantage", "advantage.*'advantage'"),
    ],
)
def test_numbers_that_are_not_finite_are_named(form, prox, field, named, bad):
    """Of equal lengths, so that row 1 is row 1 in both forms."""
    same = random_trajectories(8, empty=0.0)[0]
    values = [*getattr(same, field)]
    values[same.answer()[0]] = bad
    trajectories = [same, replace(same, **{field: values})]
    loss = DecoupledPPOLoss(TablePolicy(trajectories), prox=prox, kl_to_ref_coeff=0.1)
    batch = to_batch(trajectories, per_token_advantage=True)
    rows = loss.select(batch, target_version=TARGET_VERSION)
    with pytest.raises(ValueError, match=f"(?s){named}.*row 1"):
        loss(form(rows, pad_id=0), normalizer=1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prox": "current"}, "prox='current'"),
        ({"correction": "clip"}, "correction='clip'"),
        ({"correction_level": "row"}, "correction_level='row'"),
        ({"ratio_level": "geometric"}, "ratio_level='geometric'"),
        ({"kl_estimator": "k1"}, "kl_estimator='k1'"),
        ({"aggregation": "mean"}, "aggregation='mean'"),
        ({"clip_epsilon": [1.2, 0.2]}, "clip_epsilon"),
        ({"clip_epsilon": 0.0}, "clip_epsilon"),
        ({"clip_epsilon": [0.2, 0.0]}, "clip_epsilon"),
        ({"dual_clip": 1.0}, r"dual_clip=1\.0"),
        ({"aggregation": "fixed", "fixed_length": -5}, "fixed_length=-5 must be at least 1"),
        ({"kl_to_ref_coeff": "1e-3"}, r"kl_to_ref_coeff='1e-3' is no number"),
        ({"clip_epsilon": "0.2"}, r"clip_epsilon='0\.2' is no number"),
        ({"clip_epsilon": [0.1, 0.2, 0.3]}, r"clip_epsilon=\[0\.1, 0\.2, 0\.3\] must be a number"),
        ({"clip_epsilon": None}, "clip_epsilon=None must be a number"),
        ({"aggregation": "fixed", "fixed_length": "64"}, "fixed_length='64' is no number"),
        ({"kl_to_ref_coeff": -1.0}, r"kl_to_ref_coeff=-1\.0 must be 0"),
        ({"entropy_coeff": float("nan")}, "entropy_coeff=nan must be 0"),
        ({"prox": "behavior", "correction": "both"}, "weight that these are of is 1"),
        ({"prox": "behavior", "correction_cap": 2.0}, "weight that these are of is 1"),
        ({"correction": "off", "correction_level": "sequence"}, "weight that these are of is 1"),
        ({"kl_estimator": "k3"}, r"kl_to_ref_coeff=0\.0 switches off"),
        ({"reference_network": TablePolicy([])}, r"kl_to_ref_coeff=0\.0 switches off"),
        ({"correction_floor": 0.5}, "only 'both' has a floor"),
        ({"correction_cap": 0.5}, r"correction_cap=0\.5"),
        ({"correction_floor": 1.5}, r"correction_floor=1\.5"),
        ({"aggregation": "fixed"}, "fixed_length=None"),
        ({"fixed_length": 8}, "fixed_length=8"),
    ],
)
def test_options_out_of_range_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        DecoupledPPOLoss(TablePolicy([]), **options)


def test_documented_defaults():
    loss = DecoupledPPOLoss(TablePolicy([]))
    assert (loss.clip_low, loss.clip_high, loss.dual_clip) == (0.2, 0.2, None)
    assert (loss.prox, loss.ratio_level, loss.aggregation) == ("recompute", "token", "token")
    assert (loss.correction, loss.correction_level) == ("truncate", "token")
    assert (loss.correction_cap, loss.correction_floor) == (5.0, None)
    assert (loss.entropy_coeff, loss.kl_to_ref_coeff, loss.kl_estimator) == (0.0, 0.0, "k2")
    assert not loss.needs_reference


def test_loglinear_needs_every_version():
    trajectories = random_trajectories(9, empty=0.0)
    trajectories[3].version = [-1] * len(trajectories[3].version)
    loss = DecoupledPPOLoss(TablePolicy(trajectories), prox="loglinear")
    rows = loss.select(to_batch(trajectories), target_version=TARGET_VERSION)
    with pytest.raises(ValueError, match=r"some are unknown .*Use prox='recompute'"):
        loss(pad_rows(rows, pad_id=0), normalizer=1.0)


def test_loglinear_needs_the_version_trained_towards():
    loss = DecoupledPPOLoss(TablePolicy([]), prox="loglinear")
    with pytest.raises(ValueError, match="target_version=version"):
        loss.select(to_batch(random_trajectories(9)))
