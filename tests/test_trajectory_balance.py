"""Trajectory balance: against a slow reference, and on a problem small enough to enumerate."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

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
from loss_references import gradient
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from torchrl_llm_async.modules.scores import TokenScores
from torchrl_llm_async.objectives import TrajectoryBalanceLoss
from torchrl_llm_async.objectives.trajectory_balance import trajectory_balance
from torchrl_llm_async.packing import pack_rows, pad_rows

TOLERANCE = 1e-6


def log_ratio(row, theta) -> complex:
    """Of the whole answer: log theta - log ref."""
    return sum((theta[t] - row.ref[t] for t in row.answer()), 0j)


def of_group(members, thetas, beta: float) -> list[tuple[complex, complex]]:
    """(residual, log Z) of each trajectory of a group that has an answer.

    log Z is differentiated through, here: whether it is must not matter.
    """
    gaps = [
        row.reward / beta - log_ratio(row, theta)
        for row, theta in zip(members, thetas, strict=True)
        if row.answer()
    ]
    log_z = sum(gaps, 0j) / (len(gaps) or 1)
    return [(log_z - gap, log_z) for gap in gaps]


def balance(trajectories, beta: float) -> tuple[float, list, list[tuple], int]:
    """Loss, its gradients by log-probs, (residual, log Z) by trajectory, and their number."""
    count = sum(bool(row.answer()) for row in trajectories)
    loss, slopes, told = 0.0, [], []
    for group in dict.fromkeys(row.group for row in trajectories):
        members = [row for row in trajectories if row.group == group]
        lengths = np.cumsum([len(row.theta) for row in members])[:-1]

        def of_tokens(tokens, members=members, lengths=lengths) -> complex:
            thetas = np.split(np.array(tokens), lengths)
            return sum((delta**2 for delta, _ in of_group(members, thetas, beta)), 0j) / count

        tokens = flat([row.theta for row in members])
        if any(row.answer() for row in members):
            loss += of_tokens(tokens).real
            slopes += gradient(of_tokens, tokens)
        else:
            slopes += [0.0] * len(tokens)
        told += of_group(members, [row.theta for row in members], beta)
    return loss, slopes, told, count


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    beta=st.sampled_from([0.1, 0.7]),
    group_size=st.sampled_from([2, 3, 4]),
    form=st.sampled_from(FORMS),
    outliers=st.sampled_from([0.0, 0.0, 0.1]),
)
def test_equals_the_reference_in_every_form(seed, beta, group_size, form, outliers):
    trajectories = random_trajectories(
        seed, rows=12, group_size=group_size, longest=5, empty=0.2, outliers=outliers
    )
    policy = TablePolicy(trajectories)
    loss = TrajectoryBalanceLoss(policy, beta=beta)
    expected, by_log_prob, told, count = balance(trajectories, beta)
    rows = loss.select(to_batch(trajectories))
    normalizer = loss.denominator(rows)
    assert normalizer == count
    micros = micro_batches(rows, form, seed, unit=group_size)
    assert sum(loss.denominator(micro) for micro in micros) == normalizer
    value = backward(loss, micros, normalizer)
    np.testing.assert_allclose(value, expected, rtol=1e-9, atol=TOLERANCE)
    np.testing.assert_allclose(flat(policy.gradients()), by_log_prob, rtol=1e-9, atol=TOLERANCE)

    outputs = [loss(micro, normalizer=1.0).diagnostics() for micro in micros]
    figures = {
        "residual_size": sum(abs(residual.real) for residual, _ in told),
        "log_z": sum(log_z.real for _, log_z in told),
        "log_ratio_to_ref": sum(log_ratio(row, row.theta).real for row in trajectories),
    }
    assert set(outputs[0]) == set(figures)
    for name, figure in figures.items():
        total = sum(output[name] for output in outputs)
        assert not total.requires_grad
        np.testing.assert_allclose(total, [figure, count], rtol=1e-5, atol=1e-4)


def test_is_the_variance_within_the_groups():
    beta = 0.3
    trajectories = random_trajectories(0, rows=8, group_size=4, empty=0.0)
    loss = TrajectoryBalanceLoss(TablePolicy(trajectories), beta=beta)
    rows = loss.select(to_batch(trajectories))
    gaps = [row.reward / beta - log_ratio(row, row.theta).real for row in trajectories]
    expected = np.var(np.reshape(gaps, (2, 4)), axis=1).mean()
    value = backward(loss, [pad_rows(rows, pad_id=0)], loss.denominator(rows))
    assert value == pytest.approx(expected, rel=1e-12)


def test_its_gradient_is_that_of_reinforce_for_the_penalised_reward():
    beta, size = 0.3, 3
    trajectories = random_trajectories(1, group_size=size, empty=0.0)
    policy = TablePolicy(trajectories)
    loss = TrajectoryBalanceLoss(policy, beta=beta)
    rows = loss.select(to_batch(trajectories))
    backward(loss, [pad_rows(rows, pad_id=0)], loss.denominator(rows))
    rewards = [row.reward - beta * log_ratio(row, row.theta).real for row in trajectories]
    advantage = np.reshape(rewards, (-1, size))
    advantage = (advantage - advantage.mean(1, keepdims=True)).flatten()
    for row, slopes, a in zip(trajectories, policy.gradients(), advantage, strict=True):
        expected = [-a / len(trajectories) * sampled for sampled in row.sampled]
        np.testing.assert_allclose(np.multiply(slopes, beta / 2), expected, atol=1e-12)


# --- A problem whose every answer is in the group ---------------------------------------------

LETTERS, BETA = 3, 0.5


class TwoLetters(TensorDictModuleBase):
    """Answers of two letters, each of a softmax of its own that may know the letter before."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        super().__init__()
        self.in_keys, self.out_keys = [("tokens", "full")], []
        self.first, self.second = nn.Parameter(first), nn.Parameter(second)

    def score(self, micro, *, mask=None, entropy="off", values=False) -> TokenScores:
        _, one, two = micro["tokens", "full"].unbind(-1)
        first = self.first.log_softmax(-1)[one]
        second = self.second.log_softmax(-1)[one, two]
        return TokenScores(torch.stack([torch.zeros_like(first), first, second], -1))

    def joint(self) -> Tensor:
        """(V, V) log-probs of all answers."""
        return self.first.log_softmax(-1)[:, None] + self.second.log_softmax(-1)


