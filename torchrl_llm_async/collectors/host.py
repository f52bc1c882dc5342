"""Where the collector's loop runs: a thread of this process, or a process of its own.

Owns the messages between the two sides and the rule that nobody waits in silence: whatever ends
the loop reaches the other side as an exception with its traceback, and a side that dies is noticed
by the end of the pipe. Owns no rollout logic.

Messages down: ``("weights", tag, version, path)`` and ``("evaluate", tag)``, carried out in their
order; ``("pause", tag)`` and ``("resume", tag)``, likewise, beside those; and, at once,
``("drop", group_id, reason)``, ``("cut", tag)``, ``("add_engine", tag, engine)``,
``("remove_engine", tag, index)`` and ``("stop",)``. So a drop sent before weights is carried out
before they are served.
Messages up: ``("ready", version)``, ``("admitted", group_id, start_version)``,
``("group", trajectories, stats)``, ``("rejected", group_id, reason, stats)``,
``("dropped", group_id)``, ``("served", version, stats)``, ``("cut", tag, state)``,
``("answer", tag, value)``, ``("failed", tag, exception, traceback)``, ``("stopped",)``,
``("error", exception, traceback)``.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing.process
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Coroutine
from multiprocessing.connection import Connection
from pathlib import Path

from torchrl._utils import logger as torchrl_logger

from torchrl_llm_async._lifetime import die_with_parent
from torchrl_llm_async.checkpoint.tree import Tree
from torchrl_llm_async.collectors.rollouts import Rollouts
from torchrl_llm_async.collectors.settings import RolloutConfig
from torchrl_llm_async.engines import EnginePool

STOP_SECONDS = 8.0  # that a host has to end when told to


class RemoteTraceback(Exception):
    """The traceback of an exception raised in the collector's thread or process, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def run_in_process(
    connection: Connection, config: RolloutConfig, engine: EnginePool, state: Tree
) -> None:
    """Target of the collector's own process."""
    die_with_parent()
    if config.log_path is not None:
        _print_to(config.log_path)
    # The loop's thread asks for the interpreter at every tensor and socket; while environment
    # threads compute, each time takes one such interval (CPython's default is 5 ms).
    sys.setswitchinterval(0.0005)
    # Ctrl-C reaches the whole process group; the trainer decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    run(connection, config, engine, state)
    # All is sent and closed; tearing down an interpreter that holds vLLM takes seconds.
    os._exit(0)


def run(connection: Connection, config: RolloutConfig, engine: EnginePool, state: Tree) -> None:
    """Serves one collector until it is told to stop or its pipe ends."""
    try:
        asyncio.run(_serve(connection, config, engine, state))
        connection.send(("stopped",))
    except BaseException as error:
        with contextlib.suppress(OSError):  # The other side is gone: nobody is left to tell.
            connection.send(("error", *_portable(error)))
    finally:
        connection.close()


def tell_to_stop(connection: Connection) -> None:
    """Asks the host at the other end of a pipe to stop."""
    try:
        connection.send(("stop",))
    except OSError:
        torchrl_logger.debug("the collector's host had ended before it was told to")


def end_process(
    connection: Connection,
    process: multiprocessing.process.BaseProcess,
    timeout: float = STOP_SECONDS,
) -> None:
    """Asks the host to stop, and kills it if it has not by then."""
    tell_to_stop(connection)
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()


class _Stop(Exception):
    """Ends the tasks of a collector that was told to stop."""


async def _serve(
    connection: Connection, config: RolloutConfig, engine: EnginePool, state: Tree
) -> None:
    # First the engine: while this process has no threads it may fork its core (seconds saved).
    await engine.start()
    rollouts = None
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(config.tokenizer_path)
        rollouts = Rollouts(config, engine, tokenizer, connection.send, state)
        connection.send(("ready", engine.version))
        await _work_until_told_to_stop(connection, rollouts)
    finally:
        try:
            if rollouts is not None:
                await rollouts.close()
        finally:
            await engine.shutdown()


