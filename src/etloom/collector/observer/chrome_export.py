"""Exports torch.profiler's trace without the GIL, so that other threads run; torch holds the GIL during its export."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

from .execution_trace_observer import load_library
from .native_build import BuildError, find_library

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
