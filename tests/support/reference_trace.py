"""A Kineto file as plain Python sees it: device work, calls and nests, read with the json module alone.

What the analyses say is worked out from this a second time (test_independent_recomputation.py), by the obvious way and
without any of etloom's code: no table, no interval, no link, no kind of it.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Any

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver", "python_function")


@dataclass(eq=False)
class Event:
    cat: str
    name: str
    start: int  # ns
    end: int
    lane: tuple[Any, Any]
    args: dict[str, Any]
    parent: Event | None = None
    children: list[Event] = field(default_factory=list)

    @property
    def dur(self) -> int:
        return self.end - self.start

    def around(self) -> Iterable[Event]:
        """Itself, its parent, and so on outwards."""
        event: Event | None = self
        while event is not None:
            yield event
            event = event.parent


@dataclass(eq=False)
class Work:
    """A kernel, copy or set, with the call that launched it."""

    event: Event
    call: Event | None

    @property
    def kind(self) -> str:
        name = self.event.name
        if self.event.cat != "kernel" or name.startswith(("Mem", "Copy", "FillBuffer", "__amd_rocclr")):
            return "memory"
        return "communication" if name.startswith("nccl") else "computation"

    @property
    def stream(self) -> tuple[int, int]:
        return self.event.args["device"], self.event.args["stream"]

    def nearest(self, *cats: str) -> Event | None:
        """The innermost event of these categories around the launch."""
        return next((one for one in self.call.around() if one.cat in cats), None) if self.call else None


@dataclass(eq=False)
class Raw:
    host: list[Event]
    work: list[Work]
    memory: list[Event]

    @cached_property
    def steps(self) -> dict[int, Event]:
        marks = (
            one for one in self.host if one.cat == "user_annotation" and one.name.startswith("ProfilerStep#")
        )
        return {int(one.name.partition("#")[2]): one for one in marks}


def load(path: Path) -> Raw:
    with gzip.open(path) as file:
        content = json.load(file, parse_float=Decimal)
    base = content.get("baseTimeNanoseconds", 0)
    events = []
    for raw in content["traceEvents"]:
        if raw.get("ph") == "X" and raw.get("cat") in (*DEVICE, *HOST):
            start = base + int(raw["ts"] * 1000)
            lane = (raw["pid"], raw["tid"])
            end = start + int(raw["dur"] * 1000)
            events.append(Event(raw["cat"], raw["name"], start, end, lane, raw.get("args", {})))
    host = [one for one in events if one.cat in HOST]
    _nest(host)
    calls = {
        one.args["correlation"]: one
        for one in host
        if one.cat in ("cuda_runtime", "cuda_driver") and "correlation" in one.args
    }
    work = [Work(one, calls.get(one.args["correlation"])) for one in events if one.cat in DEVICE]
    memory = []
    for raw in content["traceEvents"]:
        if raw.get("name") == "[memory]":
            time = base + int(raw["ts"] * 1000)
            memory.append(Event("memory", raw["name"], time, time, (raw["pid"], raw["tid"]), raw["args"]))
    memory.sort(key=lambda one: one.start)
    return Raw(host, sorted(work, key=lambda one: one.event.start), memory)


def _nest(host: list[Event]) -> None:
    """The parent of each: the innermost of its thread that holds it whole."""
    lanes = defaultdict(list)
    for one in host:
        lanes[one.lane].append(one)
    for lane in lanes.values():
        open_: list[Event] = []
        for one in sorted(lane, key=lambda one: (one.start, -one.end)):
            while open_ and open_[-1].end <= one.start and one.end > open_[-1].end:
                open_.pop()
            one.parent = next((outer for outer in reversed(open_) if outer.end >= one.end), None)
            if one.parent:
                one.parent.children.append(one)
            open_.append(one)


def covered(pieces: Iterable[tuple[int, int]]) -> int:
    """The time in any of these stretches."""
    total, until = 0, None
    for start, end in sorted(pieces):
        begin = start if until is None else max(start, until)
        total += max(0, end - begin)
        until = end if until is None else max(until, end)
    return total


def together(work: Iterable[Work], start: int, end: int) -> dict[frozenset[str], int]:
    """Set of kinds that run at one time -> how long, from start to end."""
    changes = []
    for one in work:
        begin, until = max(start, one.event.start), min(end, one.event.end)
        if begin < until:
            changes += [(begin, 1, one.kind), (until, -1, one.kind)]
    found: dict[frozenset[str], int] = defaultdict(int)
    running: dict[str, int] = defaultdict(int)
    now = start
    for time, change, kind in sorted(changes):
        found[frozenset(name for name, count in running.items() if count)] += time - now
        running[kind] += change
        now = time
    found[frozenset()] += end - now
    return found
