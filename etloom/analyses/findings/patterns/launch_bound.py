"""The device is idle because the host launches too slowly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import polars as pl

from etloom.analyses.findings.finding import (
    BOTH,
    Finding,
    describe_long_gaps,
    describe_place,
    find_long_gaps,
    sum_places,
)
from etloom.analyses.findings.rank_view import RankView
from etloom.core.text import count_noun

SCOPE = "rank"
_ADVICE = (
    "capture the step in a CUDA graph or torch.compile it (mode='reduce-overhead'), fuse small operators "
    "(foreach or fused optimizers), or give each launch more work (a larger batch)"
)
_WARM_UP_ADVICE = (
    "warm up before the trace (first calls load libraries and tune kernels); if the gaps remain, check on the timeline "
    "what the host does in them"
)
_LONG_GAPS_ADVICE = "check on the timeline what the host does in the long gaps: it is more than launching"


def find(view: RankView) -> Iterator[Finding]:
    late = view.gaps.filter(pl.col("cause") == "launch").with_columns(cost_ns="gap_ns")
    first = view.steps["start"].min()
    early = pl.lit(False) if first is None else 2 * (first - pl.col("start")) > pl.col("gap_ns")

    def warm_up(row: dict[str, Any]) -> str:
        if row["early"] and 2 * row["longest"][0] > row["cost_ns"]:
            return " (before the first annotated step: may be warm-up)"
        return " (no step is annotated: may be warm-up)" if first is None and find_long_gaps(row) else ""

    def title(row: dict[str, Any]) -> str:
        gaps = count_noun(row["count"], "gap")
        where = f"{describe_place(row, 'block')}, {gaps}{describe_long_gaps(row)}{warm_up(row)}"
        return f"host-bound: the device waits for the host to launch{where}"

    def advice(row: dict[str, Any]) -> str:
        if warm_up(row):
            return _WARM_UP_ADVICE
        long = len(find_long_gaps(row))
        return (
            _LONG_GAPS_ADVICE
            if long == row["count"]
            else f"{_LONG_GAPS_ADVICE}; for the others {_ADVICE}"
            if long
            else _ADVICE
        )

    yield from sum_places(
        view,
        late.with_columns(early=early),
        title,
        confidence="medium",
        advice=advice,
        tracks=BOTH,
        by="block",
    )
