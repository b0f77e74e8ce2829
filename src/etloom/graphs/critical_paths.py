"""Find the critical path of a job, or of a part of it, and return it as a table."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
import polars as pl

from etloom.core import categories, nesting
from etloom.core.trace import Job, Trace
from etloom.graphs import algorithms
from etloom.graphs.event_arrays import EventArrays, rows_of_ids
from etloom.graphs.graph import EdgeKind, Graph, Int32Array, Int64Array
from etloom.timeline.activity import MAX_LAUNCH_LATENCY_NS

LATER_START = "later start"
"""The kind of the time from the beginning of the window to the path's first point."""

KIND_LABELS = {
    EdgeKind.SEGMENT.label: "host operators and calls",
    EdgeKind.IDLE.label: "Python or idle host",
    EdgeKind.WAIT.label: "blocked threads",
    EdgeKind.COMPLETE.label: "ranges across threads",
    EdgeKind.LAUNCH.label: "launch latency",
    EdgeKind.STREAM.label: "gaps on a stream",
    EdgeKind.OVERLAP.label: "overlapping kernels",
    EdgeKind.STREAM_WAIT.label: "waits between streams",
    EdgeKind.SYNC.label: "return from synchronization",
    EdgeKind.HANDOFF.label: "switches between threads",
    EdgeKind.RETURN.label: "switches between threads",
    EdgeKind.ARRIVAL.label: "arrival at collectives",
    EdgeKind.TRANSFER.label: "transfer in collectives",
    EdgeKind.MESSAGE.label: "messages between ranks",
    LATER_START: "later start of a recording",
}
"""Kinds of edges as a sentence names them; GPU activities see `format_path_shares`."""

KIND_DTYPE = pl.Enum([*(kind.label for kind in EdgeKind), LATER_START])
_KIND_NAMES = pl.Series([kind.label for kind in EdgeKind], dtype=KIND_DTYPE)

PATH_SCHEMA: dict[str, Any] = {
    "rank": pl.Int64,
    "kind": KIND_DTYPE,
    "event": pl.Int64,
    "start_ns": pl.Int64,
    "time_ns": pl.Int64,
    "unexplained_ns": pl.Int64,
}


CHUNK_ROWS = 1 << 20
"""Edges of a path that are processed at a time."""


def find_critical_path(graph: Graph, end: int | None = None, begin_ns: int | None = None) -> pl.DataFrame:
    """Return the edges (`PATH_SCHEMA`) of the critical (zero-slack) path to the point ``end``, by time.

    ``end``: default: the latest point.

    The first row covers the time before the path begins, so the times sum to that of ``end`` minus ``begin_ns``.
    ``event`` is the owner of an edge in its rank, null for none; ``unexplained_ns`` the part of its time beyond its
    minimum latency.

    Args:
        begin_ns: stop looking back at this time; default: the first time of the graph.
    """
    return pl.concat(iterate_critical_path(graph, end, begin_ns))


def iterate_critical_path(
    graph: Graph,
    end: int | None = None,
    begin_ns: int | None = None,
    columns: Collection[str] = tuple(PATH_SCHEMA),
) -> Iterator[pl.DataFrame]:
    """Yield the critical path (see `find_critical_path`) as tables of about `CHUNK_ROWS` rows; at least one table.

    A path may be as long as the recording. ``columns``: the columns of `PATH_SCHEMA` to compute; fewer cost less on
    long paths.
    """
    schema = {name: dtype for name, dtype in PATH_SCHEMA.items() if name in columns}
    if not len(graph):
        yield pl.DataFrame(schema=schema)
        return
    end = int(np.argmax(graph.time)) if end is None else end
    begin = int(graph.time[0]) if begin_ns is None else begin_ns
    path = algorithms.find_longest_path(graph, end)
    # All points of the path; an edge counts if its target is in the window.
    points = np.append(graph.source[path], np.int32(end))
    skip = bisect_right(range(len(path)), begin, key=lambda i: graph.time[points[i + 1]])
    path, points = path[skip:], points[skip:]
    path_start = max(int(graph.time[points[0]]), begin)
    if path_start > begin or not path.size:
        # An arrival belongs to no rank.
        rank = next((int(rank) for rank in graph.rank[points[:2]] if rank >= 0), None)
        first = [(rank, LATER_START, None, begin, path_start - begin, 0)] if path_start > begin else []
        yield pl.DataFrame(first, schema=PATH_SCHEMA, orient="row").select(*schema)
    for low in range(0, len(path), CHUNK_ROWS):
        yield _path_chunk(
            graph, path[low : low + CHUNK_ROWS], points[low : low + CHUNK_ROWS + 1], begin, schema
        )


