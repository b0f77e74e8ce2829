"""The device is idle because the host launches too slowly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import polars as pl

from etloom.analyses.findings.finding import Finding, describe_place, group_by_place
from etloom.analyses.findings.rank_view import RankView
from etloom.core.text import count_noun

SCOPE = "rank"
LONG_GAP_NS = 10_000_000
"""Gap length in ns: a launch takes a few us, so in a gap this long the host did something else."""
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
        return " (no step is annotated: may be warm-up)" if first is None and _long(row) else ""

    def title(row: dict[str, Any]) -> str:
        gaps = count_noun(row["count"], "gap")
        text = f"the device waits for the host to launch{describe_place(row, 'block')}, {gaps}"
        if long := _long(row):
            upto = "up to " if len(long) > 1 else ""
            part = "" if len(long) == row["count"] else f", most of the time in {len(long)}"
            text += f"{part} of {upto}{long[0] / 1e6:,.0f} ms"
        return text + warm_up(row)

    def advice(row: dict[str, Any]) -> str:
        if warm_up(row):
            return _WARM_UP_ADVICE
        long = len(_long(row))
        return (
            _LONG_GAPS_ADVICE
            if long == row["count"]
            else f"{_LONG_GAPS_ADVICE}; for the others {_ADVICE}"
            if long
            else _ADVICE
        )

    yield from group_by_place(
        view, late.with_columns(early=early), title, confidence="medium", advice=advice, by="block"
    )


def _long(row: dict[str, Any]) -> list[int]:
    """Return the few long gaps if they make up most of the cost, else nothing."""
    long = [gap for gap in row["longest"] if gap >= LONG_GAP_NS]
    return long if 2 * sum(long) > row["cost_ns"] else []
