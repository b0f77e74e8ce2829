"""Parsers for options of a recording: steps, ranks, sources, durations, folder names.

Each function raises CollectError, naming the option and the expected form, for a value that it cannot parse.
"""

from __future__ import annotations

import os
import re
import socket
from datetime import datetime, timezone
from typing import Any

from .rank_environment import rank_from_environment, read_int_variable

SOURCES = ("kineto", "et", "memory", "stacks", "shapes", "flight-recorder", "nsys")
_MIN_STEP_NS = 10_000_000
_UNITS_NS = {"ms": 10**6, "s": 10**9, "m": 60 * 10**9}
_DEFAULT_STEPS = "3:5"
_DEFAULT_RING_STEPS = "3:"
_DEFAULT_LENGTH = 2


def parse_steps(steps: str | None) -> tuple[int, int | None]:
    """Parse a range of steps such as "3:5" to (first, last), where `last` is exclusive, or None for the end of the job.

    Args:
        steps: "3:5" for steps 3 and 4, "3:" for all from 3 on, ":5" for the first five, "3" for step 3, None for all.
    """
    if steps is None:
        return 0, None
    match = re.fullmatch(r"\s*(\d*)\s*(:?)\s*(\d*)\s*", steps)
    if match and (match[1] or match[2]):
        first = int(match[1] or 0)
        last = (int(match[3]) if match[3] else None) if match[2] else first + 1
        if last is None or first < last:
            return first, last
    raise option_error(
        f"expected a range of steps, got {steps!r}",
        "steps",
        "write FIRST:LAST as in a slice, for example 3:5 for steps 3 and 4",
    )


def parse_window(
    steps: str | None, every: int | None, length: int | None, on_demand: int | None, ring: bool = False
) -> tuple[int, int | None]:
    """Return the first recording window that the options define, as steps (first, last); `last` is exclusive or None.

    It is `steps`, else, with `every` N and `length` L, the steps from N to N + L, else 3:5. With `ring`, which keeps
    the end of a long window, the default is 3: instead of 3:5.
    """
    for name, number in (("every", every), ("length", length), ("on_demand", on_demand)):
        if number is not None and number < 1:
            raise option_error(f"expected at least 1 step, got {number}", name)
    if every is None:
        if length is not None:
            raise option_error("requires --every", "length", "write --every N --for M, or --steps FIRST:LAST")
        default = _DEFAULT_RING_STEPS if ring and on_demand is None else _DEFAULT_STEPS
        return parse_steps(steps or default)
    if on_demand is not None:
        raise option_error("cannot be combined with --on-demand", "every")
    first, last = parse_steps(steps) if steps else (every, every + (length or _DEFAULT_LENGTH))
    if steps and length is not None:
        raise option_error("cannot be combined with --steps", "length")
    if last is None:
        raise option_error(f"expected a last step with --every, got {steps!r}", "steps", "write FIRST:LAST")
    if last - first >= every:
        raise option_error(
            f"windows of {last - first} steps every {every} steps overlap",
            "every",
            "choose shorter windows or a larger --every",
        )
    return first, last


def parse_ranks(ranks: str | None) -> tuple[int, ...] | None:
    """Parse ranks such as "0,8-15" (rank 0 and ranks 8 to 15) into ascending order; None means all ranks."""
    if ranks is None:
        return None
    numbers: set[int] = set()
    for part in ranks.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise option_error(
                f"expected rank numbers and ranges, got {ranks!r}", "ranks", "for example 0,8-15"
            )
        numbers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(numbers))


def parse_sources(sources: str) -> dict[str, bool]:
    """Parse a list of trace sources and details, such as "kineto,et,shapes", into fields of RecordingOptions."""
    names = [part.strip() for part in sources.split(",")]
    unknown = [name for name in names if name not in SOURCES]
    if unknown:
        raise option_error(f"unknown source {unknown[0]!r}; expected one of {', '.join(SOURCES)}", "sources")
    if "nsys" in names and "kineto" in names:
        raise option_error(
            "nsys and kineto are mutually exclusive: both use CUPTI",
            "sources",
            "record them one after the other",
        )
    if not {"nsys", "kineto", "et", "flight-recorder"} & set(names):
        raise option_error(f"{sources} only adds details to a trace", "sources", "add kineto")
    if {"stacks", "memory"} & set(names) and "kineto" not in names:
        raise option_error("stacks and memory require the Kineto trace", "sources", "add kineto")
    fields = {"stacks": "stack", "flight-recorder": "flight_recorder"}
    return {fields.get(name, name): name in names for name in SOURCES}


def parse_step_by(step_by: str | None) -> dict[str, Any]:
    """Parse what delimits steps, "optimizer", "profiler" or a duration ("2s"), into fields of RecordingOptions."""
    if step_by in (None, "optimizer"):
        return {}
    if step_by == "profiler":
        # The job has its own Kineto session, and a second one would crash the process.
        return {"step_name": r"^ProfilerStep#\d+$", "job_marks_steps": True, "kineto": False}
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m)\s*", step_by or "")
    if match is None:
        raise option_error(
            f"expected optimizer, profiler or a duration, got {step_by!r}", "step_by", "for example 500ms"
        )
    step_ns = round(float(match[1]) * _UNITS_NS[match[2]])
    if step_ns < _MIN_STEP_NS:
        raise option_error(f"expected at least 10ms, got {step_by}", "step_by")
    return {"step_ns": step_ns}


def expand_folder_name(out: str) -> str:
    """Replace {host}, {rank} and {time} in a folder name, so that several hosts can write to different folders.

    A leading ~ is the home folder.
    """
    rank = rank_from_environment()
    values = {
        "host": socket.gethostname(),
        "time": datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ"),
        "rank": read_int_variable("SLURM_PROCID") if rank is None else rank,
    }

    def expand(match: re.Match[str]) -> str:
        name = match[1]
        if values.get(name) is None:
            reason = "the environment has no rank" if name in values else "unknown placeholder"
            raise option_error(
                f"{reason}: {{{name}}} in {out}",
                "out",
                "use {host}, {time}, or {rank} with a launcher that sets RANK",
            )
        return str(values[name])

    return os.path.expanduser(re.sub(r"\{(\w*)\}", expand, out))  # noqa: PTH111


def local_folder(out: str) -> str:
    """Convert a user's folder name to an absolute path, with placeholders replaced. Raises CollectError for a URL."""
    if re.match(r"[a-z][a-z0-9+.-]+:/", out):
        raise option_error(
            f"expected a local folder, got {out.partition('://')[0]}://",
            "out",
            "etloom collect --out uploads to URLs",
        )
    return os.path.abspath(expand_folder_name(out))  # noqa: PTH100


def option_error(message: str, option: str, remedy: str | None = None) -> Exception:
    """Return the error for a wrong value of a parameter of `collect` or `record`."""
    from etloom.core.errors import InvalidOption

    return InvalidOption(message, option=option, remedy=remedy)
