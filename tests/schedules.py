"""A training run without data: the rules of staleness, and what becomes of each group."""

from __future__ import annotations

import json
from collections import Counter

from torchrl_llm_async.deadlines import check_deadlines, select_groups
from torchrl_llm_async.ledger import Ledger
from torchrl_llm_async.staleness import StalenessController


class Run:
    """A controller, a consumer and a ledger; the caller decides what happens next.

    Every token is taken to be as old as it may be, of its group's start version.
    """

    def __init__(self, groups_per_step, max_staleness, total_steps, publish_every=1, drop=False):
        self.bounds = dict(groups_per_step=groups_per_step, max_staleness=max_staleness)
        self.controller = StalenessController(**self.bounds, total_steps=total_steps)
        self.ledger = Ledger()
        self.total_steps, self.publish_every, self.drop = total_steps, publish_every, drop
        self.step, self.next_id = 0, 0
        self.running, self.finished, self.consumed, self.rejected = {}, {}, {}, {}
        self.dropped = []
        self.most_in_flight = (max_staleness + 1) * groups_per_step

    def admit(self):
        start = self.controller.admit(self.next_id)
        self.ledger.submit(self.next_id, start)
        self.running[self.next_id] = start
        self.next_id += 1

    def finish(self, group_id):
        self.finished[group_id] = self.running.pop(group_id)
        self.ledger.accept(group_id)
        assert self.controller.finish(group_id)

    def reject(self, group_id):
        self.rejected[group_id] = self.running.pop(group_id)
        self.ledger.reject(group_id, "test")
        assert self.controller.reject(group_id, "test")

    def publish(self):
        """Serves the newest version that was published."""
        last = self.step == self.total_steps
        version = self.step if last else self.step - self.step % self.publish_every
        self.controller.serve(max(version, self.controller.served_version))

    def train(self):
        """One training step; its groups, or None if its batch is not there."""
        eta = self.bounds["max_staleness"]
        running = {
            group_id: start
            for group_id, start in self.running.items()
            if not self.drop or start + eta > self.step
        }
        chosen = select_groups(self.step, **self.bounds, finished=self.finished, running=running)
        if chosen is None:
            return None
        assert len(chosen) == self.bounds["groups_per_step"]
        for group_id in chosen:
            start = self.finished.pop(group_id)
            assert 0 <= self.step - start <= eta
            assert group_id not in self.consumed
            self.ledger.consume(group_id)
            self.consumed[group_id] = self.step
        if self.drop:
            for group_id in [g for g, start in self.running.items() if start + eta <= self.step]:
                del self.running[group_id]
                self.dropped.append(group_id)
                self.ledger.drop(group_id, "stale")
                assert self.controller.drop(group_id, "stale")
                assert not self.controller.reject(group_id, "stale")  # its producer ends it
            # Messages cross: of these the consumer might not have heard yet.
            for group_id in [g for g, start in self.rejected.items() if start + eta <= self.step]:
                assert not self.controller.drop(group_id, "stale")
                del self.rejected[group_id]
        self.step += 1
        return chosen

    def check(self):
        counts, ledger = self.ledger.counts(), self.controller.ledger()
        assert counts["consumed"] == len(self.consumed)
        assert {name: counts[name] for name in ledger} == ledger
        assert ledger["submitted"] == self.next_id
        assert ledger["running"] == len(self.running)
        assert ledger["accepted"] == len(self.finished) + len(self.consumed)
        assert ledger["dropped"] == len(self.dropped)
        in_flight = len(self.in_flight())
        assert in_flight <= self.most_in_flight
        eta, batch = self.bounds["max_staleness"], self.bounds["groups_per_step"]
        fed = min(self.controller.served_version + eta + 1, self.total_steps)
        assert self.controller.capacity() == max((fed - self.step) * batch - in_flight, 0)

    # ------------------------------------------------------------------ checkpoints
    def cut(self) -> str:
        """Everything, as a checkpoint has it."""
        own = ("step", "next_id", "running", "finished", "consumed", "rejected", "dropped")
        return json.dumps(
            {
                "bounds": self.bounds,
                "publish_every": self.publish_every,
                "controller": self.controller.state_dict(),
                "ledger": self.ledger.state_dict(),
                **{name: getattr(self, name) for name in own},
            }
        )

    @classmethod
    def resumed(cls, cut: str, total_steps: int, drop: bool, **bounds: int) -> Run:
        """Another run, of other processes, that goes on from a cut; by default with its bounds.

        Raises:
            RuntimeError: with these bounds some deadline could not be met.
        """
        state = json.loads(cut)
        run = cls(
            **{**state["bounds"], "publish_every": state["publish_every"], **bounds},
            total_steps=total_steps,
            drop=drop,
        )
        run.step, run.next_id, run.dropped = state["step"], state["next_id"], state["dropped"]
        for name in ("running", "finished", "consumed", "rejected"):
            setattr(run, name, {int(group_id): v for group_id, v in state[name].items()})
        check_deadlines(run.step, **run.bounds, waiting=Counter(run.in_flight()))
        run.most_in_flight = max(run.most_in_flight, len(run.in_flight()))
        run.controller.load_state_dict(state["controller"], step=run.step)
        run.ledger.load_state_dict(state["ledger"])
        return run

    def in_flight(self) -> list[int]:
        """Start versions of the groups that are admitted, and not consumed or refunded."""
        return [*self.running.values(), *self.finished.values()]