def every_answer(reward: Tensor) -> TensorDict:
    """One group that is all there is to say."""
    answers = torch.tensor([[0, *letters] for letters in product(range(LETTERS), repeat=2)])
    return TensorDict(
        {
            "tokens": {"full": answers},
            "masks": {
                "all_attention_mask": torch.ones_like(answers, dtype=torch.bool),
                "all_assistant_mask": torch.tensor([False, True, True]).expand_as(answers).clone(),
            },
            "next": {"reward": reward.reshape(-1, 1)},
            "group": {"id": torch.full((len(answers),), 7)},
        },
        batch_size=[len(answers)],
    )


def toy() -> tuple[TwoLetters, Tensor, Tensor, Tensor]:
    """The reference, the rewards, and the best policy's log-probs with its log Z."""
    generator = torch.Generator().manual_seed(0)
    first, second, reward = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((LETTERS,), (LETTERS, LETTERS), (LETTERS, LETTERS))
    )
    reference = TwoLetters(first, second)
    tilted = (reference.joint() + reward / BETA).detach()
    log_z = tilted.flatten().logsumexp(0)
    return reference, reward, tilted - log_z, log_z


def test_nothing_is_left_to_learn_at_the_optimum():
    reference, reward, best, log_z = toy()
    policy = TwoLetters(best.logsumexp(-1), best)
    torch.testing.assert_close(policy.joint(), best)
    loss = TrajectoryBalanceLoss(policy, beta=BETA, reference_network=reference)
    rows = loss.select(every_answer(reward))
    output = loss(rows, normalizer=loss.denominator(rows))
    output.total().backward()
    assert output.total() < 1e-24
    assert policy.first.grad.abs().max() < 1e-12 and policy.second.grad.abs().max() < 1e-12
    total, count = output.log_z
    assert (total / count).item() == pytest.approx(log_z.item(), rel=1e-6)


@pytest.mark.parametrize("start", ["reference", "uniform"])
def test_gradient_descent_gets_to_the_optimum(start):
    reference, reward, best, _ = toy()
    if start == "reference":
        policy = TwoLetters(reference.first.detach().clone(), reference.second.detach().clone())
    else:
        policy = TwoLetters(torch.zeros_like(best[0]), torch.zeros_like(best))
    loss = TrajectoryBalanceLoss(policy, beta=BETA, reference_network=reference)
    rows = loss.select(every_answer(reward))
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.4, momentum=0.8)
    assert (policy.joint().exp() - best.exp()).abs().sum() > 0.3
    for _ in range(150):
        optimizer.zero_grad()
        loss(rows, normalizer=loss.denominator(rows)).total().backward()
        optimizer.step()
    assert (policy.joint().exp() - best.exp()).abs().sum() < 1e-6
    assert reference.first.grad is None


# --- What goes wrong ---------------------------------------------------------------------------


