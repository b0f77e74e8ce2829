"""Protects children of fork, such as DataLoader workers, from the profiler state they inherit.

A child shares the file of the execution trace and has a copy of its unwritten buffer; libkineto's thread does not
exist in it, but the objects that wait for that thread do. See fork_hold.py for the moment of the fork.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_skips_destructors = False


def redirect_to_null(path: Path) -> None:
    """Redirect this process's descriptors of the file `path` to /dev/null, since C++ writes its buffer there at exit.

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


def remove_callbacks_in_child(*, kineto: bool, stock_observer: bool) -> None:
    """Call `remove_callbacks` in a forked child, so that it does not record forever; suppress torch's output.

    The sessions stay open: closing them waits for a thread that the child does not have.
    """
    with _silence_stderr():
        remove_callbacks(kineto=kineto, stock_observer=stock_observer)


def remove_callbacks(*, kineto: bool, stock_observer: bool) -> None:
    """Disable the callbacks of torch's profiler and of torch's execution trace observer; their sessions stay open."""
    import torch

    autograd: Any = torch._C._autograd

    if kineto and hasattr(autograd, "_toggle_collection_dynamic"):
        autograd._toggle_collection_dynamic(False, {torch.profiler.ProfilerActivity.CPU})
    if stock_observer:
        autograd._disable_execution_trace_observer()


@contextmanager
def _silence_stderr() -> Iterator[None]:
    """Redirect stderr to /dev/null in this context, which is safe only if the process has a single thread."""
    try:
        saved = os.dup(2)
    except OSError:  # closed: what torch writes there is lost anyway
        yield
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)
    try:
        yield
    finally:
        with suppress(OSError):
            os.dup2(saved, 2)
        os.close(saved)


def skip_static_destructors() -> None:
    """Make exit() end this process with its status but without C++'s static destructors.

    libkineto's destructor waits for a thread that fork did not copy: torch 2.13 hangs or aborts there. Children of
    multiprocessing leave by os._exit and do not reach it. Handlers run last in, first out, each with (status,
    argument). Does nothing if the C library has no on_exit, or the second time, in a child of the child.
    """
    global _skips_destructors
    libc = ctypes.CDLL(None)
    if _skips_destructors:
        return
    _skips_destructors = True
    if hasattr(libc, "on_exit") and hasattr(libc, "fcloseall"):
        libc.on_exit(libc._exit, None)
        libc.on_exit(libc.fcloseall, None)


def register_worker_exit(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of a process forked by multiprocessing, which skips atexit but runs finalizers."""
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None and processes.parent_process() is not None:
        from multiprocessing.util import Finalize

        Finalize(None, callback, exitpriority=100)
