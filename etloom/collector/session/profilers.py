"""Opens the profilers of a window: an observer, torch's profiler, torch's Flight Recorder.

Limitations of what can be recorded are appended to the list `warnings`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..options import RecordingOptions


def open_observer(options: RecordingOptions, folder: Path, warnings: list[str]) -> tuple[Any, bool]:
    """Return the selected observer with its file open, and whether it is the native one.

    torch's observer is the fallback if the native one was not built.
    """
    if options.observer == "native":
        observer = _open_native_observer(options, folder, warnings)
        if observer is not None:
            return observer, True
    return _open_stock_observer(folder), False


def _open_native_observer(options: RecordingOptions, folder: Path, warnings: list[str]) -> Any | None:
    from ..observer import BuildError, ExecutionTraceObserver, find_library

    try:
        if find_library() is not None:
            limits: dict[str, Any] = {"ring": options.ring}
            if options.max_bytes is not None:
                limits["max_bytes"] = options.max_bytes
            return ExecutionTraceObserver(**limits).register_callback(folder / "et.etob")
        is_limited = options.ring or options.max_bytes is not None
        warnings.append(
            "the native observer was not built for this torch: torch's observer is used"
            + (", without a size limit" if is_limited else "")
        )
    except BuildError as error:
        warnings.append(f"{error}: torch's observer is used")
    return None


def _open_stock_observer(folder: Path) -> Any:
    from torch.profiler import ExecutionTraceObserver

    # A failed registration breaks every later one of the process, including the job's own: test the folder first.
    path = folder / "et.json"
    path.write_text("")
    path.unlink()
    observer = ExecutionTraceObserver()
    observer.register_callback(str(path))
    if not path.exists():
        # torch reports success even if another observer is registered; unregistering would remove that one.
        observer._registered = False
        raise RuntimeError("another execution trace observer is registered in this process")
    return observer


def create_profiler(options: RecordingOptions, observer: Any, warnings: list[str]) -> Any:
    """Return torch's profiler, which also starts and stops the observer."""
    from torch.profiler import profile

    return profile(
        record_shapes=options.shapes,
        with_stack=options.stack,
        profile_memory=options.memory,
        experimental_config=_all_threads_config(warnings) if options.all_threads else None,
        execution_trace_observer=observer,
    )


def _all_threads_config(warnings: list[str]) -> Any:
    from torch._C._profiler import _ExperimentalConfig

    try:
        return _ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        warnings.append(
            "this torch cannot profile threads that Python code starts: their operators will be missing"
        )
        return None


def dump_flight_recorder(path: Path, warnings: list[str]) -> None:
    """Write the contents of torch's Flight Recorder: the job's last collectives, before and in the window."""
    from torch._C import _distributed_c10d as c10d

    dump = getattr(c10d, "_dump_fr_trace_json", None) or getattr(c10d, "_dump_nccl_trace_json", None)
    if dump is None:
        warnings.append("this torch cannot dump its Flight Recorder")
        return
    contents = dump()
    path.write_text(contents.decode() if isinstance(contents, bytes) else contents)


def count_process_groups() -> int:
    """Return the number of process groups of this process."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return 0
    return len(dist.distributed_c10d._world.pg_names)
