"""Ties a child process's life to its parent's."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Asks the kernel to kill this process when the thread that spawned it ends (Linux).

    Called first thing in a process started by :mod:`multiprocessing`; ends at once if the parent is
    already gone. Elsewhere than on Linux it does nothing, and the end of the pipe is what a child
    notices.
    """
    parent = multiprocessing.parent_process()
    if not sys.platform.startswith("linux") or parent is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:
        os._exit(1)
