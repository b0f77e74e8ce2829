"""Device memory is taken from the driver, or given back, in steady state."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.analyses.findings.finding import Finding, describe_place, group_by_place, times
from etloom.analyses.findings.rank_view import View

SCOPE = "rank"


def find(view: View) -> Iterator[Finding]:
    steady, since, guessed = view.allocations, view.steady_from, ""
    if since is not None:
        steady = steady.filter(pl.col("ts") >= since)
    else:
        # Nothing says where warm-up ends: the first tenth of the launches is a careful guess.
        launches = view.work["launch_ts"].drop_nulls().sort()
        if len(launches):
            steady = steady.filter(pl.col("ts") > launches[len(launches) // 10])
        guessed = f" ({view.unsure}: it may be warm-up)"
    yield from group_by_place(
        view,
        steady.select("step", "name", "end", start="ts", cost_ns="dur", event="id"),
        lambda row: (
            f"{row['name']} is called {times(row['count'])}{describe_place(row)}, and the host waits for it{guessed}"
        ),
        confidence="low" if guessed else "medium",
        advice="warm up before the trace; set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; do not call "
        "empty_cache() in the loop; keep shapes stable",
        by="name",
    )
