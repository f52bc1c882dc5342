"""The loss arithmetic piece by piece: exact values, gradcheck, and one compiled graph each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import get_args

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from torchrl_llm_async.objectives import functional, values

# Three sequences of 4, 3 and 1 tokens, the second one of which nobody sampled a token of.
SEGMENT_IDS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2])
MASK = torch.tensor([False, True, True, True, False, False, False, True])
TOKENS, SEGMENTS = len(MASK), 3
LAYOUT = (MASK, SEGMENT_IDS, SEGMENTS)
GROUP_IDS = torch.arange(TOKENS) // 4


def noise(seed: int, count: int = TOKENS) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator, dtype=torch.float64)


MU, PROX, REF, ADVANTAGE = (noise(seed) for seed in range(4))
VERSION = torch.tensor([-1, 5, 3, 0, -1, -1, -1, 4])
FOLLOWING = values.next_sampled(MASK, SEGMENT_IDS)


def each(function: Callable, **options: tuple) -> dict[str, Callable]:
    """The function with every combination of the given options, by a readable name."""
    return {
        "-".join([function.__name__, *map(str, chosen)]): partial(
            function, **dict(zip(options, chosen, strict=True))
        )
        for chosen in product(*options.values())
    }


# Differentiable, as functions of the one argument that carries the gradient.
DIFFERENTIABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "bounded_exp": functional.bounded_exp,
    "segment_sum": lambda x: functional.segment_sum(x, SEGMENT_IDS, SEGMENTS),
    "segment_mean": lambda x: functional.segment_mean(x, *LAYOUT),
    **{
        name: lambda x, f=f: f(x, PROX, ADVANTAGE, *LAYOUT).loss
        for name, f in each(
            functional.clipped_surrogate,
            level=get_args(functional.RatioLevel),
            dual_clip=(None, 1.5),
        ).items()
    },
    **{
        name: lambda x, f=f: f(x, REF, MASK)
        for name, f in each(
            functional.kl_estimate, estimator=get_args(functional.KLEstimator)
        ).items()
    },
    **{
        name: lambda x, f=f: f(x, *LAYOUT)
        for name, f in each(
            functional.aggregate, aggregation=get_args(functional.Aggregation)
        ).items()
    },
    **each(
        functional.preference_loss,
        kind=get_args(functional.PreferenceLoss),
        beta=(0.3,),
        label_smoothing=(0.0, 0.2),
    ),
    "discounted_sum": lambda x: values.discounted_sum(x, FOLLOWING, 0.9),
    **{
        name: lambda x, f=f: f(x, MU, ADVANTAGE, MASK).loss
        for name, f in each(values.clipped_value_loss, clip=(None, 0.5)).items()
    },
}
# Constants of the loss, or counts: compiled all the same.
WITHOUT_GRADIENT: dict[str, Callable[[Tensor], Tensor]] = {
    "loglinear_log_prob": lambda x: functional.loglinear_log_prob(x, MU, VERSION, 6),
    **{
        name: lambda x, f=f: f(x - MU, *LAYOUT)
        for name, f in each(
            functional.correction_weight,
            correction=get_args(functional.Correction),
            level=get_args(functional.CorrectionLevel),
        ).items()
    },
    **{
        name: lambda x, f=f: f(*LAYOUT) + 0 * x.sum()
        for name, f in each(
            functional.denominator,
            aggregation=get_args(functional.Aggregation),
            fixed_length=(10,),
        ).items()
    },
    **{
        name: lambda x, f=f: f(x, GROUP_IDS, 2)
        for name, f in each(
            functional.group_advantage,
            estimator=get_args(functional.AdvantageEstimator),
            divide_by_std=(False, True),
        ).items()
    },
    "next_sampled": lambda x: values.next_sampled(MASK & x.isfinite(), SEGMENT_IDS),
    "terminal_reward": lambda x: values.terminal_reward(x, MASK, SEGMENT_IDS),
    "gae": lambda x: values.gae(ADVANTAGE, x, MASK, SEGMENT_IDS, gamma=0.9, lmbda=0.8),
}


def test_every_function_has_its_cases():
    names = {name.split("-")[0] for name in (*DIFFERENTIABLE, *WITHOUT_GRADIENT)}
    public = {
        name
        for module in (functional, values)
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    }
    assert names == public - {"explained_variance"}  # Of numbers, for the log.


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradcheck(name):
    assert torch.autograd.gradcheck(DIFFERENTIABLE[name], noise(9).requires_grad_())


@pytest.mark.parametrize(
    "function",
    [
        lambda x: functional.clipped_surrogate(MU, x, ADVANTAGE, *LAYOUT).loss,
        lambda x: functional.clipped_surrogate(x, PROX, ADVANTAGE, *LAYOUT).ratio,
        lambda x: functional.kl_estimate(MU, x, MASK, "k3"),
        lambda x: functional.correction_weight(x, *LAYOUT)[0],
        lambda x: functional.loglinear_log_prob(x, MU, VERSION, 6),
        lambda x: torch.cat(values.gae(x, MU, MASK, SEGMENT_IDS)),
        lambda x: torch.cat(values.gae(MU, x, MASK, SEGMENT_IDS)),
        lambda x: values.clipped_value_loss(MU, x, ADVANTAGE, MASK).loss,
        lambda x: values.clipped_value_loss(MU, ADVANTAGE, x, MASK).loss,
    ],
)
def test_anchors_weights_and_targets_are_constants(function):
    assert not function(noise(9).requires_grad_()).requires_grad


@pytest.mark.parametrize("name", [*DIFFERENTIABLE, *WITHOUT_GRADIENT])
def test_compiles_into_one_graph(name, monkeypatch):
    # vLLM's start sets it for its own process; here it would make this test say nothing.
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    torch._dynamo.reset()
    function = (DIFFERENTIABLE | WITHOUT_GRADIENT)[name]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    eager_input, compiled_input = (noise(9).requires_grad_() for _ in range(2))
    expected, result = function(eager_input), compiled(compiled_input)
    assert counter.frame_count == 1 and counter.op_count > 0
    torch.testing.assert_close(result, expected)
    if name in DIFFERENTIABLE:
        expected.sum().backward()
        result.sum().backward()
        torch.testing.assert_close(compiled_input.grad, eager_input.grad)


@pytest.mark.slow
def test_compiles_with_inductor(monkeypatch):
    """What the others show with a backend that changes nothing, once to machine code."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    options = {"level": "sequence", "dual_clip": 1.5}

    def loss(log_prob: Tensor) -> Tensor:
        weight, _ = functional.correction_weight(PROX - MU, *LAYOUT, level="geometric")
        surrogate = functional.clipped_surrogate(log_prob, PROX, ADVANTAGE, *LAYOUT, **options)
        return functional.aggregate(weight * surrogate.loss, *LAYOUT, "sequence")

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend=counter)):
        log_prob = noise(9).requires_grad_()
        value = function(log_prob)
        value.backward()
        results.append((value.detach(), log_prob.grad))
    assert counter.frame_count == 1
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_penalty_never_pushes_away(estimator):
    """The further below the reference, the more it costs, up to where it is bounded."""
    below = torch.linspace(0.0, 30.0, 61, dtype=torch.float64).requires_grad_()
    mask = torch.ones(61, dtype=torch.bool)
    kl = functional.kl_estimate(-below, torch.zeros_like(below), mask, estimator)
    assert (kl.diff() >= 0).all()
    (gradient,) = torch.autograd.grad(kl.sum(), below)
    assert (gradient >= 0).all() and gradient[1:40].gt(0).all()
