"""The collector's loop: prompts in, finished groups out, generation never waiting for training.

Owns the admission loop, the assembly of groups, what becomes of those that fail, weight switches,
and the collector's state for a checkpoint. How many may be admitted is the
:class:`~torchrl_llm_async.staleness.StalenessController`'s affair, a single trajectory
:mod:`.episode`'s, environments and their threads :mod:`.env_pool`'s, held-out problems
:mod:`.evaluation`'s, transport the host's (:mod:`.host`).
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from torchrl._utils import logger as torchrl_logger
from torchrl.envs import EnvBase

from torchrl_llm_async.checkpoint.tree import Tree
from torchrl_llm_async.collectors.conversation import Conversation
from torchrl_llm_async.collectors.env_pool import EnvPool, EpisodeError, WorkerThreads
from torchrl_llm_async.collectors.episode import run_episode
from torchrl_llm_async.collectors.evaluation import HeldOut
from torchrl_llm_async.collectors.lengths import LengthPredictor
from torchrl_llm_async.collectors.problems import Problems
from torchrl_llm_async.collectors.settings import RolloutConfig, RolloutStats
from torchrl_llm_async.collectors.state import (
    Progress,
    pack_problem,
    pack_trajectory,
    unpack_problem,
    unpack_trajectory,
)
from torchrl_llm_async.data.trajectory import Trajectory
from torchrl_llm_async.engines import EnginePool, WeightUpdateError
from torchrl_llm_async.staleness import StalenessController

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class _Group:
    """A running group: its problem, and how far each of its members has come."""

    id: int
    start_version: int
    problem: Conversation
    begun: dict[int, Progress] = field(default_factory=dict)
    finished: dict[int, Trajectory] = field(default_factory=dict)
    task: asyncio.Task | None = None

    def state(self, engine: EnginePool) -> Tree:
        members = {
            index: pack_trajectory(self.finished[index])
            if index in self.finished
            else progress.state(engine)
            for index, progress in self.begun.items()
        }
        return {
            "id": self.id,
            "start_version": self.start_version,
            "problem": pack_problem(self.problem),
            "members": [members.get(index, []) for index in range(max(members, default=-1) + 1)],
        }

    def sampled_tokens(self, engine: EnginePool) -> int:
        """Of all its members, those under way included as far as they have come."""
        under_way = [self.begun[index] for index in self.begun.keys() - self.finished.keys()]
        return _sampled_tokens(self.finished.values()) + sum(
            progress.sampled_tokens(engine) for progress in under_way
        )

    @classmethod
    def restored(cls, state: Tree, tokenizer: PreTrainedTokenizerBase) -> _Group:
        problem = unpack_problem(state["problem"], tokenizer)
        group = cls(state["id"], state["start_version"], problem)
        for index, member in enumerate(state["members"]):
            group.begun[index] = Progress()
            if isinstance(member, dict):
                group.finished[index] = unpack_trajectory(member)
            else:
                group.begun[index] = Progress.restored(member)
        return group


class Rollouts:
    """Runs on one asyncio loop, in whichever thread or process hosts it.

    Args:
        config: what to do.
        engine: a started pool of engines.
        tokenizer: the policy's tokenizer.
        send: called with ``("admitted", group_id, start_version)``, then for each group with
            ``("group", trajectories, stats)`` or ``("rejected", group_id, reason, stats)``.
        state: what :meth:`state` gave, to go on from there.

    Attributes:
        held_out: evaluates, if there is an environment for it.
        weights: held while weights switch, and while an evaluation needs them not to.
    """

    def __init__(
        self,
        config: RolloutConfig,
        engine: EnginePool,
        tokenizer: PreTrainedTokenizerBase,
        send: Callable[[tuple], None],
        state: Tree = None,
    ):
        self.config = config
        self.engine = engine
        self.tokenizer = tokenizer
        self.stats = RolloutStats()
        self.controller = StalenessController(
            groups_per_step=config.groups_per_step,
            max_staleness=config.max_staleness,
            total_steps=config.total_steps,
        )
        self._send = send
        self._threads = WorkerThreads(config.env_workers)
        self._envs = self._env_pool(config.make_env, seed=config.seed)
        self.held_out: HeldOut | None = None
        if config.make_eval_env is not None:
            self.held_out = HeldOut(config, engine, tokenizer, self._env_pool(config.make_eval_env))
        self.weights = asyncio.Lock()
        self._changed = asyncio.Event()
        self._lengths = LengthPredictor() if config.longest_first else None
        self._problems = Problems(
            self._envs,
            tokenizer,
            window=1 if self._lengths is None else config.groups_per_step,
            expected_length=self._expected_length,
            on_failure=self._count_failure,
            state=None if state is None else state["problems"],
        )
        self._published = (0, 0)  # the last two versions heard of, refused ones included
        self._paused = False
        self._is_first_group = True
        self._groups: dict[int, _Group] = {}  # those that are running
        self._next_id = 0
        self._in_a_row: Counter[str] = Counter()  # rejections since a group was accepted
        self._failures_in_a_row = 0
        self._start = time.perf_counter()
        self._blocked_since: float | None = None
        self._dump: TextIO | None = None
        self._before = RolloutStats()  # of the run that this one goes on with
        self._dump_bytes: int | None = None  # of the run gone on with; what is behind comes again
        if state is not None:
            self._restore(state)

    def _env_pool(self, make_env: Callable[[], EnvBase], *, seed: int | None = None) -> EnvPool:
        config = self.config
        return EnvPool(
            make_env,
            self._threads,
            timeout=config.step_timeout,
            retries=config.step_retries,
            seed=seed,
        )

    # ------------------------------------------------------------------ the loop
    async def continuous_rollouts(self) -> None:
        """Admits groups whenever the staleness bound has room, until it is cancelled."""
        self._open_dump()
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._problems.open()
                await self._take_up(tasks)
                while True:
                    await self._wait_for_room()
                    problem = await self._problems.next()
                    if self._paused:  # while it was drawn
                        self._problems.put_back(problem)
                        continue
                    group_id, self._next_id = self._next_id, self._next_id + 1
                    start_version = self.controller.admit(group_id)
                    self._send(("admitted", group_id, start_version))
                    self._begin(_Group(group_id, start_version, problem), tasks)
        finally:
            if self._dump is not None:
                self._dump.close()

    def _open_dump(self) -> None:
        path = self.config.dump_path
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._dump = open(path, "a", encoding="utf-8")  # noqa: SIM115
            if self._dump_bytes is not None:
                self._dump.truncate(min(self._dump_bytes, self._dump.tell()))
                self._dump.seek(0, os.SEEK_END)  # Where a later cut finds it.

    async def _take_up(self, tasks: asyncio.TaskGroup) -> None:
        """Goes on with the groups of a run resumed, once weights as new as theirs are served."""
        while self.engine.version < self.controller.served_version:
            self._changed.clear()
            await self._changed.wait()
        for group in self._groups.values():
            self._begin(group, tasks)

    def _begin(self, group: _Group, tasks: asyncio.TaskGroup) -> None:
        self._groups[group.id] = group
        group.task = tasks.create_task(self._group(group))
        group.task.add_done_callback(lambda _: self._heed_version())

    async def _wait_for_room(self) -> None:
        """Waits until another group may be admitted: for ever, if the last step has its own."""
        while True:
            has_capacity = self.controller.capacity() > 0
            self._account_for_waiting(has_capacity)
            if (
                has_capacity
                and len(self._groups) < self.config.max_concurrent_groups
                and not self._paused
            ):
                return
            self._changed.clear()
            await self._changed.wait()

    def _account_for_waiting(self, has_capacity: bool) -> None:
        horizon = self.controller.served_version + self.config.max_staleness + 1
        total = self.config.total_steps
        at_the_bound = not has_capacity and (total is None or horizon < total)
        if at_the_bound:
            self._blocked_since = self._blocked_since or time.perf_counter()
        elif self._blocked_since is not None:
            self.stats.waiting_for_trainer_s += time.perf_counter() - self._blocked_since
            self._blocked_since = None

    def _expected_length(self, problem: Conversation) -> float:
        if self._lengths is None:
            return 0.0
        return self._lengths.expect(problem.prompt, problem.prompt_length)

    # ------------------------------------------------------------------ one group
    async def _group(self, group: _Group) -> None:
        """All trajectories of one problem; if one can't be finished the group is rejected."""
        failure: EpisodeError | None = None
        expected = round(self._expected_length(group.problem)) if self._lengths else 0
        try:
            async with asyncio.TaskGroup() as tasks:
                for index in range(self.config.group_size):
                    if index not in group.finished:
                        tasks.create_task(self._member(group, index, max(0, expected) or None))
        except BaseExceptionGroup as errors:
            failures, others = errors.split(EpisodeError)
            if others is not None:
                raise others from None
            failure = failures.exceptions[0]
        if self._groups.get(group.id) is not group:
            return  # Dropped while it failed: a task group that aborts swallows the cancellation.
        trajectories = [group.finished[index] for index in sorted(group.finished)]
        if failure is None:
            self._judge(group.id, trajectories)
        else:
            self._reject(group.id, failure.reason, trajectories)
            torchrl_logger.warning(f"group {group.id} is rejected, {failure.reason}: {failure}")
            self._count_failure(failure.__cause__ or failure)

    async def _member(self, group: _Group, index: int, expected_tokens: int | None) -> None:
        progress = group.begun.setdefault(index, Progress())
        try:
            group.finished[index] = await run_episode(
                self.engine,
                self._envs,
                group.problem,
                sampling=self.config.sampling,
                max_turns=self.config.max_turns,
                seed=self.config.seed,
                group_id=group.id,
                index=index,
                start_version=group.start_version,
                expected_tokens=expected_tokens,
                progress=progress,
            )
        finally:
            self.stats.discarded_tokens += progress.discarded

    def _judge(self, group_id: int, trajectories: list[Trajectory]) -> None:
        """Hands a complete group on, unless the filter objects."""
        self._failures_in_a_row = 0
        self._warn_of_cut_conversations(trajectories)
        if self._lengths is not None:
            self._lengths.learn_group(trajectories)
        group_filter = self.config.group_filter
        reason = None if group_filter is None else group_filter(trajectories)
        if reason is not None:
            self._reject(group_id, reason, trajectories)
            return
        self._in_a_row.clear()
        del self._groups[group_id]
        self.controller.finish(group_id)
        self.stats.groups += 1
        self.stats.samples += len(trajectories)
        self.stats.sampled_tokens += _sampled_tokens(trajectories)
        if self._dump is not None:
            self._dump.writelines(json.dumps(t.to_json()) + "\n" for t in trajectories)
            self._dump.flush()
        self._send(("group", trajectories, self.snapshot()))

    def _warn_of_cut_conversations(self, trajectories: list[Trajectory]) -> None:
        if self._is_first_group and all(t.ended_by == "turns" for t in trajectories):
            torchrl_logger.warning(
                f"no conversation of the first group has ended after {self.config.max_turns} "
                "turn(s), so all are cut and marked truncated; raise collector.max_turns if the "
                "environment has more turns"
            )
        self._is_first_group = False

    def _reject(self, group_id: int, reason: str, finished: list[Trajectory]) -> None:
        """Refunds a group; raises if that has gone on for too long."""
        del self._groups[group_id]
        self.controller.reject(group_id, reason)
        self.stats.rejected_tokens += _sampled_tokens(finished)
        # Before its refund lets another group be announced in its place.
        self._send(("rejected", group_id, reason, self.snapshot()))
        self._in_a_row[reason] += 1
        if self._in_a_row.total() >= self.config.max_rejections:
            raise RuntimeError(
                f"{self._in_a_row.total()} groups in a row were rejected ("
                + ", ".join(f"{count} x {why}" for why, count in self._in_a_row.most_common())
                + "), so training would wait for ever; change the problems, the reward or the "
                "group filter, or raise collector.max_rejections"
            )

    def _count_failure(self, error: BaseException) -> None:
        """Raises the error met if it was one too many in a row."""
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= self.config.max_failures:
            error.add_note(
                f"{self._failures_in_a_row} problems in a row failed, the last with this error; "
                "see collector.max_failures"
            )
            raise error

    # ------------------------------------------------------------------ commands
    async def update_weights(self, version: int, path: Path) -> bool:
        """Switches the engines to the published weights at a token boundary, then admits more.

        Returns:
            Whether they serve. If the publication was refused and the trainer can still go on to
            publish another, the former weights serve until then.

        Raises:
            WeightUpdateError: the publication was refused, and the staleness bound leaves no room
                for the steps up to the next one.
        """
        async with self.weights:
            start = time.perf_counter()
            self._published = (self._published[1], version)
            try:
                await self.engine.update_weights(version, path)
            except WeightUpdateError as error:
                self.stats.weight_updates_refused += 1
                if not self._can_be_repaired():
                    raise
                torchrl_logger.warning(f"{error}; the next publication has to repair it")
                return False
            finally:
                self.stats.weight_update_s += time.perf_counter() - start
                self._heed_version()
        return True

    def _can_be_repaired(self) -> bool:
        """Whether the trainer can go on to its next publication without the last one."""
        if self.engine.version < self.controller.served_version:
            return False  # A run resumed is taken up with it, or not at all.
        former, last = self._published
        following = last + (last - former)  # published every so many steps
        last_step = self.controller.served_version + self.config.max_staleness
        total = self.config.total_steps
        return following - 1 <= last_step and (total is None or last < total)

    def _heed_version(self) -> None:
        """Admits by what the slowest engine serves now, which also grows when that one dies."""
        if self.engine.version > self.controller.served_version:
            self.controller.serve(self.engine.version)
        self._changed.set()

    def drop(self, group_id: int, reason: str) -> None:
        """Gives up a group that the trainer no longer waits for; another takes its place."""
        self.controller.drop(group_id, reason)
        group = self._groups.pop(group_id, None)
        if group is not None:
            self.stats.discarded_tokens += group.sampled_tokens(self.engine)
            if group.task is not None:
                group.task.cancel()
            self.controller.reject(group_id, reason)  # Cancelled, it will not tell of its end.
            self._send(("rejected", group_id, reason, self.snapshot()))  # It will not come.
        self._changed.set()

    async def pause(self) -> None:
        """Admits nothing and samples nothing until :meth:`resume`; running groups stay."""
        self._paused = True
        await self.engine.pause()

    async def resume(self) -> None:
        """Goes on after :meth:`pause`."""
        await self.engine.resume()
        self._paused = False
        self._changed.set()

    def snapshot(self) -> RolloutStats:
        """The totals up to now."""
        now = time.perf_counter()
        engines = vars(self.engine.stats)
        blocked = 0.0 if self._blocked_since is None else now - self._blocked_since
        here = replace(
            self.stats,
            elapsed_s=now - self._start,
            waiting_for_trainer_s=self.stats.waiting_for_trainer_s + blocked,
            env_retries=self._envs.retried,
            engine_restarts=engines["restarts"],
            resubmitted=engines["resubmitted"],
            given_up=engines["given_up"],
            kept_tokens=engines["kept_tokens"],
            discarded_tokens=self.stats.discarded_tokens + engines["discarded_tokens"],
        )
        before = vars(self._before)
        totals = {k: v + before[k] for k, v in vars(here).items() if k != "reasons"}
        rejected = {
            reason: count
            for (state, reason), count in self.controller.reasons().items()
            if state == "rejected"
        }
        return RolloutStats(**{**totals, **self.controller.ledger()}, reasons=rejected)

    # ------------------------------------------------------------------ checkpoints
    def state(self) -> Tree:
        """Everything a resumed run needs, as of this instant: nothing is awaited meanwhile."""
        if self._dump is not None:
            self._dump.flush()
        return {
            "seed": self.config.seed,
            "controller": self.controller.state_dict(),
            "next_id": self._next_id,
            "groups": [group.state(self.engine) for group in self._groups.values()],
            "problems": self._problems.state(),
            "published": self._published,
            "in_a_row": dict(self._in_a_row),
            "failures_in_a_row": self._failures_in_a_row,
            "stats": asdict(self.snapshot()),
            # A run without a dump leaves that of the run it goes on with to those after it.
            "dump_bytes": (self._dump_bytes or 0) if self._dump is None else self._dump.tell(),
            "lengths": None if self._lengths is None else self._lengths.state(),
        }

    def _restore(self, state: Tree) -> None:
        self.controller.load_state_dict(state["controller"], step=state["step"])
        self._next_id = state["next_id"]
        self._published = tuple(state["published"])
        self._in_a_row = Counter(state["in_a_row"])
        self._failures_in_a_row = state["failures_in_a_row"]
        self._is_first_group = False
        ledger = dict.fromkeys(self.controller.ledger(), 0)  # counted by the controller
        self._before = RolloutStats(**{**state["stats"], **ledger, "reasons": {}})
        self._dump_bytes = state["dump_bytes"]
        if self._lengths is not None and state["lengths"] is not None:
            self._lengths.restore(state["lengths"])
        for packed in state["groups"]:
            group = _Group.restored(packed, self.tokenizer)
            self._groups[group.id] = group
        for group_id, reason in state["pending_drops"]:
            self.drop(group_id, reason)

    async def close(self) -> None:
        """Closes the environments and ends their threads; calls that hang are not waited for."""
        self._problems.close()
        await self._envs.close()
        if self.held_out is not None:
            await self.held_out.env_pool.close()
        self._threads.close()


def _sampled_tokens(trajectories: Iterable[Trajectory]) -> int:
    return sum(int(trajectory.sampled.sum()) for trajectory in trajectories)
