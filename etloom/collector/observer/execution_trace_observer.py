"""The Python class of the native observer, with the interface of torch.profiler.ExecutionTraceObserver."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import weakref
from pathlib import Path
from typing import Any

from .. import fork_hold
from .native_build import BuildError, build_library

COUNTERS = (
    "no_space",
    "no_dictionary",
    "arguments_omitted",
    "lists_truncated",
    "failed",
    "reentrant",
    "raised",
    "ended_elsewhere",
    "ended_outside",
    "unsized",
    "thread_exiting",
    "overwritten",
    "stuck",
    "operators",
    "overwritten_operators",
)
"""The counters of the C++ code, in its order (native/format.hpp)."""

_DEFAULT_MAX_BYTES = 4 << 30
_MIN_BYTES = 1 << 20
_lock = fork_hold.profiler_lock
_sessions: weakref.WeakSet[_Session] = weakref.WeakSet()


class ExecutionTraceObserver:
    """Records the operators of the process into one file, in windows from `start` to `stop`.

    Operators that began before `start` are not recorded, nor the ends of operators that are open at `stop`. Only one
    observer of a process records at a time. The file is complete after `unregister_callback`, or when the observer is
    garbage-collected, and can be read at any time before, even if the process was killed.

    Args:
        detail: Record inputs and outputs; without them the cost is a fifth.
        max_bytes: Size limit of the file, in bytes, at least 1 MiB. When it is reached, recording ends.
        ring: When the limit is reached, overwrite the oldest operators instead.
    """

    def __init__(
        self, *, detail: bool = True, max_bytes: int = _DEFAULT_MAX_BYTES, ring: bool = False
    ) -> None:
        if max_bytes < _MIN_BYTES:
            raise ValueError(f"expected max_bytes of at least 1 MiB, got {max_bytes}")
        self._detail, self._max_bytes, self._ring = detail, max_bytes, ring
        self._path: str | None = None
        self._session: _Session | None = None
        self._running = False
        self._groups: list[dict[str, Any]] = []

    def register_callback(self, output_file_path: str | os.PathLike[str]) -> ExecutionTraceObserver:
        """Open the output file; a second call does nothing, as in torch.

        Raises:
            BuildError: The library cannot be built or loaded.
            OSError: The file cannot be written.
        """
        with _lock:
            if self._session is None:
                self._session = _Session(
                    str(output_file_path), max_bytes=self._max_bytes, ring=self._ring, detail=self._detail
                )
                self._path = str(output_file_path)
        return self

    def start(self) -> None:
        """Start recording operators; do nothing if no file is registered or the observer is already recording.

        Raises:
            RuntimeError: Another observer of this process is recording.
        """
        with _lock:
            if self._session is None or self._running:
                return
            self._session.start()
            self._running = True
        self._record_groups()

    def stop(self) -> None:
        """Stop recording; afterwards all recorded operators are in the file."""
        with _lock:
            if self._session is None or not self._running:
                return
        if _process_groups() != self._groups:
            self._record_groups()
        with _lock:
            if self._session is None or not self._running:  # another thread ended it meanwhile
                return
            self._running = False
            self._session.stop()

    def unregister_callback(self) -> None:
        """Stop recording, then complete and close the file."""
        self.stop()
        with _lock:
            session, self._session = self._session, None
            if session is not None:
                session.close()

    def cleanup(self) -> None:
        """Call `unregister_callback`; torch.profiler.profile calls this on exit."""
        self.unregister_callback()

    def get_output_file_path(self) -> str | None:
        return self._path

    @property
    def is_registered(self) -> bool:
        return self._session is not None

    def is_running(self) -> bool:
        return self._running

    def set_extra_resource_collection(self, value: bool) -> None:
        """Do nothing: required by torch's interface, but there are no resources except the file."""

    def note(self, **facts: Any) -> None:
        """Write facts about the recording to the trace file, as JSON; do nothing if the observer is not recording."""
        with _lock:
            if self._session is not None and self._running:
                self._session.note(json.dumps(facts))

    def counters(self) -> dict[str, int]:
        """Return the counters of the C++ observer, by their names in COUNTERS; empty if no file is open."""
        return {} if self._session is None else self._session.counters()

    def overwritten_ns(self) -> int | None:
        """Return the time (ns, time.monotonic_ns) of the last operator overwritten in the ring buffer, or None.

        Everything after it is complete.
        """
        return None if self._session is None else self._session.overwritten_ns() or None

    def _record_groups(self) -> None:
        """Record the process groups with all their ranks, as an operator with the name that torch's observer uses."""
        from torch._C import _autograd

        self._groups = _process_groups()
        if self._groups:
            arguments = ("## process_group:init ##", json.dumps(self._groups))
            handle = _autograd._record_function_with_args_enter(*arguments)
            _autograd._record_function_with_args_exit(handle)


