"""AsyncLLMCollector: the TorchRL collector whose generation never waits for a batch to end.

Owns the trainer's side of a collector: starting and ending the host, handing finished groups to the
replay buffer (or to whoever iterates), telling the engine of new weights. The loop itself is
:mod:`.rollouts`.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import multiprocessing.process
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Literal

from tensordict import TensorDictBase
from torchrl.collectors import BaseCollector
from torchrl.envs import EnvBase
from torchrl.weight_update import WeightSyncScheme

from torchrl_llm_async.checkpoint.tree import Tree
from torchrl_llm_async.collectors import host as _host
from torchrl_llm_async.collectors.cut import Cut, check_ledgers, complete_cut
from torchrl_llm_async.collectors.evaluation import Evaluation
from torchrl_llm_async.collectors.settings import GroupFilter, RolloutConfig, RolloutStats
from torchrl_llm_async.data.replay_buffer import StalenessReplayBuffer
from torchrl_llm_async.data.trajectory import stack_group
from torchrl_llm_async.engines import EnginePool, GenerationEngine, SamplingConfig


class AsyncLLMCollector(BaseCollector):
    """Collects whole groups of trajectories without ever waiting for the longest answer.

    One coroutine per trajectory asks the engine for tokens, steps the environment in a bounded
    pool of threads, and goes on turn by turn; a group is handed over when all its trajectories are
    done. New groups are admitted whenever the staleness bound has room, whatever the trainer does.

    Args:
        create_env_fn: makes a TorchRL LLM environment of batch size ``()`` or ``(1,)`` whose state
            lives in its tensordict (as :class:`~torchrl.envs.llm.ChatEnv` and
            :class:`~torchrl_llm_async.envs.ReasoningGymEnv` do): the trajectories of a group are
            stepped from copies of one reset. Must be picklable if ``host="process"``.
        engine: an engine that has not been started, or an
            :class:`~torchrl_llm_async.engines.EnginePool` of several. One that dies is started
            again, and its answers are taken up where they broke off.
        tokenizer: path or name of the policy's Hugging Face tokenizer.
        sampling: how answers are sampled.
        group_size: trajectories per prompt, K.
        groups_per_step: groups one training step consumes, B.
        max_staleness: bound on a sample's lag in training steps; 0 is the synchronous run.

    Keyword Args:
        total_steps: training steps of the whole run; nothing is generated beyond them. Endless if
            None. Without new weights no more than ``(max_staleness + 1) * groups_per_step`` groups
            are ever collected: that is the staleness bound.
        replay_buffer: where finished groups go. If None, iterate over the collector instead.
        max_concurrent_groups: groups in flight. Keep it near the engine's number of sequences over
            ``group_size``: more would only wait in the engine's queue and grow stale.
        max_turns: turns after which a conversation is cut and marked truncated.
        env_workers: threads in which environments are stepped.
        step_timeout: seconds one environment step (rewards and tools included) may take.
        step_retries: how often a step that failed is tried again, if ``max_turns`` is 1: between
            turns tools may have acted. If the last try fails its group is rejected and counted, and
            another admitted in its place; it is never scored 0.
        max_failures: groups in a row that may fail in this way; then the error met ends the
            collector.
        max_rejections: groups in a row that may be rejected for whatever reason, before the
            collector ends with an error that says so.
        group_filter: called with a complete group's :class:`~torchrl_llm_async.data.Trajectory` s;
            returns why to reject it, or None. Must be picklable if ``host="process"``.
        longest_first: begin the problems whose answers are expected to be long before the others
            of the same ``groups_per_step``, and spread them over the engines, as StreamRL
            (arXiv:2504.15930) does for batches. The expectation is learnt from the answers. No
            problem is left out, but their order then depends on which answers were there first.
        seed: seeds the prompts and every request.
        create_eval_env_fn, eval_problems: the held-out problems of :meth:`evaluate`.
        dump_path: JSON lines file that every finished sample is appended to.
        log_path: file for all that the host prints, vLLM included, if it is a process.
        host: ``"process"`` (default) or ``"thread"``.
        weight_sync_schemes: ``{"policy": scheme}``, for :meth:`update_policy_weights_` to send by;
            see :class:`~torchrl_llm_async.weight_update.VLLMSharedWeightSyncScheme`.

    Raises:
        ValueError: a count is not positive, or ``host`` is unknown.

    Example, with a model that takes an engine to run::

        collector = AsyncLLMCollector(
            WrittenSumsEnv, VLLMEngine("assets/sums"), tokenizer="assets/sums",
            sampling=SamplingConfig(max_new_tokens=48, stop_token_ids=(1,)),
            group_size=8, groups_per_step=64, max_staleness=2, total_steps=1)
        for group in collector:
            print(group["next", "reward"].mean())
        collector.shutdown()
    """

    def __init__(
        self,
        create_env_fn: Callable[[], EnvBase],
        engine: GenerationEngine,
        *,
        tokenizer: str,
        sampling: SamplingConfig,
        group_size: int,
        groups_per_step: int,
        max_staleness: int,
        total_steps: int | None = None,
        replay_buffer: StalenessReplayBuffer | None = None,
        max_concurrent_groups: int = 16,
        max_turns: int = 1,
        env_workers: int = 2,
        step_timeout: float = 60.0,
        step_retries: int = 1,
        max_failures: int = 8,
        max_rejections: int = 256,
        group_filter: GroupFilter | None = None,
        longest_first: bool = False,
        seed: int = 0,
        create_eval_env_fn: Callable[[], EnvBase] | None = None,
        eval_problems: int = 0,
        dump_path: str | Path | None = None,
        log_path: str | Path | None = None,
        host: Literal["process", "thread"] = "process",
        weight_sync_schemes: dict[str, WeightSyncScheme] | None = None,
    ):
        super().__init__()
        if host not in ("process", "thread"):
            raise ValueError(f"host is {host!r}; it must be 'process' or 'thread'")
        self._config = RolloutConfig(
            make_env=create_env_fn,
            tokenizer_path=str(tokenizer),
            sampling=sampling,
            group_size=group_size,
            groups_per_step=groups_per_step,
            max_staleness=max_staleness,
            total_steps=total_steps,
            max_concurrent_groups=max_concurrent_groups,
            max_turns=max_turns,
            env_workers=env_workers,
            step_timeout=step_timeout,
            step_retries=step_retries,
            max_failures=max_failures,
            max_rejections=max_rejections,
            group_filter=group_filter,
            longest_first=longest_first,
            seed=seed,
            make_eval_env=create_eval_env_fn,
            eval_problems=eval_problems,
            dump_path=None if dump_path is None else Path(dump_path),
            log_path=None if log_path is None else Path(log_path),
        )
        self._engine = engine if isinstance(engine, EnginePool) else EnginePool([engine])
        self.replay_buffer = replay_buffer
        self._weight_sync_schemes = weight_sync_schemes
        self._host_kind = host
        self._host: threading.Thread | multiprocessing.process.BaseProcess | None = None
        self._groups: queue.SimpleQueue = queue.SimpleQueue()
        self._yielded = 0
        self._ready: Future = Future()
        self._asked: dict[int, Future] = {}
        self._tags = itertools.count()
        self._error: BaseException | None = None
        self._sending = threading.Lock()
        self._stats = RolloutStats()
        self._served_version = 0
        self._stopping = False
        self._state: Tree = None  # of the run to go on with
        self._dropped: dict[int, str] = {}  # that the host has not told to have carried out

    # ------------------------------------------------------------------ life
    def start(self) -> None:
        """Starts the host and returns; :meth:`wait_until_ready` tells when the engine serves."""
        if self._host is not None:
            raise RuntimeError("the collector was started already")
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        args = (theirs, self._config, self._engine, self._state)
        if self._host_kind == "process":
            host = context.Process(target=_host.run_in_process, args=args, name="collector")
            host.start()
            theirs.close()  # So that the pipe ends when the process does.
            # A program that ends without shutdown() would wait for ever for its child.
            self._finalizer = Finalize(
                None, _host.end_process, (self._connection, host), exitpriority=1
            )
        else:
            host = threading.Thread(target=_host.run, args=args, name="collector", daemon=True)
            host.start()
        self._host = host
        self._receiver = threading.Thread(
            target=self._receive, name="collector-receiver", daemon=True
        )
        self._receiver.start()

    def wait_until_ready(self, timeout: float = 300.0) -> None:
        """Blocks until the engine serves version 0.

        Raises:
            TimeoutError: it does not within ``timeout`` seconds.
            Exception: whatever ended the host meanwhile.
        """
        self._within(timeout, self._ready, "the engine is not ready")

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """Ends the host: asked first, killed after ``timeout`` seconds (default 8). Idempotent.

        Publications of its weight sync schemes are removed.
        """
        del close_env, raise_on_error
        if self._host is None or self._connection.closed:
            return
        self._stopping = True
        timeout = _host.STOP_SECONDS if timeout is None else timeout
        try:
            if self._host_kind == "process":
                self._finalizer.cancel()
                _host.end_process(self._connection, self._host, timeout)
            else:
                self._tell_to_stop()
                self._host.join(timeout)
                if self._host.is_alive():
                    raise TimeoutError(f"the collector's thread has not ended after {timeout} s")
            self._receiver.join()
            self._connection.close()
        finally:
            for scheme in (self._weight_sync_schemes or {}).values():
                scheme.shutdown()
            self._fail(RuntimeError("the collector was shut down"))

    # ------------------------------------------------------------------ data
    def iterator(self) -> Iterator[TensorDictBase]:
        """Yields finished groups of batch size ``(K,)`` in the order in which they finish.

        A second iteration goes on where the one before stopped.
        """
        if self.replay_buffer is not None:
            raise RuntimeError("groups go to the replay buffer; sample it instead of iterating")
        if self._host is None:
            self.start()
        while self._config.total_steps is None or self._yielded < len(self):
            group = self._groups.get()
            if isinstance(group, BaseException):
                self._groups.put(group)  # for whoever comes next
                raise group
            self._yielded += 1
            yield group

    def __len__(self) -> int:
        """Groups of the whole run; a TypeError if it is endless."""
        if self._config.total_steps is None:
            raise TypeError("a collector without total_steps is endless and has no length")
        return self._config.total_steps * self._config.groups_per_step

    def _receive(self) -> None:
        """Hands on what the host sends; ends with the host."""
        try:
            while self._hand_on_next():
                pass
        except (EOFError, ConnectionResetError):
            if not self._stopping:
                self._host.join()
                code = getattr(self._host, "exitcode", None)
                self._fail(
                    RuntimeError(f"the collector's process died, exit code {code}{self._see_log()}")
                )

    def _hand_on_next(self) -> bool:
        """False after the host's last message. When one can't be handed on the host has to end."""
        try:
            message = self._connection.recv()
            if self._error is None:
                return self._dispatch(message)
        except (EOFError, ConnectionResetError):
            raise
        except Exception as error:  # The buffer or its transform may object to a group.
            self._fail(error)
            # Whoever sends just now may wait for the host, and that for what is received here.
            threading.Thread(target=self._tell_to_stop, daemon=True).start()
            return True
        return message[0] not in ("stopped", "error")

    def _dispatch(self, message: tuple) -> bool:
        match message:
            case ("ready", version):
                self._served_version = version
                self._ready.set_result(None)
            case ("admitted", group_id, start_version):
                if self.replay_buffer is not None:
                    self.replay_buffer.announce(group_id, start_version)
            case ("group", trajectories, stats):
                self._stats = stats
                rows = stack_group(trajectories)
                if self.replay_buffer is not None:
                    self.replay_buffer.extend(rows)
                else:
                    self._groups.put(rows)
            case ("served", version, stats):
                self._served_version, self._stats = version, stats
                if self.replay_buffer is not None:
                    check_ledgers(stats, self.replay_buffer.ledger())
            case ("rejected", group_id, reason, stats):
                self._stats = stats
                if self.replay_buffer is not None:
                    self.replay_buffer.retract(group_id, reason)
            case ("dropped", group_id):
                self._dropped.pop(group_id, None)
            case ("cut", tag, state):
                # Now: all that was sent before is in the buffer, and nothing of what comes.
                cut = complete_cut(state, self.replay_buffer, self._dropped, self._served_version)
                self._asked.pop(tag).set_result(cut)
            case ("answer", tag, value):
                self._asked.pop(tag).set_result(value)
            case ("failed", tag, error, text):
                error.__cause__ = _host.RemoteTraceback(text)
                self._asked.pop(tag).set_exception(error)
            case ("stopped",):
                return False
            case ("error", error, text):
                error.__cause__ = _host.RemoteTraceback(text)
                self._fail(error)
                return False
        return True

    def _fail(self, error: BaseException) -> None:
        """Everybody who waits for the host gets its exception; the first one counts."""
        if self._error is not None:
            return
        self._error = error
        self._groups.put(error)
        if self.replay_buffer is not None:
            self.replay_buffer.fail(error)
        for future in (self._ready, *self._asked.values()):
            if not future.done():
                future.set_exception(error)

    # ------------------------------------------------------------------ weights
    def serve_weights(self, path: str | Path, *, version: int) -> Future[bool]:
        """Has the engines switch to published weights at their next token boundary.

        Weight sync schemes call this; :meth:`update_policy_weights_` is what a trainer calls. A
        publication that is refused leaves the former weights serving, to be repaired by the next;
        if the staleness bound leaves no step in which to publish that, it ends the collector.

        Args:
            path: what :meth:`.WeightStore.write` or :meth:`.WeightPublisher.publish` returned.
            version: number of training steps behind these weights.

        Returns:
            Whether they serve, once that is known; nobody needs to wait for it.
        """
        return self._ask("weights", version, Path(path))

    @property
    def policy_version(self) -> int:
        """The version the engine serves, as last heard."""
        return self._served_version

    def evaluate(self) -> Future[Evaluation]:
        """Asks for greedy answers to the held-out problems under the weights last published.

        Returns at once. Rollouts go on; later weights are switched to after the evaluation. A
        problem whose episode fails is answered anew, ``step_retries`` times.

        Raises:
            ValueError: the collector has no ``create_eval_env_fn``.
        """
        if self._config.make_eval_env is None:
            raise ValueError("give the collector a create_eval_env_fn to evaluate with")
        return self._ask("evaluate")

    # ------------------------------------------------------------------ while it runs
    def drop(self, group_id: int, reason: str) -> None:
        """Gives a group up, and admits another: the buffer's ``on_drop``."""
        self._dropped[group_id] = reason
        self._command("drop", group_id, reason)

    def pause(self) -> AbstractContextManager:
        """Stops generation at the next token boundary and admits nothing, until :meth:`resume`.

        What is in flight stays as it is. Weights are updated meanwhile, unless an evaluation is
        under way: that stands still too, and updates wait for it as ever. The context manager that
        is returned resumes when it is left.

        Example::

            with collector.pause():
                running = collector.stats()["running"]
        """
        self._ask("pause").result()
        stack = contextlib.ExitStack()
        stack.callback(self.resume)
        return stack

    def resume(self) -> None:
        """Goes on after :meth:`pause`."""
        self._ask("resume").result()

    def add_engine(self, engine: GenerationEngine) -> Future[None]:
        """Starts a further engine, which joins once it serves the newest weights."""
        return self._ask("add_engine", engine)

    def remove_engine(self, index: int = -1) -> Future[None]:
        """Lets one of the live engines finish what it has begun, then ends it."""
        return self._ask("remove_engine", index)

    def _ask(self, what: str, *arguments: object) -> Future:
        tag, future = next(self._tags), Future()
        future.set_running_or_notify_cancel()  # Who asked may stop waiting, not cancel the answer.
        self._asked[tag] = future
        self._command(what, tag, *arguments)
        return future

    def _within(self, timeout: float, future: Future, otherwise: str) -> Any:
        """Its result; ``otherwise`` begins what a TimeoutError says."""
        try:
            return future.result(timeout)
        except TimeoutError:
            if future.done():
                raise  # It is the host's.
            raise TimeoutError(f"{otherwise} after {timeout} s{self._see_log()}") from None

    def _command(self, *message: object) -> None:
        if self._host is None:
            raise RuntimeError("start() the collector first")
        if self._error is None:
            try:
                with self._sending:
                    self._connection.send(message)
                return
            except OSError:
                self._receiver.join()  # It is about to hear why.
        raise self._error

    def _tell_to_stop(self) -> None:
        with self._sending:
            _host.tell_to_stop(self._connection)

    def _see_log(self) -> str:
        return "" if self._config.log_path is None else f"; see {self._config.log_path}"

    # ------------------------------------------------------------------ the rest of the interface
    def stats(self) -> dict[str, int | float | bool]:
        """Counters since the start, as of the last group or weight switch heard of.

        Those of :meth:`.RolloutStats.flat`, a former run's included, and ``"policy_version"``.
        """
        return {**self._stats.flat(), "policy_version": self._served_version}

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seeds prompts and requests; before :meth:`start` only."""
        del static_seed
        if self._host is not None:
            raise RuntimeError("seed the collector before it starts")
        self._config = replace(self._config, seed=seed)
        return seed

    # ------------------------------------------------------------------ checkpoints
    def cut(self, timeout: float = 60.0) -> Cut:
        """The state of collector and replay buffer at one instant, while generation goes on.

        Groups in flight are in it with all that is sampled of them: a resumed run asks the engines
        only for the rest. Without a replay buffer, groups that have come and not been iterated
        over are not in it.

        Raises:
            TimeoutError: the collector does not answer.
            TypeError: an environment's observation can't be written to a checkpoint.
            Exception: whatever ended the collector.
        """
        return self._within(timeout, self._ask("cut"), "the collector has not told its state")

    def state_dict(self) -> OrderedDict:
        """The collector's part of :meth:`cut`; before :meth:`start`, the seed."""
        is_new = self._host is None
        return OrderedDict({"seed": self._config.seed} if is_new else self.cut().collector)

    def load_state_dict(self, state_dict: OrderedDict) -> None:
        """Has :meth:`start` go on where the state was taken.

        Start it, then publish the weights of the version that is trained: groups in flight are
        taken up, and others admitted, once the engines serve a version as new as those did. The
        replay buffer is restored before, by its :meth:`.StalenessReplayBuffer.loads`.
        """
        self.set_seed(state_dict["seed"])
        if "controller" in state_dict:
            self._state = dict(state_dict)
            self._yielded = state_dict["controller"]["accepted"]
            self._stats = RolloutStats(**state_dict["stats"])
