"""Starts and stops torch's profiler while other threads of the job run operators.

torch 2.13 crashes if a thread is inside one of the profiler's callbacks when a profiler of all threads stops, or if an
operator ends in a later window than it began in. native/gate.cpp keeps the threads out of the callbacks for the
microseconds that this takes; docs/decisions/0045-stopping-the-profiler.md has the details.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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


# Exports torch.profiler's trace without the GIL, so that other threads run; torch holds the GIL during its export.

# pybind11's name of the ABI of torch's wheels (pybind11_platform_abi_id.h); it refuses any other name.
_ABI = b"system_libstdcpp_gxx_abi_1xxx_use_cxx11_abi_1"


def export_chrome_trace(profile: Any, path: Path) -> None:
    """Write the trace like `profile.export_chrome_trace(path)`, if possible without the GIL; may empty the profile.

    Raises:
        RuntimeError: The trace cannot be written.
    """
    result = getattr(profile.profiler, "kineto_results", None)
    pointer = None if getattr(profile, "_use_cupti_monitor", False) else _native_result(result)
    if pointer is None:
        profile.export_chrome_trace(str(path))
    elif load_library().etloom_export(pointer, os.fsencode(path)):
        raise RuntimeError(f"torch cannot write {path.name}")


def _native_result(result: Any) -> int | None:
    """Return the address of torch's C++ ProfilerResult, through pybind11's conduit.

    Returns None if it has another ABI, or if the library cannot be used: torch then writes its trace itself.
    """
    try:
        if find_library() is None or not hasattr(result, "_pybind11_conduit_v1_"):
            return None
        return _unwrap_result(result, load_library())
    except (BuildError, OSError, AttributeError, ValueError):
        return None


def _unwrap_result(result: Any, library: ctypes.CDLL) -> int | None:
    python = ctypes.PyDLL(None)
    new_capsule, capsule_pointer = python.PyCapsule_New, python.PyCapsule_GetPointer
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    capsule_pointer.restype, capsule_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_void_p)
    result_type = new_capsule(library.etloom_result_type(), library.etloom_type_name(), None)
    capsule = result._pybind11_conduit_v1_(_ABI, result_type, b"raw_pointer_ephemeral")
    return None if capsule is None else capsule_pointer(capsule, library.etloom_result_name())
