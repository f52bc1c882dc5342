"""Group-relative advantages against NumPy, and the buffer that takes whole groups only."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer

from torchrl_llm_async.objectives import GroupAdvantage, advantage


@settings(max_examples=50, deadline=None)
@given(
    rewards=st.lists(st.lists(st.floats(-9, 9), min_size=4, max_size=4), min_size=1, max_size=4),
    estimator=st.sampled_from(["mean", "leave_one_out"]),
    divide_by_std=st.booleans(),
)
def test_group_advantage_equals_numpy(rewards, estimator, divide_by_std):
    table = np.array(rewards)
    expected = table - table.mean(1, keepdims=True)
    if estimator == "leave_one_out":
        expected = np.stack([row - (row.sum() - row) / 3 for row in table])
    if divide_by_std:
        expected = expected / (table.std(1, ddof=1, keepdims=True) + 1e-6)
    transform = GroupAdvantage(4, estimator=estimator, divide_by_std=divide_by_std)
    value = transform.inv(group_rows(table)).get("advantage")
    assert value.shape == (table.size, 1)
    value = value.numpy().reshape(table.shape)
    np.testing.assert_allclose(value, expected, atol=1e-9)
    np.testing.assert_allclose(value.sum(1), 0, atol=1e-9)


def group_rows(table: np.ndarray) -> LazyStackedTensorDict:
    """Ragged rows of the groups whose rewards are the rows of ``table``."""
    return lazy_stack(
        [
            TensorDict(
                {
                    "tokens": {"full": torch.arange(2 + index)},
                    "group": {"id": torch.tensor(10 + group), "index": torch.tensor(index)},
                    "next": {"reward": torch.tensor([table[group, index]])},
                }
            )
            for group, index in np.ndindex(*table.shape)
        ]
    )


def test_equal_rewards_give_no_advantage_in_float32():
    rewards = group_rows(np.full((1, 8), 0.1, dtype=np.float32))
    value = GroupAdvantage(8, divide_by_std=True).inv(rewards).get("advantage")
    assert value.dtype == torch.float32 and value.abs().max() < 1e-7


@pytest.mark.inv7
def test_replay_buffer_takes_whole_groups_only():
    buffer = ReplayBuffer(storage=LazyStackStorage(16), batch_size=4, transform=GroupAdvantage(4))
    rows = group_rows(np.arange(8.0).reshape(2, 4) ** 2)
    incomplete = (rows[:3], rows[[0, 1, 2, 2]], rows[[0, 1, 2, 4]], rows[[0, 4, 1, 5, 2, 6, 3, 7]])
    for wrong in incomplete:
        with pytest.raises(ValueError, match="no whole group"):
            buffer.extend(wrong)
    with pytest.raises(ValueError, match="no whole group"):
        buffer.add(rows[0])
    failed = rows[:4].clone()
    failed[1]["next", "reward"] = torch.tensor([float("nan")], dtype=torch.float64)
    with pytest.raises(ValueError, match="not finite"):
        buffer.extend(failed)
    assert len(buffer) == 0
    buffer.extend(rows[:4])
    buffer.extend(rows[4:])
    assert rows[0].get("advantage", None) is None
    stored = buffer[:]
    expected = rows["next", "reward"].view(2, 4)
    torch.testing.assert_close(
        stored["advantage"].view(2, 4), expected - expected.mean(1, keepdim=True)
    )
    assert buffer.sample()["advantage"].shape == (4, 1)


def test_group_advantage_keys_and_options():
    transform = GroupAdvantage(
        2,
        reward_key=("deep", "er", "reward"),
        advantage_key=("deep", "advantage"),
        group_key=("deep", "id"),
        index_key=("deep", "index"),
    )
    rows = TensorDict(
        {
            "deep": {
                "er": {"reward": torch.tensor([[1.0], [0.0]])},
                "id": torch.tensor([3, 3]),
                "index": torch.tensor([1, 0]),
            }
        },
        batch_size=(2,),
    )
    assert transform.inv(rows)["deep", "advantage"].tolist() == [[0.5], [-0.5]]
    with pytest.raises(ValueError, match="group_size=1"):
        GroupAdvantage(1)
    with pytest.raises(ValueError, match="estimator='median'"):
        GroupAdvantage(4, estimator="median")


def test_examples_run():
    result = doctest.testmod(advantage)
    assert result.attempted > 0 and result.failed == 0
