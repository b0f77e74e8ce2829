"""What a child of fork inherits from a process that profiles, and must not touch.

A loader's worker is such a child. It shares the file of the execution trace and holds a copy of its unwritten
buffer, and libkineto's thread is gone while the objects that wait for it are still there.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path


def redirect_to_null(path: Path) -> None:
    """Point this process's descriptors of the file to /dev/null: C++ flushes its buffer there at exit.

    Does nothing where there is no /proc.
    """
    descriptors = Path("/proc/self/fd")
    for entry in list(descriptors.iterdir()) if descriptors.exists() else ():
        try:
            same = entry.readlink() == path
        except OSError:
            continue  # the descriptor of the listing itself
        if same:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, int(entry.name))
            os.close(nowhere)


def skip_static_destructors() -> None:
    """Make this process end, when it calls exit(), with its status but without C++'s static destructors.

    libkineto's waits for a thread that fork did not copy: torch 2.13 hangs or aborts there. Children of
    multiprocessing never come so far, they leave by os._exit. Handlers run last in, first out, and each gets
    (status, argument). Does nothing where the C library has no on_exit.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit") and hasattr(libc, "fcloseall"):
        libc.on_exit(libc._exit, None)
        libc.on_exit(libc.fcloseall, None)


def register_worker_exit(leave: Callable[[], None]) -> None:
    """A process forked by multiprocessing leaves through os._exit, past atexit, but runs its finalizers."""
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None and processes.parent_process() is not None:
        from multiprocessing.util import Finalize

        Finalize(None, leave, exitpriority=100)
