"""A native (C++) execution trace observer: records every operator with its times, at about 1 µs per operator.

`ExecutionTraceObserver` has the public interface of torch.profiler's class, and torch.profiler.profile accepts it as
execution_trace_observer. It is C++ code, compiled against the installed torch at first use (`build_library`); its file
format is described in docs/observer-format.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .execution_trace_observer import COUNTERS, ExecutionTraceObserver
    from .native_build import BuildError, build_library, find_failure, find_library

__all__ = [
    "BuildError",
    "COUNTERS",
    "ExecutionTraceObserver",
    "build_library",
    "find_failure",
    "find_library",
]

_MODULES = {
    "BuildError": "native_build",
    "build_library": "native_build",
    "find_failure": "native_build",
    "find_library": "native_build",
    "COUNTERS": "execution_trace_observer",
    "ExecutionTraceObserver": "execution_trace_observer",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value
