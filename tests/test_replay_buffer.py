"""The replay buffer of whole groups, case by case, on ragged rows and with real threads."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from groups import PATIENCE, make_buffer, make_group, names
from tensordict import lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import ConsumingSampler
from torchrl.envs.transforms import Transform

from torchrl_llm_async.objectives import GroupAdvantage


@pytest.fixture
def threads():
    with ThreadPoolExecutor(8) as executor:
        yield executor


# ------------------------------------------------------------------ order, slots, batches
def test_batch_is_ordered_and_ragged():
    buffer = make_buffer()
    for group_id in range(3):
        buffer.announce(group_id, 0)
    shuffled = make_group(1)
    buffer.extend(make_group(2))
    buffer.extend(lazy_stack([shuffled[1], shuffled[0]]))
    buffer.extend(make_group(0))
    batch, info = buffer.sample(timeout=0, return_info=True)
    assert names(batch) == ["0/0", "0/1", "1/0", "1/1"]
    assert info["step"] == 0 and info["group_ids"] == [0, 1] and buffer.consumer_version == 1
    padded = batch.get(
        ("policy_version", "full"), as_padded_tensor=True, padding_side="left", padding_value=-1
    )
    assert padded.tolist() == [[-1, -1, 0], [-1, 0, 0], [-1, -1, 0], [-1, 0, 0]]


@pytest.mark.inv4
def test_slots_are_reused_and_batches_outlive_them():
    buffer = make_buffer(groups_per_step=2, max_staleness=1, group_size=2)
    batches = []
    for step in range(20):
        ids = [2 * step, 2 * step + 1]
        for group_id in ids:
            buffer.announce(group_id, step)
        buffer.extend(lazy_stack([row for i in ids for row in make_group(i, step)]))
        assert len(buffer) == 4
        batches.append(buffer.sample(timeout=0))
        assert len(buffer) == 0 and len(buffer.storage) <= 8
    assert [int(i) for batch in batches for i in batch["group", "id"][::2]] == list(range(40))
    assert buffer.write_count == 80 and buffer.stats()["capacity"] == 8


def test_full_storage_is_filled_to_the_last_slot_and_refilled():
    """Interleaved: slots freed by a step and slots never used are taken together."""
    buffer = make_buffer(groups_per_step=1, max_staleness=3, group_size=3)
    ids = itertools.count()
    expected = []
    for step in range(12):
        while len(expected) < step + 4:
            group_id = next(ids)
            buffer.announce(group_id, step)
            buffer.extend(make_group(group_id, step, size=3))
            expected.append(group_id)
        assert len(buffer) == 12 == len(buffer.storage)
        assert buffer.sample(timeout=0)["group", "id"].tolist() == [expected[step]] * 3


def test_slots_are_kept_as_torchrl_would_keep_them():
    # The sampler leaves out TorchRL's pass over all slots; made up for here, it finds nothing.
    buffer = make_buffer(max_staleness=2)
    ids = itertools.count()
    for step, count in enumerate((2, 4, 2, 1, 3, 0)):  # grows, wraps into freed slots, empties
        for group_id in itertools.islice(ids, count):
            buffer.announce(group_id, step)
            buffer.extend(make_group(group_id, step))
        buffer.sample(timeout=0)
        sampler = buffer.sampler
        counts, live = sampler._sample_count.clone(), sampler._live_mask.clone()
        ConsumingSampler._ensure_state(sampler, buffer.storage)
        assert torch.equal(counts, sampler._sample_count) and torch.equal(live, sampler._live_mask)
        assert int(live.sum()) == len(buffer) == 2 * len(sampler.finished)
    assert len(buffer) == 0


def test_iteration_ends_when_closed():
    buffer = make_buffer(groups_per_step=1)
    for group_id in range(2):
        buffer.announce(group_id, 0)
        buffer.extend(make_group(group_id))
    batches = iter(buffer)
    assert [names(next(batches))[0] for _ in range(2)] == ["0/0", "1/0"]
    buffer.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(batches)


def test_one_row_is_a_group_of_size_one_only():
    single = make_buffer(groups_per_step=1, group_size=1)
    single.announce(0, 0)
    single.add(make_group(0, size=1)[0])
    assert names(single.sample(1, timeout=0)) == ["0/0"]
    pair = make_buffer()
    pair.announce(0, 0)
    with pytest.raises(ValueError, match="whole groups"):
        pair.add(make_group(0)[0])


# ------------------------------------------------------------------ staleness
@pytest.mark.inv1
def test_waits_at_the_deadline_but_not_before():
    buffer = make_buffer(groups_per_step=1, max_staleness=1)
    buffer.announce(0, 0)
    buffer.announce(1, 0)
    buffer.extend(make_group(1))
    assert names(buffer.sample(timeout=0))[0] == "1/0"  # 0 is overtaken
    buffer.announce(2, 1)
    buffer.extend(make_group(2, 1))
    with pytest.raises(TimeoutError, match="the oldest of them group 0, due at step 1"):
        buffer.sample(timeout=0)
    buffer.extend(make_group(0))
    assert names(buffer.sample(timeout=0))[0] == "0/0"
    assert names(buffer.sample(timeout=0))[0] == "2/0"


def test_lag_is_measured_per_token_and_per_sample():
    buffer = make_buffer(groups_per_step=1, max_staleness=2, group_size=2)
    assert "lag_token_mean" not in buffer.stats()
    for group_id in range(3):
        buffer.announce(group_id, 0)
    for group_id in range(2):
        buffer.extend(make_group(group_id))
        buffer.sample(timeout=0)
    buffer.extend(make_group(2, versions=[[1, 2], [0, 0, 2, 2]]))
    _, info = buffer.sample(timeout=0, return_info=True)
    stats = buffer.stats()
    assert info["step"] == 2
    assert stats["lag_token_mean"] == info["lag_token_mean"] == pytest.approx(5 / 6)
    assert stats["lag_token_max"] == 2
    assert stats["lag_sample_mean"] == pytest.approx(1.5)
    assert stats["lag_sample_max"] == 2
    assert stats["groups_consumed"] == 3 and stats["consumer_version"] == 3
    assert info["lag_histogram"] == {0: 3, 1: 1, 2: 2}
    assert [stats[f"lag_tokens/{lag}"] for lag in range(3)] == [3, 1, 2]
    assert [stats[f"lag_token_p{p}"] for p in (10, 50, 90)] == [0, 0, 2]


def test_lag_is_split_into_flight_and_queue():
    buffer = make_buffer(groups_per_step=1, max_staleness=2, group_size=2)
    for group_id in range(3):
        buffer.announce(group_id, 0)
    buffer.extend(make_group(0))
    buffer.sample(timeout=0)
    buffer.extend(make_group(1))  # at step 1, with tokens of version 0
    buffer.extend(make_group(2, versions=[[1], [0, 1]]))
    buffer.sample(timeout=0)
    stats = buffer.stats()
    assert (stats["lag_flight_mean"], stats["lag_queue_mean"]) == (1, 0)
    buffer.sample(timeout=0)  # group 2, at step 2
    stats = buffer.stats()
    assert (stats["lag_flight_mean"], stats["lag_flight_max"]) == (0.5, 1)
    assert (stats["lag_queue_mean"], stats["lag_queue_max"]) == (1, 1)
    assert stats["lag_sample_mean"] == 1.5


@pytest.mark.inv1
@pytest.mark.inv4
def test_drop_consumes_first_and_discards_late_rows():
    dropped = []
    buffer = make_buffer(
        groups_per_step=1,
        max_staleness=1,
        on_stale="drop",
        on_drop=lambda group_id, reason: dropped.append((group_id, reason)),
    )
    buffer.announce(0, 0)
    buffer.announce(1, 0)
    buffer.extend(make_group(1))
    buffer.sample(timeout=0)
    assert not dropped  # group 0 is due at step 1 only
    with pytest.raises(TimeoutError):
        buffer.sample(timeout=0)
    assert not dropped  # nothing to train on instead
    buffer.announce(2, 1)
    buffer.extend(make_group(2, 1))
    assert names(buffer.sample(timeout=0))[0] == "2/0"
    assert dropped == [(0, "stale")]
    assert buffer.extend(make_group(0)).numel() == 0
    stats = buffer.stats()
    assert stats["groups_dropped"] == 1 and stats["discarded_tokens"] == 3
    assert stats["groups_running"] == stats["groups_ready"] == stats["size"] == 0
    with pytest.raises(ValueError, match="not running"):
        buffer.extend(make_group(0))


def test_a_dropped_group_may_be_retracted():
    buffer = make_buffer(
        groups_per_step=1, on_stale="drop", on_drop=lambda *args: None, max_staleness=1
    )
    buffer.announce(0, 0), buffer.announce(1, 0)
    buffer.extend(make_group(1))
    buffer.sample(timeout=0)
    buffer.announce(2, 1)
    buffer.extend(make_group(2, 1))
    buffer.sample(timeout=0)
    buffer.retract(0, "crash")
    with pytest.raises(ValueError, match="not running"):
        buffer.retract(0, "crash")
    assert buffer.stats()["groups_rejected"] == 0


# ------------------------------------------------------------------ what is refused
def corrupt(group, key, value, row=1):
    group[row][key] = torch.as_tensor(value)
    return group


@pytest.mark.inv7
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (make_group(0)[:1], r"batch size \(1,\)"),
        (make_group(0)[0], r"batch size \(\)"),
        (make_group(0, size=3), r"batch size \(3,\)"),
        (make_group(0)[:0], r"batch size \(0,\)"),
        (corrupt(make_group(0), ("group", "id"), 1), "adjacent"),
        (corrupt(make_group(0), ("group", "index"), 0), "each once"),
        (corrupt(make_group(0), ("group", "start_version"), 1), r"start versions \[0, 1\]"),
        (make_group(7), "group 7 is not running"),
        (make_group(0, versions=[[0], []]), "row 1 of group 0 has no sampled token"),
        (make_group(1, 1, versions=[[1], [0, 1]]), "row 1 of group 1 has tokens of versions 0 to"),
        (make_group(0, versions=[[0], [0, 3]]), "0 to 3; they must lie between"),
        (lazy_stack([*make_group(0), *make_group(0)]), "the same group comes twice"),
        (lazy_stack([*make_group(1, 1), *make_group(7)]), "group 7 is not running"),
    ],
)
def test_wrong_rows_are_refused_and_nothing_is_stored(rows, message):
    buffer = make_buffer(groups_per_step=1, max_staleness=2)
    buffer.announce(-1, 0)
    buffer.extend(make_group(-1))
    buffer.sample(timeout=0)
    buffer.announce(0, 0)
    buffer.announce(1, 1)
    with pytest.raises(ValueError, match=message):
        buffer.extend(rows)
    assert len(buffer) == 0 and buffer.stats()["groups_running"] == 2
    buffer.extend(lazy_stack([*make_group(0), *make_group(1, 1)]))
    assert len(buffer) == 4


@pytest.mark.inv4
def test_a_group_is_delivered_once():
    buffer = make_buffer(groups_per_step=1)
    buffer.announce(0, 0)
    buffer.extend(make_group(0))
    with pytest.raises(ValueError, match="not running"):
        buffer.extend(make_group(0))
    buffer.sample(timeout=0)
    with pytest.raises(ValueError, match="not running"):
        buffer.extend(make_group(0))
    with pytest.raises(ValueError, match="not running"):
        buffer.retract(0, "late")
    with pytest.raises(ValueError, match="announce each group once"):
        buffer.announce(0, 0)


@pytest.mark.inv1
def test_announcements_follow_admission():
    buffer = make_buffer(groups_per_step=1, max_staleness=1)
    buffer.announce(3, 1)
    with pytest.raises(ValueError, match="in the order of admission"):
        buffer.announce(4, 0)
    buffer.announce(5, 1)
    with pytest.raises(RuntimeError, match="one too many"):
        buffer.announce(6, 1)
    buffer.retract(3, "reward timeout")
    buffer.announce(6, 1)


@pytest.mark.inv1
@pytest.mark.inv5
def test_an_impossible_bound_is_an_error_not_a_wait(threads):
    buffer = make_buffer(groups_per_step=1, max_staleness=1)
    waiter = threads.submit(buffer.sample, timeout=PATIENCE)
    buffer.announce(0, -1)
    buffer.announce(1, -1)  # both due at step 0
    with pytest.raises(RuntimeError, match="more groups were admitted"):
        waiter.result(PATIENCE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(groups_per_step=0), "groups_per_step is 0"),
        (dict(max_staleness=-1), "max_staleness is -1"),
        (dict(group_size=0), "group_size is 0"),
        (dict(on_stale="ignore"), "'wait' or 'drop'"),
        (dict(on_stale="drop"), "needs an on_drop"),
        (dict(on_drop=print), "drops nothing"),
        (dict(storage=LazyStackStorage(7)), "the storage holds 7 rows; up to 8"),
        (dict(prefetch=1), "Prefetching is not supported"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_buffer(**arguments)


def test_batch_size_is_fixed():
    with pytest.raises(ValueError, match="pass timeout= by name"):
        make_buffer().sample(30)


# ------------------------------------------------------------------ keys and transforms
KEYS = [
    {},
    dict(group_id_key="gid", group_index_key="position"),
    dict(start_version_key=("a", "b", "c"), version_key="versions"),
    dict(
        group_id_key=("deep", "er", "id"),
        group_index_key=("deep", "index"),
        start_version_key="start",
        version_key=("tokens", "meta", "version"),
    ),
]


@pytest.mark.parametrize("keys", KEYS, ids=lambda keys: "+".join(keys) or "default")
def test_keys_are_configurable(keys):
    renamed = {
        "group_id_key": ("group", "id"),
        "group_index_key": ("group", "index"),
        "start_version_key": ("group", "start_version"),
        "version_key": ("policy_version", "full"),
    }
    buffer = make_buffer(groups_per_step=1, max_staleness=0, **keys)
    group = make_group(0)
    for name, key in keys.items():
        for row in group.unbind(0):
            row.rename_key_(renamed[name], key)
    buffer.announce(0, 0)
    buffer.extend(lazy_stack(list(group.unbind(0))[::-1]))
    batch = buffer.sample(timeout=0)
    assert names(batch) == ["0/0", "0/1"]
    assert batch[keys.get("group_index_key", ("group", "index"))].tolist() == [0, 1]
    if keys:
        buffer.announce(1, 1)
        with pytest.raises(KeyError):
            buffer.extend(make_group(1, 1))


class MeanReward(Transform):
    """Writes each row's group mean on the way in, and counts the rows that come out."""

    def __init__(self):
        super().__init__()
        self.seen, self.given = [], []

    def _inv_call(self, tensordict):
        self.seen.append((tuple(tensordict.shape), tensordict["text", "response"][0]))
        mean = tensordict["next", "reward"].mean(0, keepdim=True)
        return tensordict.set("mean", mean.expand(len(tensordict), 1))

    def forward(self, tensordict):
        self.given.append(len(tensordict))
        return tensordict


