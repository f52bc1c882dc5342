"""The replay buffer of whole groups, with the real controller, real threads and ragged rows."""

from __future__ import annotations

import itertools
import random
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from tensordict import NonTensorData, TensorDict, lazy_stack
from torchrl.data import LazyStackStorage
from torchrl.envs.transforms import Transform

from torchrl_llm_async.data import StalenessReplayBuffer, StalenessSampler
from torchrl_llm_async.objectives import GroupAdvantage
from torchrl_llm_async.staleness import StalenessController

PATIENCE = 20.0  # seconds after which a test that should have been woken fails


def make_group(group_id, start=0, size=2, versions=None):
    """A group; row i has a prompt token and i + 1 sampled ones, or those of ``versions[i]``."""
    rows = []
    for index in range(size):
        sampled = [start] * (index + 1) if versions is None else versions[index]
        rows.append(
            TensorDict(
                {
                    "group": {
                        "id": torch.tensor(group_id),
                        "index": torch.tensor(index),
                        "start_version": torch.tensor(start),
                    },
                    "policy_version": {"full": torch.tensor([-1, *sampled])},
                    "next": {"reward": torch.tensor([float(group_id + index)])},
                    "text": {"response": NonTensorData(f"{group_id}/{index}")},
                }
            )
        )
    return lazy_stack(rows)


def make_buffer(groups_per_step=2, max_staleness=1, group_size=2, **kwargs):
    return StalenessReplayBuffer(
        groups_per_step=groups_per_step,
        max_staleness=max_staleness,
        group_size=group_size,
        **kwargs,
    )


def names(batch):
    return list(batch["text", "response"])


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


def test_start_version_comes_before_id():
    buffer = make_buffer(groups_per_step=1, max_staleness=2, group_size=1)
    buffer.announce(4, 0)
    buffer.announce(5, 0)
    buffer.extend(make_group(4, size=1))
    buffer.sample(timeout=0)
    buffer.announce(9, 1)
    buffer.extend(make_group(9, start=1, size=1))
    buffer.extend(make_group(5, size=1))
    assert names(buffer.sample(timeout=0)) == ["5/0"]
    assert names(buffer.sample(timeout=0)) == ["9/0"]


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


@pytest.mark.inv1
def test_drop_trains_on_a_late_group_that_came_in_time():
    dropped = []
    buffer = make_buffer(
        groups_per_step=1, max_staleness=0, on_stale="drop", on_drop=lambda *args: dropped.append(1)
    )
    buffer.announce(0, 0)
    buffer.extend(make_group(0))
    assert names(buffer.sample(timeout=0))[0] == "0/0" and not dropped


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
    assert buffer.stats()["groups_retracted"] == 0


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
        (corrupt(make_group(0), ("group", "start_version"), 1), r"start versions \[0, 1\]; 0 was"),
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
            return tensordict[:1]

    buffer = make_buffer(groups_per_step=1, transform=Half())
    buffer.announce(0, 0)
    with pytest.raises(RuntimeError, match="turned the 2 rows of group 0 into 1"):
        buffer.extend(make_group(0))


# ------------------------------------------------------------------ waiting
@pytest.mark.inv5
def test_timeout_consumes_nothing_and_tells_what_is_missing():
    buffer = make_buffer()
    with pytest.raises(TimeoutError, match="is a producer at work"):
        buffer.sample(timeout=0.01)
    buffer.announce(0, 0)
    buffer.announce(1, 0)
    buffer.extend(make_group(0))
    with pytest.raises(TimeoutError, match="takes 2 groups, 1 are complete and 1 running"):
        buffer.sample(timeout=0.01)
    assert buffer.stats()["wait_s"] >= 0.02
    buffer.extend(make_group(1))
    assert len(buffer.sample(timeout=0)) == 4


@pytest.mark.inv5
def test_sample_wakes_when_the_batch_is_complete(threads):
    buffer = make_buffer()
    waiter = threads.submit(buffer.sample, timeout=PATIENCE)
    for group_id in (0, 1):
        buffer.announce(group_id, 0)
    buffer.extend(make_group(1))
    buffer.extend(make_group(0))
    assert names(waiter.result(PATIENCE)) == ["0/0", "0/1", "1/0", "1/1"]
    assert buffer.stats()["last_wait_s"] == pytest.approx(buffer.stats()["wait_s"])


@pytest.mark.inv5
def test_sample_wakes_when_the_group_waited_for_is_retracted(threads):
    buffer = make_buffer(groups_per_step=1, max_staleness=0)
    buffer.announce(0, 0)
    waiter = threads.submit(buffer.sample, timeout=PATIENCE)
    buffer.retract(0, "reward timeout")
    buffer.announce(1, 0)
    buffer.extend(make_group(1))
    assert names(waiter.result(PATIENCE))[0] == "1/0"
    assert buffer.stats()["groups_retracted"] == 1


