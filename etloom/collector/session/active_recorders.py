"""The recorders of this process that have begun: they are told of its end, and of a fork.

Asked for once a process, whatever the number of recorders: neither atexit nor register_at_fork forgets whom it calls,
and a service may record some steps of every request.
"""

from __future__ import annotations

import atexit
import os
from typing import TYPE_CHECKING

from . import fork_safety

if TYPE_CHECKING:
    from .recorder import Recorder

_recorders: dict[Recorder, None] = {}  # in their order
_registered_pid: int | None = None
_profiled = False


def add_recorder(recorder: Recorder) -> None:
    global _registered_pid
    _recorders[recorder] = None
    if _registered_pid != os.getpid():
        _registered_pid = os.getpid()
        atexit.register(_finish_all)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_after_fork)
        fork_safety.register_worker_exit(_finish_all)


def remove_recorder(recorder: Recorder) -> None:
    """Nothing is left to do for it at the end."""
    _recorders.pop(recorder, None)


def mark_profiled() -> None:
    """This process makes a session of torch's profiler, if only to prepare it."""
    global _profiled
    _profiled = True


def _finish_all() -> None:
    for recorder in reversed(list(_recorders)):
        recorder.leave()


def _after_fork() -> None:
    for recorder in list(_recorders):
        recorder.forked()
    if _profiled:
        fork_safety.skip_static_destructors()
