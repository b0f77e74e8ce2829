"""The critical path of a job or of a part of it, as a table."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
import polars as pl

from etloom.core import arrays, categories
from etloom.core.trace import Job, Trace
from etloom.graphs import algorithms
from etloom.graphs.algorithms import EdgeKind, Graph, Int32Array, Int64Array
from etloom.graphs.event_arrays import EventArrays, rows_of_ids

LATER_START = "later start"
"""In place of a kind: the time from the beginning of the window to the own time of the path's first point."""

KIND_LABELS = {
    EdgeKind.SEGMENT.label: "host",
    EdgeKind.IDLE.label: "Python or nothing",
    EdgeKind.LAUNCH.label: "delays of launches",
    EdgeKind.STREAM.label: "delays on a stream",
    EdgeKind.COMPLETE.label: "ranges across threads",
}
"""Kinds of a path in a sentence, where they are called otherwise; device work by its category, see `in_words`."""

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
"""Pieces of a path that are looked at together."""


def find_critical_path(graph: Graph, end: int | None = None, begin_ns: int | None = None) -> pl.DataFrame:
    """The edges (`EDGE`) that lead to the point ``end`` (default: the last) without play, in the order of time.

    begin_ns: where to stop looking back (default: the first time of the graph). The first row covers what lies
    before the path begins, so the times sum to that of ``end`` less ``begin_ns``. Of an edge, ``event`` is its
    owner in its rank, null for none; ``unexplained_ns`` the part of its time beyond its floor.
    """
    return pl.concat(iterate_critical_path(graph, end, begin_ns))


def iterate_critical_path(
    graph: Graph,
    end: int | None = None,
    begin_ns: int | None = None,
    columns: Collection[str] = tuple(PATH_SCHEMA),
) -> Iterator[pl.DataFrame]:
    """`critical_path` in parts of about `PART` rows, one at least: a path may be as long as the recording.

    columns: those of `EDGE` that are wanted, of many pieces the fewer the better.
    """
    schema = {name: dtype for name, dtype in PATH_SCHEMA.items() if name in columns}
    if not len(graph):
        yield pl.DataFrame(schema=schema)
        return
    end = int(np.argmax(graph.time)) if end is None else end
    begin = int(graph.time[0]) if begin_ns is None else begin_ns
    path = algorithms.find_longest_path(graph, end)
    # The points from the source of the first edge on; an edge counts if its target is in the window.
    points = np.append(graph.source[path], np.int32(end))
    skip = bisect_right(range(len(path)), begin, key=lambda at: graph.time[points[at + 1]])
    path, points = path[skip:], points[skip:]
    begun = max(int(graph.time[points[0]]), begin)
    if begun > begin or not path.size:
        # An arrival is of no rank.
        rank = next((int(rank) for rank in graph.rank[points[:2]] if rank >= 0), None)
        first = [(rank, LATER_START, None, begin, begun - begin, 0)] if begun > begin else []
        yield pl.DataFrame(first, schema=PATH_SCHEMA, orient="row").select(*schema)
    for low in range(0, len(path), CHUNK_ROWS):
        yield _path_chunk(
            graph, path[low : low + CHUNK_ROWS], points[low : low + CHUNK_ROWS + 1], begin, schema
        )


def _path_chunk(
    graph: Graph, path: Int32Array, points: Int32Array, begin: int, schema: Mapping[str, Any]
) -> pl.DataFrame:
    """Columns of `EDGE` of consecutive edges and the points between which they lead."""

    def ranks() -> Int32Array:
        rank = graph.rank[points]
        return np.where(rank[1:] >= 0, rank[1:], rank[:-1])

    recorded = graph.time[points]
    took = np.diff(recorded)
    at = np.maximum(recorded, begin, out=recorded)
    time = np.diff(at)
    found: dict[str, Callable[[], Any]] = {
        "rank": ranks,
        "kind": lambda: _KIND_NAMES.gather(pl.Series(graph.kind[path]).cast(pl.UInt32)),
        "event": lambda: _null_negatives(graph.owner[path]),
        "start_ns": lambda: at[:-1],
        "time_ns": lambda: time,
        # Each edge of a path binds its target: what it took beyond its floor is the excess.
        "unexplained_ns": lambda: np.minimum(took - graph.floor[path], time),
    }
    return pl.DataFrame({name: found[name]() for name in schema}, schema_overrides=schema)


def find_last_point(graph: Graph, rank: int | None = None, events: pl.Series | None = None) -> int | None:
    """The last point of all, of a rank, or of these events (ids) of it; None where there is none."""
    if rank is None and events is None:
        return int(np.searchsorted(graph.time, graph.time[-1])) if len(graph) else None
    chosen = np.ones(len(graph), bool) if rank is None else graph.rank == rank
    if events is not None:
        chosen &= np.isin(graph.event, events.to_numpy())
    points = np.flatnonzero(chosen)
    return int(points[np.argmax(graph.time[points])]) if points.size else None


