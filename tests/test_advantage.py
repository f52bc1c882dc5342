"""Advantages and shaped rewards against plain Python, and a buffer of whole groups only."""

from __future__ import annotations

import math
import multiprocessing
import statistics

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_batches import random_trajectories, to_batch
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.transforms import Compose

from torchrl_llm_async.data import StalenessReplayBuffer
from torchrl_llm_async.objectives import GroupAdvantage, rewards

REWARD, RAW = ("next", "reward"), ("next", "raw_reward")


def make_rows(
    table: np.ndarray, lengths: np.ndarray | None = None, first_group: int = 10
) -> LazyStackedTensorDict:
    """Ragged rows of the groups whose rewards are the rows of ``table``.

    A row has a prompt of 2 tokens, as many sampled ones as ``lengths`` says, and one more.
    """
    if lengths is None:
        lengths = np.arange(1, table.size + 1).reshape(table.shape)
    return lazy_stack(
        [
            TensorDict(
                {
                    "masks": {
                        "all_assistant_mask": torch.tensor([0, 0] + [1] * length + [0]).bool()
                    },
                    "policy_version": {"full": torch.tensor([-1, -1] + [0] * length + [-1])},
                    "group": {
                        "id": torch.tensor(first_group + group),
                        "index": torch.tensor(index),
                        "start_version": torch.tensor(0),
                    },
                    "next": {"reward": torch.tensor([table[group, index]])},
                }
            )
            for (group, index), length in np.ndenumerate(lengths)
        ]
    )


def column(rows, key) -> list[float]:
    return rows.get(key).flatten().tolist()


groups_of_4 = st.lists(
    st.lists(st.floats(-9, 9), min_size=4, max_size=4), min_size=1, max_size=4
).map(np.array)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    table=groups_of_4,
    estimator=st.sampled_from(["mean", "leave_one_out", "none"]),
    divide_by_std=st.booleans(),
)
def test_group_advantage_equals_numpy(table, estimator, divide_by_std):
    expected = table if estimator == "none" else table - table.mean(1, keepdims=True)
    if estimator == "leave_one_out":
        expected = np.stack([row - (row.sum() - row) / 3 for row in table])
    divide_by_std &= estimator != "none"
    if divide_by_std:
        expected = expected / (table.std(1, ddof=1, keepdims=True) + 1e-6)
    transform = GroupAdvantage(4, estimator=estimator, divide_by_std=divide_by_std)
    rows = transform.inv(make_rows(table))
    value = rows.get("advantage")
    assert value.shape == (table.size, 1) and rows.get(RAW, None) is None
    value = value.numpy().reshape(table.shape)
    np.testing.assert_allclose(value, expected, atol=1e-9)
    if estimator != "none":
        np.testing.assert_allclose(value.sum(1), 0, atol=1e-9)


# --- Shaping of rewards -------------------------------------------------------------------------


def shaped(reward, length, scale, bias, clip, buffer, factor, limit) -> float:
    """One reward, step by step as the documentation has it."""
    if length > limit:
        reward -= factor
    elif length > limit - buffer:
        reward -= factor * (length - (limit - buffer)) / buffer
    reward = reward * scale + bias
    return reward if clip is None else min(max(reward, clip[0]), clip[1])


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    table=groups_of_4,
    lengths=st.lists(st.integers(0, 40), min_size=16, max_size=16).map(np.array),
    scale=st.floats(0.1, 10),
    bias=st.floats(-3, 3),
    clip=st.sampled_from([None, 2.0, (-0.5, 1.5)]),
    buffer=st.integers(1, 30),
    factor=st.floats(0.1, 2),
)
def test_shaping_equals_plain_python(table, lengths, scale, bias, clip, buffer, factor):
    lengths = lengths[: table.size].reshape(table.shape)
    transform = GroupAdvantage(
        4,
        reward_scale=scale,
        reward_bias=bias,
        reward_clip=clip,
        overlong_buffer=buffer,
        overlong_factor=factor,
        max_new_tokens=30,
    )
    rows = make_rows(table, lengths)
    after = transform.inv(rows)
    assert column(rows, REWARD) == column(after, RAW) == table.flatten().tolist()
    bounds = (-clip, clip) if isinstance(clip, float) else clip
    expected = np.array(
        [
            [shaped(reward, int(n), scale, bias, bounds, buffer, factor, 30) for reward, n in pairs]
            for pairs in (zip(*both, strict=True) for both in zip(table, lengths, strict=True))
        ]
    )
    np.testing.assert_allclose(column(after, REWARD), expected.flatten(), atol=1e-12)
    advantages = (expected - expected.mean(1, keepdims=True)).flatten()
    np.testing.assert_allclose(column(after, "advantage"), advantages, atol=1e-12)


