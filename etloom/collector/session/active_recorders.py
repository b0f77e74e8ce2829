"""The recorders of this process that have begun: notified of the end of the process, and of a fork.

The handlers are registered once per process, however many recorders there are: neither atexit nor register_at_fork
can unregister, and a service may record some steps of every request.
"""

from __future__ import annotations

import atexit
import os
from typing import TYPE_CHECKING

from . import fork_safety

if TYPE_CHECKING:
    from .recorder import Recorder

_recorders: dict[Recorder, None] = {}  # in the order of their begin
_registered_pid: int | None = None
_profiled = False


def add_recorder(recorder: Recorder) -> None:
    """Notify the recorder of the end of the process and of a fork."""
    global _registered_pid
    _recorders[recorder] = None
    if _registered_pid != os.getpid():
        _registered_pid = os.getpid()
        atexit.register(_finish_all)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_after_fork)
        fork_safety.register_worker_exit(_finish_all)


def remove_recorder(recorder: Recorder) -> None:
    """Remove a recorder that has nothing to do at the end of the process."""
    _recorders.pop(recorder, None)


def mark_profiled() -> None:
    """Note that this process creates a session of torch's profiler, at least a prepared one."""
    global _profiled
    _profiled = True


def _finish_all() -> None:
    for recorder in reversed(list(_recorders)):
        recorder.finish_process()


def _after_fork() -> None:
    for recorder in list(_recorders):
        recorder.reset_after_fork()
    if _profiled:
        fork_safety.skip_static_destructors()
