"""Cuts beside steps that drop groups: whatever is on the way, they are of one instant.

A dropped group is refunded by a message from the trainer to the collector's host. A cut may fall
before it is sent, or before it is heard; then the resumed run has to refund the group once more.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from groups import PATIENCE
from resuming import restored, saved, train
from scripted import GROUPS_PER_STEP, ScriptedEngine, ScriptedEnv, make_buffer

from torchrl_llm_async.collectors import Cut
from torchrl_llm_async.collectors.cut import complete_cut
from torchrl_llm_async.engines import SamplingConfig
from torchrl_llm_async.ledger import Ledger
from torchrl_llm_async.staleness import StalenessController

STEPS = 4


@pytest.fixture
def settings():
    """Of collectors whose problem 1 is never scored while the test runs."""
    end = threading.Event()

    class Hangs(ScriptedEnv):
        def _step(self, tensordict):
            if int(tensordict["number"]) == 1:
                end.wait()
            return super()._step(tensordict)

    yield dict(
        env=Hangs,
        total_steps=STEPS,
        max_staleness=1,
        step_timeout=600,
        env_workers=8,
        sampling=SamplingConfig(max_new_tokens=16),
    )
    end.set()


def assert_of_one_instant(cut: Cut, total_steps: int = STEPS) -> None:
    """The collector's accounts, with the drops it has yet to hear of, are the buffer's."""
    controller = StalenessController(
        groups_per_step=GROUPS_PER_STEP, max_staleness=1, total_steps=total_steps
    )
    controller.load_state_dict(cut.collector["controller"], step=cut.collector["step"])
    for group_id, reason in cut.collector["pending_drops"]:
        assert controller.drop(group_id, reason)
    ledger = Ledger()
    ledger.load_state_dict(cut.buffer.state["groups"]["ledger"])
    assert {**ledger.counts(), **controller.ledger()} == ledger.counts()


def assert_goes_on(make_collector, folder, settings) -> None:
    buffer_options = dict(on_stale="drop", on_drop=lambda *group: collector.drop(*group))
    collector, buffer = restored(make_collector, folder, buffer_options=buffer_options, **settings)
    collector.start()
    step = buffer.consumer_version
    collector.serve_weights("unread", version=step)
    train(collector, buffer, range(step, STEPS), in_order=False)
    assert collector.stats()["dropped"] == buffer.ledger()["dropped"] == 1
    assert_of_one_instant(collector.cut())
    assert buffer.ledger()["consumed"] == STEPS * GROUPS_PER_STEP


@pytest.mark.inv4
@pytest.mark.inv5
def test_a_drop_that_was_not_sent_yet(make_collector, settings, tmp_path):
    cuts = []

    def on_drop(*group):
        cuts.append(collector.cut())
        collector.drop(*group)

    buffer = make_buffer(on_stale="drop", on_drop=on_drop)
    collector = make_collector(replay_buffer=buffer, **settings)
    collector.start()
    train(collector, buffer, range(2))
    (cut,) = cuts
    assert cut.collector["pending_drops"] == [[1, "stale"]]
    assert 1 in [group["id"] for group in cut.collector["groups"]]
    assert_of_one_instant(cut)
    after = collector.cut()
    assert after.collector["pending_drops"] == []
    assert_of_one_instant(after)
    saved(cut, tmp_path)
    collector.shutdown()
    assert_goes_on(make_collector, tmp_path, settings)


class Stops(ScriptedEngine):
    """Stops the host's loop, and with it all that the host hears, until it is let go."""

    begun, let_go = threading.Event(), threading.Event()  # It goes through a pipe, without these.

    async def start(self):
        self.begun.set()
        assert self.let_go.wait(PATIENCE)
        await super().start()


