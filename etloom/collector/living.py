"""The recorders of this process that have begun: they are told of its end, and of a fork.

Asked for once a process, whatever the number of recorders: neither atexit nor register_at_fork forgets whom it calls,
and a service may record some steps of every request.
"""

from __future__ import annotations

import atexit
import os
from typing import TYPE_CHECKING

from . import forking

if TYPE_CHECKING:
    from .recorder import Recorder

_begun: dict[Recorder, None] = {}  # in their order
_asked_in: int | None = None
_profiled = False


def join(recorder: Recorder) -> None:
    global _asked_in
    _begun[recorder] = None
    if _asked_in != os.getpid():
        _asked_in = os.getpid()
        atexit.register(_leave)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_forked)
        forking.at_end_of_a_worker(_leave)


def forget(recorder: Recorder) -> None:
    """Nothing is left to do for it at the end."""
    _begun.pop(recorder, None)


def profiles() -> None:
    """This process makes a session of torch's profiler, if only to prepare it."""
    global _profiled
    _profiled = True


def _leave() -> None:
    for recorder in reversed(list(_begun)):
        recorder.leave()


def _forked() -> None:
    for recorder in list(_begun):
        recorder.forked()
    if _profiled:
        forking.leave_without_destructors()