def test_overlong_penalty_is_that_of_dapo():
    """Equation 13 of arXiv 2503.14476 with its numbers: 20480 tokens, the last 4096 a buffer."""
    lengths = torch.tensor([0, 16384, 16385, 18432, 20480, 20481, 99999])
    penalty = rewards.overlong_penalty(lengths, 20480, 4096)
    assert penalty.tolist() == [0, 0, -1 / 4096, -0.5, -1, -1, -1]


def test_shaping_comes_before_the_baseline_and_after_other_transforms():
    rows = make_rows(np.array([[1.0, 0.0]]), lengths=np.array([[4, 1]]))
    options = dict(overlong_buffer=2, max_new_tokens=4, overlong_factor=0.5)
    value = GroupAdvantage(2, reward_scale=2.0, **options).inv(rows)
    assert column(value, "advantage") == [0.5, -0.5]  # of 2 * (1 - 0.5) and 0
    buffer = ReplayBuffer(
        storage=LazyStackStorage(2),
        batch_size=2,
        transform=Compose(GroupAdvantage(2, reward_scale=2.0)),
    )
    buffer.extend(rows)
    assert column(buffer[:], REWARD) == [2.0, 0.0] and column(buffer[:], RAW) == [1.0, 0.0]
    assert column(rows, REWARD) == [1.0, 0.0] and rows.get(RAW, None) is None


def test_rewards_are_not_shaped_twice():
    transform = GroupAdvantage(2, reward_bias=1.0)
    once = transform.inv(make_rows(np.array([[1.0, 0.0]])))
    with pytest.raises(ValueError, match="shaped before"):
        transform.inv(once)
    # Without shaping there is nothing to do twice.
    assert column(GroupAdvantage(2).inv(once), "advantage") == [0.5, -0.5]


# --- Normalisation over the sampled batch -------------------------------------------------------


def over_tokens(values, lengths, eps=1e-6) -> list[float]:
    """Normalised by mean and sample deviation of a list with each value once per token."""
    tokens = [value for value, n in zip(values, lengths, strict=True) for _ in range(n)]
    mean = math.fsum(tokens) / max(len(tokens), 1)
    if len(tokens) < 2:
        return [value - mean for value in values]
    deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in tokens) / (len(tokens) - 1))
    return [(value - mean) / (deviation + eps) for value in values]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    rows=st.lists(
        st.tuples(st.one_of(st.floats(-9, 9), st.sampled_from([0.0, 0.1])), st.integers(0, 7)),
        min_size=1,
        max_size=12,
    )
)
def test_batch_normalize_equals_a_list_of_tokens(rows):
    values, lengths = zip(*rows, strict=True)
    result = rewards.batch_normalize(
        torch.tensor(values, dtype=torch.float64), torch.tensor(lengths)
    )
    np.testing.assert_allclose(result, over_tokens(values, lengths), rtol=1e-6, atol=1e-6)


