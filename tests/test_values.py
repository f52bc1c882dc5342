"""GAE, value loss and explained variance against loops in plain Python, and TorchRL's GAE."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torchrl.objectives.value.functional import (
    generalized_advantage_estimate,
    vec_generalized_advantage_estimate,
)

from torchrl_llm_async.objectives import values

TOLERANCE = 1e-6
discounts = st.sampled_from([0.0, 0.5, 0.95, 1.0])


def flat_tokens(seed: int, lengths: Sequence[int], share: float = 0.6):
    """Reward, value, mask and segment ids of sequences one behind another, padding between."""
    generator = torch.Generator().manual_seed(seed)
    ids = [
        part
        for i, length in enumerate(lengths)
        for part in (torch.full((length,), i), torch.full((length % 3,), -1))
    ]
    segment_ids = torch.cat(ids)
    count = len(segment_ids)
    mask = (torch.rand(count, generator=generator) < share) & (segment_ids >= 0)
    reward, value = torch.randn(2, count, generator=generator, dtype=torch.float64)
    return reward, value, mask, segment_ids


def reference_gae(reward, value, mask, segment_ids, gamma, lmbda):
    """From each sequence's end, one sampled token after the other."""
    advantage, target = [0.0] * len(mask), [0.0] * len(mask)
    for sequence in {i for i in segment_ids if i >= 0}:
        next_value = next_advantage = 0.0
        for t in reversed(range(len(mask))):
            if segment_ids[t] == sequence and mask[t]:
                delta = reward[t] + gamma * next_value - value[t]
                next_advantage = advantage[t] = delta + gamma * lmbda * next_advantage
                next_value = value[t]
                target[t] = advantage[t] + value[t]
    return advantage, target


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    share=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    gamma=discounts,
    lmbda=discounts,
)
def test_gae_equals_a_loop_over_tokens(seed, lengths, share, gamma, lmbda):
    tokens = flat_tokens(seed, lengths, share)
    result = values.gae(*tokens, gamma=gamma, lmbda=lmbda)
    expected = reference_gae(*(entry.tolist() for entry in tokens), gamma, lmbda)
    for got, want in zip(result, expected, strict=True):
        torch.testing.assert_close(
            got, torch.tensor(want, dtype=torch.float64), atol=TOLERANCE, rtol=0
        )


@pytest.mark.parametrize(("gamma", "lmbda"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.5)])
def test_gae_equals_torchrl_on_plain_sequences(gamma, lmbda):
    """Where every token is sampled, TorchRL's estimates are ours."""
    rows, length = 3, 17
    torch.manual_seed(1)
    reward, value = torch.randn(2, rows, length, 1, dtype=torch.float64)
    done = torch.zeros(rows, length, 1, dtype=torch.bool)
    done[:, -1] = True
    done[0, 4] = done[2, 0] = True  # several sequences in a row
    next_value = torch.cat([value[:, 1:], torch.zeros(rows, 1, 1)], 1)
    segment_ids = done.flatten().cumsum(0) - done.flatten().long()
    mask = torch.ones(rows * length, dtype=torch.bool)
    ours = values.gae(
        reward.flatten(), value.flatten(), mask, segment_ids, gamma=gamma, lmbda=lmbda
    )
    for theirs in (generalized_advantage_estimate, vec_generalized_advantage_estimate):
        expected = theirs(gamma, lmbda, value, next_value, reward, done)
        for got, want in zip(ours, expected, strict=True):
            torch.testing.assert_close(got, want.flatten(), atol=TOLERANCE, rtol=0)


def test_gae_leaves_nothing_out():
    """TorchRL's vectorised GAE drops what weighs less than 1e-7; a large reward shows it."""
    length, gamma, lmbda = 400, 1.0, 0.95
    reward = torch.zeros(length, dtype=torch.float64)
    reward[-1] = 1e9
    value, done = torch.zeros_like(reward), reward > 0
    ours, _ = values.gae(reward, value, reward == reward, torch.zeros(length, dtype=torch.long),
                         gamma=gamma, lmbda=lmbda)  # fmt: skip
    columns = (entry[None, :, None] for entry in (value, value, reward, done))
    theirs, _ = vec_generalized_advantage_estimate(gamma, lmbda, *columns)
    assert theirs[0, 0, 0] == 0
    assert ours[0].item() == pytest.approx(1e9 * lmbda ** (length - 1), rel=1e-9)


def test_monte_carlo_limit_is_return_minus_value():
    reward, value, mask, segment_ids = flat_tokens(2, [9, 1, 30, 4])
    reward = values.terminal_reward(reward, mask, segment_ids)
    assert reward.count_nonzero() <= 4
    advantage, target = values.gae(reward, value, mask, segment_ids)
    for sequence in range(4):
        here = mask & (segment_ids == sequence)
        total = reward[here].sum()
        torch.testing.assert_close(target[here], total.expand(int(here.sum())))
        torch.testing.assert_close(advantage[here], total - value[here])


