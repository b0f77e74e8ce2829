"""The device runs dry because the host launches too slowly."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.patterns._finding import Finding, at, counted, places
from etloom.patterns._view import View

SCOPE = "rank"


def find(view: View) -> Iterator[Finding]:
    late = view.gaps.filter(pl.col("cause") == "launch").with_columns(cost_ns="gap_ns")
    yield from places(
        view,
        late,
        lambda row: (
            f"the device waits for the host to launch{at(row, 'block')}, {counted(row['count'], 'gap')}"
        ),
        confidence="medium",
        advice="capture the step in a CUDA graph or torch.compile it (mode='reduce-overhead'), fuse small operators "
        "(foreach or fused optimizers), or give each launch more work (a larger batch)",
        by="block",
    )
