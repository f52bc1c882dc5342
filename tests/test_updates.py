"""Optimizer updates: clipped, skipped where the gradient is not finite, and counted."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from torchrl_llm_async.recipes.updates import Updates


def make(**options):
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return model, Updates(model, optimizer, schedule, **options), schedule


def give(model, *gradient: float) -> None:
    model.weight.grad = torch.tensor([gradient])


def test_the_norm_is_of_before_clipping():
    model, updates, _ = make(clip_grad_norm=1.0)
    give(model, 3.0, 4.0)
    assert updates.step() == 5.0
    torch.testing.assert_close(
        model.weight.detach(), torch.tensor([[-0.6, -0.8]]), rtol=0, atol=1e-6
    )
    assert model.weight.grad is None


@pytest.mark.inv7
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_gradient_that_is_not_finite_changes_nothing(bad, clip):
    model, updates, schedule = make(clip_grad_norm=clip)
    give(model, bad, 1.0)
    assert updates.step() is None
    assert updates.skipped == 1 and model.weight.eq(0).all() and model.weight.grad is None
    assert schedule.last_epoch == 1  # It ends with the run all the same.
    give(model, 0.0, 1.0)
    assert updates.step() == 1.0  # And the next is made as ever, at the next learning rate.
    assert model.weight.flatten().tolist() == pytest.approx([0.0, -0.5], abs=1e-6)


@pytest.mark.inv5
def test_too_many_in_a_row_end_the_run():
    model, updates, _ = make(max_skipped=2)
    for gradient in (math.nan, math.nan, 1.0, math.inf, math.inf):
        give(model, gradient, 0.0)
        updates.step()
    assert updates.skipped == 4
    give(model, math.nan, 0.0)
    with pytest.raises(RuntimeError, match=r"norm is nan in 3 updates in a row .*optimizer.lr"):
        updates.step()


def test_an_update_with_nothing_to_learn_moves_the_schedule_alone():
    model, updates, schedule = make()
    updates.pass_over()
    assert schedule.last_epoch == 1 and model.weight.eq(0).all()
