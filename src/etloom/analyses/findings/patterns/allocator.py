"""Find calls that allocate device memory from the driver, or release it, in steady state (after warm-up).

Calls that allocate device memory from the driver or free it. Those of the first annotated step count only if
they take about as long as in a later step; if fewer than two steps are annotated, those after a tenth of the
launches count.

Cost: the calls, and late launches after them.
Confidence: medium; low if fewer than two steps are annotated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import polars as pl

from etloom.analyses.findings.finding import (
    BOTH,
    HOST,
    Finding,
    describe_place,
    format_times,
    sum_findings,
    sum_places,
)
from etloom.analyses.findings.rank_view import RankView

MAX_WARM_UP = 1.5
"""The calls of the first step are warm-up if they take this many times as long as those of a later step."""

SCOPE = "rank"
_SUMMED = ("cost_ns", "lost", "in_steps_ns", "components")


def find(view: RankView) -> Iterator[Finding]:
    steady, since, guessed = view.allocations, view.steady_start, ""
    if steady.is_empty():
        return
    if since is not None:
        steady = _leave_out_warm_up(steady, since, view.steps.height)
    else:
        # The end of warm-up is unknown: assume the first tenth of the launches.
        launches = view.activities["launch_ts"].drop_nulls().sort()
        if len(launches):
            steady = steady.filter(pl.col("ts") > launches[len(launches) // 10])
        guessed = f" ({view.warmup_caveat}: may be warm-up)"
    calls = sum_places(
        view,
        steady.select("step", "name", "end", start="ts", cost_ns="dur", event="id"),
        lambda row: (
            f"memory is allocated or released {format_times(row['count'])} and blocks the host{guessed}"
            if row["places"] > 1
            else f"{row['name']} is called {format_times(row['count'])}{describe_place(row)} and blocks the host"
            f"{guessed}"
        ),
        confidence="low" if guessed else "medium",
        advice="warm up before the trace; set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; do not call "
        "empty_cache() in the loop; keep shapes stable",
        tracks=HOST,
        by="name",
    )
    for finding in calls:
        # What the host launches late after the calls is due to them, too.
        is_due = pl.col("is_late_effect") & pl.col("event").is_in(steady["id"].implode())
        late = view.select_gaps("allocator").filter(is_due)
        gaps = sum_places(
            view,
            late,
            lambda _, finding=finding: finding.title,  # type: ignore[misc]
            confidence=finding.confidence,
            advice=finding.advice,
            tracks=BOTH,
            by="name",
        )
        both = sum_findings([finding, *gaps], finding.title)
        yield replace(finding, **{name: getattr(both, name) for name in _SUMMED})


def _leave_out_warm_up(calls: pl.DataFrame, since: int, step_count: int) -> pl.DataFrame:
    """Return the allocation calls after the first step, and those of the first step unless they take much longer than
    usual."""
    later = calls.filter(pl.col("ts") >= since)
    first = calls.filter((pl.col("ts") < since) & pl.col("step").is_not_null())
    usual_ns = int(later["dur"].sum()) / (step_count - 1)
    is_usual = step_count > 2 and int(first["dur"].sum()) <= MAX_WARM_UP * usual_ns
    return pl.concat([first, later]) if is_usual else later
