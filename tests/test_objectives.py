"""Losses against independent float64 NumPy references, and the identities they must keep."""

from __future__ import annotations

import doctest
import importlib
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack
from tensordict.nn import TensorDictModuleBase

from torchrl_llm_async.objectives import (
    DecoupledPPOLoss,
    OnlineDPOLoss,
    functional,
)
from torchrl_llm_async.objectives.dpo import preference_pairs
from torchrl_llm_async.packing import blank_rows, pad_rows

TOLERANCE = 1e-6
TARGET_VERSION = 6


class TablePolicy(TensorDictModuleBase):
    """A policy that is its own table of log-probs, so gradients are those of log-probs.

    Row i of a micro-batch is scored by row ``("table", "row")[i]``, aligned on the right.
    """

    def __init__(self, log_probs: torch.Tensor, entropy: torch.Tensor) -> None:
        super().__init__()
        self.in_keys = [("table", "row")]
        self.out_keys = []
        self.table = torch.nn.Parameter(log_probs)
        self.entropy = torch.nn.Parameter(entropy)

    def log_probs(self, micro, *, mask, entropy="off"):
        row, length = micro["table", "row"], mask.shape[1]
        log_prob, value = (
            torch.where(mask, table[row, table.shape[1] - length :], 0.0)
            for table in (self.table, self.entropy)
        )
        value = value.detach() if entropy == "detached" else value
        return log_prob, None if entropy == "off" else value