async def _work_until_told_to_stop(connection: Connection, rollouts: Rollouts) -> None:
    in_order: asyncio.Queue = asyncio.Queue()
    pauses: asyncio.Queue = asyncio.Queue()
    at_once: asyncio.Queue = asyncio.Queue()
    stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()
    descriptor = connection.fileno()

    def receive() -> None:
        try:
            message = connection.recv()
        except (EOFError, ConnectionResetError):
            message = ("stop",)  # The other side is gone.
        except Exception as error:  # What was sent can't be unpickled here.
            loop.remove_reader(descriptor)
            stopped.set_exception(error)
            return
        if message == ("stop",):
            loop.remove_reader(descriptor)
            stopped.set_result(None)
        elif message[0] in ("weights", "evaluate"):
            in_order.put_nowait(message)
        elif message[0] in ("pause", "resume"):
            pauses.put_nowait(message)
        else:
            at_once.put_nowait(message)

    async def stop() -> None:
        await stopped
        raise _Stop

    loop.add_reader(descriptor, receive)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stop())
            tasks.create_task(rollouts.continuous_rollouts())
            tasks.create_task(_switch_and_evaluate(in_order, connection, rollouts, tasks))
            tasks.create_task(_pause_and_resume(pauses, connection, rollouts))
            tasks.create_task(_control(at_once, connection, rollouts, tasks))
    except* _Stop:
        pass
    finally:
        loop.remove_reader(descriptor)


async def _switch_and_evaluate(
    inbox: asyncio.Queue, connection: Connection, rollouts: Rollouts, tasks: asyncio.TaskGroup
) -> None:
    async def evaluate(tag: int) -> None:
        try:
            await _answer(connection, tag, rollouts.held_out.evaluate())
        finally:
            rollouts.weights.release()

    while True:
        match await inbox.get():
            case ("weights", tag, version, path):
                served = await rollouts.update_weights(version, path)
                if served:
                    connection.send(("served", version, rollouts.snapshot()))
                connection.send(("answer", tag, served))
            case ("evaluate", tag):
                # Rollouts go on meanwhile; a later switch waits.
                await rollouts.weights.acquire()
                tasks.create_task(evaluate(tag))


async def _pause_and_resume(
    inbox: asyncio.Queue, connection: Connection, rollouts: Rollouts
) -> None:
    while True:
        match await inbox.get():
            case ("pause", tag):
                await _answer(connection, tag, rollouts.pause())
            case ("resume", tag):
                await _answer(connection, tag, rollouts.resume())


async def _control(
    inbox: asyncio.Queue, connection: Connection, rollouts: Rollouts, tasks: asyncio.TaskGroup
) -> None:
    """Waits for nothing but messages: the next may be a drop, which must not come late."""
    engines = rollouts.engine
    while True:
        match await inbox.get():
            case ("drop", group_id, reason):
                rollouts.drop(group_id, reason)
                connection.send(("dropped", group_id))
            case ("cut", tag):
                # Nothing is awaited between the state and its sending, so that no message is
                # both in it and before it.
                await _answer(connection, tag, _cut(rollouts), kind="cut")
            case ("add_engine", tag, engine):
                tasks.create_task(_answer(connection, tag, engines.add(engine)))
            case ("remove_engine", tag, index):
                tasks.create_task(_answer(connection, tag, _remove_engine(engines, index)))


async def _cut(rollouts: Rollouts) -> Tree:
    return rollouts.state()


async def _remove_engine(engines: EnginePool, index: int) -> None:
    live = engines.engines
    if not -len(live) <= index < len(live):
        raise ValueError(f"there is no live engine {index}: {len(live)} are live now")
    await engines.remove(live[index])


async def _answer(
    connection: Connection, tag: int, coroutine: Coroutine, *, kind: str = "answer"
) -> None:
    """Carries out what was asked; whoever asked gets the result, or the exception."""
    try:
        value = await coroutine
    except Exception as error:
        connection.send(("failed", tag, *_portable(error)))
    else:
        connection.send((kind, tag, value))


def _print_to(path: Path) -> None:
    """Sends all that this process and its children print to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _portable(error: BaseException) -> tuple[Exception, str]:
    """The first of a group of errors, such that it can be pickled, and its traceback."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = "".join(traceback.format_exception(error))
    if not isinstance(error, Exception):  # SystemExit would end the trainer without a word.
        error = RuntimeError(f"the collector ended with {error!r}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception as unpicklable:
        error = RuntimeError(f"{type(error).__name__}: {error} (not picklable: {unpicklable})")
    return error, text
