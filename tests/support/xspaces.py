"""XLA's profiles by protobuf's own library: an implementation independent of `etloom.formats.xplane`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.protobuf_messages import declare

_MESSAGES = {
    "XSpace": "planes=1*XPlane errors=2*string warnings=3*string hostnames=4*string",
    "XPlane": "id=1:int64 name=2:string lines=3*XLine event_metadata=4*EventEntry stat_metadata=5*StatEntry "
    "stats=6*XStat",
    "EventEntry": "key=1:int64 value=2:XEventMetadata",
    "StatEntry": "key=1:int64 value=2:XStatMetadata",
    "XLine": "id=1:int64 name=2:string timestamp_ns=3:int64 events=4*XEvent display_id=10:int64 display_name=11:string",
    "XEvent": "metadata_id=1:int64 offset_ps=2:int64 duration_ps=3:int64 stats=4*XStat num_occurrences=5:int64",
    "XStat": "metadata_id=1:int64 double_value=2:double uint64_value=3:uint64 int64_value=4:int64 str_value=5:string "
    "bytes_value=6:bytes ref_value=7:uint64",
    "XEventMetadata": "id=1:int64 name=2:string display_name=4:string stats=5*XStat",
    "XStatMetadata": "id=1:int64 name=2:string",
}
"""Fields of the messages of tsl/profiler/protobuf/xplane.proto; a star marks a repeated field."""


XSpace = declare("xplane_test", _MESSAGES, "XSpace")


def sum_kernels(path: Path) -> dict[tuple[str, str], tuple[int, int]]:
    """Count and duration (ps) of the events of each device by plane and name."""
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for plane in XSpace.FromString(path.read_bytes()).planes:
        names = {entry.key: entry.value.name for entry in plane.event_metadata}
        for line in plane.lines if plane.name.startswith("/device:GPU") else ():
            for event in line.events:
                key = (plane.name, names[event.metadata_id])
                count, total = sums.get(key, (0, 0))
                sums[key] = (count + 1, total + event.duration_ps)
    return sums


class PlaneBuilder:
    """Adds events to a plane; names and values get their metadata on their own."""

    def __init__(self, space: Any, name: str) -> None:
        self.plane = space.planes.add(name=name)
        self._lines: dict[str, Any] = {}
        self._events: dict[str, int] = {}
        self._stats: dict[str, int] = {}

    def add(self, line: str, name: str, start_ns: float, dur_ns: float, **values: Any) -> Any:
        """Add an event; lines are numbered from 1 in the order in which they come."""
        if line not in self._lines:
            self._lines[line] = self.plane.lines.add(id=len(self._lines) + 1, name=line)
        event = self._lines[line].events.add(
            metadata_id=self._number_event(name),
            offset_ps=round(start_ns * 1000),
            duration_ps=round(dur_ns * 1000),
        )
        self._add_values(event, values)
        return event

    def describe(self, name: str, display_name: str = "", **values: Any) -> None:
        """Add values that all events of a name share."""
        number = self._number_event(name)
        entry = next(entry for entry in self.plane.event_metadata if entry.key == number)
        entry.value.display_name = display_name
        self._add_values(entry.value, values)

    def set(self, **values: Any) -> None:
        """Add values of the plane."""
        self._add_values(self.plane, values)

    def _number_event(self, name: str) -> int:
        if name not in self._events:
            self._events[name] = len(self._events) + 1
            entry = self.plane.event_metadata.add(key=self._events[name])
            entry.value.id, entry.value.name = self._events[name], name
        return self._events[name]

    def _number_stat(self, name: str) -> int:
        if name not in self._stats:
            self._stats[name] = len(self._stats) + 1
            entry = self.plane.stat_metadata.add(key=self._stats[name])
            entry.value.id, entry.value.name = self._stats[name], name
        return self._stats[name]

    def _add_values(self, owner: Any, values: dict[str, Any]) -> None:
        for key, value in values.items():
            field = {int: "int64_value", float: "double_value", str: "str_value"}[type(value)]
            owner.stats.add(metadata_id=self._number_stat(key), **{field: value})


def write_space(space: Any, folder: Path, name: str = "host.xplane.pb") -> Path:
    """Write a profile to a folder; return its path."""
    path = folder / name
    path.write_bytes(space.SerializeToString())
    return path


def write_gpus(folder: Path, name: str = "host.xplane.pb") -> Path:
    """Two GPUs, each launched on by a thread; a third thread marks the step."""
    space = XSpace()
    host = PlaneBuilder(space, "/host:CPU")
    host.add("python", "train", 0, 1000, step_num=5)
    for device in (0, 1):
        gpu = PlaneBuilder(space, f"/device:GPU:{device}")
        for i in range(60):  # more than a round of the reader
            correlation = 100 * (device + 1) + i
            host.add(f"execute {device}", "cuLaunchKernel", 10 * i, 5, correlation_id=correlation)
            gpu.add(
                "Stream #13(Compute)", "loop_add_fusion", 10 * i + 4.5, 4.5, correlation_id=correlation,
                kernel_details="regs:32 static_shared:16 dynamic_shared:8 grid:2,3,1 block:64,1,1 occ_pct:50",
            )  # fmt: skip
        gpu.add(
            "Stream #14(MemcpyH2D)",
            "MemcpyH2D",
            700,
            3,
            memcpy_details="kind_src:pinned size:4096 dest:0 async:1",
        )
        gpu.add("XLA Ops", "fusion", 5, 600)
    return write_space(space, folder, name)