def make_batch(seed: int, *, rows: int = 6, group_size: int = 2, longest: int = 7):
    """Random ragged float64 rows, and the policy that scores them."""
    rng = np.random.default_rng(seed)
    log_prob, entropy = np.zeros((rows, longest)), np.zeros((rows, longest))
    data = []
    for row in range(rows):
        length = int(rng.integers(2, longest + 1))
        sampled = rng.random(length) < 0.7
        sampled[0], sampled[-1] = False, True
        behavior = rng.normal(-1.5, 1.0, length)
        log_prob[row, -length:] = behavior + rng.normal(0, 0.5, length)
        entropy[row, -length:] = rng.random(length)
        data.append(
            {
                "tokens": {"full": rng.integers(0, 9, length)},
                "masks": {
                    "all_attention_mask": np.ones(length, dtype=bool),
                    "all_assistant_mask": sampled,
                },
                "log_probs": {
                    "full": np.where(sampled, behavior, 0.0),
                    "prox": behavior + rng.normal(0, 0.8, length),
                    "ref": behavior + rng.normal(0, 0.8, length),
                },
                "policy_version": {
                    "full": np.where(sampled, rng.integers(1, TARGET_VERSION, length), -1)
                },
                "advantage": rng.normal(0, 1, 1),
                "next": {"reward": rng.integers(0, 3, 1).astype(np.float64)},
                "group": {"id": np.array(row // group_size), "index": np.array(row % group_size)},
                "table": {"row": np.array(row)},
            }
        )
    to_tensor = torch.utils._pytree.tree_map
    batch = lazy_stack([TensorDict(to_tensor(torch.from_numpy, row)) for row in data])
    return data, batch, TablePolicy(torch.from_numpy(log_prob), torch.from_numpy(entropy))


def table_rows(policy: TablePolicy, data: list[dict]) -> list[np.ndarray]:
    table = policy.table.detach().numpy()
    return [table[i, -len(row["tokens"]["full"]) :] for i, row in enumerate(data)]


def reference_ppo(data: list[dict], policy: TablePolicy, options: dict):
    """Loss and its gradients by log-prob and entropy, one token at a time."""
    gradient = np.zeros_like(policy.table.detach().numpy())
    entropy_gradient = np.zeros_like(gradient)
    entropy_table = policy.entropy.detach().numpy()
    count = {
        "token": sum(row["masks"]["all_assistant_mask"].sum() for row in data),
        "sequence": len(data),
        "fixed": len(data) * (options["fixed_length"] or 0),
    }[options["aggregation"]]
    low, high = options["clip_epsilon"]
    cap = options["correction_cap"]
    floor = 1 / cap if options["correction_floor"] is None else options["correction_floor"]
    total = 0.0
    for i, (row, theta) in enumerate(zip(data, table_rows(policy, data), strict=True)):
        mask = row["masks"]["all_assistant_mask"]
        mu, length = row["log_probs"]["full"], len(theta)
        prox = {
            "recompute": row["log_probs"]["prox"],
            "behavior": mu,
            "loglinear": [
                mu[t] + (TARGET_VERSION - 1 - v) / (TARGET_VERSION - v) * (theta[t] - mu[t])
                for t, v in enumerate(row["policy_version"]["full"])
            ],
        }[options["prox"]]
        log_w = [prox[t] - mu[t] for t in range(length)]
        sampled = [t for t in range(length) if mask[t]]
        for t in sampled:
            if options["correction_level"] == "sequence":
                w = np.exp(sum(log_w[s] for s in sampled))
            elif options["correction_level"] == "geometric":
                w = np.exp(sum(log_w[s] for s in sampled) / len(sampled))
            else:
                w = np.exp(log_w[t])
            w = {
                "off": 1.0,
                "truncate": min(w, cap),
                "mask": w if w <= cap else 0.0,
                "both": w if floor <= w <= cap else 0.0,
            }[options["correction"]]
            ratio, advantage = np.exp(theta[t] - prox[t]), row["advantage"][0]
            bounded = min(max(ratio, 1 - low), 1 + high)
            loss, slope = -advantage * ratio, -advantage * ratio
            if -advantage * bounded > loss:
                loss, slope = -advantage * bounded, 0.0
            dual = options["dual_clip"]
            if dual is not None and advantage < 0 and loss > -dual * advantage:
                loss, slope = -dual * advantage, 0.0
            loss, slope = w * loss, w * slope
            if options["kl_to_ref_coeff"]:
                gap = row["log_probs"]["ref"][t] - theta[t]
                k2 = options["kl_estimator"] == "k2"
                kl = gap**2 / 2 if k2 else np.exp(gap) - 1 - gap
                weight = options["kl_to_ref_coeff"] * w * ratio
                loss += weight * kl
                slope += weight * (-gap if k2 else 1 - np.exp(gap))
            loss -= options["entropy_coeff"] * entropy_table[i, t - length]
            share = 1 / count
            if options["aggregation"] == "sequence":
                share /= len(sampled)
            total += share * loss
            gradient[i, t - length] = share * slope
            entropy_gradient[i, t - length] = -share * options["entropy_coeff"]
    return total, gradient, entropy_gradient


ppo_options = st.fixed_dictionaries(
    {
        "clip_epsilon": st.sampled_from([(0.2, 0.2), (0.1, 0.3)]),
        "dual_clip": st.sampled_from([None, 1.5]),
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
).map(lambda o: o | {"fixed_length": 20 if o["aggregation"] == "fixed" else None})


def random_parts(seed: int, units: int) -> list[list[int]]:
    """A random partition of ``range(units)`` into at least one non-empty part."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(units).tolist()
    cuts = sorted({0, units, *rng.integers(0, units + 1, 2).tolist()})
    return [order[start:stop] for start, stop in pairwise(cuts)]


def train_once(loss, micros: Sequence, normalizer) -> float:
    """Accumulates gradients over micro-batches; the summed loss."""
    total = 0.0
    for micro in micros:
        output = loss(micro, normalizer=normalizer)
        output.total().backward()
        total += output.total().item()
    return total


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**31), options=ppo_options)
def test_ppo_equals_numpy_whatever_the_packing(seed, options):
    data, batch, policy = make_batch(seed)
    loss = DecoupledPPOLoss(policy, **options)
    rows = loss.select(batch, target_version=TARGET_VERSION)
    normalizer = loss.denominator(rows)
    expected, gradient, entropy_gradient = reference_ppo(data, policy, options)

    parts = random_parts(seed, len(data))
    packed = [pad_rows(rows[part], pad_id=0) for part in parts]
    packed.append(blank_rows(rows, pad_id=0))
    for micros in ([rows], [pad_rows(rows, pad_id=0)], packed):
        policy.zero_grad()
        assert train_once(loss, micros, normalizer) == pytest.approx(expected, abs=TOLERANCE)
        np.testing.assert_allclose(policy.table.grad.numpy(), gradient, atol=TOLERANCE)
        if options["entropy_coeff"]:
            np.testing.assert_allclose(
                policy.entropy.grad.numpy(), entropy_gradient, atol=TOLERANCE
            )


def reference_dpo(data: list[dict], policy: TablePolicy, options: dict):
    """Loss, gradient by log-prob, number of pairs and of ties of the best-worst pairing."""
    gradient = np.zeros_like(policy.table.detach().numpy())
    theta = table_rows(policy, data)
    pairs, ties = [], 0
    for group in sorted({int(row["group"]["id"]) for row in data}):
        members = [i for i, row in enumerate(data) if row["group"]["id"] == group]
        rewards = [data[i]["next"]["reward"][0] for i in members]
        if max(rewards) == min(rewards):
            ties += 1
        else:
            pairs.append((members[int(np.argmax(rewards))], members[int(np.argmin(rewards))]))
    beta, total = options["beta"], 0.0
    for pair in pairs:
        implicit = [
            sum((theta[i] - data[i]["log_probs"]["ref"])[data[i]["masks"]["all_assistant_mask"]])
            for i in pair
        ]
        slope = 0.0
        for sign, weight in (
            (1, 1 - options["label_smoothing"]),
            (-1, options["label_smoothing"]),
        ):
            h = sign * (implicit[0] - implicit[1])
            value, derivative = {
                "sigmoid": (np.log1p(np.exp(-beta * h)), -beta / (1 + np.exp(beta * h))),
                "hinge": (max(0.0, 1 - beta * h), -beta * (beta * h < 1)),
                "ipo": ((h - 0.5 / beta) ** 2, 2 * (h - 0.5 / beta)),
            }[options["loss_type"]]
            total += weight * value / len(pairs)
            slope += sign * weight * derivative / len(pairs)
        for i, sign in zip(pair, (1, -1), strict=True):
            mask = data[i]["masks"]["all_assistant_mask"]
            gradient[i, -len(mask) :] += sign * slope * mask
    return total, gradient, len(pairs), ties


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    options=st.fixed_dictionaries(
        {
            "beta": st.sampled_from([0.1, 0.7]),
            "loss_type": st.sampled_from(["sigmoid", "ipo", "hinge"]),
            "label_smoothing": st.sampled_from([0.0, 0.2]),
        }
    ),
)
def test_dpo_equals_numpy_whatever_the_packing(seed, options):
    data, batch, policy = make_batch(seed, rows=9, group_size=3)
    loss = OnlineDPOLoss(policy, **options)
    rows = loss.select(batch)
    expected, gradient, pairs, ties = reference_dpo(data, policy, options)
    assert (loss.groups_selected, loss.groups_tied, len(rows)) == (3, ties, 2 * pairs)
    normalizer = loss.denominator(rows)
    assert normalizer == pairs
    if not pairs:
        return
    parts = [[2 * p + k for p in part for k in (0, 1)] for part in random_parts(seed, pairs)]
    packed = [pad_rows(rows[part], pad_id=0) for part in parts]
    packed.append(blank_rows(rows, pad_id=0))
    for micros in ([rows], [pad_rows(rows, pad_id=0)], packed):
        policy.zero_grad()
        assert train_once(loss, micros, normalizer) == pytest.approx(expected, abs=TOLERANCE)
        np.testing.assert_allclose(policy.table.grad.numpy(), gradient, atol=TOLERANCE)


@pytest.mark.inv6
@pytest.mark.parametrize("prox", ["recompute", "loglinear", "behavior"])
def test_fresh_data_gives_the_reinforce_gradient(prox):
    """With mu = theta every decoupled and the coupled loss have the gradient of REINFORCE."""
    _, batch, policy = make_batch(0)
    for i, row in enumerate(batch.unbind(0)):
        row["log_probs", "full"] = policy.table.detach()[i, -len(row["tokens", "full"]) :]
        row["policy_version", "full"] = torch.full_like(row["tokens", "full"], TARGET_VERSION - 1)
        row["log_probs"].pop("prox")
    loss = DecoupledPPOLoss(policy, prox=prox)
    micro = pad_rows(loss.select(batch, target_version=TARGET_VERSION), pad_id=0)
    micro = loss.anchor(micro)
    count = loss.denominator(micro)
    loss(micro, normalizer=count).total().backward()
    mask = micro["masks", "all_assistant_mask"]
    torch.testing.assert_close(
        policy.table.grad, -micro["advantage"] * mask / count, atol=1e-12, rtol=0
    )


def test_loglinear_anchor():
    log_prob, mu = torch.randn(2, 5, dtype=torch.float64)
    version = torch.tensor([7, 5, 4, 3, 2])
    prox = functional.loglinear_log_prob(log_prob, mu, version, 6)
    share = (prox - mu) / (log_prob - mu)
    torch.testing.assert_close(
        share, torch.tensor([0, 0, 1 / 2, 2 / 3, 3 / 4], dtype=torch.float64)
    )


def test_recompute_without_anchor_uses_the_current_policy():
    _, batch, policy = make_batch(1)
    loss = DecoupledPPOLoss(policy)
    micro = pad_rows(batch, pad_id=0)
    del micro["log_probs", "prox"]
    anchored = loss.anchor(micro)
    assert ("log_probs", "prox") not in micro.keys(True)
    assert not anchored["log_probs", "prox"].requires_grad
    with torch.no_grad():
        torch.testing.assert_close(
            loss(micro, normalizer=1.0).total(), loss(anchored, normalizer=1.0).total()
        )


def test_ratios_stay_finite():
    _, batch, policy = make_batch(2)
    with torch.no_grad():
        policy.table += 1e4
    for prox in ("recompute", "behavior"):
        policy.zero_grad()
        loss = DecoupledPPOLoss(policy, prox=prox, kl_to_ref_coeff=0.1, kl_estimator="k3")
        loss(pad_rows(batch, pad_id=0), normalizer=1.0).total().backward()
        assert policy.table.grad.isfinite().all()


def test_padding_may_hold_anything():
    _, batch, policy = make_batch(3)
    losses = (DecoupledPPOLoss(policy, kl_to_ref_coeff=0.1), OnlineDPOLoss(policy))
    for loss in losses:
        micro = pad_rows(batch, pad_id=0)
        results = []
        for _ in range(2):
            policy.zero_grad()
            output = loss(micro, normalizer=4.0)
            output.total().backward()
            results.append((output.total().item(), policy.table.grad.clone()))
            for key in ("full", "prox", "ref"):
                mask = micro["masks", "all_assistant_mask"]
                micro["log_probs", key] = micro["log_probs", key].masked_fill(~mask, float("nan"))
        assert results[0][0] == results[1][0]
        assert torch.equal(results[0][1], results[1][1])


def test_diagnostics_add_up():
    _, batch, policy = make_batch(4)
    loss = DecoupledPPOLoss(policy, kl_to_ref_coeff=0.1, entropy_coeff=0.1)
    whole = loss(batch, normalizer=1.0).diagnostics()
    parts = [loss(batch[part], normalizer=1.0).diagnostics() for part in ([0, 1], [2, 3, 4, 5])]
    tokens = loss.denominator(batch)
    for name, value in whole.items():
        assert value.shape == (2,) and not value.requires_grad
        assert value[1] == tokens
        torch.testing.assert_close(sum(part[name] for part in parts), value)


def test_dpo_of_equal_policies_and_equal_pairs():
    _, batch, policy = make_batch(5)
    twin = batch[[0, 0]]
    for loss_type in ("sigmoid", "hinge", "ipo"):
        policy.zero_grad()
        OnlineDPOLoss(policy, loss_type=loss_type)(twin, normalizer=1).total().backward()
        assert policy.table.grad.abs().max() < 1e-12


def test_ipo_is_zero_at_its_target():
    target = torch.tensor([1 / (2 * 0.25)], requires_grad=True)
    loss = functional.preference_loss(target, "ipo", beta=0.25)
    loss.sum().backward()
    assert loss.item() == 0.0 and target.grad.item() == 0.0


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
    if pairs:
        assert [(rewards[c], rewards[r]) for c, r in pairs[:1]] == [(max(rewards), min(rewards))]


def test_limited_pairs_use_no_trajectory_twice():
    pairs = preference_pairs([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0], "all", 4)
    assert sorted(sum(pairs, ())) == list(range(8))


def test_dpo_selects_nothing_from_ties():
    _, batch, policy = make_batch(6)
    for row in batch.unbind(0):
        row["next", "reward"] = torch.ones(1)
    loss = OnlineDPOLoss(policy, pairing="all", max_pairs_per_group=1)
    rows = loss.select(batch)
    assert len(rows) == 0 and loss.groups_tied == 3 and loss.denominator(rows) == 0


@pytest.mark.parametrize(
    "make", [OnlineDPOLoss, partial(DecoupledPPOLoss, kl_to_ref_coeff=0.5)], ids=["dpo", "ppo"]
)
def test_reference_network_equals_its_log_probs_in_the_batch(make):
    _, batch, policy = make_batch(7)
    _, _, reference = make_batch(8)
    micro = pad_rows(batch, pad_id=0)
    mask = micro["masks", "all_assistant_mask"]
    micro["log_probs", "ref"] = reference.log_probs(micro, mask=mask)[0].detach()
    recorded = make(policy)(micro, normalizer=1.0).total()
    del micro["log_probs", "ref"]
    computed = make(policy, reference_network=reference)(micro, normalizer=1.0).total()
    assert recorded.item() == computed.item()
    assert make(policy).needs_reference and not DecoupledPPOLoss(policy).needs_reference
    with pytest.raises(KeyError, match=r"ref_log_prob at .*set_keys\(ref_log_prob="):
        make(policy)(micro, normalizer=1.0)


def test_set_keys_nested():
    _, batch, policy = make_batch(9)
    loss = DecoupledPPOLoss(policy, prox="loglinear", kl_to_ref_coeff=0.1)
    dpo = OnlineDPOLoss(policy)
    selected = loss.select(batch, target_version=TARGET_VERSION)
    expected = loss(pad_rows(selected, pad_id=0), normalizer=1.0).total()
    expected_dpo = dpo(pad_rows(dpo.select(batch), pad_id=0), normalizer=1.0).total()
    moved = batch.clone()
    for module in (loss, dpo):
        for name, key in vars(module.tensor_keys).copy().items():
            module.set_keys(**{name: ("moved", "deep", name)})
            if key in moved[0].keys(True):
                for row in moved.unbind(0):
                    row.rename_key_(key, ("moved", "deep", name))
    selected = loss.select(moved, target_version=TARGET_VERSION)
    assert loss(pad_rows(selected, pad_id=0), normalizer=1.0).total() == expected
    assert dpo(pad_rows(dpo.select(moved), pad_id=0), normalizer=1.0).total() == expected_dpo
    assert set(loss.in_keys) == {
        ("table", "row"),
        *(("moved", "deep", name) for name in vars(loss.tensor_keys)),
    }
    loss.set_keys(advantage=None)
    assert loss.tensor_keys.advantage == "advantage"
    with pytest.raises(ValueError, match="not an accepted tensordict key"):
        loss.set_keys(nonsense="x")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: DecoupledPPOLoss(p, prox="current"), "prox='current'"),
        (lambda p: DecoupledPPOLoss(p, correction="clip"), "correction='clip'"),
        (lambda p: DecoupledPPOLoss(p, clip_epsilon=[1.2, 0.2]), "clip_epsilon"),
        (lambda p: DecoupledPPOLoss(p, dual_clip=0.5), "dual_clip=0.5"),
        (lambda p: DecoupledPPOLoss(p, correction_cap=0.5), "correction_cap=0.5"),
        (lambda p: DecoupledPPOLoss(p, aggregation="fixed"), "fixed_length=None"),
        (lambda p: DecoupledPPOLoss(p, fixed_length=8), "fixed_length=8"),
        (lambda p: OnlineDPOLoss(p, beta=0.0), "beta=0.0"),
        (lambda p: OnlineDPOLoss(p, loss_type="kto"), "loss_type='kto'"),
        (lambda p: OnlineDPOLoss(p, label_smoothing=0.5), "label_smoothing=0.5"),
        (lambda p: OnlineDPOLoss(p, max_pairs_per_group=2), "max_pairs_per_group=2"),
    ],
)
def test_bad_options_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make(make_batch(0)[2])


def test_bad_batches_are_refused():
    _, batch, policy = make_batch(10)
    with pytest.raises(ValueError, match="target_version=version"):
        DecoupledPPOLoss(policy, prox="loglinear").select(batch)
    with pytest.raises(ValueError, match="at least 2 adjacent rows"):
        OnlineDPOLoss(policy).select(batch[[0, 2, 1, 3]])
    with pytest.raises(ValueError, match="no whole pairs"):
        OnlineDPOLoss(policy)(pad_rows(batch[:3], pad_id=0), normalizer=1.0)
    batch[0]["next", "reward"] = torch.tensor([float("nan")])
    with pytest.raises(ValueError, match="must be finite"):
        OnlineDPOLoss(policy).select(batch)


@pytest.mark.parametrize("name", ["functional", "ppo", "dpo"])
def test_examples_run(name):
    module = importlib.import_module(f"torchrl_llm_async.objectives.{name}")
    assert doctest.testmod(module).failed == 0