class _Session:
    """The C++ recording session of one trace file; closed when garbage-collected, but never in a forked child.

    Any thread may collect the garbage, also one that the holder of a lock of ours waits for: so the finalizer takes
    none, and ExecutionTraceObserver has no `__del__` that would.
    """

    def __init__(self, path: str, *, max_bytes: int, ring: bool, detail: bool) -> None:
        import torch

        library = load_library()
        self._pid = os.getpid()
        self._library = library
        self._handle = library.etloom_open(
            os.fsencode(path), torch.__version__.encode(), max_bytes, ring, detail
        )
        if not self._handle:
            raise OSError(f"{path} {library.etloom_error().decode()}")
        _watch_forks()
        _sessions.add(self)
        self._close = weakref.finalize(self, _close_session, library, self._handle, self._pid)

    def start(self) -> None:
        if os.getpid() == self._pid and self._library.etloom_start(self._handle):
            raise RuntimeError("another observer is recording in this process; stop it first")

    def stop(self) -> None:
        if os.getpid() == self._pid:
            self._library.etloom_stop(self._handle)

    def note(self, text: str) -> None:
        if os.getpid() == self._pid:
            self._library.etloom_note(self._handle, text.encode())

    def close(self) -> None:
        _sessions.discard(self)
        self._close()

    def release(self) -> None:
        self._library.etloom_release(self._handle)

    def overwritten_ns(self) -> int:
        return int(self._library.etloom_overwritten_ns(self._handle))

    def counters(self) -> dict[str, int]:
        return {name: self._library.etloom_counter(self._handle, i) for i, name in enumerate(COUNTERS)}


@functools.cache
def _watch_forks() -> None:
    fork_hold.register()
    fork_hold.call_in_child(_release_sessions)


def _release_sessions() -> None:
    """Release the parent's trace files in a forked child, without writing to them."""
    for session in list(_sessions):
        session.release()
    _sessions.clear()


def _close_session(library: ctypes.CDLL, handle: int, pid: int) -> None:
    if os.getpid() == pid:
        library.etloom_stop(handle)
        library.etloom_close(handle, 1)


@functools.cache
def load_library() -> ctypes.CDLL:
    """Load the native observer library for the installed torch; compile it first if necessary.

    Raises:
        BuildError: It cannot be built or loaded.
    """
    path = build_library()
    try:
        return _load(path)
    except (OSError, AttributeError) as error:  # truncated, of another machine, on a disk mounted noexec
        raise BuildError(f"the native observer cannot be loaded: {error}") from error


def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.etloom_error.restype = ctypes.c_char_p
    library.etloom_open.restype = ctypes.c_void_p
    library.etloom_open.argtypes = (
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_uint64,
        ctypes.c_int,
        ctypes.c_int,
    )
    library.etloom_overwritten_ns.restype = ctypes.c_int64
    library.etloom_overwritten_ns.argtypes = (ctypes.c_void_p,)
    library.etloom_counter.restype = ctypes.c_uint64
    library.etloom_counter.argtypes = (ctypes.c_void_p, ctypes.c_int)
    for name in ("etloom_start", "etloom_stop", "etloom_release"):
        getattr(library, name).argtypes = (ctypes.c_void_p,)
    library.etloom_note.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
    library.etloom_close.argtypes = (ctypes.c_void_p, ctypes.c_int)
    for name in ("etloom_result_type", "etloom_result_name", "etloom_type_name"):
        getattr(library, name).restype = ctypes.c_void_p
    library.etloom_export.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
    for name in ("etloom_gate_is_clear", "etloom_gate_close"):
        getattr(library, name).argtypes = (ctypes.c_int64,)
    return library


def _process_groups() -> list[dict[str, Any]]:
    """Return torch's description of this process's process groups, with the ranks that torch leaves empty filled in."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return []
    return [
        {**group, "ranks": group["ranks"] or list(range(group["group_size"]))}
        for group in dist.distributed_c10d._world.pg_config_info
    ]
