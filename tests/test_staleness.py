"""The two rules of bounded staleness: proofs by search, by random schedules and by brute force."""

from __future__ import annotations

import heapq
import itertools
import json
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from schedules import Run, Slots, loaded_sampler

from torchrl_llm_async.data import StalenessSampler
from torchrl_llm_async.staleness import StalenessController


class StalenessMachine(RuleBasedStateMachine):
    """Any order of admissions, ends, failures, publications, training steps, cuts and crashes."""

    @initialize(
        groups_per_step=st.integers(1, 3),
        max_staleness=st.integers(0, 3),
        total_steps=st.integers(1, 8),
        drop=st.booleans(),
        max_reuse=st.integers(1, 3),
        data=st.data(),
    )
    def start(self, groups_per_step, max_staleness, total_steps, drop, max_reuse, data):
        every = data.draw(st.integers(1, max_staleness + 1), label="publish_every")
        self.run = Run(groups_per_step, max_staleness, total_steps, every, drop, max_reuse)
        self.stuck = set()
        self.newest_cut = self.run.cut()

    @precondition(lambda self: self.run.controller.capacity() > 0)
    @rule(count=st.integers(1, 6))
    def admit(self, count):
        for _ in range(min(count, self.run.controller.capacity())):
            self.run.admit()

    @precondition(lambda self: self.run.running)
    @rule(data=st.data())
    def finish(self, data):
        self.run.finish(data.draw(st.sampled_from(sorted(self.run.running))))

    @precondition(lambda self: self.run.running)
    @rule(data=st.data())
    def reject(self, data):
        self.run.reject(data.draw(st.sampled_from(sorted(self.run.running))))

    @precondition(lambda self: self.run.running)
    @rule(data=st.data())
    def straggle(self, data):
        self.stuck.add(data.draw(st.sampled_from(sorted(self.run.running))))

    @precondition(lambda self: self.run.step < self.run.total_steps)
    @rule()
    def train(self):
        self.run.train()

    @rule()
    def publish(self):
        self.run.publish()

    @rule()
    def checkpoint(self):
        self.newest_cut = self.run.cut()

    @rule()
    def crash_and_resume(self):
        run = self.run
        self.run = Run.resumed(self.newest_cut, run.total_steps, run.drop)
        assert self.run.cut() == self.newest_cut

    @rule(
        groups_per_step=st.integers(1, 3),
        max_staleness=st.integers(0, 3),
        max_reuse=st.integers(1, 3),
    )
    def resume_with_other_bounds(self, groups_per_step, max_staleness, max_reuse):
        """It is refused if, and only if, some deadline could not be met."""
        run, cut = self.run, self.run.cut()
        bounds = dict(groups_per_step=groups_per_step, max_staleness=max_staleness)
        options = dict(publish_every=1, max_reuse=max_reuse)
        try:
            self.run = Run.resumed(cut, run.total_steps, run.drop, **bounds, **options)
        except ValueError:
            assert not meets_deadlines(run.step - 1, run.in_flight(), **bounds)
            assert any(bounds[name] < run.bounds[name] for name in bounds)
        else:
            assert meets_deadlines(run.step - 1, run.in_flight(), **bounds)
            self.newest_cut = self.run.cut()

    @invariant()
    def adds_up(self):
        if hasattr(self, "run"):
            self.run.check()

    def teardown(self):
        """Whatever happened, the run can end, even if stragglers finish only when they must."""
        if not hasattr(self, "run"):
            return
        run = self.run
        while run.step < run.total_steps:
            run.publish()
            while run.controller.capacity():
                run.admit()
            if run.train():
                continue
            assert run.running, f"deadlock at step {run.step}"
            run.finish(min(run.running, key=lambda group_id: (group_id in self.stuck, group_id)))
        run.check()
        assert sorted({*run.consumed.values()}) == list(range(run.total_steps))


