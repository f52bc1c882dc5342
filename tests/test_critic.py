"""PPO with a critic: against loops in plain Python, in every form of a batch, and learning."""

from __future__ import annotations

from collections.abc import Sequence
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
    Trajectory,
    backward,
    flat,
    micro_batches,
    random_trajectories,
    to_batch,
)
from loss_references import ppo
from omegaconf import OmegaConf
from safetensors.torch import load_file
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchtune.models.qwen2 import qwen2
from torchtune.models.qwen2._convert_weights import _FROM_HF

from torchrl_llm_async.checkpoint import TrainingState
from torchrl_llm_async.modules import TorchtuneActor, add_value_head
from torchrl_llm_async.objectives import (
    CriticPPOLoss,
    CriticPPOLossOutput,
    DecoupledPPOLoss,
)
from torchrl_llm_async.packing import blank_rows, pack_rows, pad_rows
from torchrl_llm_async.recipes.config import PACKAGE_DIR, ConfigError, load_config
from torchrl_llm_async.weight_update import WeightPublisher, WeightStore

TOLERANCE = 1e-6
TOKEN_REWARD = ("next", "token_reward")

CRITIC = {
    "gamma": st.sampled_from([1.0, 0.9]),
    "lmbda": st.sampled_from([1.0, 0.8, 0.0]),
    "value_clip": st.sampled_from([None, 0.3]),
    "value_coeff": st.sampled_from([0.1, 1.0]),
}
POLICY = {
    "prox": st.sampled_from(["recompute", "loglinear", "behavior"]),
    "correction": st.sampled_from(["truncate", "both", "off"]),
    "aggregation": st.sampled_from(["token", "sequence", "fixed"]),
    "entropy_coeff": st.sampled_from([0.0, 0.02]),
    "kl_to_ref_coeff": st.sampled_from([0.0, 0.3]),
}


def estimates(row: Trajectory, token_reward: Sequence[float], gamma: float, lmbda: float):
    """Advantage and value target of each token of a sequence, from its end."""
    advantage, target = [0.0] * len(row.theta), [0.0] * len(row.theta)
    next_value, next_advantage, final = 0.0, 0.0, row.reward
    for t in reversed(row.answer()):
        delta = final + token_reward[t] + gamma * next_value - row.value[t]
        next_advantage = advantage[t] = delta + gamma * lmbda * next_advantage
        target[t] = advantage[t] + row.value[t]
        next_value, final = row.value[t], 0.0
    return advantage, target


def value_loss(value: float, old: float, target: float, clip: float | None):
    """Of one token: the loss, its derivative, and whether clipping has taken that away."""
    plain = (value - target) ** 2 / 2
    if clip is not None and abs(value - old) > clip:
        clipped = (old + (clip if value > old else -clip) - target) ** 2 / 2
        if clipped > plain:
            return clipped, 0.0, True
    return plain, value - target, False


def token_rewards(trajectories: Sequence[Trajectory], seed: int) -> list[list[float]]:
    rng = np.random.default_rng(seed)
    return [rng.normal(0, 0.3, len(row.theta)).tolist() for row in trajectories]


def with_token_rewards(rows: TensorDictBase, rewards: Sequence[Sequence[float]]) -> TensorDictBase:
    singles = [row.copy() for row in rows.unbind(0)]
    for row, reward in zip(singles, rewards, strict=True):
        row[TOKEN_REWARD] = torch.tensor(reward, dtype=torch.float64)
    return lazy_stack(singles)


def set_tables(policy: TablePolicy, trajectories: Sequence[Trajectory]) -> None:
    """As an optimizer step would: the same policy, other scores."""
    other = TablePolicy(trajectories)
    with torch.no_grad():
        for mine, theirs in zip(policy.parameters(), other.parameters(), strict=True):
            mine.copy_(theirs)


