"""A collector that goes on from a cut: nothing is lost, and nothing comes twice."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import random
import threading

import pytest
from resuming import HeldEngine, restored, saved, train
from scripted import (
    GROUP_SIZE,
    GROUPS_PER_STEP,
    ScriptedEngine,
    ScriptedEnv,
    make_buffer,
)
from torchrl.envs import StepCounter, TransformedEnv

from torchrl_llm_async.engines import SamplingConfig, WeightUpdateError

STEPS = 8
LONG = SamplingConfig(max_new_tokens=16)


class EnvWithState(ScriptedEnv):
    """Tells and takes its position."""

    def get_extra_state(self):
        return {"next": self._next}

    def set_extra_state(self, state):
        self._next = state["next"]


SETTINGS = {
    "plain": {},
    "with a state": {"env": EnvWithState},
    "two turns": {"env": lambda: ScriptedEnv(turns=2), "max_turns": 2},
    "crashes": {"env": lambda: ScriptedEnv(crash_at=(3, 4, 11)), "step_retries": 0},
    "group filter": {"group_filter": lambda group: "odd" if group[0].group_id in (3, 4) else None},
    "longest first": {"longest_first": True},
    "many at once": {"max_concurrent_groups": 2, "env_workers": 1},
}


@pytest.mark.inv1
@pytest.mark.inv4
@pytest.mark.parametrize("name", SETTINGS)
def test_runs_cut_anywhere_train_on_every_group_once(name, make_collector, tmp_path):
    rng = random.Random(name)
    settings = {
        "total_steps": STEPS,
        "max_staleness": 2,
        "sampling": LONG,
        **SETTINGS[name],
    }

    buffer, engine = make_buffer(max_staleness=2), HeldEngine()
    collector = make_collector(replay_buffer=buffer, **settings, engine=engine)
    collector.start()
    step, trained = 0, {}
    go_on = functools.partial(train, in_order=name != "longest first")
    for attempt in range(6):
        # Goes on for some steps, and is cut and then lost somewhere behind the cut.
        upto = min(step + max(rng.randrange(0, 3), attempt == 0), STEPS - 3)
        trained |= go_on(collector, buffer, range(step, upto), hold=engine)
        if upto > step:
            engine.wait_until_half_done()
        cut = collector.cut()
        engine.let_go()
        taken_up = [member for group in cut.collector["groups"] for member in group["members"]]
        assert any(taken_up) or upto == step
        step = upto
        ahead = go_on(collector, buffer, range(step, min(step + rng.randrange(0, 2), STEPS)))
        folder = tmp_path / str(attempt)
        folder.mkdir()
        saved(cut, folder)
        collector.shutdown()
        engine = HeldEngine()
        collector, buffer = restored(make_collector, folder, **settings, engine=engine)
        assert buffer.consumer_version == step
        ledger = buffer.ledger()
        del ledger["by_version"]
        assert ledger == {
            **{key: cut.collector["stats"][key] for key in ("submitted", "rejected", "dropped")},
            **{key: cut.collector["stats"][key] for key in ("running", "accepted")},
            "consumed": step * GROUPS_PER_STEP,
        }
        del ahead  # What was trained on behind the cut is trained on again.
        collector.start()
        if step:
            collector.serve_weights("unread", version=step)
    trained |= go_on(collector, buffer, range(step, STEPS))
    ids = [group_id for step in range(STEPS) for group_id in trained[step]]
    assert len(ids) == len(set(ids)) == STEPS * GROUPS_PER_STEP
    ledger = buffer.ledger()
    assert ledger["consumed"] == len(ids) and ledger["submitted"] == len(ids) + ledger["rejected"]
    assert (ledger["rejected"] > 0) == (name in ("crashes", "group filter"))
    # Nobody is missing: an id that was not trained on was rejected.
    assert len(set(range(max(ids) + 1)) - set(ids)) <= ledger["rejected"]


@pytest.mark.inv2
@pytest.mark.inv4
def test_what_was_sampled_is_not_sampled_again(make_collector, tmp_path):
    engine = HeldEngine()
    engine.hold()
    buffer = make_buffer(max_staleness=2)
    settings = dict(total_steps=3, max_staleness=2, sampling=LONG)
    collector = make_collector(engine=engine, replay_buffer=buffer, **settings)
    collector.start()
    engine.wait_until_half_done()
    with collector.pause():
        cut = collector.cut()
        sampled = engine.sampled
    engine.let_go()
    saved(cut, tmp_path)
    collector.shutdown()
    again = HeldEngine()
    collector, buffer = restored(make_collector, tmp_path, engine=again, **settings)
    collector.start()
    train(collector, buffer, range(3))
    tokens_of_all = 3 * GROUPS_PER_STEP * GROUP_SIZE * 13
    assert again.sampled == tokens_of_all - sampled
    assert collector.stats()["sampled_tokens"] == tokens_of_all


def test_the_figures_go_on_where_they_were(make_collector, tmp_path):
    """From the first on, so that what a step has gained is not all that was gained before."""
    buffer = make_buffer()
    collector = make_collector(replay_buffer=buffer, total_steps=6)
    collector.start()
    train(collector, buffer, range(3))
    cut = collector.cut()
    saved(cut, tmp_path)
    collector.shutdown()
    collector, buffer = restored(make_collector, tmp_path, total_steps=6)
    before = collector.stats()
    assert before["sampled_tokens"] == cut.collector["stats"]["sampled_tokens"] > 0
    assert before["submitted"] == cut.collector["stats"]["submitted"]
    collector.start()
    collector.serve_weights("unread", version=3)
    train(collector, buffer, range(3, 6))
    after = collector.stats()
    for name in ("sampled_tokens", "samples", "groups", "submitted"):
        assert after[name] > before[name]


@pytest.mark.inv1
def test_nothing_is_taken_up_before_weights_as_new_are_served(make_collector, tmp_path):
    settings = dict(total_steps=6, sampling=LONG)
    buffer = make_buffer()
    engine = HeldEngine()
    collector = make_collector(engine=engine, replay_buffer=buffer, **settings)
    collector.start()
    train(collector, buffer, range(3), hold=engine)
    engine.wait_until_half_done()
    saved(collector.cut(), tmp_path)
    collector.shutdown()
    engine = HeldEngine()
    held_out = dict(create_eval_env_fn=ScriptedEnv, eval_problems=1)
    collector, buffer = restored(make_collector, tmp_path, engine=engine, **settings, **held_out)
    collector.start()
    # Answers to others would have come meanwhile.
    assert collector.evaluate().result(60).version == 0
    assert engine.sampled == 13
    before = collector.cut()
    running = len(before.collector["groups"])
    assert running and before.collector["next_id"] == running + buffer.ledger()["accepted"]
    collector.serve_weights("unread", version=3)
    train(collector, buffer, range(3, 6))


@pytest.mark.inv5
def test_weights_refused_by_a_resumed_run_end_it(make_collector, tmp_path):
    """Nothing is taken up without them, so nobody would ever train on to the next ones."""
    buffer = make_buffer()
    collector = make_collector(replay_buffer=buffer, total_steps=9)
    collector.start()
    train(collector, buffer, range(2))
    buffer.sample(timeout=60)
    collector.serve_weights("unread", version=3).result(20)
    saved(collector.cut(), tmp_path)
    collector.shutdown()
    engine = ScriptedEngine(refuse=(3,))
    collector, buffer = restored(make_collector, tmp_path, engine=engine, total_steps=9)
    collector.start()
    collector.serve_weights("unread", version=3)
    with pytest.raises(WeightUpdateError, match="version 3 refused, as told"):
        while True:
            buffer.sample(timeout=60)


@pytest.mark.inv2
@pytest.mark.inv8
def test_answers_to_what_an_environment_no_longer_says_are_sampled_anew(make_collector, tmp_path):
    class Moody(ScriptedEnv):
        life = 0

        def _step(self, tensordict):
            out = super()._step(tensordict)
            return out.set(("text", "prompt"), f"{out['text', 'prompt']} {Moody.life}")

    settings = dict(
        env=lambda: Moody(turns=2), max_turns=2, total_steps=1, max_staleness=0, sampling=LONG
    )
    buffer, engine = make_buffer(max_staleness=0), HeldEngine()
    engine.hold(turn=1)
    collector = make_collector(replay_buffer=buffer, engine=engine, **settings)
    collector.start()
    engine.wait_until_half_done()
    cut = collector.cut()
    saved(cut, tmp_path)
    collector.shutdown()
    second = [
        sum(len(turn["token_ids"]) for turn in member[1:])
        for group in cut.collector["groups"]
        for member in group["members"]
    ]
    assert sum(second)
    Moody.life = 1
    collector, buffer = restored(make_collector, tmp_path, engine=HeldEngine(), **settings)
    collector.start()
    batch = buffer.sample(timeout=60)
    assert all("more? 1" in row["text", "response"] for row in batch.unbind(0))
    assert all(row["masks", "all_assistant_mask"].sum() == 26 for row in batch.unbind(0))
    assert collector.stats()["discarded_tokens"] == sum(second)


@pytest.mark.inv4
def test_samples_come_once_in_their_file(make_collector, tmp_path):
    path = tmp_path / "samples.jsonl"
    settings = dict(total_steps=6, dump_path=path, sampling=LONG)
    buffer = make_buffer()
    collector = make_collector(replay_buffer=buffer, **settings)
    collector.start()
    trained = train(collector, buffer, range(2))
    saved(collector.cut(), tmp_path)
    train(collector, buffer, range(2, 4))  # They come again.
    collector.shutdown()
    for _ in range(2):  # Cut before a sample has come, they go on for nothing.
        collector, buffer = restored(make_collector, tmp_path, **settings)
        collector.start()
        collector.wait_until_ready()
        saved(collector.cut(), tmp_path)
        collector.serve_weights("unread", version=2)
        train(collector, buffer, range(2, 3))
        collector.shutdown()
    collector, buffer = restored(make_collector, tmp_path, **settings)
    collector.start()
    collector.serve_weights("unread", version=2)
    trained |= train(collector, buffer, range(2, 6))
    collector.shutdown()
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    names = [(sample["group"], sample["index"]) for sample in samples]
    assert len(set(names)) == len(names) == 6 * GROUPS_PER_STEP * GROUP_SIZE
    assert {group for group, _ in names} == {group for ids in trained.values() for group in ids}


@pytest.mark.inv5
def test_a_cut_waits_for_no_evaluation(make_collector):
    asked, answered = threading.Event(), threading.Event()

    class Thoughtful(ScriptedEnv):
        def _step(self, tensordict):
            asked.set()
            assert answered.wait(60)
            return super()._step(tensordict)

    buffer = make_buffer()
    collector = make_collector(
        replay_buffer=buffer, create_eval_env_fn=Thoughtful, eval_problems=1, env_workers=2
    )
    collector.start()
    evaluation = collector.evaluate()
    assert asked.wait(60)
    assert len(buffer.sample(timeout=60))  # Rollouts go on meanwhile.
    assert collector.cut().collector["next_id"] >= GROUPS_PER_STEP
    assert not evaluation.done()
    answered.set()
    assert evaluation.result(60).rewards == [1.0]


def test_one_that_tells_its_position_need_not_repeat_itself(make_collector, tmp_path):
    starts = itertools.count(step=100)

    class Elsewhere(EnvWithState):
        def __init__(self):
            super().__init__()
            self._next = next(starts)

    buffer = make_buffer()
    settings = dict(env=lambda: TransformedEnv(Elsewhere(), StepCounter()), total_steps=4)
    collector = make_collector(replay_buffer=buffer, **settings)
    collector.start()
    train(collector, buffer, range(2))
    saved(collector.cut(), tmp_path)
    collector.shutdown()
    collector, buffer = restored(make_collector, tmp_path, **settings)
    collector.start()
    collector.serve_weights("unread", version=2)
    train(collector, buffer, range(2, 4))


def test_an_environment_that_does_not_repeat_itself_is_told(make_collector, tmp_path):
    class Forgetful(ScriptedEnv):
        begun = 0

        def __init__(self):
            super().__init__()
            self._next = Forgetful.begun
            Forgetful.begun += 1

    buffer = make_buffer()
    settings = dict(env=Forgetful, env_workers=1, total_steps=50)
    collector = make_collector(replay_buffer=buffer, **settings)
    collector.start()
    collector.wait_until_ready()
    train(collector, buffer, range(1))
    saved(collector.cut(), tmp_path)
    collector.shutdown()
    collector, buffer = restored(make_collector, tmp_path, **settings)
    collector.start()
    with pytest.raises(RuntimeError, match="poses another problem than it did"):
        train(collector, buffer, range(1, 50))


@pytest.mark.inv5
def test_a_cut_that_can_not_be_made_says_why(make_collector):
    collector = make_collector(replay_buffer=make_buffer())
    with pytest.raises(RuntimeError, match="start"):
        collector.cut()
    collector.start()
    collector.wait_until_ready()
    collector.shutdown()
    with pytest.raises(RuntimeError, match="was shut down"):
        collector.cut()


@pytest.mark.inv5
def test_a_cut_that_does_not_come_is_an_error_in_time(make_collector):
    class Late(ScriptedEngine):
        may_start = threading.Event()

        async def start(self):
            await asyncio.to_thread(self.may_start.wait)
            await super().start()

    collector = make_collector(engine=Late(), replay_buffer=make_buffer())
    collector.start()
    with pytest.raises(TimeoutError, match=r"not told its state after 0\.05 s"):
        collector.cut(timeout=0.05)
    Late.may_start.set()
    assert collector.cut().collector["controller"]