def test_batch_norm_of_groups_over_tokens():
    """As the mean and deviation of the tokens' advantages, from Python's own statistics."""
    lengths = np.array([[3, 1, 2], [1, 5, 4]])
    transform = GroupAdvantage(3, divide_by_std=True, batch_norm=True)
    stored = transform.inv(make_rows(np.array([[1.0, 0.0, 0.5], [0.0, 0.0, 1.0]]), lengths))
    sampled = column(transform(stored), "advantage")
    tokens = np.repeat(column(stored, "advantage"), lengths.flatten()).tolist()
    mean, deviation = statistics.mean(tokens), statistics.stdev(tokens)
    expected = [(x - mean) / (deviation + 1e-6) for x in column(stored, "advantage")]
    assert sampled == pytest.approx(expected, abs=1e-12)
    tokens = np.repeat(sampled, lengths.flatten()).tolist()
    assert statistics.mean(tokens) == pytest.approx(0, abs=1e-12)
    assert statistics.stdev(tokens) == pytest.approx(1, abs=1e-5)


def test_sampling_again_normalises_the_stored_advantages_again():
    """Of a group that is reused, the second time in another batch."""
    buffer = StalenessReplayBuffer(
        groups_per_step=1,
        max_staleness=1,
        group_size=2,
        max_reuse=2,
        transform=GroupAdvantage(2, batch_norm=True),
    )
    tables = np.array([[1.0, 0.0], [3.0, 0.0]])
    for group in range(2):
        buffer.announce(group, 0)
        buffer.extend(make_rows(tables[[group]], np.array([[1, 2]]), first_group=group))
    first, second = buffer.sample(timeout=0), buffer.sample(timeout=0)
    assert column(first, "advantage") == pytest.approx(over_tokens([0.5, -0.5], [1, 2]))
    assert column(second, ("group", "id")) == [1, 1, 0, 0]
    expected = over_tokens([1.5, -1.5, 0.5, -0.5], [1, 2, 1, 2])
    assert column(second, "advantage") == pytest.approx(expected)


def test_stored_rows_keep_their_advantage():
    """Sampling never writes into the storage, whose rows LazyStackStorage shares."""
    transform = GroupAdvantage(2, batch_norm=True)
    buffer = ReplayBuffer(storage=LazyStackStorage(4), batch_size=4, transform=transform)
    buffer.extend(make_rows(np.array([[1.0, 0.0], [5.0, 0.0]])))
    before = [row["advantage"].item() for row in buffer.storage[:].unbind(0)]
    several = [buffer[:]["advantage"] for _ in range(3)]
    buffer.sample()
    assert [row["advantage"].item() for row in buffer.storage[:].unbind(0)] == before
    assert all(torch.equal(several[0], other) for other in several)
    # One row is no batch.
    assert buffer[0]["advantage"].item() == before[0]