TestStalenessMachine = pytest.mark.inv1(pytest.mark.inv4(StalenessMachine.TestCase))
TestStalenessMachine.settings = settings(
    max_examples=2000,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


def simulate(seed: int, drop: bool) -> Run:
    """A run in continuous time whose groups take Pareto-distributed (heavy-tailed) times."""
    rng = np.random.default_rng(seed)
    eta = int(rng.integers(0, 5))
    every = int(rng.integers(1, eta + 2))
    run = Run(int(rng.integers(1, 9)), eta, int(rng.integers(5, 25)), every, drop)
    workers = int(rng.integers(1, 40))
    events, now, training = [], 0.0, False
    while run.step < run.total_steps or training:
        while run.controller.capacity() and len(run.running) < workers:
            heapq.heappush(events, (now + rng.pareto(1.1), run.next_id, "end"))
            run.admit()
        if not training and run.step < run.total_steps and run.train():
            training = True
            heapq.heappush(events, (now + rng.exponential(0.5), -1, "trained"))
        assert events, f"deadlock at step {run.step}"
        now, group_id, event = heapq.heappop(events)
        if event == "trained":
            training = False
            run.publish()
        elif group_id in run.running:  # else it was dropped
            run.reject(group_id) if rng.random() < 0.05 else run.finish(group_id)
        run.check()
    return run


@pytest.mark.inv1
@pytest.mark.inv4
@pytest.mark.parametrize("drop", [False, True], ids=["wait", "drop"])
def test_heavy_tailed_schedules_keep_the_bound_and_never_deadlock(drop):
    runs = [simulate(seed, drop) for seed in range(150)]
    for run in runs:
        assert len(run.consumed) == run.total_steps * run.bounds["groups_per_step"]
    assert any(run.dropped for run in runs) == drop
    overtaken = sum(
        earlier < later and run.consumed[earlier] > run.consumed[later]
        for run in runs
        for earlier, later in itertools.pairwise(sorted(run.consumed))
    )
    assert overtaken  # the schedules do exercise the rule


def meets_deadlines(step, left_over, groups_per_step, max_staleness):
    """The rule of consumption, word by word."""
    horizon = max([step, *(start + max_staleness for start in left_over)])
    return all(
        sum(start <= j - max_staleness for start in left_over) <= (j - step) * groups_per_step
        for j in range(step, horizon + 1)
    )


@pytest.mark.inv1
@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    step=st.integers(0, 5),
    groups_per_step=st.integers(1, 3),
    max_staleness=st.integers(0, 3),
    groups=st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=8),
    drop=st.booleans(),
)
def test_selection_is_sound_and_complete(step, groups_per_step, max_staleness, groups, drop):
    """The sampler's choice against all there are; groups that will be dropped claim no place."""
    bounds = dict(groups_per_step=groups_per_step, max_staleness=max_staleness)
    groups.sort()  # Versions and ids rise together.
    finished = {i: start for i, (start, done) in enumerate(groups) if done}
    running = {i: start for i, (start, done) in enumerate(groups) if not done}

    def acceptable(candidates, size, everything):
        return [
            chosen
            for chosen in itertools.combinations(candidates, size)
            if all(everything[i] + max_staleness >= step for i in chosen)
            and meets_deadlines(
                step, [s for i, s in everything.items() if i not in chosen], **bounds
            )
        ]

    on_stale = "drop" if drop else "wait"
    everything = {**finished, **running}
    try:
        sampler = loaded_sampler(step, finished, running, **bounds, on_stale=on_stale)
    except ValueError:
        size = min(groups_per_step, len(groups))
        assert not acceptable(everything, size, everything)  # not even if all were finished
        return
    if drop:
        everything = {
            i: s for i, s in everything.items() if i in finished or s + max_staleness > step
        }
    possible = acceptable(finished, groups_per_step, everything)
    if not sampler.can_sample(sampler.slots, len(groups)):
        assert not possible
        return
    _, info = sampler.sample(sampler.slots, len(groups))
    chosen = info["group_ids"]
    assert tuple(sorted(chosen)) in possible
    assert chosen == sorted(chosen, key=lambda i: (finished[i], i))
    assert max(finished[i] for i in chosen) <= min(
        (start for i, start in finished.items() if i not in chosen), default=np.inf
    )
    dropped = [i for i, start in running.items() if start + max_staleness <= step]
    assert sampler.drop_overdue() == dropped and (drop or not dropped)


@pytest.mark.inv1
@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_publishing_too_rarely_starves_the_trainer(max_staleness):
    """Why k <= max_staleness + 1 is required: one more, and the last step before it has no data."""
    run = Run(2, max_staleness, total_steps=20, publish_every=max_staleness + 2)
    for _ in range(max_staleness + 1):
        run.publish()
        while run.controller.capacity():
            run.admit()
        for group_id in list(run.running):
            run.finish(group_id)
        assert run.train()
    run.publish()
    assert run.controller.capacity() == 0 and not run.running and not run.train()


def test_on_policy_admits_one_step_at_a_time():
    controller = StalenessController(groups_per_step=3, max_staleness=0, total_steps=2)
    assert [controller.admit(i) for i in range(3)] == [0, 0, 0]
    with pytest.raises(RuntimeError, match="wait until capacity"):
        controller.admit(3)
    controller.serve(1)
    assert [controller.admit(i) for i in range(3, 6)] == [1, 1, 1]
    controller.serve(2)
    assert controller.capacity() == 0  # total_steps


def test_refunds_are_counted_by_reason_and_admit_others():
    controller = StalenessController(groups_per_step=2, max_staleness=0)
    controller.admit(0), controller.admit(1)
    controller.reject(0, "reward timeout")
    controller.drop(1, "stale")
    assert controller.capacity() == 2
    assert controller.reasons() == {("rejected", "reward timeout"): 1, ("dropped", "stale"): 1}
    assert controller.admit(2) == 0


