"""The replay buffer and the controller together: any schedule, and real threads."""

from __future__ import annotations

import copy
import itertools
import json
import random
import tempfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from groups import PATIENCE, assert_rows_lie_in_their_slots, make_buffer, make_group
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from torchrl_llm_async.deadlines import least_staleness
from torchrl_llm_async.staleness import StalenessController


class BufferMachine(RuleBasedStateMachine):
    """Controller and buffer together; a message about a group may be under way between them."""

    @initialize(
        groups_per_step=st.integers(1, 2),
        max_staleness=st.integers(0, 2),
        group_size=st.integers(1, 2),
        drop=st.booleans(),
        max_reuse=st.integers(1, 3),
        reuse=st.sampled_from(["recency", "reward", "uniform"]),
    )
    def start(self, groups_per_step, max_staleness, group_size, drop, max_reuse, reuse):
        self.total_steps = 5
        self.bounds = dict(groups_per_step=groups_per_step, max_staleness=max_staleness)
        self.options = dict(
            group_size=group_size,
            on_stale="drop" if drop else "wait",
            on_drop=self.on_drop if drop else None,
            max_reuse=max_reuse if max_staleness else 1,
            reuse=reuse,
        )
        self.begin_anew()
        self.running, self.sent, self.dropped = {}, [], set()
        self.next_id, self.consumed, self.delivered, self.uses = 0, [], 0, Counter()
        self.checkpoint()

    def begin_anew(self):
        self.controller = StalenessController(**self.bounds, total_steps=self.total_steps)
        self.buffer = make_buffer(**self.bounds, **self.options)

    _OWN = ("running", "sent", "dropped", "next_id", "consumed", "delivered", "uses")

    @rule()
    def checkpoint(self):
        own = {name: getattr(self, name) for name in self._OWN}
        self.cut = self.buffer.snapshot(), self.controller.state_dict(), copy.deepcopy(own)

    @rule()
    def crash_and_resume(self):
        snapshot, controller, own = self.cut
        self.begin_anew()
        with tempfile.TemporaryDirectory() as folder:
            snapshot.save(folder)
            self.buffer.loads(folder)
        state = json.loads(json.dumps(controller))
        self.controller.load_state_dict(state, step=self.buffer.consumer_version)
        for name, value in copy.deepcopy(own).items():
            setattr(self, name, value)

    @rule(
        groups_per_step=st.integers(1, 2),
        max_staleness=st.integers(0, 2),
        max_reuse=st.integers(1, 3),
    )
    def resume_with_other_bounds(self, groups_per_step, max_staleness, max_reuse):
        """From now, or not at all, if some group in flight could not be trained on in time."""
        step, former = self.buffer.consumer_version, (self.bounds, self.options)
        self.checkpoint()
        waiting = Counter(self.buffer.sampler.running.values())
        waiting.update(g.start_version for g in self.buffer.sampler.finished.values())
        self.bounds = dict(groups_per_step=groups_per_step, max_staleness=max_staleness)
        self.options = self.options | {"max_reuse": max_reuse if max_staleness else 1}
        least = least_staleness(step, groups_per_step=groups_per_step, waiting=waiting)
        if least <= max_staleness:
            self.crash_and_resume()
            self.checkpoint()
            return
        with pytest.raises(ValueError, match=f"a max_staleness of at least {least}"):
            self.crash_and_resume()
        self.bounds, self.options = former
        self.crash_and_resume()

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
            batch, info = self.buffer.sample(timeout=0, return_info=True)
        except TimeoutError:
            assert self.buffer.consumer_version == step
            return
        size = self.buffer.group_size
        reused = len(info["reused_ids"])
        assert len(batch) == self.buffer.batch_size + reused * size
        for row in batch.unbind(0):
            versions = row["policy_version", "full"]
            lag = step - versions[versions >= 0]
            assert lag.min() >= 0 and lag.max() <= self.controller.max_staleness
        order = [
            tuple(int(row["group", key]) for key in ("start_version", "id", "index"))
            for row in batch.unbind(0)
        ]
        assert len(order) == len(set(order))
        ids = [group_id for _, group_id, index in order if index == 0]
        self.uses.update(ids)
        assert max(self.uses[group_id] for group_id in ids) <= self.options["max_reuse"]
        assert ids == [*info["group_ids"], *info["reused_ids"]]
        assert len(info["group_ids"]) == self.bounds["groups_per_step"]
        fresh = order[: self.buffer.batch_size]
        assert fresh == sorted(fresh)
        self.consumed += [group_id for _, group_id, index in fresh if index == 0]

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
            + stats["groups_rejected"]
        )
        size = self.buffer.group_size
        held = stats["groups_ready"] + len(self.buffer.sampler.reusable)
        assert stats["size"] == len(self.buffer) == held * size
        assert self.delivered == (stats["groups_ready"] + stats["groups_consumed"]) * size
        assert_rows_lie_in_their_slots(self.buffer)

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
        assert self.buffer.consumer_version == self.total_steps


TestBufferMachine = pytest.mark.inv1(pytest.mark.inv4(BufferMachine.TestCase))
TestBufferMachine.settings = settings(
    max_examples=120,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.inv1
@pytest.mark.inv4
@pytest.mark.inv5
@pytest.mark.parametrize("on_stale", ["wait", "drop"])
def test_real_threads(on_stale):
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
    threads = ThreadPoolExecutor(4)
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
    threads.shutdown()
    assert len(consumed) == len(set(consumed)) == steps * 4
    assert controller.ledger()["rejected"] > 0
    ledger, stats = controller.ledger(), buffer.stats()
    assert ledger["accepted"] == steps * 4 and ledger["running"] == 0
    refunded = ledger["rejected"] + ledger["dropped"]
    assert refunded == stats["groups_rejected"] + stats["groups_dropped"]
