"""A rank comes late to a communication, and the others wait for it."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.analyses.findings.finding import Finding, times
from etloom.analyses.findings.job_view import Views
from etloom.collectives import match_collectives
from etloom.collectives.lateness import CAUSES, compute_delays, largest_cause
from etloom.core.intervals import Intervals
from etloom.timeline.activity import has_device_events

SCOPE = "job"
_WHY = {
    "longer compute": "it computes longer",
    "other work": "it does other work longer",
    "late launch": "its host launches late",
    "before": "it was late already, before the trace or when it left the communication before",
}
_WITHOUT_DEVICE = _WHY | {"late launch": "it begins late, after longer in no operator (Python, input)"}
_OF_A_DEVICE = "its device's clock and temperature, "
"""Of the advice, what a run without device work does not need."""
_SAID = {
    # message -> confidence, what it keeps waiting, advice
    False: (
        "medium",
        "keeps the others waiting",
        "compare the rank with the others: its share of the data, its device's clock and temperature, its host's load; "
        "`etloom analyze stragglers` splits the delay, `collectives` shows each wait",
    ),
    True: (
        "low",
        "is waited for by the other end of a message",
        "a pipeline waits while it fills and empties: use more or smaller micro-batches, an interleaved schedule, "
        "stages of even length, and post receives early; `etloom analyze collectives` shows each wait",
    ),
}


def find(views: Views) -> Iterator[tuple[int, Finding]]:
    job = views.job
    if len(job) < 2:
        return
    parts = match_collectives(job).comparable.filter(pl.col("meeting").is_not_null())
    # What two clocks may be apart is no delay that is known.
    late = compute_delays(parts, job).filter(
        (pl.col("delay_ns") > 0) & (pl.col("delay_ns") > pl.col("error"))
    )
    late = late.with_columns(is_message=pl.col("collective") == "message")
    groups = late.partition_by("rank", "is_message", as_dict=True)
    for (rank, is_message), own in sorted(groups.items()):
        confidence, waits, advice = _SAID[is_message]
        why = own.select(pl.col(*CAUSES).sum(), delay_ns=1).select(largest_cause()).item()
        said = _WHY
        if not has_device_events(job[rank]):
            said, advice = _WITHOUT_DEVICE, advice.replace(_OF_A_DEVICE, "")
        worst = own.sort("delay_ns", "start", descending=(True, False)).row(0, named=True)
        # Several can wait for a rank at once: that time is lost once.
        lost = Intervals.of(own["own_start"] - own["delay_ns"], own["own_start"])
        yield (
            rank,
            Finding(
                f"rank {rank} {waits} {times(own.height)}: {said[why]}",
                lost.total,
                confidence,
                advice,
                own.height,
                step=views[rank].step_at(worst["own_start"]),
                name=f"rank {rank}",
                event=worst["issuer"],
                in_steps_ns=(lost & views[rank].stepped).total,
                place=f"{rank} {is_message}",
            ),
        )
