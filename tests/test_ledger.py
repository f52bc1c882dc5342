"""Accounts of groups: against plain sets, through JSON, and caught when they do not add up."""

from __future__ import annotations

import json
import random

import pytest

from torchrl_llm_async.ledger import Ledger

MOVES = {
    ("running", "waiting"): "accept",
    ("running", "rejected"): "reject",
    ("running", "dropped"): "drop",
    ("waiting", "dropped"): "drop",
    ("waiting", "consumed"): "consume",
}


@pytest.mark.inv4
def test_random_lives_against_plain_sets():
    rng = random.Random(0)
    ledger, version = Ledger(), 0
    states = {s: set() for s in ("running", "waiting", "consumed", "rejected", "dropped")}
    starts: dict[int, int] = {}
    for group_id in range(3000):
        version += rng.random() < 0.2
        ledger.submit(group_id, version)
        starts[group_id] = version
        states["running"].add(group_id)
        for _ in range(rng.randrange(3)):
            source, target = rng.choice([move for move in MOVES if states[move[0]]] or list(MOVES))
            if states[source]:
                group = rng.choice(sorted(states[source]))
                reason = rng.choice("ab") if target in ("rejected", "dropped") else None
                move = getattr(ledger, MOVES[source, target])
                move(group) if reason is None else move(group, reason)
                states[source].remove(group)
                states[target].add(group)
        if group_id % 100 == 0:
            copy = Ledger()
            copy.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
            assert copy.by_version() == ledger.by_version()
            ledger = copy
        counts = ledger.counts()
        assert counts == {
            "submitted": group_id + 1,
            "running": len(states["running"]),
            "accepted": len(states["waiting"] | states["consumed"]),
            "rejected": len(states["rejected"]),
            "dropped": len(states["dropped"]),
            "consumed": len(states["consumed"]),
        }
    rows = ledger.by_version()
    assert -1 in rows and len(rows) > 100
    for version, row in rows.items():
        here = {
            group for group, start in starts.items() if (start if start in rows else -1) == version
        }
        assert row["submitted"] == len(here)
        assert row["consumed"] == len(here & states["consumed"])
        assert row["running"] == len(here & states["running"])
    assert sum(ledger.reasons().values()) == len(states["rejected"] | states["dropped"])


@pytest.mark.inv4
def test_a_count_that_is_off_is_caught():
    def wrong(change):
        ledger = Ledger()
        ledger.submit(0, 0), ledger.submit(1, 1), ledger.accept(0), ledger.consume(0)
        ledger.reject(1, "crash")
        state = ledger.state_dict()
        change(state)
        ledger.load_state_dict(state)
        with pytest.raises(RuntimeError, match=r"add up|by reason"):
            ledger.counts()

    wrong(lambda state: state["submitted"].pop())
    wrong(lambda state: state["submitted"].pop(0))
    wrong(lambda state: state["submitted"].reverse() or state["submitted"].append([0, 2]))
    wrong(lambda state: state["consumed"].append([1, 1]))
    wrong(lambda state: state["running"].append([7, 0]))
    wrong(lambda state: state["reasons"].clear())


def test_a_group_in_another_state_is_refused():
    ledger = Ledger()
    ledger.submit(0, 0)
    with pytest.raises(ValueError, match="entered already"):
        ledger.submit(0, 1)
    with pytest.raises(ValueError, match="group 0 is not in that state"):
        ledger.consume(0)
    ledger.accept(0)
    with pytest.raises(ValueError, match="group 0 is not in that state"):
        ledger.reject(0, "late")
    ledger.drop(0, "stale")
    with pytest.raises(ValueError, match="group 0 is not in that state"):
        ledger.drop(0, "stale")


def test_it_does_not_grow_with_the_groups_or_for_ever_with_the_versions():
    ledger = Ledger()
    for group_id in range(20_000):
        ledger.submit(group_id, group_id // 2)
        if group_id != 10:  # one that never ends
            ledger.accept(group_id), ledger.consume(group_id)
    assert len(ledger.by_version()) <= 103
    assert ledger.by_version()[5] == dict(
        submitted=2, running=1, accepted=1, rejected=0, dropped=0, consumed=1
    )
    assert ledger.counts()["submitted"] == 20_000 and ledger.counts()["consumed"] == 19_999
    assert len(json.dumps(ledger.state_dict())) < 5_000