def _path_chunk(
    graph: Graph, path: Int32Array, points: Int32Array, begin: int, schema: Mapping[str, Any]
) -> pl.DataFrame:
    """Return consecutive edges of the critical path as a table (columns ``schema``), cut at time ``begin``."""

    def ranks() -> Int32Array:
        rank = graph.rank[points]
        return np.where(rank[1:] >= 0, rank[1:], rank[:-1])

    recorded = graph.time[points]
    durations = np.diff(recorded)
    clipped = np.maximum(recorded, begin, out=recorded)
    time = np.diff(clipped)
    compute: dict[str, Callable[[], Any]] = {
        "rank": ranks,
        "kind": lambda: _KIND_NAMES.gather(pl.Series(graph.kind[path]).cast(pl.UInt32)),
        "event": lambda: _null_negatives(graph.owner[path]),
        "start_ns": lambda: clipped[:-1],
        "time_ns": lambda: time,
        # Each edge of a path binds its target: its time beyond its minimum latency is unexplained.
        "unexplained_ns": lambda: np.minimum(durations - graph.min_latency[path], time),
    }
    return pl.DataFrame({name: compute[name]() for name in schema}, schema_overrides=schema)


def find_last_point(graph: Graph, rank: int | None = None, events: pl.Series | None = None) -> int | None:
    """Return the latest point of the graph, of a rank, or of ``events`` (ids) of a rank; None if there is none."""
    if rank is None and events is None:
        return int(np.searchsorted(graph.time, graph.time[-1])) if len(graph) else None
    mask = np.ones(len(graph), bool) if rank is None else graph.rank == rank
    if events is not None:
        mask &= np.isin(graph.event, events.to_numpy())
    points = np.flatnonzero(mask)
    return int(points[np.argmax(graph.time[points])]) if points.size else None


def summarize_path(
    graph: Graph, job: Job, path: Int32Array, time_ns: Int64Array, before_ns: int
) -> pl.DataFrame:
    """Return a table of a critical path's edges, and of the time before it: kind, category (of GPU activity), time_ns.

    Args:
        path: edges, by time.
        time_ns: of each.
        before_ns: from the first point of the graph to the first of the path.
    """
    rank = graph.rank[graph.source[path]]
    if path.size:
        last = np.searchsorted(graph.first, path[-1], side="right") - 1
        after = np.append(rank[1:], graph.rank[last])
        rank = np.where(after >= 0, after, rank)
    pieces = pl.DataFrame(
        {
            "rank": rank,
            "kind": _KIND_NAMES.gather(pl.Series(graph.kind[path]).cast(pl.UInt32)),
            "event": _null_negatives(graph.owner[path]),
            "time_ns": time_ns,
        }
    )
    is_work = pl.col("kind") == EdgeKind.KERNEL.label
    work = make_event_labeler(job, {"category"})(pieces.filter(is_work)).with_columns(
        pl.col("category").cast(pl.String)
    )
    before = pl.DataFrame(
        {"kind": [LATER_START], "time_ns": [before_ns]}, schema_overrides={"kind": KIND_DTYPE}
    )
    return pl.concat((work, pieces.filter(~is_work), before), how="diagonal_relaxed")


