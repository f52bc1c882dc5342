"""A training run without data: the rules of staleness, and what becomes of each group.

The controller and the sampler are those of a real run. What stands in for the replay buffer hands
out slots in its place, and remembers whose they are.
"""

from __future__ import annotations

import json
import random

import torch

from torchrl_llm_async.data import StalenessSampler
from torchrl_llm_async.data.stored_group import StoredGroup
from torchrl_llm_async.staleness import StalenessController


class Slots:
    """A storage without contents: one slot for each group, and who has it."""

    ndim, device = 1, None

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self.owners: list[int] = []

    def __len__(self) -> int:
        return len(self.owners)

    def take(self, group_id: int, sampler: StalenessSampler) -> torch.Tensor:
        """A free slot, found as TorchRL's buffer finds it."""
        index = sampler._pop_consumed_indices(self, 1)
        if index.numel():
            self.owners[int(index)] = group_id
        else:
            index = torch.tensor([len(self)])
            self.owners.append(group_id)
        sampler.extend(index)
        return index


class Run:
    """A controller, a sampler and their accounts; the caller decides what happens next.

    Every token is taken to be as old as it may be, of its group's start version.
    """

    def __init__(
        self, groups_per_step, max_staleness, total_steps, publish_every=1, drop=False, max_reuse=1
    ):
        self.bounds = dict(groups_per_step=groups_per_step, max_staleness=max_staleness)
        self.controller = StalenessController(**self.bounds, total_steps=total_steps)
        self.max_reuse = max_reuse if max_staleness else 1
        self.sampler = StalenessSampler(
            **self.bounds,
            on_stale="drop" if drop else "wait",
            max_reuse=self.max_reuse,
            reuse_groups=(self.max_reuse - 1) * groups_per_step,
        )
        kept = max_staleness if self.max_reuse > 1 else 0
        self.slots = Slots((max_staleness + 1 + kept) * groups_per_step)
        self.total_steps, self.publish_every, self.drop = total_steps, publish_every, drop
        self.next_id = 0
        self.consumed, self.uses, self.rejected, self.dropped = {}, {}, {}, []

    @property
    def step(self):
        return self.sampler.consumer_version

    @property
    def running(self):
        return self.sampler.running

    @property
    def ledger(self):
        return self.sampler.ledger

    def admit(self):
        start = self.controller.admit(self.next_id)
        self.sampler.announce(self.next_id, start)
        self.next_id += 1

    def finish(self, group_id):
        start = self.running[group_id]
        index = self.slots.take(group_id, self.sampler)
        versions = {start: 1}
        group = StoredGroup(start, index, versions, oldest=(start,), delivered_at=self.step)
        self.sampler.deliver(group_id, group)
        assert self.controller.finish(group_id)

    def reject(self, group_id):
        self.rejected[group_id] = self.running[group_id]
        self.sampler.retract(group_id, "test")
        assert self.controller.reject(group_id, "test")

    def publish(self):
        """Serves the newest version that was published."""
        last = self.step == self.total_steps
        version = self.step if last else self.step - self.step % self.publish_every
        self.controller.serve(max(version, self.controller.served_version))

    def train(self):
        """One training step; its groups, or None if its batch is not there."""
        step, eta = self.step, self.bounds["max_staleness"]
        if not self.sampler.can_sample(self.slots, len(self.slots)):
            return None
        finished = {i: group.start_version for i, group in self.sampler.finished.items()}
        index, info = self.sampler.sample(self.slots, len(self.slots))
        chosen, reused = info["group_ids"], info["reused_ids"]
        assert info["step"] == step == self.step - 1
        assert [self.slots.owners[slot] for slot in index.tolist()] == [*chosen, *reused]
        assert len({*chosen, *reused}) == len(index)
        assert len(chosen) == self.bounds["groups_per_step"]
        assert chosen == sorted(finished, key=lambda i: (finished[i], i))[: len(chosen)]
        assert not self.consumed.keys() & {*chosen} and self.consumed.keys() >= {*reused}
        assert min(info["lag_histogram"]) >= 0 and max(info["lag_histogram"]) <= eta
        for group_id in (*chosen, *reused):
            self.consumed.setdefault(group_id, step)
            self.uses[group_id] = self.uses.get(group_id, 0) + 1
            assert self.uses[group_id] <= self.max_reuse
        overdue = self.sampler.drop_overdue()
        assert self.drop or not overdue
        for group_id in overdue:
            self.dropped.append(group_id)
            assert self.controller.drop(group_id, "stale")
            assert not self.controller.reject(group_id, "stale")  # its producer ends it
            assert self.sampler.discard_late(group_id)
            del self.sampler.untold[group_id]
        if self.drop:  # Messages cross: of these the consumer might not have heard yet.
            for group_id in [g for g, start in self.rejected.items() if start + eta <= step]:
                assert not self.controller.drop(group_id, "stale")
                del self.rejected[group_id]
        return chosen

    def check(self):
        counts, ledger = self.ledger.counts(), self.controller.ledger()
        assert counts["consumed"] == len(self.consumed)
        assert {name: counts[name] for name in ledger} == ledger
        assert ledger["submitted"] == self.next_id
        assert ledger["running"] == len(self.running)
        assert ledger["accepted"] == len(self.sampler.finished) + len(self.consumed)
        assert ledger["dropped"] == len(self.dropped)
        in_flight = len(self.in_flight())
        eta, batch = self.bounds["max_staleness"], self.bounds["groups_per_step"]
        assert in_flight <= (eta + 1) * batch
        fed = min(self.controller.served_version + eta + 1, self.total_steps)
        assert self.controller.capacity() == max((fed - self.step) * batch - in_flight, 0)
        held = {**self.sampler.finished, **self.sampler.reusable}
        for group_id, group in held.items():
            assert self.slots.owners[int(group.index)] == group_id
        assert len(self.slots) <= self.slots.max_size

    # ------------------------------------------------------------------ checkpoints
    def cut(self) -> str:
        """Everything, as a checkpoint has it; but no times, and a slot for each group."""
        own = ("next_id", "consumed", "uses", "rejected", "dropped")
        groups = self.sampler.groups_state()
        for packed in (*groups["finished"], *groups["reusable"]):
            packed |= {"index": None, "flight_s": 0.0, "arrived": 0.0}
        groups["running"] = [[group_id, start, 0.0] for group_id, start, _ in groups["running"]]
        return json.dumps(
            {
                "bounds": self.bounds,
                "publish_every": self.publish_every,
                "max_reuse": self.max_reuse,
                "controller": self.controller.state_dict(),
                "groups": groups,
                **{name: getattr(self, name) for name in own},
            }
        )

    @classmethod
    def resumed(cls, cut: str, total_steps: int, drop: bool, **options: int) -> Run:
        """Another run, of other processes, that goes on from a cut; by default with its options.

        Raises:
            ValueError: with these bounds some deadline could not be met.
        """
        state = json.loads(cut)
        options = {
            **state["bounds"],
            "publish_every": state["publish_every"],
            "max_reuse": state["max_reuse"],
            **options,
        }
        run = cls(**options, total_steps=total_steps, drop=drop)
        run.sampler.load_groups_state(
            state["groups"], store=lambda group_id: run.slots.take(group_id, run.sampler)
        )
        run.next_id, run.dropped = state["next_id"], state["dropped"]
        for name in ("consumed", "uses", "rejected"):
            setattr(run, name, {int(group_id): v for group_id, v in state[name].items()})
        run.controller.load_state_dict(state["controller"], step=run.step)
        return run

    def in_flight(self) -> list[int]:
        """Start versions of the groups that are admitted, and not consumed or refunded."""
        return [*self.running.values(), *(g.start_version for g in self.sampler.finished.values())]


def loaded_sampler(step: int, finished: dict, running: dict, **options) -> StalenessSampler:
    """A sampler that finds these groups, start versions by id in ascending order, before a step.

    Raises:
        ValueError: with the sampler's bounds some deadline could not be met.
    """
    groups = len(finished) + len(running)
    free = StalenessSampler(groups_per_step=groups + 1, max_staleness=10**6)
    free.consumer_version = step
    for group_id, start in sorted({**finished, **running}.items()):
        free.announce(group_id, start)
    slots = Slots(groups)
    for group_id, start in random.Random(step).sample(sorted(finished.items()), len(finished)):
        index = slots.take(group_id, free)
        free.deliver(group_id, StoredGroup(start, index, {start: 1}, (start,), delivered_at=step))
    sampler = StalenessSampler(**options)
    slots = Slots(groups)
    sampler.load_groups_state(
        free.groups_state(), store=lambda group_id: slots.take(group_id, sampler)
    )
    sampler.slots = slots
    return sampler
