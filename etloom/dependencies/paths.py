"""The critical path of a job or of a part of it, as a table; the slack of each event."""

from __future__ import annotations

import numpy as np
import polars as pl

from etloom import graphs, kinds, stacks
from etloom.dependencies.events import rows_of
from etloom.graphs import Graph, Kind, Role
from etloom.trace import Job, Trace

LATER_START = "later start"
"""In place of a kind: the time from the beginning of the window to the own time of the path's first point."""

EDGE = {
    "rank": pl.Int64,
    "kind": pl.String,
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
    target = np.searchsorted(graph.first, path, side="right") - 1
    inside = graph.time[target] > begin
    path, target = path[inside], target[inside]
    source = graph.source[path]
    start = np.maximum(graph.time[source], begin)
    time = graph.time[target] - start
    rank = np.where(graph.rank[target] >= 0, graph.rank[target], graph.rank[source])
    table = pl.DataFrame(
        {
            "rank": rank,
            "kind": pl.Series(labels(), dtype=pl.String).gather(graph.kind[path]),
            "event": pl.Series(graph.owner[path]).replace(-1, None),
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


def slack(graph: Graph) -> pl.DataFrame:
    """rank, event, slack_ns of each event: how much longer it could take without the makespan growing.

    That is the slack of its end: what comes after it may be delayed by so much.
    """
    ends = np.flatnonzero((graph.role == Role.END) & (graph.event >= 0))
    return pl.DataFrame(
        {"rank": graph.rank[ends], "event": graph.event[ends], "slack_ns": graphs.slack(graph)[ends]},
        schema={"rank": pl.Int64, "event": pl.Int64, "slack_ns": pl.Int64},
    )


def described(path: pl.DataFrame, job: Job) -> pl.DataFrame:
    """The path with what each edge's event is: category, name, operator around it (of device work, around its
    launch), module around that."""
    parts = [path.with_row_index("at").clear().with_columns(pl.lit("").alias(name) for name in _WHAT)]
    for (rank,), own in path.with_row_index("at").group_by("rank", maintain_order=True):
        parts.append(own.hstack(_what(job[int(rank)], own["event"])))  # type: ignore[call-overload]
    return pl.concat(parts).sort("at").drop("at")


_WHAT = ("category", "name", "operator", "module")
_MODULE = r"^nn\.Module: (.*)$"


def _what(trace: Trace, event: pl.Series) -> pl.DataFrame:
    """`_WHAT` of events of a trace."""
    events = trace.events
    row = rows_of(events, event)
    launch = np.full(events.height + 1, -1, np.int64)
    launches = trace.launches
    launch[rows_of(events, launches["device_event"])] = rows_of(events, launches["launch"])
    launch[-1] = -1
    caller = np.where((row >= 0) & (launch[row] >= 0), launch[row], row)
    parent = rows_of(events, events["parent"])
    operators = stacks.among(events["cat"], kinds.OPERATORS)
    modules = stacks.asked(events["name"], lambda name: name.str.contains(_MODULE))

    def named(column: str, rows: np.ndarray) -> pl.Series:
        if not events.height:
            return pl.Series(column, [None] * len(rows), dtype=pl.String)
        found: pl.Series = events[column][np.maximum(rows, 0).astype(np.int64)].cast(pl.String)
        return found.set(pl.Series(rows < 0), None)

    return pl.DataFrame(
        {
            "category": named("cat", row),
            "name": named("name", row),
            "operator": named("name", stacks.nearest(parent, operators, caller)),
            "module": named("name", stacks.nearest(parent, modules, caller)).str.extract(_MODULE),
        }
    )


def labels() -> list[str]:
    """The label of each `Kind`, by number."""
    return [kind.label for kind in Kind]
