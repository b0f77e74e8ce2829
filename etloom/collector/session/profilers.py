"""What a window records with: an observer, options of torch's profiler, torch's Flight Recorder.

What is poorer than asked for is a line of the list `warnings`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..options import Options


def open_observer(options: Options, folder: Path, warnings: list[str]) -> tuple[Any, bool]:
    """The observer that the options name, its file open, and whether it is ours: torch's where that was not built."""
    if options.observer == "native":
        from ..observer import BuildError, ExecutionTraceObserver, built

        try:
            if built() is not None:
                bounds: dict[str, Any] = {"ring": options.ring}
                if options.max_bytes is not None:
                    bounds["max_bytes"] = options.max_bytes
                return ExecutionTraceObserver(**bounds).register_callback(folder / "et.etob"), True
            unbounded = ", without a bound" if options.ring or options.max_bytes is not None else ""
            warnings.append(
                f"the native observer was not built for this torch: torch's own records{unbounded}"
            )
        except BuildError as error:
            warnings.append(f"{error}: torch's own observer records")
    from torch.profiler import ExecutionTraceObserver as Stock

    # A registration that fails breaks every later one of the process, the job's own too: try the folder first.
    (folder / "et.json").write_text("")
    (folder / "et.json").unlink()
    stock = Stock()
    stock.register_callback(str(folder / "et.json"))
    if not (folder / "et.json").exists():
        # True is answered even where another observer is registered; to unregister would then remove that one.
        stock._registered = False
        raise RuntimeError("another execution trace observer is registered in this process")
    return stock, False


def create_profiler(options: Options, observer: Any, warnings: list[str]) -> Any:
    """torch's profiler, which starts and stops the observer with itself."""
    from torch.profiler import profile as torch_profile

    return torch_profile(
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
        warnings.append("this torch cannot profile threads that Python code starts: theirs will be missing")
        return None


def dump_flight_recorder(path: Path, warnings: list[str]) -> None:
    """What torch's Flight Recorder holds: the last collectives of the job, before and in the window."""
    from torch._C import _distributed_c10d as c10d

    dump = getattr(c10d, "_dump_fr_trace_json", None) or getattr(c10d, "_dump_nccl_trace_json", None)
    if dump is None:
        warnings.append("this torch gives no dump of its Flight Recorder")
        return
    dumped = dump()
    path.write_text(dumped.decode() if isinstance(dumped, bytes) else dumped)


def count_process_groups() -> int:
    """Process groups of this process."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return 0
    return len(dist.distributed_c10d._world.pg_names)
