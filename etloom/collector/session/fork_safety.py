"""Protects children of fork, such as DataLoader workers, from the profiler state they inherit.

A child shares the file of the execution trace and has a copy of its unwritten buffer; libkineto's thread does not
exist in it, but the objects that wait for that thread do.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path


def redirect_to_null(path: Path) -> None:
    """Redirect this process's descriptors of the file to /dev/null, because C++ flushes its buffer there at exit.

    Does nothing on a system without /proc.
    """
    descriptors = Path("/proc/self/fd")
    for entry in list(descriptors.iterdir()) if descriptors.exists() else ():
        try:
            is_file = entry.readlink() == path
        except OSError:
            continue  # the descriptor of the listing itself
        if is_file:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, int(entry.name))
            os.close(null)


def skip_static_destructors() -> None:
    """Make exit() end this process with its status but without C++'s static destructors.

    libkineto's destructor waits for a thread that fork did not copy: torch 2.13 hangs or aborts there. Children of
    multiprocessing leave by os._exit and do not reach it. Handlers run last in, first out, each with (status,
    argument). Does nothing if the C library has no on_exit.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit") and hasattr(libc, "fcloseall"):
        libc.on_exit(libc._exit, None)
        libc.on_exit(libc.fcloseall, None)


def register_worker_exit(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of a process forked by multiprocessing, which skips atexit but runs finalizers."""
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None and processes.parent_process() is not None:
        from multiprocessing.util import Finalize

        Finalize(None, callback, exitpriority=100)