def test_unsampled_tokens_may_hold_anything():
    reward, value, mask, segment_ids = flat_tokens(3, [6, 8])
    poison = torch.where(mask, 0.0, torch.nan)
    for clean, poisoned in zip(
        values.gae(reward, value, mask, segment_ids, gamma=0.9),
        values.gae(reward + poison, value + poison, mask, segment_ids, gamma=0.9),
        strict=True,
    ):
        assert torch.equal(clean, poisoned)
    value = value.requires_grad_()
    loss = values.clipped_value_loss(value, value + poison, reward + poison, mask).loss.sum()
    loss.backward()
    assert loss.isfinite() and value.grad.isfinite().all()
    assert not value.grad[~mask].any()


def reference_value_loss(value, old, target, clip):
    """Loss and its derivative by the value, of one token."""
    loss, slope = (value - target) ** 2 / 2, value - target
    if clip is not None and abs(value - old) > clip:
        bounded = old + math.copysign(clip, value - old)
        if (bounded - target) ** 2 / 2 > loss:
            return (bounded - target) ** 2 / 2, 0.0, True
    return loss, slope, False


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    rows=st.lists(
        st.tuples(*[st.integers(-2000, 2000).map(lambda n: n / 1000)] * 3, st.booleans()),
        min_size=1,
        max_size=8,
    ),
    clip=st.sampled_from([None, 0.2, 0.5]),
)
def test_value_loss_equals_its_definition(rows, clip):
    value, old, target, mask = (torch.tensor(column) for column in zip(*rows, strict=True))
    value, old, target = (entry.double() for entry in (value, old, target))
    value.requires_grad_()
    result = values.clipped_value_loss(value, old, target, mask, clip)
    result.loss.sum().backward()
    for t, sampled in enumerate(mask.tolist()):
        now, before, goal = (entry[t].item() for entry in (value, old, target))
        if clip is not None and abs(abs(now - before) - clip) < 1e-9:
            continue  # the kink
        loss, slope, clipped = reference_value_loss(now, before, goal, clip)
        assert result.loss[t].item() == pytest.approx(sampled * loss, abs=TOLERANCE)
        assert value.grad[t].item() == pytest.approx(sampled * slope, abs=TOLERANCE)
        assert result.clipped[t].item() == (sampled and clipped)


def test_value_loss_gradcheck():
    old, target, mask = torch.zeros(4), torch.tensor([1.0, -1.0, 0.2, 3.0]), torch.ones(4) > 0
    value = torch.tensor([0.3, 0.9, -0.8, 1.2], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda v: values.clipped_value_loss(v, old, target, mask, 0.5).loss, value
    )


def test_clipping_spares_a_value_that_has_not_moved():
    """Without an update between, the gradient is the plain one, to the last bit."""
    value = torch.tensor([0.1, 0.7], requires_grad=True)
    target = torch.tensor([5.0, -5.0])
    result = values.clipped_value_loss(value, value, target, torch.ones(2) > 0, 0.1)
    result.loss.sum().backward()
    assert torch.equal(value.grad, value.detach() - target) and not result.clipped.any()


def moments(target: list[float], value: list[float]) -> list[float]:
    error = [t - v for t, v in zip(target, value, strict=True)]
    return [
        statistics.fmean(numbers)
        for numbers in (target, [t * t for t in target], error, [e * e for e in error])
    ]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    pairs=st.lists(
        st.tuples(st.floats(-3, 3, width=32), st.floats(-3, 3, width=32)), min_size=2, max_size=20
    ).filter(lambda pairs: statistics.pvariance([t for t, _ in pairs]) > 1e-3)
)
def test_explained_variance_equals_its_definition(pairs):
    target, value = map(list, zip(*pairs, strict=True))
    left = statistics.pvariance([t - v for t, v in pairs])
    expected = 1 - left / statistics.pvariance(target)
    assert values.explained_variance(*moments(target, value)) == pytest.approx(expected, abs=1e-6)


def test_explained_variance_of_the_perfect_the_constant_and_the_pointless():
    target = [0.0, 1.0, 3.0]
    assert values.explained_variance(*moments(target, target)) == 1
    assert values.explained_variance(*moments(target, [7.0] * 3)) == pytest.approx(0)
    assert math.isnan(values.explained_variance(*moments([0.3] * 3, target)))


def test_one_compiled_graph():
    """``fullgraph`` raises at a break; the counter shows that a frame was compiled at all."""

    def critic(reward, value, old_value, mask, segment_ids):
        reward = values.terminal_reward(reward, mask, segment_ids)
        advantage, target = values.gae(reward, value, mask, segment_ids, gamma=0.9, lmbda=0.8)
        return advantage, values.clipped_value_loss(value, old_value, target, mask).loss

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(critic, backend=counter, fullgraph=True)
    for seed, lengths in ((4, [5, 3]), (5, [40, 7, 2]), (6, [1])):  # shapes become dynamic
        reward, value, mask, segment_ids = flat_tokens(seed, lengths)
        gradients = []
        for function in (critic, compiled):
            leaf = value.clone().requires_grad_()
            outputs = function(reward, leaf, reward, mask, segment_ids)
            outputs[1].sum().backward()
            gradients.append((*outputs, leaf.grad))
        torch.testing.assert_close(*gradients)
    assert counter.frame_count > 0
