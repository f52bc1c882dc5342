"""The plan keeps its bounds for any lengths, and padding loses nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_batches import random_trajectories, to_batch
from tensordict import NonTensorData, TensorDict, lazy_stack

from torchrl_llm_async.packing import blank_rows, pack_rows, pad_rows, plan_micro_batches


def dense_tokens(lengths, form, longest) -> int:
    """Padding included, of the very micro-batch that is made of rows of these lengths."""
    rows = lazy_stack([TensorDict({"tokens": {"full": torch.zeros(n)}}) for n in lengths])
    if form == "padded":
        return pad_rows(rows, 0)["tokens", "full"].numel()
    return pack_rows(rows, 0, row_tokens=longest)["tokens", "full"].numel()


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), max_size=60),
    world_size=st.integers(1, 4),
    unit=st.integers(1, 4),
    slack=st.integers(0, 200),
    form=st.sampled_from(["padded", "packed"]),
)
def test_plan(lengths, world_size, unit, slack, form):
    lengths = lengths[: len(lengths) // unit * unit]
    budget = unit * max(lengths, default=1) + slack
    plan = plan_micro_batches(
        lengths, world_size=world_size, token_budget=budget, unit=unit, form=form
    )

    assert len(plan) == world_size
    assert len({len(batches) for batches in plan}) == 1
    rows = [row for batches in plan for batch in batches for row in batch]
    assert sorted(rows) == list(range(len(lengths)))
    for batch in (batch for batches in plan for batch in batches):
        if batch:
            assert dense_tokens([lengths[row] for row in batch], form, max(lengths)) <= budget
        for start in range(0, len(batch), unit):
            assert batch[start] % unit == 0
            assert batch[start : start + unit] == list(range(batch[start], batch[start] + unit))
    loads = [sum(lengths[row] for batch in batches for row in batch) for batches in plan]
    heaviest = max((sum(lengths[i : i + unit]) for i in range(0, len(lengths), unit)), default=0)
    assert max(loads) - min(loads) <= heaviest
    # Empty micro-batches only where a rank has fewer units than the others need passes.
    for batches in plan:
        if any(not batch for batch in batches):
            assert all(len(batch) <= unit for batch in batches)


def test_plan_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match=r"Rows \[2, 3\] take 2 x 9 = 18 tokens.*=17"):
        plan_micro_batches([4, 4, 9, 1], world_size=1, token_budget=17, unit=2)
    with pytest.raises(ValueError, match="3 rows are no whole number of units of 2"):
        plan_micro_batches([4, 4, 4], world_size=1, token_budget=17, unit=2)


@pytest.mark.parametrize(("form", "waste"), [("padded", 0.13), ("packed", 0.05)])
@pytest.mark.parametrize("spread", ["uniform", "lognormal"])
def test_plan_wastes_little_on_padding(form, waste, spread):
    generator = torch.Generator().manual_seed(0)
    if spread == "uniform":
        lengths = torch.randint(8, 200, (512,), generator=generator).tolist()
    else:
        lengths = (
            torch.randn(512, generator=generator).exp().mul(100).long().clamp(8, 1024).tolist()
        )
    plan = plan_micro_batches(lengths, world_size=2, token_budget=4096, form=form)
    dense = sum(
        dense_tokens([lengths[row] for row in batch], form, max(lengths))
        for batches in plan
        for batch in batches
    )
    assert 1 - sum(lengths) / dense < waste


def make_rows():
    return lazy_stack(
        [
            TensorDict(
                {
                    "tokens": {
                        "prompt": torch.arange(1, 3),
                        "response": torch.arange(3, length + 1),
                        "full": torch.arange(1, length + 1),
                    },
                    "masks": {"all_assistant_mask": torch.arange(length) > 1},
                    "log_probs": {"full": torch.full((length,), -0.5)},
                    "policy_version": {"full": torch.full((length,), 3)},
                    "hidden": torch.ones(length, 2),
                    "advantage": torch.tensor([0.5]),
                    "group": {"id": torch.tensor(length)},
                    "text": {"prompt": NonTensorData("a")},
                }
            )
            for length in (3, 5)
        ]
    )


def test_pad_rows():
    dense = pad_rows(make_rows(), pad_id=9)
    assert dense.batch_size == (2,)
    assert dense["tokens", "full"].tolist() == [[9, 9, 1, 2, 3], [1, 2, 3, 4, 5]]
    assert dense["masks", "all_assistant_mask"].sum(-1).tolist() == [1, 3]
    assert not dense["masks", "all_assistant_mask"][0, :2].any()
    assert dense["log_probs", "full"][0].tolist() == [0.0, 0.0, -0.5, -0.5, -0.5]
    assert dense["policy_version", "full"][0].tolist() == [-1, -1, 3, 3, 3]
    assert dense["hidden"].shape == (2, 5, 2) and dense["hidden"][0, :2].eq(0).all()
    assert dense["advantage"].tolist() == [[0.5], [0.5]]
    assert dense["group", "id"].tolist() == [3, 5]
    assert set(dense["tokens"].keys()) == {"full"}
    again = pad_rows(dense, pad_id=9)
    assert (again == dense).all()


def test_blank_rows():
    rows = make_rows()
    blank, dense = blank_rows(rows, pad_id=9), pad_rows(rows, pad_id=9)
    assert set(blank.keys(True, True)) == set(dense.keys(True, True))
    assert blank.batch_size == (2,)
    assert blank["tokens", "full"].eq(9).all()
    assert not blank["masks", "all_assistant_mask"].any()
    assert blank["policy_version", "full"].eq(-1).all()
    assert blank["advantage"].tolist() == [[0.0], [0.0]]


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12), slack=st.integers(0, 20))
def test_packing_loses_and_mixes_nothing(lengths, slack):
    size = max(lengths) + slack
    rows = lazy_stack(
        [
            TensorDict(
                {
                    "tokens": {"full": torch.arange(n) + 100 * i, "prompt": torch.zeros(n)},
                    "masks": {"all_attention_mask": torch.ones(n, dtype=torch.bool)},
                    "log_probs": -torch.arange(n) - 0.5 * i,
                    "next": {"reward": torch.tensor([i + 0.25])},
                    "group": torch.tensor(i),
                    "image": torch.zeros(2, 2),
                    "text": NonTensorData("x"),
                }
            )
            for i, n in enumerate(lengths)
        ]
    )
    packed = pack_rows(rows, pad_id=7, row_tokens=size, segment_ids_key=("a", "b", "ids"))
    ids = packed["a", "b", "ids"]
    assert set(packed.keys(True, True)) == {
        *[("tokens", "full"), ("masks", "all_attention_mask"), "log_probs"],
        *[("next", "reward"), "group", ("a", "b", "ids")],
    }
    assert ids.shape == (*packed.batch_size, size)
    for i, n in enumerate(lengths):
        row, place = (ids == i).nonzero(as_tuple=True)
        assert len(set(row.tolist())) == 1 and place.tolist() == list(range(place[0], place[0] + n))
        part = packed[row[0]]
        assert (part["tokens", "full"][place] == torch.arange(n) + 100 * i).all()
        assert (part["log_probs"][place] == -torch.arange(n) - 0.5 * i).all()
        assert (part["next", "reward"][place] == i + 0.25).all()
        assert (part["group"][place] == i).all()
    padding = ids == -1
    assert padding.sum() == ids.numel() - sum(lengths)
    assert (packed["tokens", "full"][padding] == 7).all()
    assert not packed["masks", "all_attention_mask"][padding].any()
    # Ascending along a row, padding last.
    assert (ids.where(~padding, 99).diff(dim=-1) >= 0).all()
    # First fit: no row but perhaps the last is half empty.
    assert sum((~padding).sum(-1) * 2 <= size) <= 1


def test_packing_refuses_a_sequence_that_is_too_long():
    rows = lazy_stack([TensorDict({"tokens": {"full": torch.arange(n)}}) for n in (2, 5)])
    with pytest.raises(ValueError, match="Row 1 has 5 tokens, over row_tokens=4"):
        pack_rows(rows, pad_id=0, row_tokens=4)


@pytest.mark.parametrize("form", [pad_rows, pack_rows])
def test_no_rows_are_named(form):
    with pytest.raises(ValueError, match=r"no rows to make a micro-batch of.*blank_rows"):
        form(to_batch(random_trajectories(0))[:0], pad_id=0)


def test_a_column_per_token_is_packed_like_a_number_per_token():
    rows = to_batch(random_trajectories(1))
    flat, column = rows.clone(), rows.clone()
    for one, other in zip(flat.unbind(0), column.unbind(0), strict=True):
        value = torch.randn(len(one["tokens", "full"]))
        one["next", "token_reward"], other["next", "token_reward"] = value, value[:, None]
    packed = [pack_rows(each, pad_id=0)["next", "token_reward"] for each in (flat, column)]
    assert torch.equal(*packed)
