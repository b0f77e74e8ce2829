"""Slack of operators and kernels: how much longer each could take without delaying the run.

One row per name. count: number of its events in the graph. critical: events without slack, for which any delay delays
the whole run. min_ns, median_ns, max_ns: of their slack, measured from the end of the event. total_ns: sum of their
durations. Sorted by the time of events without slack, largest first.

- explainable: whether the graph explains the recording (as in graph-quality, for all ranks). If it does not, slack is
  only the distance between consecutive events.

Units: ns. The slack is valid for one event at a time: events of one chain share it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Annotated

import numpy as np
import polars as pl

from etloom import _native
from etloom.analyses.helpers import check_top, conform_columns
from etloom.analyses.helpers.dependency_graph import build_dependencies, warn_if_unexplained
from etloom.core import arrays, categories
from etloom.core.errors import UnknownName
from etloom.core.machine import run_both
from etloom.core.trace import Job, Trace
from etloom.graphs import algorithms, quality
from etloom.graphs.event_arrays import TextColumn, rows_of_ids
from etloom.graphs.graph import Graph, Int64Array, PointRole

SCOPE = "job"
COLUMNS = {
    "rank": pl.Int64,
    "category": pl.String,
    "name": pl.String,
    "count": pl.Int64,
    "critical": pl.Int64,
    "min_ns": pl.Int64,
    "median_ns": pl.Int64,
    "max_ns": pl.Int64,
    "total_ns": pl.Int64,
    "critical_ns": pl.Int64,
    "explainable": pl.Boolean,
}


def analyze(
    job: Job,
    *,
    category: Annotated[
        str | None,
        "Events of this category (python_function, user_annotation, ...) instead of operators and GPU "
        "activity.",
    ] = None,
    top: Annotated[int | None, "Maximum number of rows (default: all)."] = None,
) -> pl.DataFrame:
    check_top(1 if top is None else top)
    graph = build_dependencies(job).graph
    selected = (
        categories.OPERATOR_CATEGORIES | categories.DEVICE_CATEGORIES if category is None else {category}
    )

    def sum_by_name(categories: Collection[str] | None) -> pl.DataFrame:
        slack = algorithms.compute_slack(graph)
        return pl.concat(_sum_by_name(graph, slack, trace, rank, categories) for rank, trace in job.items())

    table, unexplained = run_both(
        lambda: sum_by_name(selected), lambda: quality.find_unexplained_ranks(graph, job), len(graph)
    )
    if category is not None and not table.height:
        parts = [sum_by_name(None)["category"]]
        raise UnknownName("category", category, {name for part in parts for name in part.drop_nulls()})
    table = table.with_columns(explainable=pl.lit(not unexplained))
    order = ["critical_ns", "total_ns", "rank", "category", "name"]
    table = conform_columns(table, COLUMNS).sort(order, descending=[True, True, False, False, False])
    return table if top is None else table.head(top)


def remarks(table: pl.DataFrame) -> Iterator[str]:
    """Yield a warning for the terminal if the dependency graph does not explain the recording."""
    yield from warn_if_unexplained(table, "these slacks")


def _sum_by_name(
    graph: Graph, slack: Int64Array, trace: Trace, rank: int, categories: Collection[str] | None
) -> pl.DataFrame:
    """Return a rank's events summed by category (None: all) and name; the slack of an event is that of its end."""
    events = trace.events
    ends = (graph.rank == rank) & (graph.role == PointRole.END) & (graph.event >= 0)
    category, name = TextColumn(events["cat"]), TextColumn(events["name"])
    selected = np.full(category.null_code + 1, categories is None)
    if categories is not None:
        selected[category.codes[category.match_values(categories)]] = True
    row, count, critical, least, low, high, most, total, critical_total = _native.sums_of_pairs(
        *(ends, rows_of_ids(events, pl.Series(graph.event)), slack, category.codes, name.codes),
        *(arrays.to_array(events["dur"], 0), selected),
    )
    return pl.DataFrame(
        {
            "rank": np.full(len(row), rank, np.int64),
            "category": events["cat"][row].cast(pl.String),
            "name": events["name"][row].cast(pl.String),
            "count": count,
            "critical": critical,
            "min_ns": least,
            "median_ns": np.rint(low / 2 + high / 2),
            "max_ns": most,
            "total_ns": total,
            "critical_ns": critical_total,
        }
    )
