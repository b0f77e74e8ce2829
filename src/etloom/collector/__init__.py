"""Collects execution traces inside a PyTorch job: an execution trace and a Kineto trace of the same steps.

There are two entry points, which write the same files:

- `record(out)`: a context manager with `.step()`, for a training loop whose code can be edited;
- `collect(command, out)`: runs a command and counts the steps of its optimizer, without changes to its code.

A folder of traces contains, for each rank r that recorded a window of steps:

    observer_<r>.etob           the native observer's execution trace (docs/observer-format.md); `etloom collect` also
                                converts it to torch's format, as below
    torch_et_<r>.json.gz        the trace of torch's ExecutionTraceObserver (torch's 1.1.1-chakra schema), if it is used
    kineto_trace_<r>.json.gz    the trace of torch.profiler, in Chrome's trace format
    flight_recorder_<r>.json, nsys_<r>.nsys-rep     if they were selected
    rank_<r>.json               the record of the rank: steps, process, device, model, groups, versions; written last,
                                so its presence means that the rank is complete
    run.json                    facts of the run, and all rank_<r>.json in one list
    <name of the folder>.yaml   CCL-Bench's workload card, filled in with what the run knows

If there may be several windows (`every`, `on_demand`), each has such a folder, step_<first>, in the run's folder.

Every rank that publishes its files rewrites run.json and the card from all records that exist, until the list is
complete; so the last one writes the full list, and no rank waits for another. `collect` adds the command and its exit
status. All files appear under these names atomically (os.replace); unfinished ones are in a hidden folder `.etloom-*`.

A step is named `ProfilerStep#N` in both traces, N counting from 0. What runs in the window after its last complete
step is named `etloom:unfinished step N`, so that it is not read as a step.

Files are written on a background thread after the window, without the GIL where that takes long, one window at a
time: if the disk is slow, the next window is skipped; if it is full, this one is; either is reported in one line. The
training waits only while torch's profiler stops, 5 to 10 µs per operator: that must happen on the training thread,
because the device is recorded until its end. A window that is open when the job raises or exits is closed and kept,
with its complete steps. A process that is killed in its window (SIGKILL, SIGTERM, os._exit) leaves the native
observer's trace up to then, which `collect` keeps; of torch's own traces nothing remains. torch 2.13 crashes the
process in one case that cannot be foreseen: a backward pass, inside the window, of a graph that another thread built
before it.

The code here runs in the user's job: a failure becomes one line on stderr that begins with `etloom:`, never an
exception, and the job's own profilers take precedence. It needs torch and the standard library only, and `collect`
also loads it into Pythons that have no etloom installed. So imports are relative, except etloom.core.errors, which is
imported inside functions only.

Sub-packages: `session` (recording in one process), `launcher` (running a command), `observer` (the native observer),
`recovery` (killed runs, several hosts). The modules next to this one are shared: options and the files of a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .launcher.collection import CollectResult, collect
    from .options import CollectOptions
    from .recovery.gathering import GatherResult, gather
    from .recovery.killed_windows import SalvageResult, salvage_run
    from .session.on_demand import request_recording
    from .session.recording import Recording, record

__all__ = [
    "CollectOptions",
    "CollectResult",
    "GatherResult",
    "Recording",
    "SalvageResult",
    "collect",
    "gather",
    "record",
    "request_recording",
    "salvage_run",
]

_MODULES = {
    "CollectOptions": "options",
    "CollectResult": "launcher.collection",
    "GatherResult": "recovery.gathering",
    "Recording": "session.recording",
    "SalvageResult": "recovery.killed_windows",
    "collect": "launcher.collection",
    "gather": "recovery.gathering",
    "record": "session.recording",
    "request_recording": "session.on_demand",
    "salvage_run": "recovery.killed_windows",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value
