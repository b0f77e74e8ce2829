"""Options of a recording: as the user writes them, and as the processes of the job receive them."""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import asdict, dataclass, replace
from typing import Annotated, TypedDict

VARIABLE = "ETLOOM_COLLECT"
"""The environment variable that carries `RecordingOptions` to the processes of the job."""
_PROFILER_WARMUP_NS = 2_000_000_000


@dataclass(frozen=True)
class CollectOptions:
    """Options of `collect`, as the user writes them.

    Other steps: with `step_name` a step is one record_function of the job whose name matches, as in an inference
    server; with `step_by` "profiler" it is one of the job's own `ProfilerStep#N`; with "500ms" it is a time interval,
    counted from the first nn.Module of any rank. Such a window opens while the job runs, so an operator at its edge
    may be in one trace only.

    Several windows: `every` 1000 with `length` 2 records two steps of every thousand; `on_demand` 2 records two steps
    each time `request_recording(out)` is called or this process receives SIGUSR2, with `ring` also what came before,
    up to `max_bytes`. Each window has its own folder in `out`, step_<first>; the newest `max_windows` are kept.

    The options `shapes`, `stack` and `memory` are for calls without `sources`. `max_bytes` is in bytes, unlike
    --max-size. `all_threads`: also profile threads that Python code starts.
    """

    steps: Annotated[
        str | None,
        "Steps to record, FIRST:END without END: 3:5 records steps 3 and 4; with --ring, 3: records all from 3.  "
        "[default: 3:5]",
    ] = None
    every: Annotated[int | None, "Record a window every N steps, into OUT/step_N."] = None
    length: Annotated[int | None, "Steps per window of --every.  [default: 2]"] = None
    max_windows: Annotated[
        int | None, "Keep only the newest N windows of --every and --on-demand.  [default: 50]"
    ] = None
    step_by: Annotated[
        str | None,
        "How steps are counted: optimizer (calls of the optimizer's step), profiler (the job's own ProfilerStep#N), "
        "or a duration such as 500ms.  [default: optimizer]",
    ] = None
    step_name: Annotated[
        str | None, "Count ranges of record_function whose name matches as steps, instead of --step-by."
    ] = None
    ranks: Annotated[str | None, "Record on these ranks only, such as 0,8-15."] = None
    sources: Annotated[
        str | None,
        "What to record, separated by commas: et, kineto, shapes, memory, stacks, flight-recorder, nsys.  "
        "[default: kineto,et,shapes]",
    ] = None
    shapes: Annotated[
        bool | None, "Without --with: record the shapes of operator inputs.  [default: shapes]"
    ] = None
    stack: Annotated[bool, "Without --with: also record Python stacks."] = False
    memory: Annotated[bool, "Without --with: also record allocations."] = False
    all_threads: bool = True
    observer: Annotated[
        str,
        "The recorder of the execution trace: native (etloom's, which also records times, at a tenth of the overhead "
        "per operator) or stock (torch's).",
    ] = "native"
    max_bytes: Annotated[
        int | None, "Maximum size of the native observer's file per window.  [default: 4096]"
    ] = None
    ring: Annotated[
        bool,
        "Record from step 3 to the end (or --steps), and overwrite the oldest records at --max-size. Records no "
        "Kineto trace, whose size cannot be limited. With --on-demand: also keep the steps before the trigger.",
    ] = False
    watch: Annotated[
        bool, "Also keep the state of each rank in OUT/.watch, for etloom watch OUT and etloom hangs OUT."
    ] = False
    on_demand: Annotated[
        int | None,
        "Record this number of steps whenever triggered: by etloom collect --trigger OUT, or by SIGUSR2 to this "
        "process.",
    ] = None
    fake_world: Annotated[
        int | None,
        "Run nothing on devices: record --ranks (default: 0) of a job of this size with fake tensors, on any "
        "machine. Each rank runs alone, without torchrun, and records step 1 or --steps.",
    ] = None


class RecordKeywords(TypedDict, total=False):
    """The options of `CollectOptions` that `record` takes as keyword arguments."""

    sources: str | None
    shapes: bool | None
    stack: bool
    memory: bool
    all_threads: bool
    observer: str
    max_bytes: int | None
    ring: bool


@dataclass(frozen=True)
class RecordingOptions:
    """Validated options, passed to the processes of the job in an environment variable.

    The window is the steps [first, last); last None: to the end of the job.
    """

    out: str
    scratch: str
    first: int = 0
    last: int | None = None
    shapes: bool = True
    stack: bool = False
    memory: bool = False
    all_threads: bool = True
    kineto: bool = True
    et: bool = True
    flight_recorder: bool = False
    nsys: bool = False
    observer: str = "native"
    max_bytes: int | None = None
    ring: bool = False
    watch: bool = False
    ranks: tuple[int, ...] | None = None
    every: int | None = None  # steps from the begin of one window to the begin of the next
    max_windows: int = 50  # of several windows, keep the newest ones
    on_demand: int | None = None  # steps of a window on demand
    step_name: str | None = None  # record_functions whose name matches this regular expression are steps
    step_ns: int | None = None  # steps are time intervals of this length
    job_marks_steps: bool = False  # the job itself marks its steps with ProfilerStep#N
    supervised: bool = False  # a launcher waits for the command and reports the outcome of the recording
    etloom_version: str | None = None
    command: tuple[str, ...] | None = None

    @property
    def step_range(self) -> str:
        return f"{self.first}:{'' if self.last is None else self.last}"

    @property
    def has_several_windows(self) -> bool:
        """True if the recording may consist of several windows, each stored in a separate folder."""
        return self.every is not None or self.on_demand is not None

    @property
    def warmup_steps(self) -> int:
        """Number of steps by which profilers are prepared before a window: 1; for time-based steps, enough for 2 s."""
        return 1 if self.step_ns is None else -(-_PROFILER_WARMUP_NS // self.step_ns)

    def for_window(self, first: int, last: int | None) -> RecordingOptions:
        """Return a copy of the options for the recording window of steps [first, last), with the window's folder."""
        out = f"{self.out}/step_{first}" if self.has_several_windows else self.out
        return replace(self, out=out, first=first, last=last)

    def to_environment(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_environment(cls) -> RecordingOptions:
        values = json.loads(os.environ[VARIABLE])
        for name in ("command", "ranks"):
            if values[name] is not None:
                values[name] = tuple(values[name])
        return cls(**values)


def new_scratch_name(out: str) -> str:
    """Return the path of a new hidden folder for unfinished files; host, pid and a random part make it unique."""
    return f"{out}/.etloom-{socket.gethostname()}-{os.getpid()}-{os.urandom(3).hex()}"


def loaded_version() -> str | None:
    """Return the version of etloom, or None in a process that has loaded only the collector."""
    version = getattr(sys.modules.get("etloom"), "__version__", None)
    return version if isinstance(version, str) else None
