"""The collector's loop: prompts in, finished groups out, generation never waiting for training.

Owns the admission loop, the assembly of groups, what becomes of those that fail, and weight
switches. How many may be admitted is the
:class:`~torchrl_llm_async.staleness.StalenessController`'s affair, a single trajectory
:mod:`.episode`'s, environments and their threads :mod:`.env_pool`'s, held-out problems
:mod:`.evaluation`'s, transport the host's (:mod:`.host`).
"""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from torchrl._utils import logger as torchrl_logger
from torchrl.envs import EnvBase

from torchrl_llm_async.collectors.conversation import Conversation
from torchrl_llm_async.collectors.env_pool import (
    EnvPool,
    EpisodeError,
    OutOfTimeError,
    StuckThreadsError,
    WorkerThreads,
)
from torchrl_llm_async.collectors.episode import run_episode
from torchrl_llm_async.collectors.evaluation import HeldOut
from torchrl_llm_async.collectors.lengths import LengthPredictor
from torchrl_llm_async.data.trajectory import Trajectory
from torchrl_llm_async.engines import EnginePool, SamplingConfig, WeightUpdateError
from torchrl_llm_async.staleness import StalenessController

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GroupFilter = Callable[[Sequence[Trajectory]], str | None]


@dataclass(frozen=True)
class RolloutConfig:
    """What a collector does; see :class:`.AsyncLLMCollector` for the meaning of each field."""

    make_env: Callable[[], EnvBase]
    tokenizer_path: str
    sampling: SamplingConfig
    group_size: int
    groups_per_step: int
    max_staleness: int
    total_steps: int | None
    max_concurrent_groups: int
    max_turns: int
    env_workers: int
    step_timeout: float
    step_retries: int
    max_failures: int
    max_rejections: int
    group_filter: GroupFilter | None
    longest_first: bool
    seed: int
    make_eval_env: Callable[[], EnvBase] | None
    eval_problems: int
    dump_path: Path | None
    log_path: Path | None


@dataclass
class RolloutStats:
    """Running totals since the start, in the units their names tell."""

    groups: int = 0
    samples: int = 0
    sampled_tokens: int = 0
    elapsed_s: float = 0.0
    # Time in which the staleness bound left no room for another group.
    waiting_for_trainer_s: float = 0.0
    weight_update_s: float = 0.0
    weight_updates_refused: int = 0
    # Tokens of finished trajectories whose group was rejected.
    rejected_tokens: int = 0
    env_retries: int = 0
    # Of answers whose engine died; see PoolStats.
    engine_restarts: int = 0
    resubmitted: int = 0
    given_up: int = 0
    kept_tokens: int = 0
    discarded_tokens: int = 0
    # The ledger: always submitted = running + accepted + rejected + dropped.
    submitted: int = 0
    running: int = 0
    accepted: int = 0
    rejected: int = 0
    dropped: int = 0
    # Rejected groups by reason.
    reasons: dict[str, int] = field(default_factory=dict)


