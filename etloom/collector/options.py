"""Options of a recording: as the user writes them, and as the processes of the job receive them."""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import asdict, dataclass, replace
from typing import TypedDict

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

    Attributes:
        steps: Steps to record, as a slice: "3:5" (the default) is steps 3 and 4. With `ring` the default is "3:".
        every: Record a window every so many steps, into `out`/step_N.
        length: Number of steps of each window of `every` (default: 2).
        on_demand: Number of steps to record each time a window is requested (`request_recording`, SIGUSR2).
        max_windows: With `every` or `on_demand`, number of windows to keep, the newest ones (default: 50).
        step_name: Regular expression; a record_function whose name matches is a step.
        step_by: "optimizer" (the default), "profiler" (the job's own ProfilerStep#N) or a duration such as "500ms".
        ranks: Ranks to record, such as "0,8-15" (default: all).
        sources: Everything to record, such as "kineto,et,shapes"; replaces `shapes`, `stack` and `memory`.
        shapes: Record input shapes (default: true). Only without `sources`.
        stack: Record Python stacks. Only without `sources`.
        memory: Record allocations. Only without `sources`.
        all_threads: Also profile threads that Python code starts.
        observer: "native" (etloom's own, with times) or "stock" (torch's).
        max_bytes: Size limit of the native observer's file of one window, in bytes (default: 4 GiB).
        ring: At `max_bytes`, overwrite the oldest operators instead of stopping. Excludes the Kineto trace.
        watch: Keep the state of each rank (last collectives, steps, main thread) in `out`/.watch, for `etloom watch`.
        fake_world: Number of ranks of a job that does not run: the chosen ranks run on fake tensors, one at a time,
            without GPUs and communication, and record an execution trace of step 1 (default) with the shapes.
    """

    steps: str | None = None
    every: int | None = None
    length: int | None = None
    on_demand: int | None = None
    max_windows: int | None = None
    step_name: str | None = None
    step_by: str | None = None
    ranks: str | None = None
    sources: str | None = None
    shapes: bool | None = None
    stack: bool = False
    memory: bool = False
    all_threads: bool = True
    observer: str = "native"
    max_bytes: int | None = None
    ring: bool = False
    watch: bool = False
    fake_world: int | None = None


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
