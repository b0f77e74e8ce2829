"""The critical path of a job or of a part of it, as a table."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import polars as pl

from etloom import graphs, kinds, stacks
from etloom.dependencies.events import Events, rows_of
from etloom.graphs import Graph, Kind
from etloom.trace import Job, Trace

LATER_START = "later start"
"""In place of a kind: the time from the beginning of the window to the own time of the path's first point."""

KIND = pl.Enum([*(kind.label for kind in Kind), LATER_START])
KIND_OF = pl.Series([kind.label for kind in Kind], dtype=KIND)
"""The label of each `Kind`, by number."""

EDGE: dict[str, Any] = {
    "rank": pl.Int64,
    "kind": KIND,
    "event": pl.Int64,
    "start_ns": pl.Int64,
    "time_ns": pl.Int64,
    "unexplained_ns": pl.Int64,
}


def critical_path(graph: Graph, end: int | None = None, begin_ns: int | None = None) -> pl.DataFrame:
    """The edges (`EDGE`) that lead to the point ``end`` (default: the last) without play, in the order of time.

    begin_ns: where to stop looking back (default: the first time of the graph). The first row covers what lies
    before the path begins, so the times sum to that of ``end`` less ``begin_ns``. Of an edge, ``event`` is its
    owner in its rank, null for none; ``unexplained_ns`` the part of its time beyond its floor.
    """
    if not len(graph):
        return pl.DataFrame(schema=EDGE)
    end = int(np.argmax(graph.time)) if end is None else end
    begin = int(graph.time[0]) if begin_ns is None else begin_ns
    path = graphs.longest_path(graph, end)
    target = np.append(graph.source[path[1:]], end)[: len(path)]
    inside = graph.time[target] > begin
    path, target = path[inside], target[inside]
    source = graph.source[path]
    start = np.maximum(graph.time[source], begin)
    time = graph.time[target] - start
    rank = np.where(graph.rank[target] >= 0, graph.rank[target], graph.rank[source])
    table = pl.DataFrame(
        {
            "rank": rank,
            "kind": KIND_OF.gather(graph.kind[path]),
            "event": _or_none(graph.owner[path]),
            "start_ns": start,
            "time_ns": time,
            "unexplained_ns": np.minimum(graph.excess[path], time),
        },
        schema_overrides=EDGE,
    )
    begun = int(start[0]) if path.size else int(graph.time[end])
    first = pl.DataFrame(
        [(int(rank[0]) if path.size else int(graph.rank[end]), LATER_START, None, begin, begun - begin, 0)],
        schema=EDGE,
        orient="row",
    )
    return pl.concat([first, table]) if begun > begin else table


def last_point(graph: Graph, rank: int | None = None, events: pl.Series | None = None) -> int | None:
    """The last point of all, of a rank, or of these events (ids) of it; None where there is none."""
    chosen = np.ones(len(graph), bool) if rank is None else graph.rank == rank
    if events is not None:
        chosen &= np.isin(graph.event, events.to_numpy())
    points = np.flatnonzero(chosen)
    return int(points[np.argmax(graph.time[points])]) if points.size else None


WHAT = ("category", "name", "operator", "module")
"""What can be said of a piece: category and name of its event; the operator around that (of device work, around its
launch); the module around that, by the name of its event."""

_MODULE = r"^nn\.Module: (.*)$"


def described(path: pl.DataFrame, job: Job, wanted: Collection[str]) -> pl.DataFrame:
    """The path with the columns of `WHAT` that are wanted."""
    if not wanted:
        return path
    ranks = path["rank"].unique().to_list() or job.ranks
    if len(ranks) == 1 or path.is_empty():
        return path.hstack(_what(job[ranks[0]], path["event"], wanted))
    parts = []
    for (rank,), own in path.with_row_index("at").group_by("rank", maintain_order=True):
        parts.append(own.hstack(_what(job[int(rank)], own["event"], wanted)))  # type: ignore[call-overload]
    return pl.concat(parts).sort("at").drop("at")


def modules(names: pl.Expr) -> pl.Expr:
    """The modules whose events have these names."""
    return names.cast(pl.String).str.extract(_MODULE)


def _what(trace: Trace, event: pl.Series, wanted: Collection[str]) -> pl.DataFrame:
    table = trace.events
    if not table.height:
        return pl.DataFrame({name: [None] * len(event) for name in wanted})
    row = rows_of(table, event)
    columns = {"category": (table["cat"], row), "name": (table["name"], row)}
    if {"operator", "module"} & set(wanted):
        events = Events(table)
        launch = np.full(len(events) + 1, -1, np.int64)
        launch[events.rows(trace.launches["device_event"])] = events.rows(trace.launches["launch"])
        launch[-1] = -1
        caller = np.where(launch[row] >= 0, launch[row], row)
        around = {"operator": events.cats.among(kinds.OPERATORS), "module": events.names.like(_MODULE)}
        for name in set(wanted) & set(around):
            columns[name] = table["name"], stacks.nearest(events.parent, around[name], caller)
    return pl.DataFrame(
        {name: columns[name][0].gather(_or_none(columns[name][1])) for name in WHAT if name in wanted}
    )


def _or_none(numbers: np.ndarray) -> pl.Series:
    """The numbers, null where they are negative."""
    series = pl.Series(numbers)
    return series.set(series < 0, None) if (numbers < 0).any() else series