class Rollouts:
    """Runs on one asyncio loop, in whichever thread or process hosts it.

    Args:
        config: what to do.
        engine: a started pool of engines.
        tokenizer: the policy's tokenizer.
        send: called with ``("admitted", group_id, start_version)``, then for each group with
            ``("group", trajectories, stats)`` or ``("rejected", group_id, reason, stats)``.

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
        self._problems: list[Conversation] = []  # drawn and not yet begun, the next one last
        self._published = (0, 0)  # the last two versions heard of, refused ones included
        self._paused = False
        self._is_first_group = True
        self._running: dict[int, asyncio.Task] = {}
        self._prompts: EnvBase | None = None
        self._in_a_row: Counter[str] = Counter()  # rejections since a group was accepted
        self._failures_in_a_row = 0
        self._start = time.perf_counter()
        self._blocked_since: float | None = None
        self._dump: TextIO | None = None

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
        self._prompts = await self._envs.make()
        if self.config.dump_path is not None:
            self.config.dump_path.parent.mkdir(parents=True, exist_ok=True)
            self._dump = open(self.config.dump_path, "a", encoding="utf-8")  # noqa: SIM115
        try:
            async with asyncio.TaskGroup() as groups:
                group_id = 0
                while True:
                    await self._wait_for_room()
                    problem = await self._next_problem(self._prompts)
                    if self._paused:  # while it was drawn
                        self._problems.append(problem)
                        continue
                    start_version = self.controller.admit(group_id)
                    self._send(("admitted", group_id, start_version))
                    task = groups.create_task(self._group(group_id, start_version, problem))
                    self._running[group_id] = task
                    task.add_done_callback(functools.partial(self._ended, group_id))
                    group_id += 1
        finally:
            if self._dump is not None:
                self._dump.close()

    async def _wait_for_room(self) -> None:
        """Waits until another group may be admitted: for ever, if the last step has its own."""
        while True:
            has_capacity = self.controller.capacity() > 0
            self._account_for_waiting(has_capacity)
            if (
                has_capacity
                and len(self._running) < self.config.max_concurrent_groups
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

    async def _next_problem(self, prompts: EnvBase) -> Conversation:
        """The next problem in their order or, by windows of a step's groups, the longest first."""
        if self._problems:
            return self._problems.pop()
        if self._lengths is None:
            return await self._draw(prompts)
        window = [await self._draw(prompts) for _ in range(self.config.groups_per_step)]
        self._problems = sorted(window, key=self._expected_length)
        return self._problems.pop()

    def _expected_length(self, problem: Conversation) -> float:
        return self._lengths.expect(problem.prompt, problem.prompt_length)

    async def _draw(self, prompts: EnvBase) -> Conversation:
        while True:
            try:
                return Conversation(self.tokenizer, await self._envs.reset(prompts))
            except (OutOfTimeError, StuckThreadsError):
                raise  # The environment that knows the position among the problems hangs.
            except Exception as error:  # An environment or a chat template may raise anything.
                torchrl_logger.warning(f"a problem could not be drawn: {error!r}")
                self._count_failure(error)

    def _ended(self, group_id: int, group: asyncio.Task) -> None:
        del self._running[group_id]
        self._heed_version()

    # ------------------------------------------------------------------ one group
    async def _group(self, group_id: int, start_version: int, problem: Conversation) -> None:
        """All trajectories of one problem; if one can't be finished the group is rejected."""
        members: list[asyncio.Task[Trajectory]] = []
        failure: EpisodeError | None = None
        expected = None
        if self._lengths is not None:
            expected = max(0, round(self._expected_length(problem))) or None
        try:
            async with asyncio.TaskGroup() as tasks:
                for index in range(self.config.group_size):
                    episode = run_episode(
                        self.engine,
                        self._envs,
                        problem,
                        sampling=self.config.sampling,
                        max_turns=self.config.max_turns,
                        seed=self.config.seed,
                        group_id=group_id,
                        index=index,
                        start_version=start_version,
                        expected_tokens=expected,
                    )
                    members.append(tasks.create_task(episode))
        except BaseExceptionGroup as errors:
            failures, others = errors.split(EpisodeError)
            if others is not None:
                raise others from None
            failure = failures.exceptions[0]
        if failure is None:
            self._judge(group_id, [member.result() for member in members])
        else:
            self._reject(group_id, failure.reason, _finished(members))
            torchrl_logger.warning(f"group {group_id} is rejected, {failure.reason}: {failure}")
            self._count_failure(failure.__cause__ or failure)

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
        if not self.controller.finish(group_id):  # dropped in the meantime
            return
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
        if not self.controller.reject(group_id, reason):  # dropped in the meantime
            return
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
        if group_id in self._running:
            self._running[group_id].cancel()
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
        return replace(
            self.stats,
            elapsed_s=now - self._start,
            waiting_for_trainer_s=self.stats.waiting_for_trainer_s + blocked,
            env_retries=self._envs.retried,
            engine_restarts=engines["restarts"],
            **{name: count for name, count in engines.items() if name != "restarts"},
            reasons={
                reason: count
                for (state, reason), count in self.controller.reasons().items()
                if state == "rejected"
            },
            **self.controller.ledger(),
        )

    async def close(self) -> None:
        """Closes the environments and ends their threads; calls that hang are not waited for."""
        if self._prompts is not None:
            self._envs.give_back(self._prompts)
        await self._envs.close()
        if self.held_out is not None:
            await self.held_out.env_pool.close()
        self._threads.close()


def _finished(tasks: Sequence[asyncio.Task[Trajectory]]) -> list[Trajectory]:
    return [t.result() for t in tasks if t.done() and not t.cancelled() and not t.exception()]


def _sampled_tokens(trajectories: Sequence[Trajectory]) -> int:
    return sum(int(trajectory.sampled.sum()) for trajectory in trajectories)
