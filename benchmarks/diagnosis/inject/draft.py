"""A clean run to which events are added and whose lags grow, and the Job that results.

Added events take no time at first. A kind of problem puts them between two points of the dependency graph and gives
edges a weight; the lag of an edge is that of the clean run plus ``scale`` times its weight. All that depends on them,
on every rank, then moves as the graph requires.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl

from etloom.analyses.findings.patterns.buffer_broadcasts import find_regions
from etloom.analyses.findings.rank_view import RankView
from etloom.core.intervals import Intervals
from etloom.core.schema import TABLES
from etloom.core.trace import Job, Trace
from etloom.graphs import algorithms
from etloom.graphs.graph import EdgeKind, Graph, Int64Array, PointRole
from etloom.simulator.retiming import retime_rank
from etloom.timeline.activity import find_steps

from .bases import Base, relink

KERNEL_GAP_NS, LAUNCH_NS = 1_000, 4_000


@dataclass(frozen=True)
class Slot:
    """A place between two outermost operators of a rank's main thread: the edge to split, its time and its step."""

    rank: int
    edge: int
    time: int
    step: int


@dataclass(frozen=True)
class Call:
    """A host event to add. Its children run in it, after its own time: ``fixed`` ns, and ``weight``.

    ``waits``: it returns after the device has finished what was launched before. ``columns``: others of its row.
    ``pause``: weight of the time before it, outside of any event.
    """

    name: str
    weight: float = 0.0
    cat: str = "cpu_op"
    children: tuple[Call, ...] = ()
    kernel: Kernel | None = None
    waits: bool = False
    fixed: int = 0
    columns: dict[str, Any] = field(default_factory=dict)
    pause: float = 0.0


@dataclass(frozen=True)
class Kernel:
    """A GPU activity to add, launched by a call; default stream: that with most activities."""

    name: str
    weight: float = 0.0
    cat: str = "kernel"
    fixed: int = 0
    bytes: int | None = None
    stream: int | None = None
    after_computation: bool = False


@dataclass(frozen=True, eq=False)
class Built:
    """A graph, whose owners and events are positions; the place of each point and edge; lag, weight, start times."""

    graph: Graph
    point: np.ndarray
    edge: np.ndarray
    lag: Int64Array
    weight: np.ndarray
    start: Int64Array


