"""Who waits for the replay buffer: woken when there is a batch, or when there won't be one."""

from __future__ import annotations

import traceback
from concurrent.futures import ThreadPoolExecutor

import pytest
from groups import PATIENCE, make_buffer, make_group, names
from tensordict import lazy_stack


@pytest.fixture
def threads():
    with ThreadPoolExecutor(8) as executor:
        yield executor


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
def test_sample_wakes_although_a_later_group_of_the_same_call_fails(threads):
    def refuse_one(tensordict):
        if int(tensordict["group", "id"][0]) == 1:
            raise ValueError("reward is missing")
        return tensordict

    buffer = make_buffer(groups_per_step=1)
    buffer.append_transform(refuse_one, invert=True)
    buffer.announce(0, 0), buffer.announce(1, 0)
    waiter = threads.submit(buffer.sample, timeout=PATIENCE)
    with buffer._changed:  # It waits, or is going to look.
        pass
    with pytest.raises(ValueError, match="reward is missing"):
        buffer.extend(lazy_stack([*make_group(0), *make_group(1)]))
    assert names(waiter.result(PATIENCE)) == ["0/0", "0/1"]
    assert buffer.stats()["last_wait_s"] < PATIENCE / 2


@pytest.mark.inv5
def test_sample_wakes_when_the_group_waited_for_is_retracted(threads):
    buffer = make_buffer(groups_per_step=1, max_staleness=0)
    buffer.announce(0, 0)
    waiter = threads.submit(buffer.sample, timeout=PATIENCE)
    buffer.retract(0, "reward timeout")
    buffer.announce(1, 0)
    buffer.extend(make_group(1))
    assert names(waiter.result(PATIENCE))[0] == "1/0"
    assert buffer.stats()["groups_rejected"] == 1


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
