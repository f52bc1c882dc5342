"""Replay buffers that go on with other bounds than they were saved with."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from groups import make_buffer, make_group, names

from torchrl_llm_async.deadlines import least_staleness


def fill_and_train(buffer, rng, ids, steps):
    """Admits what some steps consume, delivers it in any order, and trains."""
    for _ in range(steps):
        sampler, version = buffer.sampler, buffer.consumer_version
        ahead = rng.randint(1, sampler.max_staleness + 1)
        while len(sampler.running) + len(sampler.finished) < ahead * sampler.groups_per_step:
            buffer.announce(next(ids), version)
        while not buffer.can_sample():
            group_id = rng.choice(sorted(sampler.running))
            buffer.extend(make_group(group_id, sampler.running[group_id]))
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
    refused = reused = 0
    bounds = list(itertools.product((1, 2, 3), (0, 1, 3), (1, 2, 3)))
    bounds = [b for b in bounds if b[1] or b[2] == 1]
    for seed in range(150):
        rng, ids = random.Random(seed), itertools.count()
        old, new = (
            dict(zip(("groups_per_step", "max_staleness", "max_reuse"), b, strict=True))
            for b in rng.choices(bounds, k=2)
        )
        buffer = make_buffer(**old)
        seen = Counter()
        for info in fill_and_train(buffer, rng, ids, steps=rng.randrange(5)):
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
            reused += any(group_id < in_flight for group_id in info["reused_ids"])
            assert all(seen[i] <= max(old["max_reuse"], new["max_reuse"]) for i in batch_ids(info))
        assert len(fresh) == len(set(fresh)) == 6 * new["groups_per_step"]
        counts = buffer.ledger()
        assert counts["submitted"] == counts["running"] + counts["accepted"]
    assert refused > 20 and reused > 20


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
