"""Starts and stops torch's profiler while other threads of the job run operators.

torch 2.13 crashes if a thread is inside one of the profiler's callbacks when a profiler of all threads stops, or if an
operator ends in a later window than it began in. native/gate.cpp keeps the threads out of the callbacks for the
microseconds that this takes; docs/decisions/0045-stopping-the-profiler.md has the details.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .execution_trace_observer import load_library
from .native_build import BuildError, find_library

_MAX_START_MS = 100
_CLOSE_MS = 100
_CLOSE_ATTEMPTS = 50
_PAUSE_S = 0.05


class GateError(Exception):
    """Raised if torch's profiler cannot be stopped without the risk of crashing the job; the message is the reason."""


class ProfilerGate:
    """Prevents the job's threads from entering torch's profiler callbacks while the profiler of a window stops.

    Only one thread at a time uses it.
    """

    def __init__(self) -> None:
        self._library = load_library()

    def is_clear(self) -> bool:
        """Wait up to 0.1 s for operators that began in an earlier recording window; return whether all have ended."""
        return bool(self._library.etloom_gate_is_clear(_MAX_START_MS))

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Return a context manager in which to start torch's profiler; it tracks the job's threads by callbacks."""
        self._library.etloom_gate_add_outer()
        try:
            yield
        finally:
            self._library.etloom_gate_add_inner()

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Return a context manager in which to stop torch's profiler while no thread can enter its callbacks.

        Raises:
            GateError: A thread did not leave a callback in 7 s; the profiler was not stopped.
        """
        from torch.autograd import profiler

        module: Any = profiler
        disable = module._disable_profiler

        def disable_behind_gate() -> Any:
            self._close()
            return disable()

        module._disable_profiler = disable_behind_gate
        try:
            yield
        finally:
            module._disable_profiler = disable
            self.remove()

    def remove(self) -> None:
        """Let threads enter the profiler's callbacks again, and stop tracking the threads."""
        self._library.etloom_gate_remove()

    def _close(self) -> None:
        for _ in range(_CLOSE_ATTEMPTS):
            if self._library.etloom_gate_close(_CLOSE_MS):
                return
            time.sleep(_PAUSE_S)
        raise GateError(
            "a thread of the job is still in a callback of torch's profiler, so the profiler cannot be changed"
        )


def open_gate() -> ProfilerGate | None:
    """Return a ProfilerGate, or None if the native library is not built for the installed torch."""
    try:
        return ProfilerGate() if find_library() is not None else None
    except BuildError:
        return None