def assert_close(value, expected) -> None:
    np.testing.assert_allclose(value, expected, rtol=1e-9, atol=TOLERANCE)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    form=st.sampled_from(FORMS),
    critic_options=st.fixed_dictionaries(CRITIC),
    policy_options=st.fixed_dictionaries(POLICY),
)
def test_equals_the_reference_in_every_form(seed, form, critic_options, policy_options):
    """Anchored before an update, trained on after it."""
    if policy_options["aggregation"] == "fixed":
        policy_options["fixed_length"] = 20
    before = random_trajectories(seed)
    rng = np.random.default_rng(seed)
    after = [
        replace(
            row,
            theta=(np.array(row.theta) + rng.normal(0, 0.2, len(row.theta))).tolist(),
            value=(np.array(row.value) + rng.normal(0, 0.5, len(row.value))).tolist(),
            prox=row.theta if policy_options["prox"] == "recompute" else row.prox,
        )
        for row in before
    ]
    rewards = token_rewards(before, seed)
    policy = TablePolicy(before)
    loss = CriticPPOLoss(policy, **critic_options, **policy_options)
    rows = loss.select(with_token_rewards(to_batch(before), rewards), target_version=TARGET_VERSION)
    normalizer = loss.denominator(rows)
    if normalizer == 0:
        return

    gamma, lmbda = critic_options["gamma"], critic_options["lmbda"]
    expected, by_value = 0.0, []
    for index, (old, now) in enumerate(zip(before, after, strict=True)):
        now.advantage, target = estimates(old, rewards[index], gamma, lmbda)
        by_value.append([0.0] * len(now.theta))
        for t in now.answer():
            share = critic_options["value_coeff"] / normalizer.item()
            if policy_options["aggregation"] == "sequence":
                share /= len(now.answer())
            token, slope, _ = value_loss(
                now.value[t], old.value[t], target[t], critic_options["value_clip"]
            )
            expected += share * token
            by_value[-1][t] = share * slope
    policy_loss, by_log_prob, by_entropy = ppo(after, policy_options)

    micros = [loss.anchor(micro) for micro in micro_batches(rows, form, seed)]
    set_tables(policy, after)
    assert_close(backward(loss, micros, normalizer), policy_loss + expected)
    assert_close(flat(policy.gradients("values")), flat(by_value))
    assert_close(flat(policy.gradients("log_probs")), flat(by_log_prob))
    assert_close(flat(policy.gradients("entropy")), flat(by_entropy))


@pytest.mark.parametrize("prox", ["recompute", "behavior"])
def test_without_an_update_between_the_anchor_may_be_left_out(prox):
    trajectories = random_trajectories(1)
    policy = TablePolicy(trajectories)
    loss = CriticPPOLoss(policy, prox=prox, lmbda=0.9, value_clip=0.1)
    rows = to_batch(trajectories)
    for row in rows.unbind(0):
        del row["log_probs", "prox"]
    results = []
    for form in FORMS:
        for anchor in (True, False):
            policy.zero_grad()
            micros = micro_batches(rows, form)
            ready = [loss.anchor(micro) if anchor else micro for micro in micros]
            total = backward(loss, ready, 10.0)
            results.append([total, *flat(policy.gradients()), *flat(policy.gradients("values"))])
    np.testing.assert_allclose(results, [results[0]] * len(results), atol=1e-12)


def test_anchor_leaves_the_batch_alone_and_asks_the_policy_once():
    class CountingPolicy(TablePolicy):
        calls = 0

        def score(self, *args, **kwargs):
            self.calls += 1
            return super().score(*args, **kwargs)

    policy = CountingPolicy(random_trajectories(2))
    micro = pad_rows(to_batch(random_trajectories(2)), pad_id=0)
    group_advantage = micro["advantage"].clone()
    loss = CriticPPOLoss(policy)
    anchored = loss.anchor(micro)
    assert policy.calls == 1
    output = loss(anchored, normalizer=1.0)
    assert policy.calls == 2
    assert "state_value" not in micro and torch.equal(micro["advantage"], group_advantage)
    written = {"state_value", "advantage", "value_target", ("log_probs", "prox")}
    for key in written:
        assert anchored[key].shape == micro["tokens", "full"].shape
        assert not anchored[key].requires_grad
    assert output.loss_value.requires_grad


def test_monte_carlo_advantages_are_reward_minus_value():
    """The default, gamma = lmbda = 1; whether the answer was cut makes no difference."""
    trajectories = random_trajectories(3, empty=0.0)
    rows = to_batch(trajectories)
    for row in rows.unbind(0):
        row["next", "truncated"] = torch.tensor([True])
    micro = CriticPPOLoss(TablePolicy(trajectories)).anchor(pad_rows(rows, pad_id=0))
    mask = micro["masks", "all_assistant_mask"]
    reward = micro["next", "reward"].expand_as(mask)
    torch.testing.assert_close(micro["value_target"], reward * mask)
    torch.testing.assert_close(micro["advantage"], (reward - micro["state_value"]) * mask)


