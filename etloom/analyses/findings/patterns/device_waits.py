"""The device is idle although work was launched in time."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.analyses.findings.finding import Finding, describe_place, format_times, group_by_place
from etloom.analyses.findings.rank_view import RankView

SCOPE = "rank"


def find(view: RankView) -> Iterator[Finding]:
    gaps = view.gaps.filter((pl.col("cause") == "device") & pl.col("event").is_not_null())
    yield from group_by_place(
        view,
        gaps.with_columns(cost_ns="gap_ns"),
        lambda row: (
            f"the device is idle {format_times(row['count'])}{describe_place(row, 'block')} although the next kernel "
            "is already launched"
        ),
        confidence="low",
        advice="about 1 us between kernels is normal; longer gaps are streams that wait for each other (see "
        "critical-path), very short kernels (use a CUDA graph or fusion), or GPU activity that was not recorded",
        by="block",
    )
