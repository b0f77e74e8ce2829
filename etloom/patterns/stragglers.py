"""A rank comes late to a communication, and the others wait for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import polars as pl

from etloom.collectives import together
from etloom.collectives.lateness import CAUSES, cause, delays
from etloom.intervals import Intervals
from etloom.patterns._finding import Finding, times
from etloom.patterns._view import View
from etloom.trace import Job

SCOPE = "job"
_WHY = {
    "longer compute": "it computes longer",
    "other work": "it does other work longer",
    "late launch": "its host launches late",
    "before": "it was late already when it left the communication before",
}


def find(views: Mapping[int, View]) -> Iterator[tuple[int, Finding]]:
    job = Job({rank: view.trace for rank, view in views.items()})
    if len(job) < 2:
        return
    parts = together(job).parts.filter(pl.col("meeting").is_not_null())
    late = delays(parts, job).filter(pl.col("delay_ns") > 0)
    sums = (
        late.group_by("rank")
        .agg(pl.len().alias("count"), pl.col("delay_ns", *CAUSES).sum())
        .with_columns(cause=cause())
    )
    # Several can wait for a rank at once: that time is lost once.
    lost = {
        rank: Intervals.of(own["start"] - own["delay_ns"], own["start"]).total
        for (rank,), own in late.group_by("rank")
    }
    for row in sums.sort("rank").iter_rows(named=True):
        yield (
            row["rank"],
            Finding(
                f"rank {row['rank']} keeps the others waiting {times(row['count'])}: {_WHY[row['cause']]}",
                lost[row["rank"]],
                "medium",
                "compare the rank with the others: its share of the data, its device's clock and temperature, its "
                "host's load; `etloom analyze stragglers` splits the delay, `collectives` shows each wait",
                row["count"],
                name=f"rank {row['rank']}",
            ),
        )
