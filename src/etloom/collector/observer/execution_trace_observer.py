"""The Python class of the native observer, with the interface of torch.profiler.ExecutionTraceObserver."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import fork_hold
from . import torch_files
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

    A file whose name ends in .json or .json.gz is written as PyTorch's JSON then; until then, and if that fails, the
    recording is next to it, in a file with ``.etob`` after the name. A file of any other name has the observer's
    format.

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
        self.extra_resources_collection = False

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
        if self._session is not None and (folder := self.get_resources_dir(can_create=True)):
            torch_files.copy_kernel_sources(folder)
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

    def set_extra_resource_collection(self, val: bool) -> None:
        """Set whether `unregister_callback` copies the sources of compiled kernels to the folder of resources."""
        self.extra_resources_collection = val
        self.get_resources_dir(can_create=True)

    def get_resources_dir(self, can_create: bool = False) -> str | None:
        """Return the folder of resources next to the file; None without `set_extra_resource_collection` or a file."""
        if not self.extra_resources_collection or self._path is None:
            return None
        return self.get_resources_dir_for_et_path(self._path, create_dir=can_create)

    @staticmethod
    def get_resources_dir_for_et_path(trace_path: str, create_dir: bool = False) -> str | None:
        """Return the folder of resources of a trace file; None if it does not exist and is not or cannot be created."""
        return torch_files.find_resources(trace_path, create=create_dir)

    @classmethod
    def build_execution_trace_obs_from_env(cls) -> ExecutionTraceObserver | None:
        """Return an observer with a temporary JSON file if ENABLE_PYTORCH_EXECUTION_TRACE is 1, else None.

        With ENABLE_PYTORCH_EXECUTION_TRACE_EXTRAS=1 it also collects resources (`set_extra_resource_collection`).
        """
        if os.environ.get("ENABLE_PYTORCH_EXECUTION_TRACE", "0") != "1":
            return None
        observer = cls().register_callback(torch_files.create_temporary_file())
        observer.set_extra_resource_collection(
            os.environ.get("ENABLE_PYTORCH_EXECUTION_TRACE_EXTRAS", "0") == "1"
        )
        return observer

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
        json_path = path if path.endswith((".json", ".json.gz")) else None
        recording = path if json_path is None else f"{path}.etob"
        resources = torch_files.name_resources(path)
        self._handle = library.etloom_open(
            *(os.fsencode(recording), torch.__version__.encode(), max_bytes, ring, detail),
            os.fsencode(resources),
        )
        if not self._handle:
            raise OSError(f"{recording} {library.etloom_error().decode()}")
        _watch_forks()
        _sessions.add(self)
        write = None if json_path is None else functools.partial(torch_files.write_json, recording, json_path)
        self._close = weakref.finalize(self, _close_session, library, self._handle, self._pid, write)

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


def _close_session(
    library: ctypes.CDLL, handle: int, pid: int, write_json: Callable[[], None] | None
) -> None:
    if os.getpid() == pid:
        library.etloom_stop(handle)
        library.etloom_close(handle, 1)
        if write_json is not None:
            write_json()


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
        ctypes.c_char_p,
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
