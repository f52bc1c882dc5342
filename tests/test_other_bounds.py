"""Replay buffers that go on with other bounds than they were saved with."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from groups import assert_rows_lie_in_their_slots, make_buffer, make_group, names

from torchrl_llm_async.deadlines import least_staleness


def fill_and_train(buffer, rng, ids, steps, *, in_step=False):
    """Admits what some steps consume, delivers it in any order, and trains.

    Every other step all that may be admitted is, and delivered: then the storage is as full as it
    gets. Or, in step, no more is admitted than the next step consumes.
    """
    for _ in range(steps):
        sampler, version = buffer.sampler, buffer.consumer_version
        most = 1 if in_step else sampler.max_staleness + 1
        everything = rng.random() < 0.5
        ahead = most if everything else rng.randint(1, most)
        while len(sampler.running) + len(sampler.finished) < ahead * sampler.groups_per_step:
            buffer.announce(next(ids), version)
        while sampler.running if everything else not buffer.can_sample():
            group_id = rng.choice(sorted(sampler.running))
            buffer.extend(make_group(group_id, sampler.running[group_id]))
        assert_rows_lie_in_their_slots(buffer)
        batch, info = buffer.sample(timeout=0, return_info=True)
        lags = version - batch["group", "start_version"]
        assert lags.min() >= 0 and lags.max() <= sampler.max_staleness
        in_order = [f"{group_id}/{row}" for group_id in batch_ids(info) for row in range(2)]
        assert names(batch) == in_order
        yield info


def batch_ids(info):
    return [*info["group_ids"], *info["reused_ids"]]


@pytest.mark.inv1
@pytest.mark.inv4
def test_refused_or_trained_within_the_new_bounds(tmp_path):
    refused = reused = filled = 0
    bounds = list(itertools.product((1, 2, 3), (0, 1, 3), (1, 2, 3)))
    bounds = [b for b in bounds if b[1] or b[2] == 1]
    for seed in range(150):
        rng, ids = random.Random(seed), itertools.count()
        old, new = (
            dict(zip(("groups_per_step", "max_staleness", "max_reuse"), b, strict=True))
            for b in rng.choices(bounds, k=2)
        )
        in_step = bool(seed % 2)
        if in_step:  # Smaller steps with nothing in flight: hard on the room for what was used.
            old = dict(groups_per_step=4, max_staleness=rng.randint(1, 3), max_reuse=3)
            new = {**old, "groups_per_step": rng.randint(1, 3)}
        buffer = make_buffer(**old)
        seen = Counter()
        for info in fill_and_train(buffer, rng, ids, steps=rng.randrange(6), in_step=in_step):
            seen.update(batch_ids(info))
        in_flight = buffer.sampler.ledger.counts()["submitted"]
        buffer.dumps(tmp_path)
        saved, buffer = buffer, make_buffer(**new)
        starts = [*saved.sampler.running.values()]
        starts += [group.start_version for group in saved.sampler.finished.values()]
        least = least_staleness(
            saved.consumer_version,
            groups_per_step=new["groups_per_step"],
            waiting=Counter(starts),
        )
        if least > new["max_staleness"]:
            with pytest.raises(ValueError, match=f"a max_staleness of at least {least}"):
                buffer.loads(tmp_path)
            refused += 1
            continue
        buffer.loads(tmp_path)
        fresh = []
        for info in fill_and_train(buffer, rng, ids, steps=6):
            fresh += info["group_ids"]
            seen.update(batch_ids(info))
            filled += len(buffer.storage) == buffer.storage.max_size
            reused += any(group_id < in_flight for group_id in info["reused_ids"])
            assert all(seen[i] <= max(old["max_reuse"], new["max_reuse"]) for i in batch_ids(info))
        assert len(fresh) == len(set(fresh)) == 6 * new["groups_per_step"]
        counts = buffer.ledger()
        assert counts["submitted"] == counts["running"] + counts["accepted"]
    assert refused > 20 and reused > 20 and filled > 100


@pytest.mark.inv4
@pytest.mark.inv7
def test_what_may_be_reused_keeps_to_its_place_when_steps_grow_smaller(tmp_path):
    """What larger steps left would, beside all that is in flight, not fit into the storage."""
    rng, ids = random.Random(0), itertools.count()
    buffer = make_buffer(groups_per_step=4, max_staleness=2, max_reuse=3)
    for step in range(4):
        for group_id in itertools.islice(ids, 4):
            buffer.announce(group_id, step)
            buffer.extend(make_group(group_id, step))
        buffer.sample(timeout=0)
    buffer.dumps(tmp_path)
    buffer = make_buffer(groups_per_step=2, max_staleness=2, max_reuse=3)
    buffer.loads(tmp_path)
    assert sorted(buffer.sampler.reusable) == [12, 13, 14, 15]
    for _ in range(6):
        while len(buffer.sampler.finished) < 3 * 2:
            group_id = next(ids)
            buffer.announce(group_id, buffer.consumer_version)
            buffer.extend(make_group(group_id, buffer.consumer_version))
        assert_rows_lie_in_their_slots(buffer)
        list(fill_and_train(buffer, rng, ids, steps=1))


@pytest.mark.inv1
@pytest.mark.inv4
@pytest.mark.parametrize(
    ("bounds", "reused"),
    [
        (dict(max_staleness=2, max_reuse=3), [0, 1, 2, 3]),
        (dict(max_staleness=1, max_reuse=3), [2, 3]),  # 0 and 1 are too old
        (dict(max_staleness=2, max_reuse=1), []),
        (dict(max_staleness=0), []),  # in a storage of 4 rows
    ],
)
def test_what_may_not_be_used_again_is_forgotten(tmp_path, bounds, reused):
    buffer = make_buffer(groups_per_step=2, max_staleness=2, max_reuse=3)
    for group_id in range(6):
        buffer.announce(group_id, group_id // 2)
        buffer.extend(make_group(group_id, group_id // 2))
        if group_id in (1, 3):
            buffer.sample(timeout=0)
    buffer.dumps(tmp_path)
    buffer = make_buffer(groups_per_step=2, **bounds)
    buffer.loads(tmp_path)
    batch, info = buffer.sample(timeout=0, return_info=True)
    assert info["group_ids"] == [4, 5] and info["reused_ids"] == reused
    assert names(batch) == [f"{group_id}/{row}" for group_id in [4, 5, *reused] for row in (0, 1)]
