"""Find long times in which the host runs no operator, but Python code, garbage collection, file access or waits.

Times of 1 ms or more without an operator. On a run with a GPU: in annotated steps, while the GPU idles. On
one without: after the same operator in at least half of the steps, if no other pattern reports them.

Cost: with a GPU the gaps, else that time.
Confidence: medium; low without a GPU, unless Python stacks name the function.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl

from etloom.analyses.findings.finding import (
    BOTH,
    Finding,
    describe_function,
    find_function,
    format_times,
    sum_places,
)
from etloom.analyses.findings.gaps import LONG_PAUSE_NS
from etloom.analyses.findings.rank_view import RankView
from etloom.core import categories
from etloom.core.arrays import take_rows
from etloom.core.intervals import union
from etloom.core.steps import STEP_PATTERN

MIN_STEP_SHARE = 0.5
"""Share of the steps in which a pause must follow the same operator; in fewer steps it may be the scheduler's."""

MIN_INSIDE = 0.8
"""Share of a pause inside an annotation that is named with it."""

_RECORD_STACKS = (
    "record Python stacks (etloom collect --stack, torch.profiler with_stack=True) to see the lines"
)
_SHORTEN = (
    "call gc.freeze() after the first steps, or gc.collect() between steps with gc.disable(); write files in a "
    "thread"
)

SCOPE = "rank"
NEEDS_OTHER_RANKS = True


def find(view: RankView) -> Iterator[Finding]:
    if view.activity.basis == "device":
        yield from _find_idle_device(view)
        return
    if view.window is None:
        return
    pauses = _list_pauses(view)
    if view.steps.height > 1:
        in_steps = pl.col("step").drop_nulls().n_unique().over("name")
        pauses = pauses.filter(in_steps >= MIN_STEP_SHARE * view.steps.height)
    # Others wait for this rank for at least half of that time: it is a straggler, and reported as such.
    if 2 * view.delaying_ranks.total >= pauses["cost_ns"].sum() > 0:
        return
    findings = sum_places(
        view,
        pauses,
        lambda row: (
            f"{format_times(row['count'])} no operator runs for 1 ms or more, up to {row['longest'][0] / 1e6:,.0f} ms, "
            f"most often after {row['name'] or 'the start of a step'}{_describe_annotation(view, row)}: Python, files, "
            "waiting, or a thread that is not recorded"
        ),
        confidence="low",
        advice=_RECORD_STACKS,
        tracks=BOTH,
        by="name",
    )
    yield from (_name_function(view, finding) for finding in findings)


def _describe_annotation(view: RankView, row: dict[str, Any]) -> str:
    """Return " inside NAME", the innermost annotation around a pause except steps; empty if there is none."""
    annotations = view.find_host_events("", categories.ANNOTATION_CATEGORIES)
    if row["event"] is not None:  # else the pause is at the start of a step
        place = view.find_host_events("").filter(id=row["event"])
        annotations = annotations.join(place.select("pid", "tid"), on=("pid", "tid"), maintain_order="left")
    overlap = pl.min_horizontal("end", row["end"]) - pl.max_horizontal("ts", row["start"])
    around = annotations.filter(
        overlap >= MIN_INSIDE * (row["end"] - row["start"]),
        ~pl.col("name").str.contains(STEP_PATTERN),
        ~pl.col("ts").is_in(view.steps["start"].implode()),
    )
    return f" inside {around.sort('dur')['name'][0]!r}" if around.height else ""


def _find_idle_device(view: RankView) -> Iterator[Finding]:
    """Yield a finding on the device's idle time while the host runs neither operators nor runtime calls."""
    findings = sum_places(
        view,
        view.compute_once(list_device_pauses),
        lambda row: (
            f"the device is idle {format_times(row['count'])}, up to {row['longest'][0] / 1e6:,.0f} ms, because the "
            "host runs no operator for 1 ms or more: Python, garbage collection, files or waiting"
        ),
        confidence="medium",
        advice=f"{_RECORD_STACKS}; {_SHORTEN}",
        tracks=BOTH,
        by="name",
    )
    yield from (_name_function(view, finding) for finding in findings)


def _name_function(view: RankView, finding: Finding) -> Finding:
    """Name the Python function in which most of the pauses are, if stacks were recorded."""
    if (named := find_function(view, finding)) is None:
        return finding
    function, _, share = named
    return replace(
        finding,
        title=f"{finding.title.rpartition(': ')[0]}: {describe_function(*named)}",
        frame=function,
        advice=f"shorten {function}, or run it in another thread; {_SHORTEN}",
        confidence="medium" if share >= MIN_INSIDE else finding.confidence,
    )


def list_device_pauses(view: RankView) -> pl.DataFrame:
    """Return the gaps of the device in which the host pauses, see `RankView.select_gaps`."""
    return view.select_gaps("pause")


RANK_TABLES = (list_device_pauses,)


def _list_pauses(view: RankView) -> pl.DataFrame:
    """Return the long pauses between operators that no other pattern reports, with the operator before each (event,
    name)."""
    other = (view.busy, view.data_loading, view.saving, view.delaying_ranks, view.waiting_for_ranks)
    assert view.window is not None
    idle = union(other).gaps(*view.window)
    calls = view.find_host_events("", categories.OPERATOR_CATEGORIES).sort("end")
    before = np.searchsorted(calls["end"].to_numpy(), idle.starts, side="right") - 1
    pauses = pl.DataFrame(
        {"start": idle.starts, "end": idle.ends, "cost_ns": idle.ends - idle.starts}
    ).with_columns(take_rows(calls["name"], before), take_rows(calls["id"], before).alias("event"))
    return pauses.with_columns(step=view.steps_at((pauses["start"] + pauses["end"]) // 2)).filter(
        pl.col("cost_ns") >= LONG_PAUSE_NS
    )