@pytest.mark.inv7
def test_transform_sees_each_group_whole_and_once():
    transform = MeanReward()
    buffer = make_buffer(groups_per_step=2, max_staleness=1, transform=transform)
    for group_id in range(4):
        buffer.announce(group_id, 0)
    buffer.extend(lazy_stack([*make_group(1), *make_group(0), *make_group(3)]))
    buffer.extend(make_group(2))
    assert transform.seen == [((2,), f"{i}/0") for i in (1, 0, 3, 2)]
    batch = buffer.sample(timeout=0)
    assert batch["mean"].squeeze(-1).tolist() == [0.5, 0.5, 1.5, 1.5]
    assert len(transform.seen) == 4 and transform.given == [4]


def test_group_advantage_as_transform():
    buffer = make_buffer(groups_per_step=1, group_size=4, transform=GroupAdvantage(4))
    buffer.announce(5, 0)
    buffer.extend(make_group(5, size=4))
    batch = buffer.sample(timeout=0)
    assert batch["advantage"].squeeze(-1).tolist() == [-1.5, -0.5, 0.5, 1.5]


@pytest.mark.inv7
def test_a_failing_transform_leaves_the_group_running():
    def refuse(tensordict):
        raise ValueError("reward is missing")

    buffer = make_buffer(groups_per_step=1)
    buffer.append_transform(refuse, invert=True)
    buffer.announce(0, 0)
    with pytest.raises(ValueError, match="reward is missing"):
        buffer.extend(make_group(0))
    assert len(buffer) == 0 and buffer.stats()["groups_running"] == 1


