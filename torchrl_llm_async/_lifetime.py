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
    once if the parent, where :mod:`multiprocessing` names one, is gone already.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = multiprocessing.parent_process()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)
