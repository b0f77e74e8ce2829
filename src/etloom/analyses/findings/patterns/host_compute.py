"""Find time in which the device is idle while operators compute on the host, such as an optimizer on the CPU.

Operators that compute on the host (they launch nothing, do not just allocate or make views, and take 50 µs or
more) while the GPU idles, such as an optimizer on the CPU.

Cost: the gaps.
Confidence: high.
"""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.analyses.findings.finding import BOTH, Finding, format_times, sum_places
from etloom.analyses.findings.rank_view import RankView
from etloom.core.intervals import Intervals

SCOPE = "rank"
MAX_NAMES = 3


def find(view: RankView) -> Iterator[Finding]:
    gaps = view.select_gaps("compute")
    if gaps.is_empty():
        return
    calls = view.host_operators
    covered = Intervals.of(gaps["start"], gaps["end"]).covered(calls["ts"], calls["end"])
    by_name = calls.with_columns(covered=covered).group_by("name").agg(pl.col("covered").sum())
    longest = by_name.filter(pl.col("covered") > 0).sort("covered", "name", descending=(True, False))
    names = ", ".join(longest["name"].head(MAX_NAMES))
    yield from sum_places(
        view,
        gaps,
        lambda row: (
            f"the device is idle {format_times(row['count'])} while operators compute on the host, mostly {names}"
        ),
        confidence="high",
        advice="move these operators to the device (create their tensors there, use a device optimizer, do not "
        "offload), or overlap them with GPU work",
        tracks=BOTH,
        by="name",
    )