@pytest.mark.inv4
def test_messages_about_a_dropped_group_may_cross():
    controller = StalenessController(groups_per_step=3, max_staleness=0)
    for group_id in range(3):
        controller.admit(group_id)
    assert controller.drop(0, "stale") and not controller.finish(0)
    assert controller.finish(1) and controller.drop(1, "stale")
    assert controller.reject(2, "crash")
    for group_id in range(3):
        assert not controller.drop(group_id, "stale")
        with pytest.raises(ValueError, match="not running"):
            controller.reject(group_id, "crash")  # its producer has ended it
    assert controller.ledger() == dict(submitted=3, running=0, accepted=0, rejected=1, dropped=2)


@pytest.mark.inv4
def test_a_drop_refunds_the_group_it_names_and_no_other():
    """However late it comes, and whatever has been forgotten of the group meanwhile."""
    controller = StalenessController(groups_per_step=2, max_staleness=1)
    for group_id in range(400):
        controller.admit(group_id)
        if group_id % 2:
            controller.finish(group_id)
            controller.serve(group_id // 2 + 1)
        else:
            controller.reject(group_id, "crash")
    ledger, capacity = controller.ledger(), controller.capacity()
    assert ledger["accepted"] == ledger["rejected"] == 200
    assert len(controller.state_dict()["droppable"]) == 1  # of the version before
    for group_id in range(399):
        assert not controller.drop(group_id, "stale")
    assert controller.ledger() == ledger and controller.capacity() == capacity
    assert controller.drop(399, "stale")
    assert controller.ledger() == {**ledger, "accepted": 199, "dropped": 1}
    assert controller.capacity() == capacity + 1


def test_another_batch_size_leaves_the_room_of_groups_in_flight():
    """Consumed groups count as if they had been consumed in steps of the new size."""
    before = StalenessController(groups_per_step=4, max_staleness=2)
    for group_id in range(12):
        before.admit(group_id)
    for group_id in range(6):
        before.finish(group_id)
    before.serve(1)  # one step behind it, which consumed 4: 8 are in flight
    assert before.capacity() == 4
    state = json.loads(json.dumps(before.state_dict()))
    for groups_per_step, room in ((4, 4), (6, 10), (3, 1), (2, 0)):
        after = StalenessController(groups_per_step=groups_per_step, max_staleness=2)
        after.load_state_dict(state, step=1)
        assert after.capacity() == room == max(groups_per_step * 3 - 8, 0)
        assert after.ledger() == before.ledger()


def test_a_run_of_no_steps_admits_nothing():
    controller = StalenessController(groups_per_step=2, max_staleness=1, total_steps=0)
    assert controller.capacity() == 0


def test_misuse_is_refused():
    controller = StalenessController(groups_per_step=2, max_staleness=1)
    controller.admit(5)
    with pytest.raises(ValueError, match="increasing counter"):
        controller.admit(5)
    with pytest.raises(ValueError, match="not running"):
        controller.finish(7)
    with pytest.raises(ValueError, match="not running"):
        controller.drop(7, "stale")
    assert controller.finish(5)
    with pytest.raises(ValueError, match="not running"):
        controller.finish(5)
    with pytest.raises(ValueError, match="not running"):
        controller.reject(5, "late")
    controller.serve(2)
    controller.serve(2)
    with pytest.raises(ValueError, match="after 2"):
        controller.serve(1)
    assert controller.served_version == 2
    for wrong in (
        dict(groups_per_step=0, max_staleness=0),
        dict(groups_per_step=1, max_staleness=-1),
        dict(groups_per_step=1, max_staleness=0, total_steps=-1),
    ):
        with pytest.raises(ValueError, match="it must be"):
            StalenessController(**wrong)


@pytest.mark.inv1
def test_a_bound_already_broken_is_an_error_not_a_wait():
    sampler = StalenessSampler(groups_per_step=1, max_staleness=1)
    sampler.consumer_version = 2
    sampler.announce(0, 1)
    assert not sampler.can_sample(Slots(2), 1)
    sampler.announce(1, 1)
    with pytest.raises(
        RuntimeError, match=r"than step 2 (?s:.)* take a max_staleness of at least 2"
    ):
        sampler.can_sample(Slots(2), 1)


@pytest.mark.inv4
def test_threads_never_admit_more_than_the_capacity():
    controller = StalenessController(groups_per_step=50, max_staleness=3)
    ids, lock, barrier = itertools.count(), threading.Lock(), threading.Barrier(8)
    admitted = []

    def work():
        barrier.wait()
        while True:
            with lock:  # one increasing counter, as admit() asks for
                group_id = next(ids)
                try:
                    controller.admit(group_id)
                except RuntimeError:
                    return
            admitted.append(group_id)
            controller.reject(group_id, "odd") if group_id % 5 == 0 else controller.finish(group_id)
            controller.ledger()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    ledger = controller.ledger()
    assert ledger["accepted"] <= 200 and controller.capacity() == 200 - ledger["accepted"]
    assert ledger["submitted"] == len(admitted) == len(set(admitted))
