"""Keeps our window and the profilers of the job itself apart.

Two Kineto sessions in one process are no exception but the end of it: with torch 2.13 a session that another
one was prepared or run beside segfaults when it starts or stops, and a second ExecutionTraceObserver silently
writes nothing. So we look before we open, and while we are open we leave at the moment the job starts one of
its own.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..options import Options

_KINETO = "torch.profiler"
_OBSERVER = "ExecutionTraceObserver"


class Guard:
    """Watches both until `remove()`; `yield_to(what)` is called before one of the job's own starts."""

    def __init__(self, yield_to: Callable[[str], None], options: Options) -> None:
        from torch.autograd.profiler import profile
        from torch.profiler import ExecutionTraceObserver

        self._yield_to = yield_to
        # nsys has CUPTI too. Our own observer and any other record side by side.
        self._kineto = options.kineto or options.nsys
        self._observer = options.et and (options.observer != "native" or not _is_observer_built())
        self._ours = False
        self._foreign: dict[str, weakref.WeakSet[Any]] = {
            _KINETO: weakref.WeakSet(),
            _OBSERVER: weakref.WeakSet(),
        }
        for thing in gc.get_objects():
            bases = type(thing).__mro__
            if self._kineto and profile in bases and thing.entered and thing.kineto_results is None:
                self._foreign[_KINETO].add(thing)
            elif self._observer and ExecutionTraceObserver in bases and thing.is_registered:
                self._foreign[_OBSERVER].add(thing)
        self._patched: list[tuple[Any, str, Any, Any]] = []
        if self._kineto:
            self._patch(profile, "_prepare_trace", _KINETO, starts=True)
            self._patch(profile, "__exit__", _KINETO, starts=False)
        if self._observer:
            self._patch(ExecutionTraceObserver, "register_callback", _OBSERVER, starts=True)
            self._patch(ExecutionTraceObserver, "unregister_callback", _OBSERVER, starts=False)

    def taken(self) -> str | None:
        """The name of what the job itself has prepared or running, None when the way is free."""
        from torch.autograd import profiler

        for what, owners in self._foreign.items():
            # A `with` that was entered before us leaves by the __exit__ it found then, past ours.
            if any(what != _KINETO or owner.kineto_results is None for owner in owners):
                return what
        return _KINETO if self._kineto and profiler._is_profiler_enabled else None

    @contextmanager
    def ours(self) -> Iterator[None]:
        """What is prepared inside is our own."""
        self._ours = True
        try:
            yield
        finally:
            self._ours = False

    def remove(self) -> None:
        for owner, name, original, replacement in self._patched:
            if owner.__dict__.get(name) is replacement:
                setattr(owner, name, original)
        self._patched = []

    def _patch(self, owner: Any, name: str, what: str, starts: bool) -> None:
        original = owner.__dict__[name]

        def replacement(thing: Any, *args: Any, **kwargs: Any) -> Any:
            if not starts:
                self._foreign[what].discard(thing)
            elif not self._ours:
                self._yield_to(what)
                self._foreign[what].add(thing)
            return original(thing, *args, **kwargs)

        setattr(owner, name, replacement)
        self._patched.append((owner, name, original, replacement))


def _is_observer_built() -> bool:
    from ..observer import BuildError, built

    try:
        return built() is not None
    except BuildError:
        return False
