"""How much longer each operator and each kernel could take without the run taking longer.

A row is a name. count: how many events of it the graph holds. critical: how many have no slack at all, so that any
delay of them delays the whole. least, median, most: of their slack, counted from the end of the event. total: the
sum of their durations. The names with the most time in events without slack come first.

category: events of this category (python_function, user_annotation, ...) instead of operators and device work.

Units: ns. The slack holds for one event at a time: those of one chain share it. See graph-quality for how far the
graph explains the recording.
"""

from __future__ import annotations

import polars as pl

from etloom import kinds
from etloom.analyses._activity import answer
from etloom.analyses._dependencies import dependencies
from etloom.dependencies import paths
from etloom.errors import UnknownName
from etloom.trace import Job

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
}


def analyze(job: Job, *, category: str | None = None) -> pl.DataFrame:
    found = paths.slack(dependencies(job).graph)
    named = found.join(
        job.table("events").select(
            "rank",
            pl.col("id").cast(pl.Int64).alias("event"),
            pl.col("cat").cast(pl.String).alias("category"),
            pl.col("name").cast(pl.String),
            "dur",
        ),
        on=["rank", "event"],
    )
    chosen = kinds.OPERATORS | kinds.DEVICE
    if category is not None:
        known = named["category"].unique().drop_nulls().to_list()
        if category not in known:
            raise UnknownName("category", category, known)
        chosen = frozenset({category})
    named = named.filter(pl.col("category").is_in(list(chosen)))
    slack, dur = pl.col("slack_ns"), pl.col("dur")
    table = named.group_by("rank", "category", "name").agg(
        pl.len().alias("count"),
        (slack == 0).sum().alias("critical"),
        slack.min().alias("least_ns"),
        slack.median().round().alias("median_ns"),
        slack.max().alias("most_ns"),
        dur.sum().alias("total_ns"),
        dur.filter(slack == 0).sum().alias("critical_ns"),
    )
    order = ["critical_ns", "total_ns", "rank", "category", "name"]
    return answer(table.sort(order, descending=[True, True, False, False, False]), COLUMNS)