def test_policy_part_is_that_of_given_advantages():
    """What is added to ``DecoupledPPOLoss`` is the value loss, and nothing else."""
    trajectories = random_trajectories(4)
    policy = TablePolicy(trajectories)
    loss = CriticPPOLoss(policy, lmbda=0.5, entropy_coeff=0.1)
    micro = loss.anchor(pack_rows(to_batch(trajectories), pad_id=0))
    ours = loss(micro, normalizer=7.0)
    plain = DecoupledPPOLoss(policy, entropy_coeff=0.1)(micro, normalizer=7.0)
    for name, value in plain.items():
        if value is not None:
            assert torch.equal(getattr(ours, name), value), name
    torch.testing.assert_close(ours.total(), plain.total() + ours.loss_value)


def test_figures_are_of_all_micro_batches_together():
    trajectories = random_trajectories(5, rows=10, empty=0.0)
    loss = CriticPPOLoss(TablePolicy(trajectories), lmbda=0.7)
    rows = to_batch(trajectories)
    wanted = [
        (target[t], row.value[t])
        for row in trajectories
        for target in [estimates(row, [0.0] * len(row.theta), 1.0, 0.7)[1]]
        for t in row.answer()
    ]
    target, value = np.array(wanted).T
    for form in FORMS:
        totals: dict[str, torch.Tensor] = {}
        for micro in micro_batches(rows, form):
            output = loss(micro, normalizer=1.0)
            assert isinstance(output, CriticPPOLossOutput)
            for name, pair in output.diagnostics().items():
                assert not pair.requires_grad
                totals[name] = totals.get(name, 0) + pair
        figures = loss_figures(totals)
        expected = {
            "explained_variance": 1 - np.var(target - value) / np.var(target),
            "value_target": target.mean(),
            "value_bias": (target - value).mean(),
            "value_error": ((target - value) ** 2).mean(),
            "value_clip_fraction": 0.0,
        }
        for name, number in expected.items():
            assert figures[name] == pytest.approx(number, abs=1e-5), name
        assert "value_target_squared" not in figures


def loss_figures(totals: dict[str, torch.Tensor]) -> dict[str, float]:
    return CriticPPOLossOutput.figures({name: pair.tolist() for name, pair in totals.items()})


def test_value_clip_fraction_counts_what_lost_its_gradient():
    trajectories = random_trajectories(6, empty=0.0)
    policy = TablePolicy(trajectories)
    loss = CriticPPOLoss(policy, value_clip=0.2)
    micro = loss.anchor(pad_rows(to_batch(trajectories), pad_id=0))
    with torch.no_grad():
        policy.values += 0.4
    output = loss(micro, normalizer=1.0)
    output.total().backward()
    lost, sampled = output.value_clip_fraction.tolist()
    places = torch.tensor(flat([row.sampled for row in trajectories]))
    assert lost == (policy.values.grad[places] == 0).sum() and 0 < lost < sampled


def test_equal_rewards_leave_nothing_to_explain():
    trajectories = [replace(row, reward=0.3) for row in random_trajectories(7)]
    loss = CriticPPOLoss(TablePolicy(trajectories))
    output = loss(to_batch(trajectories), normalizer=1.0)
    assert output.total().isfinite()
    assert "explained_variance" not in loss_figures(output.diagnostics())


@pytest.mark.parametrize("make", [pad_rows, pack_rows, blank_rows])
def test_a_micro_batch_without_a_sampled_token(make):
    trajectories = random_trajectories(8, empty=1.0)
    policy = TablePolicy(trajectories)
    loss = CriticPPOLoss(policy, lmbda=0.9)
    micro = loss.anchor(make(to_batch(trajectories), pad_id=0))
    output = loss(micro, normalizer=5.0)
    output.total().backward()
    assert output.total().item() == 0 and loss.denominator(micro) == 0
    assert not policy.values.grad.any() and not policy.log_probs.grad.any()
    assert "value_error" not in loss_figures(output.diagnostics())


