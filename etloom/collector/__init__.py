"""Collect execution traces inside a PyTorch job: an execution trace and a Kineto trace of the same steps.

Two ways in, one set of files out:

- `record(out)`: a context manager with `.step()`, for a training loop one can edit;
- `launch(command, out, steps)`: runs a command and counts the steps of its optimizer, its code unedited.

A folder of traces holds, for each rank r that recorded a window of steps:

    observer_<r>.etob           what our own observer saw (docs/observer-format.md); `etloom collect` also puts it
                                into torch's format, as below
    torch_et_<r>.json.gz        what torch's ExecutionTraceObserver saw (torch's 1.1.1-chakra schema), where it is used
    kineto_trace_<r>.json.gz    what torch.profiler saw, in Chrome's trace format
    flight_recorder_<r>.json, nsys_<r>.nsys-rep     where they were asked for
    rank_<r>.json               facts of the rank: steps, process, device, model, groups, versions; the last, as a seal
    run.json                    facts of the run, and all rank_<r>.json in one list
    <name of the folder>.yaml   CCL-Bench's workload card, filled in as far as the run knows itself

Where there may be several windows (`every`, `on_demand`) each has such a folder, step_<first>, in the run's.

Every rank that seals its files writes run.json and the card anew from all the sealed ranks it finds, until its list
is whole; so the last one to finish writes the full list, and no rank waits for another. `launch` adds the
command and its exit status. All files appear under these names by os.replace and whole; unfinished ones stay
in a hidden folder `.etloom-*`.

A step is named `ProfilerStep#N` in both traces, N counting from 0. What runs in the window after its last
whole step is named `etloom:unfinished step N`, so that no partial step is taken for one.

Files are written on a thread of ours after the window, without Python's lock where that takes long, one window at a
time: where the disk is slow the next window is left out, where it is full this one is, and a line says so. What the
training waits for is torch's profiler as it stops, 5 to 10 us an operator: it must be on the training thread, for the
device goes on being recorded until its end. A window that is open when the job raises or exits is
closed and kept, with the whole steps it has. A process that is killed in its window (SIGKILL, SIGTERM, os._exit) leaves
what our observer saw up to then, which `launch` keeps; of torch's own it leaves only the hidden folder. torch's crashes
the process in one case we cannot see coming (2.13): a backward pass, inside the window, of a graph that another thread
built before it.

The code here runs in a stranger's job: a failure becomes one line on stderr that begins with `etloom:`, never
an exception, and it yields to the job's own profilers. It needs torch and the standard library only, and
`launch` also loads it into Pythons that have no etloom installed. So: no imports from etloom but
etloom.core.errors, and that one inside functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .launcher.collection import Collected, launch
    from .session.recording import Recording, record

__all__ = ["Collected", "Recording", "launch", "record"]

_HOME = {
    "Collected": "launcher.collection",
    "launch": "launcher.collection",
    "Recording": "session.recording",
    "record": "session.recording",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