@pytest.mark.inv7
def test_a_transform_must_not_thin_out_a_group():
    class Half(Transform):
        def _inv_call(self, tensordict):
            return tensordict[:1] if self.at_work else tensordict

    transform = Half()
    buffer = make_buffer(groups_per_step=1, max_staleness=0, transform=transform)
    buffer.announce(0, 0)
    transform.at_work = True
    for _ in range(3):  # Nor do its rows stay.
        with pytest.raises(RuntimeError, match="turned the 2 rows of group 0 into 1"):
            buffer.extend(make_group(0))
        assert len(buffer) == 0
    transform.at_work = False
    buffer.extend(make_group(0))
    assert names(buffer.sample(timeout=0)) == ["0/0", "0/1"]


@pytest.mark.inv7
def test_a_full_storage_is_not_written_over():
    """TorchRL's writer would begin anew, where the rows of others are."""
    buffer = make_buffer(groups_per_step=1, max_staleness=1)
    for group_id in range(2):
        buffer.announce(group_id, 0)
        buffer.extend(make_group(group_id))
    with pytest.raises(RuntimeError, match="storage of 4 rows has no 2 free slots: 2 groups wait"):
        ReplayBuffer.extend(buffer, make_group(2))  # past the limits on groups
    assert [names(buffer.sample(timeout=0)) for _ in range(2)] == [["0/0", "0/1"], ["1/0", "1/1"]]