def normalise_as_a_rank(rank: int, world_size: int, folder) -> None:
    """Writes what a rank makes of its share of :data:`TABLE`: one group, and two."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size
    )
    transform = GroupAdvantage(2, batch_norm=True, process_group=dist.group.WORLD)
    groups = slice(0, 1) if rank == 0 else slice(1, 3)
    rows = transform.inv(make_rows(TABLE[groups], LENGTHS[groups]))
    torch.save(transform(rows)["advantage"], folder / f"{rank}.pt")
    # On its own: nothing is reduced.
    alone = GroupAdvantage(2, batch_norm=True)
    torch.save(alone(rows)["advantage"], folder / f"{rank}_alone.pt")
    dist.destroy_process_group()


TABLE = np.array([[1.0, 0.0], [0.3, 0.7], [5.0, 0.0]])
LENGTHS = np.array([[3, 1], [9, 4], [0, 2]])


def test_two_ranks_normalise_over_the_whole_batch(tmp_path):
    # Both ranks are forked off one process that has done the imports.
    multiprocessing.set_forkserver_preload(["torchrl_llm_async.modules", "torchtune.models.qwen2"])
    torch.multiprocessing.start_processes(
        normalise_as_a_rank, (2, tmp_path), nprocs=2, start_method="forkserver"
    )
    advantages = (TABLE - TABLE.mean(1, keepdims=True)).flatten().tolist()
    shares = [torch.load(tmp_path / f"{rank}.pt").flatten().tolist() for rank in range(2)]
    expected = over_tokens(advantages, LENGTHS.flatten().tolist())
    assert [*shares[0], *shares[1]] == pytest.approx(expected, abs=1e-12)
    alone = torch.load(tmp_path / "0_alone.pt").flatten().tolist()
    assert alone == pytest.approx(over_tokens(advantages[:2], [3, 1]), abs=1e-12)


# --- Input that tells nothing -------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"divide_by_std": True}, {"batch_norm": True}])
def test_equal_rewards_give_no_advantage_in_float32(options):
    transform = GroupAdvantage(8, reward_scale=0.3, **options)
    rows = transform(transform.inv(make_rows(np.full((2, 8), 0.1, dtype=np.float32))))
    value = rows.get("advantage")
    assert value.dtype == torch.float32 and value.abs().max() < 1e-7


def test_batches_without_a_deviation():
    """No tokens at all, one token only, and one single value."""
    ones = torch.ones(3)
    for lengths, expected in (([0, 0, 0], 1), ([0, 1, 0], 0), ([2, 1, 3], 0)):
        value = rewards.batch_normalize(ones, torch.tensor(lengths))
        assert value.tolist() == [expected] * 3


def test_empty_answers_are_shaped_and_normalised():
    transform = GroupAdvantage(2, overlong_buffer=1, max_new_tokens=1, batch_norm=True)
    rows = transform(transform.inv(make_rows(np.array([[1.0, 0.0]]), np.array([[0, 2]]))))
    # All tokens are of the second; the first counts for nothing, and is finite.
    assert column(rows, REWARD) == [1.0, -1.0]
    assert column(rows, "advantage") == pytest.approx([2e6, 0.0])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("options", [{}, {"reward_clip": 1.0}])
def test_rewards_that_are_not_finite_are_refused(value, options):
    with pytest.raises(ValueError, match=r"groups \[10\] has a value that is not finite"):
        GroupAdvantage(2, **options).inv(make_rows(np.array([[1.0, value]])))


def test_rewards_that_overflow_when_shaped_are_refused():
    rows = make_rows(np.array([[1e30, 0.0]], dtype=np.float32))
    with pytest.raises(ValueError, match="not finite"):
        GroupAdvantage(2, reward_scale=1e30).inv(rows)


def test_integer_rewards_have_advantages_between_integers():
    rows = make_rows(np.array([[1, 0]]))
    assert rows.get(REWARD).dtype == torch.int64
    assert column(GroupAdvantage(2).inv(rows), "advantage") == [0.5, -0.5]
    assert column(GroupAdvantage(2, reward_scale=0.5).inv(rows), REWARD) == [0.5, 0.0]


def test_one_reward_per_token_is_refused():
    rows = make_rows(np.array([[1.0, 0.0]]))
    rows.set(REWARD, torch.ones(2, 3))
    with pytest.raises(ValueError, match="one return per trajectory"):
        GroupAdvantage(2).inv(rows)


# --- Whole groups, keys, options ----------------------------------------------------------------


@pytest.mark.inv7
def test_replay_buffer_takes_whole_groups_only():
    buffer = ReplayBuffer(storage=LazyStackStorage(16), batch_size=4, transform=GroupAdvantage(4))
    rows = make_rows(np.arange(8.0).reshape(2, 4) ** 2)
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


KEYS = {
    "reward_key": REWARD,
    "raw_reward_key": RAW,
    "advantage_key": "advantage",
    "group_key": ("group", "id"),
    "index_key": ("group", "index"),
    "mask_key": ("masks", "all_assistant_mask"),
}


@pytest.mark.parametrize("moved", [*KEYS, tuple(KEYS)], ids=str)
def test_nested_keys(moved):
    options = dict(reward_scale=3.0, overlong_buffer=2, max_new_tokens=5, batch_norm=True)
    table = np.array([[1.0, 0.0], [0.25, 0.5]])
    transform = GroupAdvantage(2, **options)
    expected = transform(transform.inv(make_rows(table)))
    names = (moved,) if isinstance(moved, str) else moved
    keys = KEYS | {name: ("moved", "very", "deep", name) for name in names}
    rows = make_rows(table)
    for row in rows.unbind(0):
        for name in names:
            if KEYS[name] in row.keys(True):
                row.rename_key_(KEYS[name], keys[name])
    transform = GroupAdvantage(2, **options, **keys)
    found = transform(transform.inv(rows))
    for name, key in keys.items():
        for one, other in zip(found.unbind(0), expected.unbind(0), strict=True):
            assert torch.equal(one[key], other[KEYS[name]])
        assert name not in names or KEYS[name] not in found.keys(True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 1}, "group_size=1.*estimator='none'"),
        ({"group_size": 0, "estimator": "none"}, "group_size=0"),
        ({"estimator": "median"}, "estimator='median' is not one of 'mean'"),
        ({"estimator": "none", "divide_by_std": True}, "divide_by_std=True with estimator='none'"),
        ({"reward_scale": -1.0}, "reward_scale=-1.0 must be above 0"),
        ({"reward_scale": math.inf}, "reward_scale=inf"),
        ({"reward_bias": math.nan}, "reward_bias=nan"),
        ({"reward_clip": 0.0}, "reward_clip=0.0 must be above 0"),
        ({"reward_clip": (1.0, -1.0)}, "reward_clip=.*a lower and a higher"),
        ({"overlong_buffer": 4}, "overlong_buffer=4 with max_new_tokens=None"),
        ({"max_new_tokens": 4}, "overlong_buffer=None with max_new_tokens=4"),
        ({"overlong_factor": 2.0}, "overlong_factor=2.0 without overlong_buffer"),
        ({"overlong_buffer": 5, "max_new_tokens": 4}, "overlong_buffer=5 must lie between 1"),
        ({"overlong_buffer": 0, "max_new_tokens": 4}, "overlong_buffer=0 must lie between 1"),
        (
            {"overlong_buffer": 1, "max_new_tokens": 4, "overlong_factor": -1.0},
            "overlong_factor=-1.0 must be above 0",
        ),
        ({"process_group": "a group"}, "process_group is given with batch_norm=False"),
    ],
    ids=str,
)
def test_options_that_contradict_each_other(options, message):
    with pytest.raises(ValueError, match=message):
        GroupAdvantage(**{"group_size": 4} | options)


def test_groups_of_one_without_a_baseline():
    transform = GroupAdvantage(1, estimator="none", batch_norm=True)
    rows = transform.inv(make_rows(np.array([[1.0], [0.0], [0.0]]), np.array([[1], [1], [2]])))
    assert column(rows, "advantage") == [1.0, 0.0, 0.0]
    expected = over_tokens([1.0, 0.0, 0.0], [1, 1, 2])
    assert column(transform(rows), "advantage") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("key", "argument", "options"),
    [
        (("next", "reward"), "reward_key", {}),
        (("group", "id"), "group_key", {}),
        (("group", "index"), "index_key", {}),
        (("masks", "all_assistant_mask"), "mask_key", {"batch_norm": True}),
    ],
)
def test_a_missing_entry_is_named(key, argument, options):
    rows = to_batch(random_trajectories(0)).exclude(key)
    buffer = ReplayBuffer(storage=LazyStackStorage(8), transform=GroupAdvantage(2, **options))
    with pytest.raises(KeyError, match=rf"found nothing at .*{key[-1]}.* among .*{argument}="):
        buffer.extend(rows)


@pytest.mark.parametrize("option", ["group_size", "reward_scale", "reward_clip", "overlong_factor"])
def test_text_is_no_number(option):
    with pytest.raises(ValueError, match=rf"{option}='1e-1' is no number"):
        GroupAdvantage(**{"group_size": 2, option: "1e-1"})