def test_what_is_not_finite_or_not_there_is_named():
    trajectories = random_trajectories(9, empty=0.0)
    policy = TablePolicy(trajectories)
    loss = CriticPPOLoss(policy)
    micro = pad_rows(to_batch(trajectories), pad_id=0)
    broken = micro.clone()
    broken["next", "reward"][0] = float("nan")
    with pytest.raises(ValueError, match=r"reward at \('next', 'reward'\) are not finite"):
        loss(broken, normalizer=1.0)
    with pytest.raises(KeyError, match=r"no reward at .*set_keys\(reward="):
        loss(micro.exclude(("next", "reward")), normalizer=1.0)
    with torch.no_grad():
        policy.values.fill_(float("inf"))
    for call in (loss.anchor, lambda rows: loss(rows, normalizer=1.0)):
        with pytest.raises(ValueError, match="values of the critic are not finite"):
            call(micro)


def test_padding_may_hold_anything():
    trajectories = random_trajectories(10)
    policy = TablePolicy(trajectories)
    loss = CriticPPOLoss(policy, lmbda=0.9)
    rows = with_token_rewards(to_batch(trajectories), token_rewards(trajectories, 10))
    micro = loss.anchor(pad_rows(rows, pad_id=0))
    results = []
    for _ in range(2):
        policy.zero_grad()
        total = loss(micro, normalizer=3.0).total()
        total.backward()
        results.append((total.item(), policy.gradients(), policy.gradients("values")))
        mask = micro["masks", "all_assistant_mask"]
        for key in ("state_value", "advantage", "value_target", TOKEN_REWARD):
            micro[key] = micro[key].masked_fill(~mask, float("nan"))
    assert results[0] == results[1]


