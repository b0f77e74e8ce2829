"""A rank arrives late at a communication, and others wait for it."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.analyses.findings.finding import Finding, format_times
from etloom.analyses.findings.job_view import JobView
from etloom.collectives import match_collectives
from etloom.collectives.lateness import CAUSES, compute_delays, largest_cause
from etloom.core.intervals import Intervals
from etloom.timeline.activity import has_device_events

SCOPE = "job"
_REASONS = {
    "longer compute": "longer compute",
    "other work": "more time in other work",
    "late launch": "its host launches late",
    "inherited delay": "it was already late, before the trace or when it left the previous communication",
}
_REASONS_WITHOUT_DEVICE = _REASONS | {
    "late launch": "late start, after more time outside of operators (Python, input)"
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


def find(views: JobView) -> Iterator[tuple[int, Finding]]:
    job = views.job
    if len(job) < 2:
        return
    parts = match_collectives(job).comparable.filter(pl.col("instance").is_not_null())
    # A delay below the clock uncertainty is not significant.
    late = compute_delays(parts, job).filter(
        (pl.col("delay_ns") > 0) & (pl.col("delay_ns") > pl.col("error"))
    )
    late = late.with_columns(is_message=pl.col("collective") == "message")
    groups = late.partition_by("rank", "is_message", as_dict=True)
    for (rank, is_message), delays in sorted(groups.items()):
        confidence, effect, advice = _TEXTS[is_message]
        main_cause = delays.select(pl.col(*CAUSES).sum(), delay_ns=1).select(largest_cause()).item()
        reasons = _REASONS
        if not has_device_events(job[rank]):
            reasons, advice = _REASONS_WITHOUT_DEVICE, advice.replace(_DEVICE_ADVICE, "")
        worst = delays.sort("delay_ns", "start", descending=(True, False)).row(0, named=True)
        # Several ranks may wait at once: count that time once.
        lost = Intervals.of(delays["own_start"] - delays["delay_ns"], delays["own_start"])
        yield (
            rank,
            Finding(
                f"rank {rank} {effect} {format_times(delays.height)}: {reasons[main_cause]}",
                lost.total,
                confidence,
                advice,
                delays.height,
                step=views[rank].step_at(worst["own_start"]),
                name=f"rank {rank}",
                event=worst["issuer"],
                in_steps_ns=(lost & views[rank].step_intervals).total,
                place=f"{rank} {is_message}",
            ),
        )
