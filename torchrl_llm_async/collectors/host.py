"""Where the collector's loop runs: a thread of this process, or a process of its own.

Owns the messages between the two sides and the rule that nobody waits in silence: whatever ends
the loop reaches the other side as an exception with its traceback, and a side that dies is noticed
by the end of the pipe. Owns no rollout logic.

Messages down: ``("weights", version, path)``, ``("evaluate", tag)``, ``("stop",)``.
Messages up: ``("ready", version)``, ``("admitted", group_id, start_version)``,
``("group", trajectories, stats)``, ``("served", version)``, ``("evaluation", tag, evaluation)``,
``("stopped",)``, ``("error", exception, traceback)``.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

from torchrl_llm_async._lifetime import die_with_parent
from torchrl_llm_async.collectors.rollouts import RolloutConfig, Rollouts
from torchrl_llm_async.engines import GenerationEngine


def run_in_process(connection: Connection, config: RolloutConfig, engine: GenerationEngine) -> None:
    """Target of the collector's own process."""
    die_with_parent()
    if config.log_path is not None:
        _print_to(config.log_path)
    # Ctrl-C reaches the whole process group; the trainer decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    run(connection, config, engine)
    # All is sent and closed; tearing down an interpreter that holds vLLM takes seconds.
    os._exit(0)


def run(connection: Connection, config: RolloutConfig, engine: GenerationEngine) -> None:
    """Serves one collector until it is told to stop or its pipe ends."""
    try:
        asyncio.run(_serve(connection, config, engine))
        connection.send(("stopped",))
    except BrokenPipeError:
        pass  # The other side is gone: nobody is left to tell.
    except BaseException as error:
        connection.send(_as_message(error))
    finally:
        connection.close()


async def _serve(connection: Connection, config: RolloutConfig, engine: GenerationEngine) -> None:
    # First the engine: while this process has no threads it may fork its core (seconds saved).
    await engine.start()
    rollouts = None
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(config.tokenizer_path)
        rollouts = Rollouts(config, engine, tokenizer, connection.send)
        connection.send(("ready", engine.version))
        async with asyncio.TaskGroup() as tasks:
            collecting = tasks.create_task(rollouts.continuous_rollouts())
            await _obey(connection, rollouts, tasks)
            collecting.cancel()
    finally:
        if rollouts is not None:
            rollouts.close()
        await engine.shutdown()


async def _obey(connection: Connection, rollouts: Rollouts, tasks: asyncio.TaskGroup) -> None:
    """Carries out the other side's messages, in order, until it stops or is gone."""
    inbox: asyncio.Queue = asyncio.Queue()
    loop = asyncio.get_running_loop()
    descriptor = connection.fileno()

    def receive() -> None:
        try:
            inbox.put_nowait(connection.recv())
        except EOFError:
            loop.remove_reader(descriptor)
            inbox.put_nowait(("stop",))

    async def evaluate(tag: object) -> None:
        try:
            evaluation = await rollouts.evaluate()
        finally:
            rollouts.weights.release()
        connection.send(("evaluation", tag, evaluation))

    loop.add_reader(descriptor, receive)
    try:
        while True:
            match await inbox.get():
                case ("weights", version, path):
                    await rollouts.update_weights(version, path)
                    connection.send(("served", version))
                case ("evaluate", tag):
                    # Rollouts and further messages go on meanwhile; a later switch waits.
                    await rollouts.weights.acquire()
                    tasks.create_task(evaluate(tag))
                case ("stop",):
                    return
    finally:
        loop.remove_reader(descriptor)


def _print_to(path: Path) -> None:
    """Sends all that this process and its children print to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _as_message(error: BaseException) -> tuple:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception as unpicklable:
        error = RuntimeError(f"{type(error).__name__}: {error} (not picklable: {unpicklable})")
    return ("error", error, text)
