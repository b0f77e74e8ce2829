"""The work was launched in time, and the device left it waiting."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.analyses.findings.finding import Finding, counted, describe_place, group_by_place
from etloom.analyses.findings.rank_view import View

SCOPE = "rank"


def find(view: View) -> Iterator[Finding]:
    kept = view.gaps.filter((pl.col("cause") == "device") & pl.col("event").is_not_null())
    yield from group_by_place(
        view,
        kept.with_columns(cost_ns="gap_ns"),
        lambda row: (
            f"{counted(row['count'], 'time')} the device stands still{describe_place(row, 'block')}, though the next kernel is "
            "already launched"
        ),
        confidence="low",
        advice="some 1 us between kernels is the device's own; longer ones are streams that wait for each other (see "
        "critical-path), very short kernels, which a CUDA graph or fusion helps, or work that the trace does not hold",
        by="block",
    )
