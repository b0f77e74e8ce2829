"""Writes torch.profiler's trace without Python's lock, which torch's own export holds from begin to end."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

from .execution_trace_observer import load_library
from .library_build import BuildError, built

# How pybind11 names what torch's wheels are compiled with (pybind11_platform_abi_id.h); it refuses another name.
_ABI = b"system_libstdcpp_gxx_abi_1xxx_use_cxx11_abi_1"


def export_chrome_trace(profile: Any, path: Path) -> None:
    """As `profile.export_chrome_trace(path)`; the profile is empty afterwards where our library could do it.

    Raises RuntimeError where it cannot be written.
    """
    result = getattr(profile.profiler, "kineto_results", None)
    pointer = None if getattr(profile, "_use_cupti_monitor", False) else _native_result(result)
    if pointer is None:
        profile.export_chrome_trace(str(path))
    elif load_library().etloom_export(pointer, os.fsencode(path)):
        raise RuntimeError(f"torch cannot write {path.name}")


def _native_result(result: Any) -> int | None:
    """The C++ ProfilerResult of torch's, by pybind11's conduit; None where ours is not of the same making.

    And where our library cannot be used at all: torch writes its trace itself.
    """
    try:
        if built() is None or not hasattr(result, "_pybind11_conduit_v1_"):
            return None
        return _unwrap_result(result, load_library())
    except (BuildError, OSError, AttributeError, ValueError):
        return None


def _unwrap_result(result: Any, library: ctypes.CDLL) -> int | None:
    python = ctypes.PyDLL(None)
    make, look = python.PyCapsule_New, python.PyCapsule_GetPointer
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    look.restype, look.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_void_p)
    kind = make(library.etloom_result_type(), library.etloom_type_name(), None)
    capsule = result._pybind11_conduit_v1_(_ABI, kind, b"raw_pointer_ephemeral")
    return None if capsule is None else look(capsule, library.etloom_result_name())