@dataclass(eq=False)
class Draft:
    """See the module.

    ``share``: of the occurrences that a kind may add, how many it adds. ``target_ns``: what they are to
    cost. ``rank``: the only rank that has occurrences; None for all. ``grids``: by rank and kernel, factor on its grid.
    """

    base: Base
    lag: Int64Array
    share: float = 1.0
    target_ns: float = 0.0
    rank: int | None = None
    weight: np.ndarray = field(init=False)
    rows: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    tables: dict[int, dict[str, list[dict[str, Any]]]] = field(default_factory=dict)
    shift_ns: dict[int, int] = field(default_factory=dict)
    names: dict[int, dict[int, str]] = field(default_factory=dict)
    streams: dict[int, dict[int, int]] = field(default_factory=dict)
    grids: dict[int, dict[int, float]] = field(default_factory=dict)
    launched: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.weight = np.zeros(len(self.lag))
        self._points: list[tuple[int, int, int, int]] = []
        self._edges: list[tuple[int, int, int, int, int, float]] = []
        self._waits: list[tuple[int, int, list[int]]] = []
        self._splits: dict[int, tuple[int, float]] = {}
        self._tails: dict[tuple[int, int, int], int] = {}
        self._ends: dict[tuple[int, int], int] = {}
        self._correlation = 1 << 40

    @property
    def graph(self) -> Graph:
        return self.base.dependencies.graph

    # Points and edges

    def add_event(self, rank: int, **columns: Any) -> int:
        rows = self.rows.setdefault(rank, [])
        identifier = self.base.job[rank].events.height + len(rows)
        rows.append({"id": identifier, "ph": "X", "dur": 0, **columns})
        return identifier

    def _add_point(self, rank: int, event: int, role: PointRole, time: int) -> int:
        self._points.append((time, event, int(role), rank))
        return len(self.graph) + len(self._points) - 1

    def _add_edge(
        self, source: int, target: int, kind: EdgeKind, lag: int = 0, weight: float = 0, owner: int = -1
    ) -> int:
        self._edges.append((source, target, lag, int(kind), owner, weight))
        return len(self.lag) + len(self._edges) - 1

    def _time(self, point: int) -> int:
        known = len(self.graph)
        return int(self.graph.time[point]) if point < known else self._points[point - known][0]

    # Host threads

    def add_calls(self, slot: Slot, calls: Sequence[Call], pause: float = 0.0) -> list[tuple[int, int]]:
        """Add host events, one after the other, at a slot; return the number of each and its first point.

        Args:
            pause: Weight of the time after them, outside of any event.
        """
        graph = self.graph
        tail, pauses = self._splits.get(slot.edge, (int(graph.source[slot.edge]), 0.0))
        kind = EdgeKind(int(graph.kind[slot.edge]))
        anchor = self.base.job[slot.rank].events.row(int(graph.event[graph.source[slot.edge]]), named=True)
        track = {"pid": anchor["pid"], "tid": anchor["tid"], "ts": self._time(tail)}
        added = []
        for call in calls:
            first = len(graph) + len(self._points)
            tail = self._add_call(slot.rank, tail, call, track, kind)
            added.append((self._points[first - len(graph)][1], first))
        self._splits[slot.edge] = (tail, pauses + pause)
        return added

    def _add_call(self, rank: int, tail: int, call: Call, track: dict[str, Any], kind: EdgeKind) -> int:
        """Add a call after the point ``tail`` and return its last point."""
        correlation = None
        if call.kernel is not None or call.cat == "cuda_runtime":
            self._correlation += 1
            correlation = self._correlation
        event = self.add_event(
            rank, cat=call.cat, name=call.name, correlation=correlation, **track, **call.columns
        )
        start = self._add_point(rank, event, PointRole.START, track["ts"])
        self._add_edge(tail, start, kind, weight=call.pause)
        inner = start
        inner_weight, inner_lag = call.weight, call.fixed
        for child in call.children:
            inside = self._add_point(rank, -1, PointRole.SUBMIT, track["ts"])
            self._add_edge(inner, inside, EdgeKind.SEGMENT, inner_lag, inner_weight, event)
            inner = self._add_call(rank, inside, child, track, EdgeKind.SEGMENT)
            inner_weight, inner_lag = 0.0, 0
        end = self._add_point(rank, event, PointRole.END, track["ts"])
        edge = self._add_edge(inner, end, EdgeKind.SEGMENT, inner_lag, inner_weight, event)
        if call.kernel is not None:
            self.launched.append((rank, self._add_kernel(rank, start, call.kernel, correlation, track)))
        if call.waits:
            self._waits.append((edge, inner, self._last_kernels(rank, track["ts"])))
        return end

    # Streams

    @cached_property
    def _streams(self) -> dict[tuple[int, int], dict[str, np.ndarray]]:
        """By rank and stream, in order: launch time, event, start point and end point of each activity."""
        graph, streams = self.graph, {}
        for rank, trace in self.base.job.items():
            of_rank = np.flatnonzero((graph.rank == rank) & (graph.event >= 0))
            starts = np.full(trace.events.height, -1)
            ends = starts.copy()
            starts[graph.event[of_rank[graph.role[of_rank] == PointRole.START]]] = of_rank[
                graph.role[of_rank] == PointRole.START
            ]
            ends[graph.event[of_rank[graph.role[of_rank] == PointRole.END]]] = of_rank[
                graph.role[of_rank] == PointRole.END
            ]
            events = trace.events
            table = trace.launches.select(event="device_event", call="launch").drop_nulls()
            table = table.with_columns(
                stream=events["stream"].gather(table["event"]),
                ts=events["ts"].gather(table["event"]),
                launch=events["ts"].gather(table["call"]),
            ).sort("ts")
            for (stream,), rows in table.group_by("stream"):
                event = rows["event"].to_numpy()
                streams[rank, int(stream)] = {
                    "launch": np.maximum.accumulate(rows["launch"].to_numpy()),
                    "event": event,
                    "start": starts[event],
                    "end": ends[event],
                }
        return streams

    def compute_stream(self, rank: int) -> int:
        """Return the stream with most activities."""
        return max(
            (key for key in self._streams if key[0] == rank), key=lambda key: len(self._streams[key]["event"])
        )[1]

    def communication_stream(self, rank: int) -> int:
        """Return the stream of the first collective."""
        events = self.base.job[rank].events
        is_collective = (events["cat"] == "kernel") & events["name"].cast(pl.String).str.contains("(?i)nccl")
        return int(events.filter(is_collective)["stream"][0])

    def describe_collective(self, rank: int, event: int, number: int, size: int, kind: str) -> None:
        """Add the facts of a collective that an added operator starts, of ``size`` bytes."""
        facts = self.base.job[rank].comms.filter(pl.col("collective") == "all_reduce").row(0, named=True)
        facts |= {"node": None, "event": event, "seq": number, "bytes": size, "collective": kind}
        facts |= {"in_nelems": size // 4, "out_nelems": size // 4}
        del facts["id"]
        self.add_row(rank, "comms", id=10_000_000 + event, **facts)

    def _last_kernels(self, rank: int, time: int) -> list[int]:
        """Return the last point of what was launched before a time, on every stream."""
        streams = [
            stream
            for (owner, stream), table in self._streams.items()
            if owner == rank and table["launch"][0] <= time
        ]
        return [self._last_kernel(rank, stream, time) for stream in streams]

    def _last_kernel(self, rank: int, stream: int, time: int) -> int:
        table = self._streams[rank, stream]
        row = max(0, int(np.searchsorted(table["launch"], time, side="right")) - 1)
        return self._tails.get((rank, stream, row), int(table["end"][row]))

    def _add_kernel(
        self, rank: int, call: int, kernel: Kernel, correlation: int | None, track: dict[str, Any]
    ) -> int:
        """Add an activity after what was launched before on the compute stream."""
        stream = self.compute_stream(rank) if kernel.stream is None else kernel.stream
        table = self._streams[rank, stream]
        row = max(0, int(np.searchsorted(table["launch"], track["ts"], side="right")) - 1)
        while row + 1 < len(table["end"]) and self._time(table["end"][row]) > self._time(
            table["start"][row + 1]
        ):
            row += 1
        return self.add_after(rank, stream, row, kernel, correlation, call)

    def add_after(
        self, rank: int, stream: int, row: int, kernel: Kernel, correlation: int | None, call: int
    ) -> int:
        """Add an activity after one of a stream (and those added there before); return its event."""
        table = self._streams[rank, stream]
        tail = self._tails.get((rank, stream, row), int(table["end"][row]))
        neighbour = self.base.job[rank].events.row(int(table["event"][row]), named=True)
        time = max(self._time(tail), self._time(call))
        computed = self._last_kernel(rank, self.compute_stream(rank), self._time(call))
        if kernel.after_computation:
            time = max(time, self._time(computed))
        columns = {name: neighbour[name] for name in ("pid", "tid", "device", "stream")}
        event = self.add_event(
            rank, cat=kernel.cat, name=kernel.name, ts=time, correlation=correlation, **columns
        )
        if kernel.bytes is not None:
            self.add_row(rank, "kernels", event=event, bytes=kernel.bytes)
        start = self._add_point(rank, event, PointRole.START, time)
        end = self._add_point(rank, event, PointRole.END, time)
        self._add_edge(tail, start, EdgeKind.STREAM, KERNEL_GAP_NS)
        self._add_edge(call, start, EdgeKind.LAUNCH, LAUNCH_NS)
        if kernel.after_computation:
            self._add_edge(computed, start, EdgeKind.STREAM_WAIT, KERNEL_GAP_NS)
        self._add_edge(start, end, EdgeKind.KERNEL, kernel.fixed, kernel.weight, event)
        self._follow(table, row, tail, end)
        self._tails[rank, stream, row] = end
        self._ends[rank, event] = end
        return event

    def _follow(self, table: dict[str, np.ndarray], row: int, tail: int, end: int) -> None:
        """Let what followed ``tail`` on its stream, or waited for it, follow ``end``."""
        if row + 1 < len(table["start"]) and self._time(int(table["start"][row + 1])) >= self._time(end):
            self._add_edge(end, int(table["start"][row + 1]), EdgeKind.STREAM, KERNEL_GAP_NS)
        for edge in self._edges_from.get(int(table["end"][row]), ()):
            if self._time(int(self.base.target[edge])) >= self._time(end):
                kind = EdgeKind(int(self.graph.kind[edge]))
                self._add_edge(end, int(self.base.target[edge]), kind, int(self.graph.min_latency[edge]))

    @cached_property
    def _edges_from(self) -> dict[int, list[int]]:
        kinds = np.isin(self.graph.kind, (EdgeKind.STREAM_WAIT, EdgeKind.SYNC))
        result: dict[int, list[int]] = {}
        for edge in np.flatnonzero(kinds):
            result.setdefault(int(self.graph.source[edge]), []).append(int(edge))
        return result

    def add_row(self, rank: int, table: str, **columns: Any) -> None:
        """Add a row to another table of a rank."""
        self.tables.setdefault(rank, {}).setdefault(table, []).append(columns)

    def match(self, kernels: Sequence[tuple[int, int]], weight: float, fixed: int = 0) -> None:
        """Make added activities, one of each rank, a collective that takes ``fixed`` ns and ``weight`` after the last
        arrival.
        """
        ends = [self._ends[kernel] for kernel in kernels]
        time = max(self._time(point) for point in ends)
        arrival = self._add_point(-1, -1, PointRole.ARRIVE, time)
        for end in ends:
            self._move(end, time)
            self._add_edge(end - 1, arrival, EdgeKind.ARRIVAL)
            self._add_edge(arrival, end, EdgeKind.TRANSFER, fixed, weight)

    def serialize(self, rank: int, stream: int, event: int, limit: int) -> bool:
        """Let the next activity of another stream start after this one has ended; False if there is none."""
        points = np.flatnonzero((self.graph.event == event) & (self.graph.rank == rank))
        start, end = points[np.argsort(self.graph.time[points])][[0, -1]]
        table = self._streams[rank, stream]
        row = int(np.searchsorted(self.graph.time[table["start"]], self.graph.time[start]))
        if row >= min(limit, len(table["start"])):
            return False
        point = int(table["start"][row])
        edges = np.flatnonzero((self.base.target == point) & (self.graph.kind == EdgeKind.STREAM))
        if not edges.size:
            return False
        self._waits.append((int(edges[0]), int(self.graph.source[edges[0]]), [int(end)]))
        # The activity itself starts after what runs on that stream.
        launch = np.flatnonzero((self.base.target == start) & (self.graph.kind == EdgeKind.LAUNCH))
        if row and launch.size:
            self._waits.append(
                (int(launch[0]), int(self.graph.source[launch[0]]), [int(table["end"][row - 1])])
            )
        return True

    def block_stream(self, rank: int, stream: int, time: int, event: int) -> None:
        """Let the next activity of a stream that is launched after ``time`` wait for an added activity."""
        table = self._streams[rank, stream]
        row = int(np.searchsorted(table["launch"], time, side="right"))
        end = self._ends[rank, event]
        while row < len(table["start"]) and self._time(int(table["start"][row])) < self._time(end):
            row += 1
        if row < len(table["start"]):
            self._add_edge(end, int(table["start"][row]), EdgeKind.STREAM_WAIT, KERNEL_GAP_NS)

    def _move(self, point: int, time: int) -> None:
        position = point - len(self.graph)
        self._points[position] = (max(time, self._points[position][0]), *self._points[position][1:])

    # Times

    @cached_property
    def _edge_columns(self) -> tuple[np.ndarray, np.ndarray]:
        """Source, target, lag, kind, number and weight (separately) of all edges except the split ones."""
        graph = self.graph
        keep = np.ones(len(self.lag), bool)
        keep[list(self._splits)] = False
        for edge, (tail, pause) in self._splits.items():
            kind, owner = EdgeKind(int(graph.kind[edge])), int(graph.owner[edge])
            pause += self.weight[edge]
            self._add_edge(tail, int(self.base.target[edge]), kind, int(self.lag[edge]), pause, owner)
        added = np.array([edge[:4] for edge in self._edges], dtype=np.int64).reshape(-1, 4)
        old = (graph.source, self.base.target, self.lag, graph.kind)
        columns = np.concatenate((np.column_stack(old)[keep], added))
        numbers = np.concatenate((np.flatnonzero(keep), np.arange(len(added)) + len(self.lag)))
        weight = np.concatenate((self.weight[keep], [edge[5] for edge in self._edges]))
        return np.column_stack((columns, numbers)), weight

    @cached_property
    def _built(self) -> Built:
        """The graph with the additions.

        A call that waits for the device ends after what it waits for, at times that only the additions lead to: the
        lags of these calls first grow until they do, then edges take their place.
        """
        edges, weight = self._edge_columns
        points = np.array(self._points, dtype=np.int64).reshape(-1, 4)
        time = np.concatenate((self.graph.time, points[:, 0])).astype(np.int64)
        built = self._build(time, edges, weight)
        if not self._waits:
            return built
        lag = built.lag.copy()
        waits = [
            (built.edge[edge], built.point[start], built.point[ends], lag[built.edge[edge]])
            for edge, start, ends in self._waits
        ]
        for _ in range(10 * len(waits) + 10):
            times = algorithms.compute_times(built.graph, lag)
            needed = [
                max(int(times[ends].max()) - int(times[start]), least) for _, start, ends, least in waits
            ]
            if all(lag[wait[0]] == value for wait, value in zip(waits, needed, strict=True)):
                break
            lag[[wait[0] for wait in waits]] = needed
        target = dict(zip(edges[:, 4].tolist(), edges[:, 1].tolist(), strict=True))
        extra = [
            (end, target[edge], 0, int(EdgeKind.SYNC), -1) for edge, _, ends in self._waits for end in ends
        ]
        more = np.concatenate((edges, np.array(extra, np.int64)))
        return self._build(times[built.point], more, np.concatenate((weight, np.zeros(len(extra)))))

    def _build(self, time: Int64Array, edges: np.ndarray, weight: np.ndarray) -> Built:
        points = np.array(self._points, dtype=np.int64).reshape(-1, 4)
        count = len(self.graph) + len(points)
        graph = Graph.from_edges(
            time=time,
            event=np.arange(count, dtype=np.int32),
            role=np.concatenate((self.graph.role, points[:, 2])).astype(np.uint8),
            rank=np.concatenate((self.graph.rank, points[:, 3])).astype(np.int32),
            source=edges[:, 0].astype(np.int32),
            target=edges[:, 1].astype(np.int32),
            min_latency=np.zeros(len(edges), np.int64),
            kind=edges[:, 3].astype(np.uint8),
            owner=np.arange(len(edges), dtype=np.int32),
        )
        if graph.dropped.any():
            raise ValueError(f"{graph.dropped.sum()} edges do not go forward")
        point, edge = np.full(count, -1), np.full(len(self.lag) + len(self._edges), -1)
        point[graph.event] = np.arange(count)
        numbers = edges[graph.owner, 4]
        edge[numbers[numbers >= 0]] = np.flatnonzero(numbers >= 0)
        start = np.concatenate((self.graph.time, points[:, 0])).astype(np.int64)[graph.event]
        return Built(graph, point, edge, edges[graph.owner, 2], weight[graph.owner], start)

    def compute_times(self, scale: float) -> Int64Array:
        """Return the time of each point of the graph with the additions."""
        built = self._built
        lag = built.lag + np.round(scale * built.weight).astype(np.int64)
        return algorithms.compute_times(built.graph, lag, built.start)

    @property
    def total_weight(self) -> float:
        """The time that a scale of 1 adds, if all edges bind, ns."""
        return float(self._built.weight.sum())

    def measure_end(self, times: Int64Array) -> int:
        """Return the time of the last point that counts."""
        return int(times[self._built.point[np.flatnonzero(self.base.counts)]].max())

    def make_job(self, times: Int64Array) -> Job:
        """Return the linked job at these times."""
        built = self._built.graph
        events = np.concatenate((self.graph.event, [point[1] for point in self._points])).astype(np.int32)
        graph = replace(built, time=self._built.start, event=events[built.event])
        return Job(
            {rank: self._make_trace(rank, trace, graph, times) for rank, trace in self.base.job.items()}
        )

    def _make_trace(self, rank: int, trace: Trace, graph: Graph, times: Int64Array) -> Trace:
        tables: dict[str, pl.DataFrame] = {}
        for name, rows in {"events": self.rows.get(rank, []), **self.tables.get(rank, {})}.items():
            if rows:
                frame = pl.DataFrame(rows, infer_schema_length=None)
                tables[name] = pl.concat([trace.table(name), TABLES[name].conform(frame)])
        events = tables.get("events", trace.events)
        for column, values, dtype in (("name", self.names, pl.String), ("stream", self.streams, pl.Int64)):
            if changed := values.get(rank):
                new = pl.DataFrame(
                    {"id": list(changed), "new": list(changed.values())},
                    schema={"id": pl.UInt32, "new": dtype},
                )
                events = events.join(new, on="id", how="left", maintain_order="left")
                both = pl.coalesce("new", pl.col(column).cast(dtype)).cast(trace.events.schema[column])
                events = events.with_columns(both.alias(column)).drop("new")
                if column == "stream":
                    on_stream = pl.col("id").is_in(list(changed))
                    events = events.with_columns(tid=pl.when(on_stream).then("stream").otherwise("tid"))
        tables["events"] = events
        if grids := self.grids.get(rank):
            kernels = tables.get("kernels", trace.kernels)
            factor = kernels["event"].replace_strict(
                list(grids), list(grids.values()), default=1.0, return_dtype=pl.Float64
            )
            grid = (kernels["grid_x"] * factor).round().cast(kernels.schema["grid_x"])
            tables["kernels"] = kernels.with_columns(grid_x=grid)
        retimed = retime_rank(trace.replace(None, **tables), graph, times, rank)
        if shift := self.shift_ns.get(rank):
            retimed = retimed.replace(None, events=retimed.events.with_columns(pl.col("ts") + shift))
        return relink(retimed, rank)


def find_slots(base: Base, rank: int) -> list[Slot]:
    """Return the places between outermost operators of a rank's main thread, in steps, after the first launch.

    Not in DDP's broadcasts of buffers: what is slow inside of them is theirs, too.
    """
    graph, trace = base.dependencies.graph, base.job[rank]
    annotated = find_steps(trace)
    annotation = trace.events.filter(pl.col("name").cast(pl.String).str.starts_with("ProfilerStep"))
    tid = annotation.filter(pl.col("cat") == "user_annotation")["tid"][0]
    events = trace.events
    is_main = (
        (events["tid"] == tid) & events["cat"].is_in(["cpu_op", "user_annotation", "cuda_runtime"])
    ).to_numpy()
    is_annotation = (events["cat"] == "user_annotation").fill_null(False).to_numpy()
    edges = np.flatnonzero((base.edge_ranks == rank) & np.isin(graph.kind, (EdgeKind.SEGMENT, EdgeKind.IDLE)))
    source, target, owner = graph.source[edges], base.target[edges], graph.owner[edges]
    ok = (graph.event[source] >= 0) & (graph.event[target] >= 0)
    ok &= is_main[graph.event[source]] & is_main[graph.event[target]]
    ok &= (owner < 0) | is_annotation[owner]
    times = graph.time[source]
    if base.has_device:
        first = trace.launches["launch"].drop_nulls().min()
        ok &= times > trace.events["ts"].gather([first]).item()
    broadcasts = find_regions(RankView(trace))
    ok &= Intervals.of(broadcasts["start"], broadcasts["end"]).covered(times, graph.time[target]) == 0
    slots = []
    for step, start, end in annotated.iter_rows():
        rows = np.flatnonzero(ok & (times >= start) & (times < end) & (graph.time[target] <= end))
        slots += [Slot(rank, int(edges[i]), int(times[i]), step) for i in rows[np.argsort(times[rows])]]
    return slots
