"""The chunked projection against autograd over whole logits."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchrl_llm_async.modules.projection import project_and_score
from torchrl_llm_async.modules.scores import score_logits


def make_inputs(tokens: int = 7, dtype: torch.dtype = torch.float64):
    hidden = torch.randn(tokens, 4, dtype=dtype, requires_grad=True)
    weight = torch.randn(11, 4, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(11, (tokens,))


@pytest.mark.parametrize("entropy", ["off", "detached", "differentiable"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100])
def test_values_and_gradients_are_those_of_whole_logits(entropy, temperature, chunk_size):
    hidden, weight, targets = make_inputs()
    options = {"temperature": temperature, "chunk_size": chunk_size, "entropy": entropy}
    found = project_and_score(hidden, weight, targets, **options)
    expected = score_logits(hidden @ weight.T, targets, temperature, entropy)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    gradients = []
    for scores in (found, expected):
        # A token of no gradient at all, one of the entropy alone, one of the log-prob alone.
        loss = (scores[0] * torch.tensor([0.0, 0.0, 1.5, -2.0, 1.0, 0.3, -0.1])).sum()
        if entropy == "differentiable":
            loss = loss + (scores[1] * torch.tensor([0.0, 0.7, 0.0, -1.0, 2.0, 0.1, 1.0])).sum()
        gradients.append(torch.autograd.grad(loss, (hidden, weight)))
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=0)
    differentiable = found if entropy == "differentiable" else found[:1]
    assert [scores.requires_grad for scores in found[1:]] == [entropy == "differentiable"] * (
        len(found) - 1
    )
    assert torch.autograd.gradcheck(
        lambda *by: project_and_score(*by, targets, **options)[: len(differentiable)],
        (hidden, weight),
    )


def test_entropy_alone():
    hidden, weight, targets = make_inputs()
    _, entropy = project_and_score(
        hidden, weight, targets, temperature=1.0, chunk_size=2, entropy="differentiable"
    )
    _, expected = score_logits(hidden @ weight.T, targets, 1.0, "differentiable")
    torch.testing.assert_close(
        *(torch.autograd.grad(e.square().sum(), (hidden, weight)) for e in (entropy, expected))
    )


def test_no_token_gives_no_score_and_gradients_of_0():
    hidden, weight, targets = make_inputs(tokens=0)
    (log_probs,) = project_and_score(
        hidden, weight, targets, temperature=1.0, chunk_size=2, entropy="off"
    )
    log_probs.sum().backward()
    assert log_probs.shape == hidden.grad.shape[:1] == (0,)
    assert weight.grad.eq(0).all()


def test_a_frozen_projection():
    hidden, weight, targets = make_inputs()
    gradients = []
    for frozen in (weight, weight.detach()):
        (log_probs,) = project_and_score(
            hidden, frozen, targets, temperature=1.0, chunk_size=2, entropy="off"
        )
        gradients.append(torch.autograd.grad(log_probs.sum(), hidden)[0])
    assert torch.equal(*gradients)


def test_bfloat16_is_scored_in_float32():
    """As whole logits of that type are; and the sum over chunks loses nothing."""
    hidden, weight, targets = make_inputs(tokens=64, dtype=torch.bfloat16)
    scored = project_and_score(
        hidden, weight, targets, temperature=0.7, chunk_size=1, entropy="differentiable"
    )
    expected = score_logits(hidden @ weight.T, targets, 0.7, "differentiable")
    for found, reference in zip(scored, expected, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, reference, atol=1e-5, rtol=1e-5)
    for inputs in ((hidden,), (weight,)):
        found, reference = (
            torch.autograd.grad(s[0].sum() + s[1].sum(), inputs, retain_graph=True)[0]
            for s in (scored, expected)
        )
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, reference, atol=0.1, rtol=0.05)


class RowsOfLogits(TorchDispatchMode):
    """Rows of every product onto the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.mm and out.shape[1] == 11:
            self.rows.append(len(out))
        return out


def test_logits_are_computed_by_chunks_and_again_only_where_there_is_a_gradient():
    hidden, weight, targets = make_inputs()
    with RowsOfLogits() as forward:
        (log_probs,) = project_and_score(
            hidden, weight, targets, temperature=1.0, chunk_size=3, entropy="off"
        )
    assert forward.rows == [3, 3, 1]
    with RowsOfLogits() as backward:
        (log_probs * torch.tensor([1.0, 0.0, 0.0, 2.0, 0.0, -1.0, 3.0])).sum().backward()
    assert backward.rows == [3, 1]
    assert hidden.grad[[1, 2, 4]].eq(0).all() and hidden.grad[[0, 3, 5, 6]].ne(0).any(-1).all()
