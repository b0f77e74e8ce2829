"""Find prefills of an inference engine that run between decode iterations and delay the requests that decode.

Prefill between decode iterations: requests that decode wait for it.

Cost: its time; of a mixed iteration the time beyond a usual decode.
Confidence: low.
"""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.analyses.findings.finding import DEVICE, Finding, format_times
from etloom.analyses.findings.rank_view import RankView
from etloom.core.intervals import Intervals

SCOPE = "rank"


def find(view: RankView) -> Iterator[Finding]:
    if view.iterations.is_empty():
        return
    table = view.iterations
    decodes = pl.col("phase").is_in(["decode", "mixed"])
    span = pl.col("device_end") - pl.col("device_start")
    typical = table.filter(pl.col("phase") == "decode").select(span.median()).item()
    if typical is None:
        return
    # A mixed iteration also does the work of a decode.
    delay = pl.when(pl.col("phase") == "mixed").then(span - round(typical)).otherwise(span)
    stalls = table.with_columns(
        delay=delay, waited=decodes.shift(1).fill_null(False) & decodes.shift(-1).fill_null(False)
    ).filter(pl.col("phase").is_in(["prefill", "mixed"]) & pl.col("waited") & (pl.col("delay") > 0))
    if not stalls.height:
        return
    lost = Intervals.of(stalls["device_end"] - stalls["delay"], stalls["device_end"])
    worst = stalls.row(stalls["delay"].arg_max() or 0, named=True)
    yield Finding(
        f"prefill delays decoding requests {format_times(stalls.height)}, by up to {worst['delay'] / 1e6:,.2f} ms; "
        f"a decode iteration takes {typical / 1e6:,.2f} ms",
        lost.total,
        "low",
        "split long prompts into chunks (vLLM --max-num-batched-tokens, SGLang --chunked-prefill-size), or run prefill "
        "on other GPUs; the work itself remains",
        lost,
        DEVICE,
        stalls.height,
        step=worst["step"],
        start_ns=worst["device_end"] - worst["delay"],
        end_ns=worst["device_end"],
        in_steps_ns=(lost & view.step_intervals).total,
    )