@pytest.mark.inv5
def test_failure_reaches_every_waiter_with_its_own_traceback(threads):
    buffer = make_buffer()

    def the_producer_that_died():
        raise ConnectionError("engine core is gone")

    waiters = [threads.submit(buffer.sample) for _ in range(3)]
    try:
        the_producer_that_died()
    except ConnectionError as error:
        failure = error
        buffer.fail(error)
    buffer.fail(RuntimeError("a consequence"))
    for waiter in waiters:
        error = waiter.exception(PATIENCE)
        assert error is failure
        assert "the_producer_that_died" in "".join(traceback.format_exception(error))
    for late in (
        lambda: buffer.sample(),
        lambda: buffer.announce(0, 0),
        lambda: buffer.extend(make_group(0)),
        lambda: buffer.retract(0, "odd"),
    ):
        with pytest.raises(ConnectionError, match="engine core"):
            late()


@pytest.mark.inv5
def test_close_wakes_the_waiter(threads):
    buffer = make_buffer()
    waiter = threads.submit(buffer.sample)
    buffer.close()
    with pytest.raises(RuntimeError, match="closed"):
        waiter.result(PATIENCE)
    buffer.close()
    with pytest.raises(RuntimeError, match="closed"):
        buffer.announce(0, 0)


# ------------------------------------------------------------------ state
def test_sampler_state_round_trips(tmp_path):
    buffer = make_buffer(groups_per_step=1, max_staleness=2)
    for group_id in range(3):
        buffer.announce(group_id, 0)
    buffer.extend(make_group(0))
    buffer.sample(timeout=0)
    buffer.extend(make_group(2))
    buffer.sampler.dumps(tmp_path)
    restored = StalenessSampler(groups_per_step=1, max_staleness=2)
    restored.loads(tmp_path)
    assert restored.consumer_version == 1 and restored.running == {1: 0}
    assert restored.select() == buffer.sampler.select() == [2]
    index, info = restored.sample(buffer.storage, 2)
    assert info["group_ids"] == [2]
    assert torch.equal(index, buffer.sample(timeout=0, return_info=True)[1]["index"])
    with pytest.raises(ValueError, match="order of admission"):
        restored.announce(2, 0)
    with pytest.raises(RuntimeError, match="step 2 has to wait"):
        restored.sample(buffer.storage, 2)


def test_empty_forgets_everything():
    buffer = make_buffer(groups_per_step=1)
    for _ in range(2):
        buffer.announce(0, 0)
        buffer.extend(make_group(0))
        buffer.sample(timeout=0)
        buffer.empty()
        assert len(buffer) == buffer.consumer_version == buffer.stats()["groups_running"] == 0
    assert "consumer_version=0" in repr(buffer)


# ------------------------------------------------------------------ the whole, under any schedule
class BufferMachine(RuleBasedStateMachine):
    """Controller and buffer together; a message about a group may be under way between them."""

    @initialize(
        groups_per_step=st.integers(1, 2),
        max_staleness=st.integers(0, 2),
        group_size=st.integers(1, 2),
        drop=st.booleans(),
    )
    def start(self, groups_per_step, max_staleness, group_size, drop):
        self.total_steps = 5
        bounds = dict(groups_per_step=groups_per_step, max_staleness=max_staleness)
        self.controller = StalenessController(**bounds, total_steps=self.total_steps)
        self.buffer = make_buffer(
            **bounds,
            group_size=group_size,
            on_stale="drop" if drop else "wait",
            on_drop=self.on_drop if drop else None,
        )
        self.running, self.sent, self.dropped = {}, [], set()
        self.next_id, self.consumed, self.delivered = 0, [], 0

    def on_drop(self, group_id, reason):
        assert self.controller.drop(group_id, reason)
        self.dropped.add(group_id)

    @precondition(lambda self: self.controller.capacity() > 0)
    @rule(count=st.integers(1, 4))
    def admit(self, count):
        for _ in range(min(count, self.controller.capacity())):
            start = self.controller.admit(self.next_id)
            self.buffer.announce(self.next_id, start)
            self.running[self.next_id] = start
            self.next_id += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data):
        group_id = data.draw(st.sampled_from(sorted(self.running)))
        if self.controller.finish(group_id):
            assert group_id not in self.dropped
        self.sent.append((group_id, self.running.pop(group_id)))

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def deliver(self, data):
        group_id, start = self.sent.pop(data.draw(st.integers(0, len(self.sent) - 1)))
        size = self.buffer.group_size
        newest = self.controller.served_version
        versions = [
            sorted(data.draw(st.lists(st.integers(start, newest), min_size=1, max_size=3)))
            for _ in range(size)
        ]
        slots = self.buffer.extend(make_group(group_id, start, size, versions))
        assert len(slots) == (0 if group_id in self.dropped else size)
        self.delivered += len(slots)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def reject(self, data):
        group_id = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[group_id]
        assert self.controller.reject(group_id, "crash") == (group_id not in self.dropped)
        self.buffer.retract(group_id, "crash")

    @precondition(lambda self: self.buffer.consumer_version < self.total_steps)
    @rule()
    def train(self):
        step = self.buffer.consumer_version
        try:
            batch = self.buffer.sample(timeout=0)
        except TimeoutError:
            assert self.buffer.consumer_version == step
            return
        assert len(batch) == self.buffer.batch_size
        for row in batch.unbind(0):
            versions = row["policy_version", "full"]
            lag = step - versions[versions >= 0]
            assert lag.min() >= 0 and lag.max() <= self.controller.max_staleness
        order = [
            tuple(int(row["group", key]) for key in ("start_version", "id", "index"))
            for row in batch.unbind(0)
        ]
        assert order == sorted(order)
        self.consumed += [group_id for _, group_id, index in order if index == 0]
        assert len(order) == len(set(order))

    @rule()
    def publish(self):
        self.controller.serve(self.buffer.consumer_version)

    @invariant()
    def adds_up(self):
        if not hasattr(self, "buffer"):
            return
        stats, ledger = self.buffer.stats(), self.controller.ledger()
        assert len(self.consumed) == len(set(self.consumed)) == stats["groups_consumed"]
        assert not self.dropped & set(self.consumed)
        assert ledger["submitted"] == self.next_id
        assert ledger["dropped"] == stats["groups_dropped"] == len(self.dropped)
        assert ledger["submitted"] == (
            stats["groups_running"]
            + stats["groups_ready"]
            + stats["groups_consumed"]
            + stats["groups_dropped"]
            + stats["groups_retracted"]
        )
        size = self.buffer.group_size
        assert stats["size"] == len(self.buffer) == stats["groups_ready"] * size
        assert self.delivered == (stats["groups_ready"] + stats["groups_consumed"]) * size
        assert len(self.buffer.storage) <= self.buffer.storage.max_size

    def teardown(self):
        if not hasattr(self, "buffer"):
            return
        while self.buffer.consumer_version < self.total_steps:
            self.publish()
            while self.controller.capacity():
                self.admit(1)
            step = self.buffer.consumer_version
            self.train()
            if self.buffer.consumer_version > step:
                continue
            if not self.sent:
                assert self.running, f"deadlock at step {step}"
                group_id = min(self.running)
                self.controller.finish(group_id)
                self.sent.append((group_id, self.running.pop(group_id)))
            group_id, start = self.sent.pop(0)
            rows = make_group(group_id, start, self.buffer.group_size)
            self.delivered += len(self.buffer.extend(rows))
        self.adds_up()
        assert len(self.consumed) == self.total_steps * self.controller.groups_per_step


