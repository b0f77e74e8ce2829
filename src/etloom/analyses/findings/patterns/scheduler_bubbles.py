"""Find idle GPU time between inference iterations, while the scheduler has not started the next iteration.

Idle GPU between iterations of an inference engine, until its host starts the next one.

Cost: that time.
Confidence: medium.
"""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.analyses.findings.finding import HOST, Finding, format_times
from etloom.analyses.findings.rank_view import RankView
from etloom.core.intervals import Intervals

SCOPE = "rank"


def find(view: RankView) -> Iterator[Finding]:
    table = view.iterations
    if table.height < 2:
        return
    until = pl.min_horizontal(pl.col("ts").shift(-1), pl.col("device_start").shift(-1))
    gaps = table.select("step", start="device_end", end=until).filter(pl.col("end") > pl.col("start"))
    lost = Intervals.of(gaps["start"], gaps["end"]) - view.busy
    if not lost.total:
        return
    worst = gaps.row((gaps["end"] - gaps["start"]).arg_max() or 0, named=True)
    yield Finding(
        f"the GPU finishes {format_times(gaps.height)} before the scheduler starts the next iteration, and idles for "
        f"up to {(worst['end'] - worst['start']) / 1e6:,.2f} ms",
        lost.total,
        "medium",
        "overlap scheduling with the GPU (vLLM --async-scheduling, SGLang's overlap scheduler), and keep tokenization "
        "and output processing out of the scheduler's process; without waiting requests, the load is too low",
        lost,
        HOST,
        gaps.height,
        step=worst["step"],
        start_ns=worst["start"],
        end_ns=worst["end"],
        in_steps_ns=(lost & view.step_intervals).total,
    )
