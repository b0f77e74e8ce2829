"""The device runs dry because the host launches too slowly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import polars as pl

from etloom.analyses.findings.finding import Finding, counted, describe_place, group_by_place
from etloom.analyses.findings.rank_view import View

SCOPE = "rank"
LONG = 10_000_000
"""ns: a launch takes some us, so in a gap of this length the host did something else."""
_ADVICE = (
    "capture the step in a CUDA graph or torch.compile it (mode='reduce-overhead'), fuse small operators "
    "(foreach or fused optimizers), or give each launch more work (a larger batch)"
)
_WARM_UP = (
    "warm up before the trace (libraries load, and kernels are tuned, at the first call); if it stays, see on the "
    "timeline what the host does meanwhile"
)
_LOOK = "see on the timeline what the host does in the long gaps, which is more than launching"


def find(view: View) -> Iterator[Finding]:
    late = view.gaps.filter(pl.col("cause") == "launch").with_columns(cost_ns="gap_ns")
    first = view.marked["start"].min()
    early = pl.lit(False) if first is None else 2 * (first - pl.col("start")) > pl.col("gap_ns")

    def warm_up(row: dict[str, Any]) -> str:
        if row["early"] and 2 * row["longest"][0] > row["cost_ns"]:
            return " (before the first marked step: it may be warm-up)"
        return " (no step is marked: it may be warm-up)" if first is None and _long(row) else ""

    def title(row: dict[str, Any]) -> str:
        said = f"the device waits for the host to launch{describe_place(row, 'block')}, {counted(row['count'], 'gap')}"
        if long := _long(row):
            upto = "up to " if len(long) > 1 else ""
            part = "" if len(long) == row["count"] else f", most of the time in {len(long)}"
            said += f"{part} of {upto}{long[0] / 1e6:,.0f} ms"
        return said + warm_up(row)

    def advice(row: dict[str, Any]) -> str:
        if warm_up(row):
            return _WARM_UP
        long = len(_long(row))
        return _LOOK if long == row["count"] else f"{_LOOK}; of the others {_ADVICE}" if long else _ADVICE

    yield from group_by_place(
        view, late.with_columns(early=early), title, confidence="medium", advice=advice, by="block"
    )


def _long(row: dict[str, Any]) -> list[int]:
    """The few long gaps that are most of the cost, if some are."""
    long = [gap for gap in row["longest"] if gap >= LONG]
    return long if 2 * sum(long) > row["cost_ns"] else []