@pytest.mark.inv7
@pytest.mark.parametrize("form", [pad_rows, pack_rows])
def test_a_group_in_two_micro_batches_is_refused(form):
    trajectories = random_trajectories(2, rows=9, group_size=3, empty=0.0)
    loss = TrajectoryBalanceLoss(TablePolicy(trajectories))
    rows = loss.select(to_batch(trajectories))
    with pytest.raises(ValueError, match=r"Groups \[1\] are not in one micro-batch"):
        loss(form(rows[:5], pad_id=0), normalizer=1.0)
    loss(form(rows[3:], pad_id=0), normalizer=1.0)


@pytest.mark.inv7
@pytest.mark.parametrize("form", [pad_rows, pack_rows])
def test_a_member_without_a_token_takes_no_part(form):
    trajectories = random_trajectories(3, rows=3, group_size=3, empty=0.0)
    silent = replace(trajectories[1], sampled=[False] * len(trajectories[1].theta), reward=50.0)
    results = []
    for members in ([trajectories[0], silent, trajectories[2]], trajectories[::2]):
        policy = TablePolicy(members)
        loss = TrajectoryBalanceLoss(policy)
        rows = loss.select(to_batch(members))
        value = backward(loss, [form(rows, pad_id=0)], loss.denominator(rows))
        results.append([value, *policy.gradients()[0], *policy.gradients()[-1]])
    assert results[0] == pytest.approx(results[1], rel=1e-12)

    policy = TablePolicy([trajectories[0], silent])
    loss = TrajectoryBalanceLoss(policy)
    rows = loss.select(to_batch([trajectories[0], silent]))
    # Alone, a trajectory is its own log Z.
    assert backward(loss, [form(rows, pad_id=0)], loss.denominator(rows)) == 0.0
    assert policy.log_probs.grad.eq(0).all()


def test_equal_rewards_pull_towards_the_reference():
    trajectories = [replace(row, reward=1.0) for row in random_trajectories(4, empty=0.0)]
    policy = TablePolicy(trajectories)
    loss = TrajectoryBalanceLoss(policy)
    rows = loss.select(to_batch(trajectories))
    assert backward(loss, [pad_rows(rows, pad_id=0)], loss.denominator(rows)) > 0.01
    assert loss.groups_tied == 0

    policy = TablePolicy([replace(row, theta=row.ref) for row in trajectories])
    loss = TrajectoryBalanceLoss(policy)
    assert backward(loss, [pad_rows(rows, pad_id=0)], loss.denominator(rows)) < 1e-20


@pytest.mark.parametrize("beta", [0.0, -0.1])
def test_options_out_of_range_are_named(beta):
    with pytest.raises(ValueError, match="beta="):
        TrajectoryBalanceLoss(TablePolicy([]), beta=beta)


def test_documented_defaults():
    loss = TrajectoryBalanceLoss(TablePolicy([]))
    assert loss.beta == 0.1 and loss.needs_reference and loss.packing_unit == "group"


# --- The arithmetic alone ----------------------------------------------------------------------

VALID = torch.tensor([True, True, False, True, False, True])
GROUPS = torch.tensor([0, 0, 0, 2, 2, 2])
REWARD = torch.linspace(-1, 1, 6, dtype=torch.float64)


LOG_RATIO = torch.linspace(2, -1, 6, dtype=torch.float64)


def residuals(log_ratio: Tensor) -> Tensor:
    return trajectory_balance(log_ratio, REWARD, VALID, GROUPS, 3, beta=0.3).residual


def test_residuals_of_a_group_sum_to_zero():
    residual, log_z = trajectory_balance(LOG_RATIO, REWARD, VALID, GROUPS, 3, beta=0.3)
    assert residual[~VALID].eq(0).all() and log_z[~VALID].eq(0).all()
    for group in (GROUPS == 0, GROUPS == 2):
        assert abs(residual[group].sum()) < 1e-12
        assert len(log_z[group & VALID].unique()) == 1


def test_gradcheck():
    assert torch.autograd.gradcheck(
        lambda x: residuals(x).square().sum(), LOG_RATIO.clone().requires_grad_()
    )


def test_compiles_into_one_graph(monkeypatch):
    # vLLM's start sets it for its own process; here it would make this test say nothing.
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(residuals, fullgraph=True, backend=counter)
    eager, other = (LOG_RATIO.clone().requires_grad_() for _ in range(2))
    residuals(eager).square().sum().backward()
    compiled(other).square().sum().backward()
    assert counter.frame_count == 1 and counter.op_count > 0
    torch.testing.assert_close(other.grad, eager.grad)
