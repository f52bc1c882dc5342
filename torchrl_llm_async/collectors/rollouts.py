"""The collector's loop: prompts in, finished groups out, generation never waiting for training.

Owns one coroutine per trajectory, the assembly of groups, the bounded pool in which environments
are stepped, and the order of weight switches and evaluations. Admission is the
:class:`~torchrl_llm_async.staleness.StalenessController`'s, sampling the engine's, transport the
host's (:mod:`.host`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase

from torchrl_llm_async.collectors.conversation import Conversation
from torchrl_llm_async.data.trajectory import Trajectory
from torchrl_llm_async.engines import GenerationEngine, SamplingConfig
from torchrl_llm_async.staleness import StalenessController

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SEEN_ELSEWHERE = {"reward", "done", "terminated", "truncated", "tokens", "text", "history"}


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


@dataclass
class Evaluation:
    """Greedy answers to the held-out problems, all under one version of the weights."""

    version: int
    rewards: list[float]
    answer_tokens: float
    truncated: float
    seconds: float

    @property
    def accuracy(self) -> float:
        """Share of problems with a reward of 1."""
        return float(np.mean(np.asarray(self.rewards) >= 1.0))


class _ThreadEnvs(threading.local):
    def __init__(self):
        self.by_maker: dict[Callable[[], EnvBase], EnvBase] = {}


class Rollouts:
    """Runs on one asyncio loop, in whichever thread or process hosts it.

    Args:
        config: what to do.
        engine: a started engine.
        tokenizer: the policy's tokenizer.
        send: called with ``("admitted", group_id, start_version)`` and
            ``("group", trajectories, stats)``, in that order for each group.

    Attributes:
        weights: held while weights switch, and while an evaluation needs them not to.
    """

    def __init__(
        self,
        config: RolloutConfig,
        engine: GenerationEngine,
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
        self._room = asyncio.Event()
        self._room.set()
        self._running: set[asyncio.Task] = set()
        self.weights = asyncio.Lock()
        self._start = time.perf_counter()
        self._blocked_since: float | None = None
        # Problems are drawn on a thread of their own, so that their order never depends on steps.
        self._prompt_thread = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._step_threads = ThreadPoolExecutor(config.env_workers, thread_name_prefix="env-step")
        # A step's time limit must not count its time in the pool's queue.
        self._free_threads = asyncio.Semaphore(config.env_workers)
        self._thread_envs = _ThreadEnvs()
        self._prompt_env: EnvBase | None = None
        self._eval_observations: list[TensorDictBase] | None = None
        self._dump: TextIO | None = None

    # ------------------------------------------------------------------ the loop
    async def continuous_rollouts(self) -> None:
        """Admits groups whenever the staleness bound has room; raises what any rollout raised."""
        self._prompt_env = await self._on_prompt_thread(self._make_env, self.config.make_env)
        if self.config.dump_path is not None:
            self.config.dump_path.parent.mkdir(parents=True, exist_ok=True)
            self._dump = open(self.config.dump_path, "a", encoding="utf-8")  # noqa: SIM115
        try:
            async with asyncio.TaskGroup() as group_tasks:
                next_id = 0
                while not self._all_admitted(next_id):
                    await self._wait_for_room()
                    observation = await self._on_prompt_thread(self._prompt_env.reset)
                    start_version = self.controller.admit(next_id)
                    self._send(("admitted", next_id, start_version))
                    task = group_tasks.create_task(self._group(next_id, start_version, observation))
                    self._running.add(task)
                    task.add_done_callback(self._ended)
                    next_id += 1
        finally:
            if self._dump is not None:
                self._dump.close()

    def _all_admitted(self, count: int) -> bool:
        total = self.config.total_steps
        return total is not None and count >= total * self.config.groups_per_step

    async def _wait_for_room(self) -> None:
        while True:
            if self.controller.capacity() == 0:
                self._blocked_since = self._blocked_since or time.perf_counter()
            elif len(self._running) < self.config.max_concurrent_groups:
                return
            self._room.clear()
            await self._room.wait()
            if self._blocked_since is not None and self.controller.capacity() > 0:
                self.stats = self.snapshot()
                self._blocked_since = None

    def _ended(self, task: asyncio.Task) -> None:
        self._running.discard(task)
        self._room.set()

    async def _on_prompt_thread(self, function: Callable, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(
            self._prompt_thread, _call_env, function, *args
        )

    def _make_env(self, make_env: Callable[[], EnvBase]) -> EnvBase:
        """An environment; those that rollouts use all have the collector's seed."""
        env = make_env()
        if make_env is self.config.make_env:
            env.set_seed(self.config.seed)
        return env

    # ------------------------------------------------------------------ one group
    async def _group(self, group_id: int, start_version: int, observation: TensorDictBase) -> None:
        async with asyncio.TaskGroup() as tasks:
            members = [
                tasks.create_task(
                    self._trajectory(
                        observation.clone(),
                        self.config.make_env,
                        request=f"{group_id}-{index}",
                        sampling=self.config.sampling,
                        group_id=group_id,
                        index=index,
                        start_version=start_version,
                    )
                )
                for index in range(self.config.group_size)
            ]
        trajectories = [member.result() for member in members]
        self.controller.finish(group_id)
        self.stats.groups += 1
        self.stats.samples += len(trajectories)
        self.stats.sampled_tokens += sum(int(t.sampled.sum()) for t in trajectories)
        if self._dump is not None:
            self._dump.writelines(json.dumps(t.to_json()) + "\n" for t in trajectories)
            self._dump.flush()
        self._send(("group", trajectories, self.snapshot()))

    async def _trajectory(
        self,
        observation: TensorDictBase,
        make_env: Callable[[], EnvBase],
        *,
        request: str,
        sampling: SamplingConfig,
        group_id: int,
        index: int,
        start_version: int,
    ) -> Trajectory:
        """One conversation, turn by turn, until its environment or a limit ends it."""
        conversation = Conversation(self.tokenizer, observation)
        size = conversation.prompt_length
        sampled, log_probs, versions = [False] * size, [0.0] * size, [-1] * size
        reward, truncated = 0.0, False
        for turn in range(self.config.max_turns):
            generation = await self.engine.generate(
                conversation.token_ids,
                sampling,
                request_id=f"{request}-{turn}",
                seed=request_seed(self.config.seed, group_id, index, turn),
            )
            if generation.finish_reason == "abort":
                raise RuntimeError(f"the engine aborted request {request}-{turn} by itself")
            sampled += [True] * len(generation.token_ids)
            log_probs += generation.log_probs
            versions += generation.versions
            action = conversation.respond(generation.token_ids)
            after = await self._step(make_env, action)
            reward += float(after["reward"].sum())
            terminated = _flag(after, "terminated")
            truncated = generation.finish_reason == "length" or _flag(after, "truncated")
            if terminated or truncated or _flag(after, "done"):
                break
            conversation.observe(after)
            added = len(conversation.token_ids) - len(sampled)
            sampled += [False] * added
            log_probs += [0.0] * added
            versions += [-1] * added
            if len(conversation.token_ids) >= self.engine.max_model_len:
                truncated = True
                break
        else:
            truncated = True
        return Trajectory(
            token_ids=np.asarray(conversation.token_ids, dtype=np.int64),
            sampled=np.asarray(sampled, dtype=bool),
            log_probs=np.asarray(log_probs, dtype=np.float32),
            versions=np.asarray(versions, dtype=np.int64),
            prompt_length=conversation.prompt_length,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            group_id=group_id,
            index=index,
            start_version=start_version,
            prompt=conversation.prompt,
            response=conversation.response,
            extras=_extras(after),
        )

    async def _step(
        self, make_env: Callable[[], EnvBase], action: TensorDictBase
    ) -> TensorDictBase:
        """One environment step off the loop; a failure or hang is an error, never reward 0."""
        async with self._free_threads:
            future = asyncio.get_running_loop().run_in_executor(
                self._step_threads, _call_env, self._step_in_thread, make_env, action
            )
            done, _ = await asyncio.wait({future}, timeout=self.config.step_timeout)
        if not done:
            raise TimeoutError(
                f"an environment step took longer than {self.config.step_timeout} s (rewards and "
                "tools run there); make it faster or raise collector.step_timeout"
            )
        return future.result()

    def _step_in_thread(
        self, make_env: Callable[[], EnvBase], action: TensorDictBase
    ) -> TensorDictBase:
        """Each thread has an instance of each environment: they need not be thread-safe."""
        envs = self._thread_envs.by_maker
        if make_env not in envs:
            envs[make_env] = self._make_env(make_env)
        return envs[make_env].step(action)["next"]

    # ------------------------------------------------------------------ commands
    async def update_weights(self, version: int, path: Path) -> None:
        """Switches the engine to the published weights at a token boundary, then admits more."""
        async with self.weights:
            start = time.perf_counter()
            await self.engine.update_weights(version, path)
            self.stats.weight_update_s += time.perf_counter() - start
            self.controller.serve(version)
        self._room.set()

    async def evaluate(self) -> Evaluation:
        """Greedy answers to the held-out problems, beside the rollouts.

        The caller holds :attr:`weights`, so that all answers come from one version.
        """
        if self.config.make_eval_env is None:
            raise ValueError("evaluation was asked for, but the collector has no make_eval_env")
        if self._eval_observations is None:
            self._eval_observations = await self._on_prompt_thread(self._held_out_problems)
        greedy = replace(self.config.sampling, temperature=0.0, top_p=1.0, top_k=0)
        start = time.perf_counter()
        version = self.engine.version
        async with asyncio.TaskGroup() as tasks:
            answers = [
                tasks.create_task(
                    self._trajectory(
                        observation.clone(),
                        self.config.make_eval_env,
                        request=f"eval-{version}-{index}",
                        sampling=greedy,
                        group_id=index,
                        index=0,
                        start_version=version,
                    )
                )
                for index, observation in enumerate(self._eval_observations)
            ]
        trajectories = [answer.result() for answer in answers]
        return Evaluation(
            version=version,
            rewards=[t.reward for t in trajectories],
            answer_tokens=float(np.mean([t.sampled.sum() for t in trajectories])),
            truncated=float(np.mean([t.truncated for t in trajectories])),
            seconds=time.perf_counter() - start,
        )

    def _held_out_problems(self) -> list[TensorDictBase]:
        env = self.config.make_eval_env()
        return [env.reset() for _ in range(self.config.eval_problems)]

    def snapshot(self) -> RolloutStats:
        """The totals up to now."""
        now = time.perf_counter()
        blocked = 0.0 if self._blocked_since is None else now - self._blocked_since
        return replace(
            self.stats,
            elapsed_s=now - self._start,
            waiting_for_trainer_s=self.stats.waiting_for_trainer_s + blocked,
        )

    def close(self) -> None:
        """Ends the environment threads; steps still running are not waited for."""
        self._prompt_thread.shutdown(wait=False, cancel_futures=True)
        self._step_threads.shutdown(wait=False, cancel_futures=True)


def request_seed(seed: int, group_id: int, index: int, turn: int) -> int:
    """A 62-bit seed that depends on nothing but what is sampled, so that runs repeat."""
    digest = hashlib.blake2b(f"{seed}/{group_id}/{index}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def _flag(after: TensorDictBase, key: str) -> bool:
    value = after.get(key, None)
    return value is not None and bool(value.any())


def _call_env(function: Callable, *args: Any) -> Any:
    """Calls an environment in a thread; asyncio would lose a StopIteration, and wait for ever."""
    try:
        return function(*args)
    except StopIteration as error:
        raise RuntimeError(
            "the environment ran out of problems (StopIteration); let it begin anew"
        ) from error


def _extras(after: TensorDictBase) -> dict[str, Any]:
    """Tensor entries of the last step that are the environment's own (``"success"``, ...)."""
    return {
        key: value.detach().cpu().numpy().reshape(-1)
        for key, value in after.items()
        if key not in _SEEN_ELSEWHERE and isinstance(value, Tensor)
    }
