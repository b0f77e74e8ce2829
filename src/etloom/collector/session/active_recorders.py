"""The started recorders of this process: they are notified when the process ends or forks.

The handlers are registered once per process, however many recorders there are: neither atexit nor register_at_fork
can unregister, and a service may record some steps of every request.
"""

from __future__ import annotations

import atexit
import os
from typing import TYPE_CHECKING

from .. import fork_hold
from . import fork_safety

if TYPE_CHECKING:
    from .recorder import Recorder

_recorders: dict[Recorder, None] = {}  # in the order of their begin
_is_registered = False
_registered_pid: int | None = None
_is_profiled = False


def add_recorder(recorder: Recorder) -> None:
    """Register a recorder to be notified when the process ends or forks."""
    _recorders[recorder] = None
    _register()


def remove_recorder(recorder: Recorder) -> None:
    """Unregister a recorder that has nothing to do at the end of the process."""
    _recorders.pop(recorder, None)


def mark_profiled() -> None:
    """Remember that this process uses torch's profiler, so that forked children are protected from its state."""
    global _is_profiled
    _is_profiled = True
    _register()


def _register() -> None:
    global _is_registered, _registered_pid
    if not _is_registered:
        _is_registered = True
        fork_hold.register()
        fork_hold.call_in_child(_continue_in_child)
        fork_hold.close_descriptors_apart(lambda: any(recorder.is_writing for recorder in list(_recorders)))
        atexit.register(_finish_all)
    if _registered_pid != os.getpid():
        _registered_pid = os.getpid()
        fork_safety.register_worker_exit(_finish_all)


def _finish_all() -> None:
    for recorder in reversed(list(_recorders)):
        recorder.finish_process()


def _continue_in_child() -> None:
    """In a forked child, unregister recorders that do not continue; if profiled, skip static destructors at exit."""
    for recorder in list(_recorders):
        if not recorder.continue_in_child():
            remove_recorder(recorder)
    if _is_profiled:
        fork_safety.skip_static_destructors()
