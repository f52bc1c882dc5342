"""Ties a child process's life to its parent's."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    """Has the kernel kill this process when the thread that started it ends, however it ends.

    Linux only; elsewhere it does nothing, and the end of its pipe is what a child notices. Ends at
    once if the parent is gone already.
    """
    if not sys.platform.startswith("linux"):
        return
    expected = multiprocessing.parent_process()
    parent = os.getppid() if expected is None else expected.pid
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
