"""What a user writes of a recording, put into values: steps, ranks, what to record, lengths of time.

Each function raises CollectError, with the way it should be written, for what it does not understand.
"""

from __future__ import annotations

import re
import socket
from datetime import datetime, timezone
from typing import Any

from .rank_environment import rank_from_environment, read_int_variable

SOURCES = ("kineto", "et", "memory", "stacks", "shapes", "flight-recorder", "nsys")
_MIN_STEP_NS = 10_000_000
_UNITS = {"ms": 10**6, "s": 10**9, "m": 60 * 10**9}


def parse_steps(steps: str | None) -> tuple[int, int | None]:
    """`"3:5"` is steps 3 and 4, `"3:"` all from 3 on, `":5"` the first five, `"3"` step 3, None all."""
    if steps is None:
        return 0, None
    match = re.fullmatch(r"\s*(\d*)\s*(:?)\s*(\d*)\s*", steps)
    if match and (match[1] or match[2]):
        first = int(match[1] or 0)
        last = (int(match[3]) if match[3] else None) if match[2] else first + 1
        if last is None or first < last:
            return first, last
    raise option_error(
        f"{steps!r} is no range of steps",
        "steps",
        "write FIRST:LAST as in a slice, for example 3:5 for steps 3 and 4",
    )


def parse_window(
    steps: str | None, every: int | None, length: int | None, on_demand: int | None, ring: bool = False
) -> tuple[int, int | None]:
    """The first window [first, last): `steps`, else of `every` N `length` L the steps from N to N + L, else 3:5.

    With `ring`, which holds the last of a long window, 3: in place of 3:5.
    """
    for name, number in (("every", every), ("length", length), ("on_demand", on_demand)):
        if number is not None and number < 1:
            raise option_error(f"{number} steps", name, "ask for 1 or more")
    if every is None:
        if length is not None:
            raise option_error("needs a period", "length", "write --every N --for M, or --steps FIRST:LAST")
        return parse_steps(steps or ("3:" if ring and on_demand is None else "3:5"))
    if on_demand is not None:
        raise option_error("windows come by the clock or on demand", "every", "leave out one of the two")
    first, last = parse_steps(steps) if steps else (every, every + (length or 2))
    if last is None or (steps and length is not None):
        raise option_error(
            "the length of a window is told twice or not at all", "every", "write --every N --for M"
        )
    if last - first >= every:
        raise option_error(
            f"windows of {last - first} steps every {every} overlap", "every", "leave room between"
        )
    return first, last


def parse_ranks(ranks: str | None) -> tuple[int, ...] | None:
    """`"0,8-15"` is rank 0 and ranks 8 to 15, None all."""
    if ranks is None:
        return None
    found: set[int] = set()
    for part in ranks.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise option_error(
                f"{ranks!r} names no ranks", "ranks", "write numbers and ranges, for example 0,8-15"
            )
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(found))


def parse_sources(what: str) -> dict[str, bool]:
    """`"kineto,et,shapes"` to fields of Options."""
    asked = [part.strip() for part in what.split(",")]
    unknown = [part for part in asked if part not in SOURCES]
    if unknown:
        raise option_error(f"{unknown[0]!r} is nothing to record", "what", f"choose of {', '.join(SOURCES)}")
    if "nsys" in asked and "kineto" in asked:
        raise option_error(
            "nsys and kineto cannot record at once, both take CUPTI", "what", "record one after the other"
        )
    if not {"nsys", "kineto", "et", "flight-recorder"} & set(asked):
        raise option_error(f"{what!r} adds to a trace, and there is none", "what", "add kineto")
    if {"stacks", "memory"} & set(asked) and "kineto" not in asked:
        raise option_error("stacks and memory stand in the Kineto trace", "what", "add kineto")
    fields = {"stacks": "stack", "flight-recorder": "flight_recorder"}
    return {fields.get(name, name): name in asked for name in SOURCES}


def parse_step_by(step_by: str | None) -> dict[str, Any]:
    """`"optimizer"`, `"profiler"` or a length of time (`"500ms"`, `"2s"`) to fields of Options."""
    if step_by in (None, "optimizer"):
        return {}
    if step_by == "profiler":
        # The job's own session is there, and two of Kineto end the process.
        return {"step_name": r"^ProfilerStep#\d+$", "marked": True, "kineto": False}
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m)\s*", step_by or "")
    if match is None:
        raise option_error(
            f"{step_by!r} makes no steps", "step_by", "write optimizer, profiler or a time as 500ms"
        )
    step_ns = round(float(match[1]) * _UNITS[match[2]])
    if step_ns < _MIN_STEP_NS:
        raise option_error(f"{step_by} is too short for a step", "step_by", "take 10ms or more")
    return {"step_ns": step_ns}


def expand_folder_name(out: str) -> str:
    """`out` with {host}, {rank} and {time} put in, so that what several hosts write does not meet."""
    rank = rank_from_environment()
    values = {
        "host": socket.gethostname(),
        "time": datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ"),
        "rank": read_int_variable("SLURM_PROCID") if rank is None else rank,
    }

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if values.get(name) is None:
            why = "is not in the environment" if name in values else "is not known"
            raise option_error(
                f"{{{name}}} of {out} {why}",
                "out",
                "use {host}, {time}, or {rank} where a launcher sets RANK",
            )
        return str(values[name])

    return re.sub(r"\{(\w*)\}", value, out)


def option_error(message: str, option: str, remedy: str) -> Exception:
    """The CollectError of a parameter of `launch`."""
    from etloom.core.errors import CollectError

    return CollectError(message, option=option, remedy=remedy)