@pytest.mark.inv4
@pytest.mark.inv5
def test_a_drop_that_was_not_heard_yet(make_collector, settings, tmp_path):
    asked = []

    def on_drop(*group):
        collector.add_engine(Stops())
        assert Stops.begun.wait(PATIENCE)
        asked.append(collector._ask("cut"))  # as cut() does, but waits for nothing
        collector.drop(*group)

    buffer = make_buffer(on_stale="drop", on_drop=on_drop)
    collector = make_collector(replay_buffer=buffer, **settings)
    collector.start()
    train(collector, buffer, range(2))
    Stops.let_go.set()
    cut = asked[0].result(PATIENCE)
    assert cut.buffer.state["groups"]["untold"] == []  # It was told of it all right.
    assert cut.collector["pending_drops"] == [[1, "stale"]]
    assert_of_one_instant(cut)
    saved(cut, tmp_path)
    collector.shutdown()
    assert_goes_on(make_collector, tmp_path, settings)


@pytest.mark.inv4
def test_a_drop_after_the_buffer_s_part_was_taken_is_not_in_the_cut():
    """Although the collector may have been told of it before it completes the cut."""
    buffer = make_buffer(max_staleness=1)
    buffer.announce(0, 0), buffer.announce(1, 0)
    cut = complete_cut({"seed": 0}, buffer, {1: "stale"}, 0)
    assert cut.collector == {"seed": 0, "step": 0, "pending_drops": []}


@pytest.mark.inv4
def test_cuts_at_any_moment(make_collector, settings):
    """A thread cuts again and again, while every other problem straggles or is dropped."""

    class Straggles(ScriptedEngine):
        async def _before_token(self, request_id, answer):
            kind = int(request_id.split("-")[0]) % 4
            # The last steps have no others to take in place of one that never comes.
            if kind == 1 and buffer.consumer_version < steps - 4:
                await asyncio.Event().wait()  # until it is dropped
            for _ in range(3000 if kind == 3 else 1):
                await super()._before_token(request_id, answer)

    steps, done = 25, threading.Event()
    buffer = make_buffer(on_stale="drop", on_drop=lambda *group: collector.drop(*group))
    options = {**settings, "env": ScriptedEnv, "total_steps": steps}
    collector = make_collector(replay_buffer=buffer, engine=Straggles(), **options)
    collector.start()

    def cut_again_and_again():
        cuts = []
        while not done.is_set():
            cuts.append(collector.cut())
        return cuts

    with ThreadPoolExecutor(1) as threads:
        cutting = threads.submit(cut_again_and_again)
        try:
            train(collector, buffer, range(steps), in_order=False)
        finally:
            done.set()
        cuts = cutting.result(PATIENCE)
    for cut in cuts:
        assert_of_one_instant(cut, steps)
    assert buffer.ledger()["dropped"] >= 5 and len(cuts) >= 20
    assert len(collector._dropped) <= 1  # Those that were heard are forgotten.


@pytest.mark.inv1
@pytest.mark.inv5
def test_nothing_waits_for_a_pause_that_takes_its_time(make_collector, settings):
    """A drop behind it is carried out, before weights that were published after it are served."""

    class Slow(ScriptedEngine):
        pausing = threading.Event()

        async def start(self):
            self.loop, self.may_pause = asyncio.get_running_loop(), asyncio.Event()
            await super().start()

        async def pause(self):
            self.pausing.set()
            await self.may_pause.wait()
            await super().pause()

    engine, buffer = Slow(), make_buffer()
    collector = make_collector(replay_buffer=buffer, engine=engine, **settings)
    collector.start()
    buffer.sample(timeout=PATIENCE)
    with ThreadPoolExecutor(1) as threads:
        paused = threads.submit(collector.pause)
        assert engine.pausing.wait(PATIENCE)
        collector.drop(1, "odd")
        cut = collector.cut(timeout=PATIENCE)
        assert [*map(list, cut.collector["controller"]["reasons"])] == [["dropped", "odd", 1]]
        assert not paused.done()
        engine.loop.call_soon_threadsafe(engine.may_pause.set)
        with paused.result(PATIENCE):
            pass
    collector.serve_weights("unread", version=1)
    train(collector, buffer, range(1, STEPS))
