"""Find decode iterations of an inference engine with few requests, which spend most time reading the weights.

Three or more decode iterations of fewer than 8 requests, which read all weights.

Cost: the share of the time that 8 requests would save.
Confidence: low.
"""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.analyses.findings.finding import DEVICE, Finding
from etloom.analyses.findings.rank_view import RankView
from etloom.core.intervals import Intervals

SCOPE = "rank"
SMALL_BATCH = 8
"""An iteration reads all weights once, however many requests it computes up to dozens."""
MIN_ITERATIONS = 3


def find(view: RankView) -> Iterator[Finding]:
    if view.iterations.is_empty():
        return
    decodes = view.iterations.filter(pl.col("phase") == "decode", pl.col("requests") > 0)
    small = decodes.filter(pl.col("requests") < SMALL_BATCH)
    if small.height < MIN_ITERATIONS:
        return
    excess = small["device_ns"] * (1 - small["requests"] / SMALL_BATCH)
    cost = int(excess.sum())
    worst = small.row(excess.arg_max() or 0, named=True)
    yield Finding(
        f"{small.height:,} of {decodes.height:,} decode iterations compute fewer than {SMALL_BATCH} requests (median "
        f"{float(small['requests'].median() or 0):g}), each of which reads all weights",  # type: ignore[arg-type]
        cost,
        "low",
        "serve more requests at a time on fewer replicas, or decode several tokens per iteration (speculation)",
        Intervals.of(small["device_start"], small["device_end"]),
        DEVICE,
        small.height,
        step=worst["step"],
        start_ns=worst["device_start"],
        end_ns=worst["device_end"],
    )