def test_set_keys_nested():
    trajectories = random_trajectories(11)
    loss = CriticPPOLoss(TablePolicy(trajectories), prox="loglinear", lmbda=0.9)
    rows = with_token_rewards(to_batch(trajectories), token_rewards(trajectories, 11))

    def total(batch: TensorDictBase, *, anchor: bool) -> float:
        micro = pack_rows(loss.select(batch, target_version=TARGET_VERSION), **packing)
        micro = loss.anchor(micro) if anchor else micro
        return loss(micro, normalizer=1.0).total().item()

    packing: dict = {"pad_id": 0}
    expected = total(rows, anchor=True)
    moved = lazy_stack([row.clone() for row in rows.unbind(0)])
    names = vars(loss.tensor_keys).copy()
    for name, key in names.items():
        loss.set_keys(**{name: ("moved", "deep", name)})
        for row in moved.unbind(0):
            if key in row.keys(True):
                row.rename_key_(key, ("moved", "deep", name))
    packing["segment_ids_key"] = ("moved", "deep", "segment_ids")
    assert total(moved, anchor=True) == expected == total(moved, anchor=False)
    assert {"reward", "token_reward", "old_value", "value_target", "advantage"} <= set(names)
    assert {("moved", "deep", name) for name in names} <= set(loss.in_keys)
    micro = loss.anchor(pad_rows(moved, pad_id=0))
    for name in ("old_value", "value_target", "advantage"):
        assert micro["moved", "deep", name].shape == micro["tokens", "full"].shape


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 1.01}, "gamma=1.01"),
        ({"lmbda": -0.1}, "lmbda=-0.1"),
        ({"value_coeff": 0.0}, "value_coeff=0.0"),
        ({"value_clip": 0.0}, "value_clip=0.0"),
        ({"ratio_level": "sequence"}, "ratio_level='sequence'"),
        ({"clip_epsilon": 1.5}, "clip_epsilon=1.5"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        CriticPPOLoss(TablePolicy(random_trajectories(0)), **options)


def tiny_critic(seed: int = 0) -> TorchtuneActor:
    torch.manual_seed(seed)
    model = qwen2(
        vocab_size=16, num_layers=1, num_heads=2, num_kv_heads=1, embed_dim=32,
        intermediate_dim=64, max_seq_len=32, tie_word_embeddings=True,
    )  # fmt: skip
    return TorchtuneActor(add_value_head(model))


def two_turn_rows(count: int, seed: int = 0) -> TensorDictBase:
    """Ragged rows of a prompt, an answer, a tool's output and an answer, at random.

    The reward is 1 if the prompt begins with an even number, else 0; answers change nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(count):
        parts = torch.randint(1, 5, (4,), generator=generator).tolist()
        sampled = torch.cat([torch.full((n,), bool(i % 2)) for i, n in enumerate(parts)])
        tokens = torch.randint(2, 8, sampled.shape, generator=generator)
        tokens[0] = torch.randint(8, 16, (), generator=generator)
        rows.append(
            TensorDict(
                {
                    "tokens": {"full": tokens},
                    "masks": {
                        "all_attention_mask": torch.ones_like(sampled),
                        "all_assistant_mask": sampled,
                    },
                    "log_probs": {"full": -2.7 * sampled},
                    "next": {"reward": 1.0 - tokens[:1] % 2},
                    "group": {"id": torch.tensor(index // 2), "index": torch.tensor(index % 2)},
                }
            )
        )
    return lazy_stack(rows)


def test_on_a_model_packed_padded_and_accumulated_give_one_gradient():
    actor = tiny_critic().double()
    torch.nn.init.normal_(actor.model.value_head.weight)
    loss = CriticPPOLoss(actor, lmbda=0.9)
    rows = two_turn_rows(6)
    forms = {
        "padded": [pad_rows(rows, pad_id=0)],
        "packed": [pack_rows(rows, pad_id=0)],
        "split": [pack_rows(rows[:4], pad_id=0), pad_rows(rows[4:], pad_id=0)],
    }
    gradients = []
    for micros in forms.values():
        actor.zero_grad()
        backward(loss, [loss.anchor(micro) for micro in micros], loss.denominator(rows))
        gradients.append(torch.cat([p.grad.flatten() for p in actor.parameters()]))
    assert gradients[0].abs().max() > 1e-3
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], atol=TOLERANCE, rtol=0)


def test_critic_learns_to_predict_the_reward():
    """With the defaults, on the decoder it shares with the policy, two updates a step."""
    actor = tiny_critic()
    loss = CriticPPOLoss(actor)
    optimizer = torch.optim.Adam(actor.parameters(), lr=1e-2)
    history = []
    for step in range(30):
        rows = two_turn_rows(32, seed=step)
        micro = loss.anchor(pack_rows(rows, pad_id=0))
        for _ in range(2):
            output = loss(micro, normalizer=loss.denominator(rows))
            optimizer.zero_grad()
            output.total().backward()
            optimizer.step()
        history.append(loss_figures(output.diagnostics()))
    # 0.25 is what the best constant leaves; the answers of each step are new to the critic.
    assert history[0]["value_error"] > 0.25
    assert history[-1]["value_error"] < 0.025
    assert history[-1]["explained_variance"] > 0.9


def test_head_stays_with_the_trainer(tmp_path):
    """In the checkpoints of a run, not in what the engine and other programs get."""
    model = tiny_critic(1).model
    torch.nn.init.normal_(model.value_head.weight)
    state = TrainingState(model, torch.optim.AdamW(model.parameters()))
    state.snapshot().save(tmp_path)
    before = model.value_head.weight.clone()
    torch.nn.init.zeros_(model.value_head.weight)
    state.load(tmp_path)
    assert torch.equal(model.value_head.weight, before)

    published = load_file(
        WeightPublisher(model, WeightStore(tmp_path / "out"), _FROM_HF).publish(1)
    )
    assert len(published) == sum(1 for _ in model.parameters()) - 2
    assert not any("value" in name for name in published)


def test_config_knows_its_arguments_and_those_of_its_base():
    cfg = OmegaConf.load(PACKAGE_DIR / "recipes/configs/arithmetic_ppo.yaml")
    component = {"_component_": "torchrl_llm_async.objectives.CriticPPOLoss"}
    cfg.loss = component | {"value_clip": None, "clip_epsilon": 0.2}
    assert load_config(cfg).loss.value_clip is None
    for options, message in (
        ({"lamda": 0.9}, "loss.lamda is 0.9, .* did you mean 'lmbda'"),
        ({"clip_epsilom": 0.2}, "loss.clip_epsilom is 0.2, .* did you mean 'clip_epsilon'"),
        ({"prox": "current"}, "loss.prox is 'current'; CriticPPOLoss wants one of 'recompute'"),
    ):
        cfg.loss = component | options
        with pytest.raises(ConfigError, match=message):
            load_config(cfg)


@pytest.mark.inv7
def test_token_rewards_of_some_rows_only_are_refused():
    trajectories = random_trajectories(5)
    rows = with_token_rewards(to_batch(trajectories), token_rewards(trajectories, 5))
    del rows[2][TOKEN_REWARD]
    loss = CriticPPOLoss(TablePolicy(trajectories))
    with pytest.raises(ValueError, match=r"5 of 6 rows have a token_reward at .*give all of them"):
        loss.select(rows)
