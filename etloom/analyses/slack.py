"""How much longer each operator and each kernel could take without the run taking longer.

A row is a name. count: how many events of it the graph holds. critical: how many have no slack at all, so that any
delay of them delays the whole. least, median, most: of their slack, counted from the end of the event. total: the
sum of their durations. The names with the most time in events without slack come first.

- explainable: whether the graph explains the recording (as of graph-quality, of all ranks): where it does not, slack
  is no more than what lies between things that came after each other.

category: events of this category (python_function, user_annotation, ...) instead of operators and device work.

Units: ns. The slack holds for one event at a time: those of one chain share it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
import polars as pl

from etloom import graphs, kinds, stacks
from etloom.analyses._activity import answer
from etloom.analyses._dependencies import dependencies, unexplained
from etloom.dependencies import quality
from etloom.dependencies.events import rows_of
from etloom.errors import UnknownName
from etloom.graphs import Graph, Role, Ticks
from etloom.trace import Job, Trace

SCOPE = "job"
COLUMNS = {
    "rank": pl.Int64,
    "category": pl.String,
    "name": pl.String,
    "count": pl.Int64,
    "critical": pl.Int64,
    "least_ns": pl.Int64,
    "median_ns": pl.Int64,
    "most_ns": pl.Int64,
    "total_ns": pl.Int64,
    "critical_ns": pl.Int64,
    "explainable": pl.Boolean,
}


def analyze(job: Job, *, category: str | None = None) -> pl.DataFrame:
    graph = dependencies(job).graph
    slack = graphs.slack(graph)
    chosen = kinds.OPERATORS | kinds.DEVICE if category is None else {category}
    table = pl.concat(
        _summed(_ends(graph, slack, trace, rank, chosen)).with_columns(rank=pl.lit(rank, pl.Int64))
        for rank, trace in job.items()
    )
    if category is not None and not table.height:
        known = {
            name
            for rank, trace in job.items()
            for name in _ends(graph, slack, trace, rank)["category"].unique().drop_nulls().cast(pl.String)
        }
        raise UnknownName("category", category, known)
    table = table.with_columns(explainable=pl.lit(not quality.doubts(graph, job)))
    order = ["critical_ns", "total_ns", "rank", "category", "name"]
    return answer(table, COLUMNS).sort(order, descending=[True, True, False, False, False])


def remarks(table: pl.DataFrame) -> Iterator[str]:
    """What the rows alone do not say."""
    yield from unexplained(table, "these slacks")


def _ends(
    graph: Graph, slack: Ticks, trace: Trace, rank: int, categories: Collection[str] | None = None
) -> pl.DataFrame:
    """category, name, dur, slack_ns of the events of a rank, by default of all categories: the slack of an event is
    that of its end."""
    ends = np.flatnonzero((graph.rank == rank) & (graph.role == Role.END) & (graph.event >= 0))
    row = rows_of(trace.events, pl.Series(graph.event[ends]))
    if categories is not None:
        wanted = stacks.among(trace.events["cat"], categories)[row]
        ends, row = ends[wanted], row[wanted]
    return trace.events.select(pl.col("cat").alias("category"), "name", "dur")[row].with_columns(
        pl.Series("slack_ns", slack[ends])
    )


def _summed(ends: pl.DataFrame) -> pl.DataFrame:
    """A row a category and name."""
    slack_ns, dur = pl.col("slack_ns"), pl.col("dur")
    return ends.group_by("category", "name").agg(
        pl.len().alias("count"),
        (slack_ns == 0).sum().alias("critical"),
        slack_ns.min().alias("least_ns"),
        slack_ns.median().round().alias("median_ns"),
        slack_ns.max().alias("most_ns"),
        dur.sum().alias("total_ns"),
        dur.filter(slack_ns == 0).sum().alias("critical_ns"),
    )
