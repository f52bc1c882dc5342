"""What starting an engine core asks of the process that starts it.

Owns the environment, the output and the thread under which a child process is started. It knows
nothing of vLLM's engine itself (:mod:`torchrl_llm_async.engines.vllm_engine`), nor of what happens
inside the child (:mod:`torchrl_llm_async.engines.vllm_worker`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

# Environment and file descriptors belong to the whole process: one start at a time.
_ONE_START = threading.Lock()


def can_fork() -> bool:
    """Whether this process may be forked: no second thread, no process group."""
    import torch.distributed as dist

    tasks = Path("/proc/self/task")
    threads = len(list(tasks.iterdir())) if tasks.is_dir() else threading.active_count() + 1
    return threads == 1 and not (dist.is_available() and dist.is_initialized())


@contextlib.contextmanager
def starting(variables: dict[str, str], log_file: Path | None) -> Iterator[None]:
    """Child processes started inside inherit the variables, and print to the file.

    So does this process meanwhile. Afterwards it has its own environment back, rid of whatever
    was exported inside.

    Args:
        variables: environment, added to this process's.
        log_file: receives file descriptors 1 and 2; None leaves them.
    """
    with _ONE_START, _environment(variables), _output_to(log_file):
        yield


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    former = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        # One by one: other threads go on reading it.
        for name in os.environ.keys() - former.keys():
            del os.environ[name]
        for name, value in former.items():
            if os.environ.get(name) != value:
                os.environ[name] = value


@contextlib.contextmanager
def _output_to(log_file: Path | None) -> Iterator[None]:
    if log_file is None:
        yield
        return
    log_file.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(saved[0], 1)
        os.dup2(saved[1], 2)
        for descriptor in (*saved, log):
            os.close(descriptor)


def log_to(log_file: Path) -> None:
    """Sends this process's vLLM logger to the file, from now on."""
    logger = logging.getLogger("vllm")
    handler = logging.FileHandler(log_file)
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(name)s] %(message)s"))
    for old in list(logger.handlers):
        logger.removeHandler(old)
    logger.addHandler(handler)


class LastingThread(Generic[T]):
    """Runs a function in a thread, which stays on after it until :meth:`end`.

    A child that dies with its parent dies with the very *thread* that started it
    (:mod:`torchrl_llm_async._lifetime`), so a pool's thread won't do.

    Args:
        function: what to run; its result, or its exception, is :meth:`result`'s.

    Examples:
        >>> thread = LastingThread(lambda: threading.current_thread().name)
        >>> asyncio.run(thread.result(unwanted=print))
        'starts-a-child'
        >>> thread.end()
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._result: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._result.set_running_or_notify_cancel()  # no caller that gives up can cancel it
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="starts-a-child", daemon=True).start()

    def _run(self) -> None:
        try:
            self._result.set_result(self._function())
        except BaseException as error:
            self._result.set_exception(error)
        else:
            self._ended.wait()

    async def result(self, unwanted: Callable[[T], object]) -> T:
        """Waits for the function.

        Args:
            unwanted: gets the result, in the thread, of a caller that was cancelled meanwhile.
        """
        try:
            return await asyncio.wrap_future(self._result)
        except asyncio.CancelledError:
            self._result.add_done_callback(lambda done: self._discard(done, unwanted))
            raise

    def _discard(self, done: concurrent.futures.Future[T], unwanted: Callable) -> None:
        if done.exception() is None:
            unwanted(done.result())
        self.end()

    def end(self) -> None:
        """Lets the thread end, and with it the children it started."""
        self._ended.set()