TestBufferMachine = pytest.mark.inv1(pytest.mark.inv4(BufferMachine.TestCase))
TestBufferMachine.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.inv1
@pytest.mark.inv4
@pytest.mark.inv5
@pytest.mark.parametrize("on_stale", ["wait", "drop"])
def test_real_threads(on_stale, threads):
    """Four producers end groups in any order while a trainer consumes and publishes."""
    steps, bounds = 30, dict(groups_per_step=4, max_staleness=2)
    controller = StalenessController(**bounds, total_steps=steps)
    room = threading.Condition()
    rng = random.Random(0)
    held, ids = [], itertools.count()

    def on_drop(group_id, reason):
        controller.drop(group_id, reason)
        with room:
            room.notify_all()

    buffer = make_buffer(
        **bounds, on_stale=on_stale, on_drop=on_drop if on_stale == "drop" else None
    )

    def produce():
        """Admits what the bound allows, then ends groups at random; the rest straggle."""
        try:
            while True:
                with room:
                    assert room.wait_for(
                        lambda: controller.capacity() or held or done.is_set(), PATIENCE
                    )
                    if done.is_set():
                        return
                    while controller.capacity():
                        group_id = next(ids)
                        held.append((group_id, controller.admit(group_id)))
                        buffer.announce(*held[-1])
                    if not held:
                        continue
                    group_id, start = held.pop(rng.randrange(len(held)))
                if rng.random() < 0.1:
                    buffer.retract(group_id, "crash")
                    controller.reject(group_id, "crash")
                    with room:
                        room.notify_all()
                else:
                    controller.finish(group_id)
                    buffer.extend(make_group(group_id, start))
        except BaseException as error:
            buffer.fail(error)
            raise

    done = threading.Event()
    producers = [threads.submit(produce) for _ in range(4)]
    consumed = []
    for step in range(steps):
        batch = buffer.sample(timeout=PATIENCE)
        assert int((step - batch["group", "start_version"]).max()) <= 2
        consumed += batch["group", "id"][::2].tolist()
        with room:
            controller.serve(step + 1)
            if step + 1 == steps:
                done.set()
            room.notify_all()
    for producer in producers:
        producer.result(PATIENCE)
    assert len(consumed) == len(set(consumed)) == steps * 4
    assert controller.ledger()["rejected"] > 0
    ledger, stats = controller.ledger(), buffer.stats()
    assert ledger["accepted"] == steps * 4 and ledger["running"] == 0
    refunded = ledger["rejected"] + ledger["dropped"]
    assert refunded == stats["groups_retracted"] + stats["groups_dropped"]