def summarize_path_at(graph: Graph, job: Job, time: Int64Array, lag: Int64Array) -> pl.DataFrame:
    """The path at other times than the recorded ones: kind, category (of device work) and time_ns of each piece, which
    sum to the makespan."""
    path = algorithms.find_longest_path(graph, time=time, lag=lag)
    points = np.append(graph.source[path], graph.target[path[-1:]])
    rank = graph.rank[points]
    pieces = pl.DataFrame(
        {
            "rank": np.where(rank[1:] >= 0, rank[1:], rank[:-1]),
            "kind": _KIND_NAMES.gather(pl.Series(graph.kind[path]).cast(pl.UInt32)),
            "event": _null_negatives(graph.owner[path]),
            "time_ns": np.diff(time[points]),
        }
    )
    is_work = pl.col("kind") == EdgeKind.KERNEL.label
    work = make_event_labeler(job, {"category"})(pieces.filter(is_work)).with_columns(
        pl.col("category").cast(pl.String)
    )
    begun = int(time[points[0]] - time.min()) if path.size else 0
    late = pl.DataFrame({"kind": [LATER_START], "time_ns": [begun]}, schema_overrides={"kind": KIND_DTYPE})
    return pl.concat((work, pieces.filter(~is_work), late), how="diagonal_relaxed")


def format_path_shares(path: pl.DataFrame, digits: int, most: int, least_pct: float = 0) -> list[str]:
    """97.0 % copies, 2.3 % kernels: the greatest parts of a path (kind, category, time_ns), with so many decimals.

    Copies and sets are told apart from kernels, which the graph counts as one kind: either may be what to mend.
    """
    total = int(path["time_ns"].sum()) or 1
    kind, of = pl.col("kind").cast(pl.String), pl.col("category").cast(pl.String)
    memory = (
        pl.when(of.is_in(list(categories.MEMCPY_CATEGORIES | categories.MEMSET_CATEGORIES)))
        .then(pl.lit("copies and sets"))
        .otherwise(pl.lit("kernels"))
    )
    name = pl.when(kind == EdgeKind.KERNEL.label).then(memory).otherwise(kind.replace(KIND_LABELS))
    parts = path.group_by(name.alias("part")).agg(pct=100 * pl.col("time_ns").sum() / total)
    parts = parts.filter(pl.col("pct") > least_pct).sort("pct", "part", descending=(True, False)).head(most)
    return [f"{pct:.{digits}f} % {part}" for part, pct in parts.iter_rows()]


EVENT_LABELS = ("category", "name", "operator", "module")
"""What can be said of a piece: category and name of its event; the operator around that (of device work, around its
launch); the module around that, by the name of its event."""

_MODULE = r"^nn\.Module: (.*)$"


def make_event_labeler(job: Job, wanted: Collection[str]) -> Callable[[pl.DataFrame], pl.DataFrame]:
    """What gives a path the columns of `WHAT` that are wanted."""

    @cache
    def said(rank: int) -> Callable[[pl.Series], pl.DataFrame]:
        # What several ranks do together is of none (-1) and no event's: any of them says that.
        return _make_rank_labeler(job[rank if rank in job else job.ranks[0]], wanted)

    def described(path: pl.DataFrame) -> pl.DataFrame:
        if not wanted:
            return path
        ranks = path["rank"].unique().to_list() or job.ranks
        if len(ranks) == 1 or path.is_empty():
            return path.hstack(said(ranks[0])(path["event"]))
        parts = []
        for (rank,), own in path.with_row_index("at").group_by("rank", maintain_order=True):
            parts.append(own.hstack(said(int(rank))(own["event"])))  # type: ignore[call-overload]
        return pl.concat(parts).sort("at").drop("at")

    return described


def extract_module_names(names: pl.Expr) -> pl.Expr:
    """The modules whose events have these names."""
    return names.cast(pl.String).str.extract(_MODULE)


def _make_rank_labeler(trace: Trace, wanted: Collection[str]) -> Callable[[pl.Series], pl.DataFrame]:
    """What gives events (ids) of a trace the columns of `WHAT` that are wanted."""
    table = trace.events
    columns = {name: column for name, column in (("category", "cat"), ("name", "name")) if name in wanted}
    around: dict[str, Int32Array] = {}
    if {"operator", "module"} & set(wanted):
        events = EventArrays(table)
        # The last one answers for no event.
        launch = np.full(len(events) + 1, -1, np.int32)
        launch[events.rows(trace.launches["device_event"])] = events.rows(trace.launches["launch"])
        launch[-1] = -1
        caller = np.where(
            launch >= 0, launch, np.append(np.arange(len(events), dtype=np.int32), np.int32(-1))
        )
        masks = {
            "operator": events.cats.among(categories.OPERATOR_CATEGORIES),
            "module": events.names.like(_MODULE),
        }
        for name in set(wanted) & set(masks):
            around[name] = np.append(arrays.find_nearest_ancestor(events.parent, masks[name]), np.int32(-1))[
                caller
            ]

    def said(event: pl.Series) -> pl.DataFrame:
        if not table.height:
            return pl.DataFrame({name: [None] * len(event) for name in wanted})
        row = rows_of_ids(table, event)
        found = {name: table[column].gather(_null_negatives(row)) for name, column in columns.items()}
        found |= {name: table["name"].gather(_null_negatives(above[row])) for name, above in around.items()}
        return pl.DataFrame({name: found[name] for name in EVENT_LABELS if name in found})

    return said


def _null_negatives(numbers: np.ndarray) -> pl.Series:
    """The numbers, null where they are negative."""
    series = pl.Series(numbers)
    return series.set(series < 0, None) if (numbers < 0).any() else series
