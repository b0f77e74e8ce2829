"""What to record and where: the one value that the launching process hands to the processes of the job."""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import asdict, dataclass, replace

VARIABLE = "ETLOOM_COLLECT"


@dataclass(frozen=True)
class Options:
    """A window of steps [first, last) (last None: to the end) and what is noted in it."""

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
    ranks: tuple[int, ...] | None = None
    every: int | None = None  # steps from the begin of one window to that of the next
    max_windows: int = 50  # of several the newest are kept
    on_demand: int | None = None  # steps of a window that waits until `trigger` is called
    step_name: str | None = None  # record_functions whose name has this regular expression are steps
    step_ns: int | None = None  # a step is so much time
    marked: bool = False  # the job names its steps ProfilerStep#N itself
    supervised: bool = False  # a launcher waits for the command, and says what became of the recording
    etloom: str | None = None
    command: tuple[str, ...] | None = None

    @property
    def steps(self) -> str:
        return f"{self.first}:{'' if self.last is None else self.last}"

    @property
    def repeats(self) -> bool:
        """There may be several windows, so each has a folder of its own."""
        return self.every is not None or self.on_demand is not None

    @property
    def lead(self) -> int:
        """Steps before a window in which the profilers get ready: one, or those of two seconds."""
        return 1 if self.step_ns is None else -(-2_000_000_000 // self.step_ns)

    def of_window(self, first: int, last: int | None) -> Options:
        """As a window of these steps is recorded."""
        out = f"{self.out}/step_{first}" if self.repeats else self.out
        return replace(self, out=out, first=first, last=last)

    def to_environment(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_environment(cls) -> Options:
        values = json.loads(os.environ[VARIABLE])
        for name in ("command", "ranks"):
            if values[name] is not None:
                values[name] = tuple(values[name])
        return cls(**values)


def new_scratch_name(out: str) -> str:
    """A name for a hidden folder of unfinished files, told apart by host, process and chance."""
    return f"{out}/.etloom-{socket.gethostname()}-{os.getpid()}-{os.urandom(3).hex()}"


def loaded_version() -> str | None:
    return getattr(sys.modules.get("etloom"), "__version__", None)
