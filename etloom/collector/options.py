"""What to record and where: the one value that the launching process hands to the processes of the job."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from dataclasses import asdict, dataclass

VARIABLE = "ETLOOM_COLLECT"


@dataclass(frozen=True)
class Options:
    """A window of steps [first, last) (last None: to the end) and what the profilers note in it."""

    out: str
    scratch: str
    first: int = 0
    last: int | None = None
    shapes: bool = True
    stack: bool = False
    memory: bool = False
    all_threads: bool = True
    observer: str = "stock"
    max_bytes: int | None = None
    ring: bool = False
    ranks: tuple[int, ...] | None = None
    step_name: str | None = None
    on_demand: int | None = None  # steps of a window that waits until `trigger` is called
    etloom: str | None = None
    command: tuple[str, ...] | None = None

    @property
    def steps(self) -> str:
        return f"{self.first}:{'' if self.last is None else self.last}"

    def to_environment(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_environment(cls) -> Options:
        values = json.loads(os.environ[VARIABLE])
        for name in ("command", "ranks"):
            if values[name] is not None:
                values[name] = tuple(values[name])
        return cls(**values)


def new_scratch(out: str) -> str:
    """A name for a hidden folder of unfinished files, told apart by host, process and chance."""
    return f"{out}/.etloom-{socket.gethostname()}-{os.getpid()}-{os.urandom(3).hex()}"


def own_version() -> str | None:
    return getattr(sys.modules.get("etloom"), "__version__", None)


def parse_steps(steps: str | None) -> tuple[int, int | None]:
    """`"3:5"` is steps 3 and 4, `"3:"` all from 3 on, `":5"` the first five, `"3"` step 3, None all.

    Raises CollectError for anything else, and for an empty range.
    """
    if steps is None:
        return 0, None
    match = re.fullmatch(r"\s*(\d*)\s*(:?)\s*(\d*)\s*", steps)
    if match and (match[1] or match[2]):
        first = int(match[1] or 0)
        last = (int(match[3]) if match[3] else None) if match[2] else first + 1
        if last is None or first < last:
            return first, last
    from etloom.errors import CollectError

    raise CollectError(
        f"{steps!r} is no range of steps",
        where="steps",
        remedy="write FIRST:LAST as in a slice, for example 3:5 for steps 3 and 4",
    )


def parse_ranks(ranks: str | None) -> tuple[int, ...] | None:
    """`"0,8-15"` is rank 0 and ranks 8 to 15, None all. Raises CollectError for anything else."""
    if ranks is None:
        return None
    found: set[int] = set()
    for part in ranks.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            from etloom.errors import CollectError

            raise CollectError(
                f"{ranks!r} names no ranks",
                where="ranks",
                remedy="write numbers and ranges, for example 0,8-15",
            )
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(found))