def format_path_shares(path: pl.DataFrame, digits: int, most: int, least_pct: float = 0) -> list[str]:
    """Return the largest shares of the path time as text, such as "97.0 % memcpy and memset", "2.3 % kernels".

    Kernels are separated from memcpy and memset, which are one kind in the graph: either may be the problem to fix.

    Args:
        digits: decimals of the percentages.
        most: maximum number of parts.
        least_pct: parts up to this percentage are left out.
    """
    total = int(path["time_ns"].sum()) or 1
    kind, category = pl.col("kind").cast(pl.String), pl.col("category").cast(pl.String)
    memory = (
        pl.when(category.is_in(list(categories.MEMCPY_CATEGORIES | categories.MEMSET_CATEGORIES)))
        .then(pl.lit("memcpy and memset"))
        .otherwise(pl.lit("kernels"))
    )
    is_late = (kind == EdgeKind.LAUNCH.label) & (pl.col("time_ns") > MAX_LAUNCH_LATENCY_NS)
    name = (
        pl.when(kind == EdgeKind.KERNEL.label)
        .then(memory)
        .when(is_late)
        .then(pl.lit("late starts after a launch"))
        .otherwise(kind.replace(KIND_LABELS))
    )
    parts = path.group_by(name.alias("part")).agg(pct=100.0 * pl.col("time_ns").sum() / total)
    parts = parts.filter(pl.col("pct") > least_pct).sort("pct", "part", descending=(True, False)).head(most)
    return [f"{pct:.{digits}f} % {part}" for part, pct in parts.iter_rows()]


EVENT_LABELS = ("category", "name", "operator", "module")
"""Labels of an edge: category and name of its event; the enclosing operator (for GPU activities, around the launch);
the enclosing module, by the name of its event."""

_MODULE = r"^nn\.Module: (.*)$"


def make_event_labeler(job: Job, columns: Collection[str]) -> Callable[[pl.DataFrame], pl.DataFrame]:
    """Return a function that adds ``columns`` of `EVENT_LABELS` (labels of each edge's event) to a critical path."""

    @cache
    def labeler(rank: int) -> Callable[[pl.Series], pl.DataFrame]:
        # An arrival has no rank (-1) and no event: any rank gives the null labels.
        return _make_rank_labeler(job[rank if rank in job else job.ranks[0]], columns)

    def label_path(path: pl.DataFrame) -> pl.DataFrame:
        if not columns:
            return path
        ranks = path["rank"].unique().to_list() or job.ranks
        if len(ranks) == 1 or path.is_empty():
            return path.hstack(labeler(ranks[0])(path["event"]))
        parts = []
        for (rank,), rows in path.with_row_index("position").group_by("rank", maintain_order=True):
            parts.append(rows.hstack(labeler(int(rank))(rows["event"])))  # type: ignore[call-overload]
        return pl.concat(parts).sort("position").drop("position")

    return label_path


def extract_module_names(names: pl.Expr) -> pl.Expr:
    """Return a polars expression that extracts the module name from event names "nn.Module: <name>"; else null."""
    return names.cast(pl.String).str.extract(_MODULE)


def _make_rank_labeler(trace: Trace, columns: Collection[str]) -> Callable[[pl.Series], pl.DataFrame]:
    """Return a function that maps event ids of a trace to a table with ``columns`` of `EVENT_LABELS`."""
    table = trace.events
    event_columns = {
        name: column for name, column in (("category", "cat"), ("name", "name")) if name in columns
    }
    enclosing: dict[str, Int32Array] = {}
    if {"operator", "module"} & set(columns):
        events = EventArrays(table)
        # The last row stands for no event.
        launch = np.full(len(events) + 1, -1, np.int32)
        launch[events.rows(trace.launches["device_event"])] = events.rows(trace.launches["launch"])
        launch[-1] = -1
        caller = np.where(
            launch >= 0, launch, np.append(np.arange(len(events), dtype=np.int32), np.int32(-1))
        )
        masks = {
            "operator": events.cats.match_values(categories.OPERATOR_CATEGORIES),
            "module": events.names.match_pattern(_MODULE),
        }
        for name in set(columns) & set(masks):
            enclosing[name] = np.append(
                nesting.find_nearest_ancestor(events.parent, masks[name]), np.int32(-1)
            )[caller]

    def label_events(event: pl.Series) -> pl.DataFrame:
        if not table.height:
            return pl.DataFrame({name: [None] * len(event) for name in columns})
        row = rows_of_ids(table, event)
        labels = {name: table[column].gather(_null_negatives(row)) for name, column in event_columns.items()}
        labels |= {
            name: table["name"].gather(_null_negatives(ancestor[row])) for name, ancestor in enclosing.items()
        }
        return pl.DataFrame({name: labels[name] for name in EVENT_LABELS if name in labels})

    return label_events


def _null_negatives(numbers: np.ndarray) -> pl.Series:
    """Convert an array of numbers to a polars Series in which negative numbers are null."""
    series = pl.Series(numbers)
    return series.set(series < 0, None) if (numbers < 0).any() else series
