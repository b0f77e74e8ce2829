"""Find communication that could overlap computation but runs on a stream that also runs computation.

Communication on the computation's stream.

Cost: its exposed part.
Confidence: low.
"""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.analyses.findings.finding import DEVICE, Finding
from etloom.analyses.findings.rank_view import RankView
from etloom.timeline.activity import to_intervals

SCOPE = "rank"


def find(view: RankView) -> Iterator[Finding]:
    if view.activity.basis != "device":
        return
    work = view.activities
    computes = (
        work.select("device", "stream", "dur")
        .filter(work["kind"] == "computation")
        .group_by("device", "stream")
        .agg(pl.col("dur").sum())
        .filter(pl.col("dur") > 0.2 * pl.col("dur").sum())
    )
    shared = work.filter(pl.col("kind") == "communication").join(
        computes, on=["device", "stream"], how="semi"
    )
    lost = to_intervals(shared) - view.activity.times["computation"]
    if not lost.total:
        return
    worst = shared.row(shared["dur"].arg_max() or 0, named=True)
    yield Finding(
        f"{shared.height:,} communications run on stream {worst['stream']}, which also runs computation, so they "
        "cannot overlap",
        lost.total,
        "low",
        "where the next computation does not need the result, use asynchronous collectives (async_op=True, wait "
        "later), which PyTorch runs on a separate stream; exposed-communication covers the same time",
        lost,
        DEVICE,
        shared.height,
        step=worst["step"],
        stream=worst["stream"],
        name=worst["name"],
        event=worst["launch"],
        start_ns=worst["ts"],
        end_ns=worst["end"],
        in_steps_ns=(lost & view.step_intervals).total,
    )
