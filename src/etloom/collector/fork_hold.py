"""Delays os.fork and os.closerange in the job while a thread of the collector works on profilers or writes files.

A child of fork has a copy of every lock and only the thread that forked: a lock that another thread held at that
moment is held in the child forever. torch's and Kineto's locks cannot be replaced there, so a fork waits until no
thread of the collector works on a profiler; that takes as long as a window needs to open or close, and at most
`_TIMEOUT_S`. In the child the collector is then switched off (`call_in_child`).

Only os.fork, forkpty and what is built on them wait. A fork from C, and subprocess, run no hooks of Python: what they
start calls exec, and runs none of the code here. docs/decisions/0043-forks-of-the-job.md lists all that the collector
has in a job, and what each part does at fork, exit and signals.
"""

from __future__ import annotations

import _thread
import functools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

_TIMEOUT_S = 10.0
_PAUSE_S = 0.005

profiler_lock: Any = threading.RLock()
"""Held while a thread prepares, starts, stops or releases profilers. It also serializes the methods of recorders."""
output_lock: Any = threading.RLock()
"""Held while a thread writes a message or a status file. A thread takes it after `profiler_lock`, never before it."""

_LOCKS = (profiler_lock, output_lock)
_held: dict[int, list[Any]] = {}  # thread that forks -> the locks it holds for that
_interrupted: list[int] = []  # threads that received Ctrl-C while they waited to fork
_child_callbacks: list[Callable[[], None]] = []
_registered = False


def register(register_at_fork: Callable[..., Any] | None = None) -> None:
    """Register the fork hooks with os.register_at_fork or an equivalent function; later calls do nothing.

    The bootstrap of a job passes its own, which was registered before the job's code ran: so of all hooks that run
    before a fork, this one is the last, and no other one waits while it holds the locks.
    """
    global _registered
    register_at_fork = register_at_fork or getattr(os, "register_at_fork", None)
    if register_at_fork is not None and not _registered:
        _registered = True
        register_at_fork(before=_prepare_fork, after_in_parent=_finish_fork, after_in_child=_release_in_child)


def call_in_child(callback: Callable[[], None]) -> None:
    """Register `callback`, which must not raise, to run in forked children after the collector's locks are released."""
    _child_callbacks.append(callback)


def close_descriptors_apart(is_writing: Callable[[], bool]) -> None:
    """Patch os.closerange to wait until no thread of the collector has a file open, for at most `_TIMEOUT_S` (10 s).

    Otherwise a job that closes all descriptors, as daemons do, also closes that of a trace which is being written, and
    the rest of the trace goes into the file that the job opens next: it has the same number.

    Args:
        is_writing: Whether a thread writes traces, which it does without a lock.
    """
    close = os.closerange

    @functools.wraps(close)
    def closerange(*bounds: Any) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            acquired: list[Any] = []
            try:
                _acquire_locks(acquired, deadline)
                if not is_writing() or time.monotonic() > deadline:
                    return close(*bounds)
            finally:
                _release_locks(acquired)
            time.sleep(_PAUSE_S)  # without the locks, which that thread may need

    os.closerange = closerange


def _acquire_locks(acquired: list[Any], deadline: float) -> None:
    """Acquire the collector's locks until `deadline` (s, as time.monotonic), and append those acquired to `acquired`.

    A signal handler of the job may raise meanwhile: the caller then releases the locks in the list.
    """
    for lock in _LOCKS:
        if lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            acquired.append(lock)


def _release_locks(locks: list[Any]) -> None:
    for lock in reversed(locks):
        lock.release()


def _prepare_fork() -> None:
    acquired = _held[threading.get_ident()] = []
    try:
        _acquire_locks(acquired, time.monotonic() + _TIMEOUT_S)
    except KeyboardInterrupt:  # Python ignores what a hook raises
        _interrupted.append(threading.get_ident())


def _finish_fork() -> None:
    _release_locks(_held.pop(threading.get_ident(), []))
    if threading.get_ident() in _interrupted:
        _interrupted.remove(threading.get_ident())
        _thread.interrupt_main()


def _release_in_child() -> None:
    acquired = _held.get(threading.get_ident(), [])
    for lock in _LOCKS:
        if lock not in acquired:
            lock._at_fork_reinit()  # its owner does not exist here
    _finish_fork()
    _held.clear()
    _interrupted.clear()
    for callback in _child_callbacks:
        callback()
