"""Prevents the collector's profilers and the job's profilers from running at the same time.

Two Kineto sessions in one process do not raise an exception, they crash it: with torch 2.13 a session segfaults when
it starts or stops while another one was prepared or is running, and a second ExecutionTraceObserver silently writes
nothing. So the guard checks for the job's profilers before a window opens, and ends the window at the moment the job
starts one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..observer.native_build import BuildError, find_library
from ..options import RecordingOptions
from .model_facts import list_instances, list_subclasses

_KINETO = "torch.profiler"
_OBSERVER = "ExecutionTraceObserver"


class ProfilerGuard:
    """Detects profilers of the job that conflict with the recording, by patching torch's methods until `remove()`.

    Args:
        yield_to: Called with the name of a profiler before the job starts it.
        options: The recording, which determines the profilers it conflicts with.
    """

    def __init__(self, yield_to: Callable[[str], None], options: RecordingOptions) -> None:
        from torch.autograd.profiler import profile
        from torch.profiler import ExecutionTraceObserver

        self._yield_to = yield_to
        # nsys uses CUPTI too. The native observer and any other record at the same time.
        self._watch_kineto = options.kineto or options.nsys
        self._watch_observer = options.et and (options.observer != "native" or not _is_observer_built())
        self._is_collectors = False
        self._foreign: dict[str, weakref.WeakSet[Any]] = {
            _KINETO: weakref.WeakSet(),
            _OBSERVER: weakref.WeakSet(),
        }
        if self._watch_kineto:
            for candidate in list_instances(list_subclasses(profile)):
                if candidate.entered and candidate.kineto_results is None:
                    self._foreign[_KINETO].add(candidate)
        if self._watch_observer:
            for candidate in list_instances(list_subclasses(ExecutionTraceObserver)):
                if candidate.is_registered:
                    self._foreign[_OBSERVER].add(candidate)
        self._patches: list[tuple[Any, str, Any, Any]] = []
        if self._watch_kineto:
            self._patch(profile, "_prepare_trace", _KINETO, starts=True)
            self._patch(profile, "__exit__", _KINETO, starts=False)
        if self._watch_observer:
            self._patch(ExecutionTraceObserver, "register_callback", _OBSERVER, starts=True)
            self._patch(ExecutionTraceObserver, "unregister_callback", _OBSERVER, starts=False)

    def active_profiler(self) -> str | None:
        """Return the name of a profiler that the job has prepared or started, or None."""
        from torch.autograd import profiler

        for name, owners in self._foreign.items():
            # A `with` that was entered before this guard leaves through the original __exit__, past the patch.
            if any(name != _KINETO or owner.kineto_results is None for owner in owners):
                return name
        return _KINETO if self._watch_kineto and profiler._is_profiler_enabled else None

    @contextmanager
    def allow_profilers(self) -> Iterator[None]:
        """Return a context in which new profilers are treated as the collector's and not as the job's."""
        self._is_collectors = True
        try:
            yield
        finally:
            self._is_collectors = False

    def remove(self) -> None:
        """Restore the methods of torch's profilers that this guard has patched."""
        for owner, name, original, replacement in self._patches:
            if owner.__dict__.get(name) is replacement:
                setattr(owner, name, original)
        self._patches = []

    def _patch(self, owner: Any, name: str, profiler: str, starts: bool) -> None:
        original = owner.__dict__[name]

        def replacement(instance: Any, *args: Any, **kwargs: Any) -> Any:
            if not starts:
                self._foreign[profiler].discard(instance)
            elif not self._is_collectors:
                self._yield_to(profiler)
                self._foreign[profiler].add(instance)
            return original(instance, *args, **kwargs)

        setattr(owner, name, replacement)
        self._patches.append((owner, name, original, replacement))


def _is_observer_built() -> bool:
    try:
        return find_library() is not None
    except BuildError:
        return False
