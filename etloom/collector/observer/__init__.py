"""An execution trace observer of our own: every operator with its times, for about a microsecond each.

`ExecutionTraceObserver` has the public face of torch.profiler's, and torch.profiler.profile takes it as
execution_trace_observer. It is C++ against the installed torch, compiled at first use (`build`); what it writes
is described in docs/observer-format.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .execution_trace_observer import COUNTERS, ExecutionTraceObserver
    from .library_build import BuildError, build, built

__all__ = ["BuildError", "COUNTERS", "ExecutionTraceObserver", "build", "built"]

_HOME = {
    "BuildError": "library_build",
    "build": "library_build",
    "built": "library_build",
    "COUNTERS": "execution_trace_observer",
    "ExecutionTraceObserver": "execution_trace_observer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
