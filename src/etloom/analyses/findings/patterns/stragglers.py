"""Find ranks that arrive late at communications, so that other ranks wait for them.

Ranks that arrive at collectives later than the median rank, while others wait, by more than the clock
uncertainty. Lateness that a rank inherits, because it waited for another one before, does not count. Also on
runs without a GPU.

Cost: the lateness that the rank causes itself.
Confidence: medium; low for messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import polars as pl

from etloom.analyses.findings.finding import BOTH, Finding, format_times
from etloom.analyses.findings.job_view import JobView
from etloom.analyses.findings.rank_view import RankView
from etloom.core.intervals import Intervals

SCOPE = "job"
SPLIT_BY_RANK = True
_REASONS = {
    "longer_compute": "longer compute",
    "other_work": "more time in other work",
    "late_launch": "its host launches late",
    "late_first": "late before its first recorded communication with them",
    "later_recording": "its recording begins later, so that it may be late in the recording only",
}
_REASONS_WITHOUT_DEVICE = _REASONS | {
    "late_launch": "late start, after more time outside of operators (Python, input)"
}
_DEVICE_ADVICE = "its device's clock and temperature, "
"""Part of the advice that does not apply to a run without GPU activity."""
_TEXTS = {
    # is_message: confidence, effect, advice
    False: (
        "medium",
        "delays other ranks",
        "compare the rank with the others: its share of the data, its device's clock and temperature, its host's load; "
        "`etloom analyze stragglers` shows the parts of the delay, `collectives` each wait",
    ),
    True: (
        "low",
        "delays the other end of a message",
        "a pipeline waits while it fills and drains: use more or smaller micro-batches, an interleaved schedule, "
        "stages of equal duration, and post receives early; `etloom analyze collectives` shows each wait",
    ),
}


def describe_others(count: int) -> str:
    """Return the end of a title: how many more ranks the finding is about."""
    return f"; {count} more {'rank delays' if count == 1 else 'ranks delay'} others" if count else ""


def find(views: JobView) -> Iterator[tuple[int, Finding]]:
    """Yield a finding for each rank that is late at communications without having inherited its lateness from another
    rank."""
    if len(views) < 2:
        return
    late = views.late_arrivals.filter(pl.col("own_late_ns") > pl.col("error"))
    kinds = (pl.col("collective") == "message", pl.col("reason") == "later_recording")
    for (is_message, is_artifact), rows in sorted(late.group_by(*kinds)):
        ranks = rows.partition_by("rank", as_dict=True)
        for (rank,), rank_rows in sorted(ranks.items()):
            finding = _describe_rank(views[rank], rank_rows, is_message, len(views))
            if is_artifact:
                finding = replace(
                    finding, kind=f"{finding.kind}, later recording", confidence="low", is_artifact=True
                )
            yield rank, finding


def _describe_axis(rows: pl.DataFrame, job_size: int) -> str:
    """Return text that names the parallelism axis of the process groups with most of the rank's delay; empty if
    unknown."""
    groups = rows.group_by(pl.col("axis").cast(pl.String), "group_size").agg(pl.col("own_late_ns").sum())
    axis, size, _ = groups.sort("own_late_ns", "axis", "group_size", descending=(True, False, False)).row(0)
    return f" in its {axis} group" if axis and size is not None and size < job_size else ""


def _describe_rank(view: RankView, rows: pl.DataFrame, is_message: bool, job_size: int) -> Finding:
    """Return the finding on a late rank of a job of ``job_size`` ranks."""
    rank = view.trace.rank
    confidence, effect, advice = _TEXTS[is_message]
    reasons = _REASONS
    if view.activity.basis != "device":
        reasons, advice = _REASONS_WITHOUT_DEVICE, advice.replace(_DEVICE_ADVICE, "")
    totals = rows.group_by("reason").agg(pl.col("own_late_ns").sum())
    reason = reasons[totals.sort("own_late_ns", "reason", descending=(True, False))["reason"][0]]
    title = f"rank {rank} {effect} {format_times(rows.height)}{_describe_axis(rows, job_size)}: {reason}"
    worst = rows.sort("own_late_ns", "start", descending=(True, False)).row(0, named=True)
    # Several ranks may wait at once: count that time once.
    lost = Intervals.of(rows["own_start"] - rows["own_late_ns"], rows["own_start"])
    return Finding(
        title,
        lost.total,
        confidence,
        advice,
        lost,
        BOTH,
        rows.height,
        step=view.steps_at(pl.Series([worst["own_start"]]))[0],
        name=f"rank {rank}",
        event=worst["issuer"],
        start_ns=worst["own_start"] - worst["own_late_ns"],
        end_ns=worst["own_start"],
        in_steps_ns=(lost & view.step_intervals).total,
        kind="message" if is_message else "collective",
    )
