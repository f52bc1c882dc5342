"""Groups that are trained on more than once: within the bound, never twice in a batch."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest
import torch
from groups import make_buffer, make_group
from tensordict import TensorDict, lazy_stack
from torchrl.envs.transforms import Transform

from torchrl_llm_async.data.reuse import choose_reused


def fill(buffer, ids, start: int) -> None:
    for group_id in ids:
        buffer.announce(group_id, start)
        buffer.extend(make_group(group_id, start, buffer.group_size))


@pytest.mark.inv1
@pytest.mark.inv4
@pytest.mark.parametrize("max_reuse", [2, 3, 5])
@pytest.mark.parametrize("reuse", ["recency", "reward", "uniform"])
def test_no_group_is_used_too_often_too_late_or_twice_at_once(max_reuse, reuse):
    buffer = make_buffer(groups_per_step=2, max_staleness=2, max_reuse=max_reuse, reuse=reuse)
    uses, slots = Counter(), set()
    for step in range(12):
        fill(buffer, (2 * step, 2 * step + 1), start=step)
        batch, info = buffer.sample(timeout=0, return_info=True)
        assert info["group_ids"] == [2 * step, 2 * step + 1]
        assert info["reused_ids"] == sorted(set(info["reused_ids"]) - set(info["group_ids"]))
        assert len(info["reused_ids"]) <= 2 * (max_reuse - 1)
        ids = batch["group", "id"].reshape(-1, 2)
        assert ids[:, 0].tolist() == info["group_ids"] + info["reused_ids"]
        assert torch.equal(ids[:, 0], ids[:, 1])
        assert int((step - batch["group", "start_version"]).max()) <= 2
        uses.update(ids[:, 0].tolist())
        slots.update(info["index"].tolist())
    assert max(uses.values()) == min(max_reuse, 3)  # three steps are within the bound
    assert max(slots) < buffer.storage.max_size == (2 * 2 + 1) * 2 * 2
    stats = buffer.stats()
    assert stats["groups_reused"] == sum(uses.values()) - 24
    assert stats["groups_consumed"] == 24 and buffer.ledger()["accepted"] == 24
    assert stats["lag_sample_max"] == min(max_reuse - 1, 2)


def test_fewer_are_reused_when_there_are_not_so_many():
    buffer = make_buffer(groups_per_step=1, max_staleness=1, max_reuse=2, reuse_groups=3)
    sizes = []
    for step in range(3):
        fill(buffer, (step,), start=step)
        sizes.append(len(buffer.sample(timeout=0)))
    assert sizes == [2, 4, 4]


def test_what_the_trainer_adds_to_a_row_is_not_there_next_time():
    buffer = make_buffer(groups_per_step=1, max_staleness=1, max_reuse=2)
    fill(buffer, (0,), start=0)
    for row in buffer.sample(timeout=0).unbind(0):
        row["loss"] = torch.tensor(1.0)
    fill(buffer, (1,), start=1)
    assert all("loss" not in row for row in buffer.sample(timeout=0).unbind(0))


def test_a_transform_on_the_way_out_sees_a_row_as_it_entered_each_time():
    class TenTimes(Transform):
        def forward(self, tensordict):
            for row in tensordict.unbind(0):
                row["next", "reward"] = 10 * row["next", "reward"]
            return tensordict

    buffer = make_buffer(groups_per_step=1, max_staleness=2, max_reuse=3, transform=TenTimes())
    for step in range(3):
        fill(buffer, (step,), start=step)
        batch = buffer.sample(timeout=0)
    assert batch["group", "id"].tolist() == [2, 2, 0, 0, 1, 1]
    assert batch["next", "reward"].flatten().tolist() == [20.0, 30.0, 0.0, 10.0, 10.0, 20.0]


@pytest.mark.inv4
@pytest.mark.parametrize("reuse", ["recency", "reward", "uniform"])
def test_a_restored_buffer_reuses_the_same_groups(reuse, tmp_path: Path):
    def fresh():
        return make_buffer(
            groups_per_step=2,
            max_staleness=3,
            max_reuse=3,
            reuse=reuse,
            reuse_groups=2,
            generator=torch.Generator().manual_seed(7),
        )

    buffer = fresh()
    for step in range(3):
        fill(buffer, (2 * step, 2 * step + 1), start=step)
        buffer.sample(timeout=0)
    buffer.dumps(tmp_path)
    again = fresh()
    again.loads(tmp_path)
    for step in range(3, 8):
        drawn = []
        for one in (buffer, again):
            fill(one, (2 * step, 2 * step + 1), start=step)
            batch, info = one.sample(timeout=0, return_info=True)
            drawn.append((info["reused_ids"], list(batch["text", "response"])))
        assert drawn[0] == drawn[1] and drawn[0][0]
    assert buffer.stats()["groups_reused"] == again.stats()["groups_reused"]


def test_the_newest_come_first_by_recency():
    groups = [(7, 3, 0.0), (2, 1, 9.0), (5, 3, 0.0), (3, 2, 9.0)]
    assert choose_reused(groups, 2, by="recency") == [5, 7]
    assert choose_reused(groups, 9, by="reward") == [2, 3, 5, 7]


def test_chances_are_those_of_the_rewards():
    """Of three groups one is drawn, by softmax of the rewards or evenly."""
    groups = [(0, 0, 0.0), (1, 0, 1.0), (2, 0, 2.0)]
    generator = torch.Generator().manual_seed(0)
    for by, wanted in (
        ("reward", torch.tensor([0.0, 1.0, 2.0]).softmax(0).tolist()),
        ("uniform", [1 / 3] * 3),
    ):
        drawn = Counter(
            choose_reused(groups, 1, by=by, generator=generator)[0] for _ in range(4000)
        )
        for group_id, chance in enumerate(wanted):
            assert drawn[group_id] / 4000 == pytest.approx(chance, abs=0.03)


def test_rewards_far_apart_are_no_trouble():
    """Wherever they stand the best are drawn, although few of their exp(reward) can be written."""
    for rewards in itertools.permutations([0.0, 1000.0, 5000.0, -5000.0, 100.0]):
        groups = [(group_id, 0, reward) for group_id, reward in enumerate(rewards)]
        for count in range(1, 5):
            best = sorted(range(5), key=lambda group_id, of=rewards: of[group_id])[-count:]
            drawn = choose_reused(groups, count, by="reward", generator=torch.Generator())
            assert drawn == sorted(best)


def test_the_reward_s_key_may_be_nested_anywhere():
    buffer = make_buffer(
        groups_per_step=1,
        max_staleness=2,
        max_reuse=2,
        reuse="reward",
        reuse_groups=1,
        reward_key=("a", "b", "reward"),
        generator=torch.Generator().manual_seed(0),
    )
    for step, reward in enumerate((1000.0, 0.0, 0.0)):
        buffer.announce(step, step)
        rows = make_group(step, step)
        shaped = [
            row.update(TensorDict({"a": {"b": {"reward": torch.tensor([reward])}}}))
            for row in rows.unbind(0)
        ]
        buffer.extend(lazy_stack(shaped))
        _, info = buffer.sample(timeout=0, return_info=True)
    assert info["reused_ids"] == [1]  # group 0 was reused at step 1, and is used up


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(max_reuse=0), "max_reuse is 0"),
        (dict(max_reuse=2, max_staleness=0), "a group would lag by 1"),
        (dict(max_reuse=2, reuse_groups=0), "max_reuse is 2 and reuse_groups 0"),
        (dict(reuse_groups=3), "max_reuse is 1 and reuse_groups 3"),
        (dict(max_reuse=2, reuse="random"), "reuse is 'random'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_buffer(**options)
