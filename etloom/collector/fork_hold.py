"""Keeps forks of the job apart from the collector's work on profilers.

A child of fork has a copy of every lock and only the thread that forked: a lock that another thread held at that
moment is held in the child forever. torch's and Kineto's locks cannot be replaced there, so a fork waits until no
thread of the collector works on a profiler; that takes as long as a window needs to open or close, and at most
`_TIMEOUT_S`. In the child the collector is then switched off (`call_in_child`).

Only os.fork, forkpty and what is built on them wait. A fork from C, and subprocess, run no hooks of Python: what they
start calls exec, and runs none of the code here. docs/decisions/0043-forks-of-the-job.md lists all that the collector
has in a job, and what each part does at fork, exit and signals.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

_TIMEOUT_S = 10.0

profiler_lock: Any = threading.RLock()
"""Held while a thread prepares, starts, stops or releases profilers; also orders the methods of the recorders."""
output_lock: Any = threading.RLock()
"""Held while a thread writes a message or a status file. A thread takes it after `profiler_lock`, never before it."""

_LOCKS = (profiler_lock, output_lock)
_held: dict[int, list[Any]] = {}  # thread that forks -> the locks it holds for that
_child_callbacks: list[Callable[[], None]] = []
_registered = False


def register(register_at_fork: Callable[..., Any] | None = None) -> None:
    """Register the hooks with os.register_at_fork, or with a function like it; does nothing the second time.

    The bootstrap of a job passes its own, which was registered before the job's code ran: so of all hooks that run
    before a fork, this one is the last, and no other one waits while it holds the locks.
    """
    global _registered
    register_at_fork = register_at_fork or getattr(os, "register_at_fork", None)
    if register_at_fork is not None and not _registered:
        _registered = True
        register_at_fork(
            before=_acquire_locks, after_in_parent=_release_locks, after_in_child=_release_in_child
        )


def call_in_child(callback: Callable[[], None]) -> None:
    """Call `callback`, which must not raise, in every child of fork, after the locks are free."""
    _child_callbacks.append(callback)


def _acquire_locks() -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    _held[threading.get_ident()] = [
        lock for lock in _LOCKS if lock.acquire(timeout=max(0.0, deadline - time.monotonic()))
    ]


def _release_locks() -> None:
    for lock in reversed(_held.pop(threading.get_ident(), [])):
        lock.release()


def _release_in_child() -> None:
    held = _held.get(threading.get_ident(), [])
    for lock in _LOCKS:
        if lock not in held:
            lock._at_fork_reinit()  # its owner does not exist here
    _release_locks()
    _held.clear()
    for callback in _child_callbacks:
        callback()
