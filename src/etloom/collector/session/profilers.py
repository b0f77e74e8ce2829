"""Opens the profilers of a window: an observer, torch's profiler, torch's Flight Recorder.

Limitations of what can be recorded are appended to the list `warnings`.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

from ..observer.execution_trace_observer import ExecutionTraceObserver
from ..observer.native_build import BuildError, find_library
from ..options import RecordingOptions


def open_observer(options: RecordingOptions, folder: Path, warnings: list[str]) -> tuple[Any, bool]:
    """Open an execution trace observer with a file in `folder`; return (observer, whether it is the native observer).

    torch's observer is the fallback if the native one was not built.
    """
    if options.observer == "native":
        observer = _open_native_observer(options, folder, warnings)
        if observer is not None:
            return observer, True
    return _open_stock_observer(folder), False


def _open_native_observer(options: RecordingOptions, folder: Path, warnings: list[str]) -> Any | None:
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
    """Create a torch profiler for the recording options; `observer` records the execution trace with it."""
    return _profiler_class()(
        record_shapes=options.shapes,
        with_stack=options.stack,
        profile_memory=options.memory,
        experimental_config=_all_threads_config(options, warnings) if options.all_threads else None,
        execution_trace_observer=observer,
    )


@functools.cache
def _profiler_class() -> Any:
    """Return a subclass of torch.profiler.profile that does not import torch._inductor when it is prepared.

    That import takes seconds, and if threads of the job import torch._dynamo at the same time, Python ends one of them
    with a deadlock of the two modules' locks.
    """
    from torch.autograd import profiler as autograd_profiler
    from torch.profiler import profile

    class WindowProfiler(profile):
        def prepare_trace(self) -> None:
            triton = getattr(sys.modules.get("torch._inductor.config"), "triton", None)
            self.has_cudagraphs = bool(getattr(triton, "cudagraphs", False))
            self.profiler = autograd_profiler.profile(  # type: ignore[no-untyped-call]
                use_device=self.use_device,
                record_shapes=self.record_shapes,
                profile_memory=self.profile_memory,
                with_stack=self.with_stack,
                use_kineto=True,
                experimental_config=self.experimental_config,
            )
            self.profiler._prepare_trace()  # type: ignore[no-untyped-call]

    return WindowProfiler


def _all_threads_config(options: RecordingOptions, warnings: list[str]) -> Any:
    from torch._C._profiler import _ExperimentalConfig

    try:
        return _ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        # Steps by time are recorded by a thread of the collector.
        lost = "all operators" if options.step_ns is not None else "their operators"
        warnings.append(f"this torch cannot profile threads that Python code starts: {lost} will be missing")
        return None


def dump_flight_recorder(path: Path, warnings: list[str]) -> None:
    """Write torch's Flight Recorder (the job's last collectives) to `path` as JSON; add a warning if unavailable."""
    contents = read_flight_recorder()
    if contents is None:
        warnings.append("this torch cannot dump its Flight Recorder")
    else:
        path.write_text(contents)


def read_flight_recorder() -> str | None:
    """Return the contents of torch's Flight Recorder as JSON, or None if this torch cannot dump it."""
    from torch._C import _distributed_c10d as c10d

    dump = getattr(c10d, "_dump_fr_trace_json", None) or getattr(c10d, "_dump_nccl_trace_json", None)
    if dump is None:
        return None
    contents = dump()
    return str(contents.decode() if isinstance(contents, bytes) else contents)


def count_process_groups() -> int:
    """Return the number of process groups of this process."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return 0
    return len(dist.distributed_c10d._world.pg_names)


# Limits the capture of Nsight Systems to a recording window, and marks operators as NVTX ranges.


class NsysCapture:
    """Starts and stops the capture of Nsight Systems by cudaProfilerStart and cudaProfilerStop; idle without CUDA."""

    def __init__(self, shapes: bool) -> None:
        self._shapes = shapes
        self._ranges: Any = None
        self._capturing = False

    def start(self) -> None:
        import torch

        if not torch.cuda.is_available():
            return
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
        self._capturing = True
        emit_nvtx: Any = torch.autograd.profiler.emit_nvtx
        self._ranges = emit_nvtx(record_shapes=self._shapes)
        self._ranges.__enter__()

    def stop(self) -> None:
        import torch

        ranges, self._ranges = self._ranges, None
        if ranges is not None:
            ranges.__exit__(None, None, None)
        if self._capturing:
            self._capturing = False
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
