"""Copies and sets with their sort, size and bandwidth."""

from __future__ import annotations

import polars as pl

from etloom.activity import of_rank
from etloom.analyses._launched import launched
from etloom.errors import AnalysisError
from etloom.stacks import row_of, taken
from etloom.trace import Trace


def copies(trace: Trace) -> pl.DataFrame:
    """ts, end, dur, step, sort ("Memcpy HtoD", "Memset"), its number (lane), bytes, gbps (bytes / dur where the trace
    states none).

    Raises AnalysisError for a trace without copies.
    """
    work = launched(trace, "id", "name", "kind", "step", "ts", "end", "dur").filter(
        pl.col("kind") == "memory"
    )
    if not work.height:
        raise AnalysisError(
            "the trace holds no copies and no sets",
            where=of_rank(trace),
            remedy="kernel-breakdown tells of its kernels",
        )
    facts = trace.kernels.select("bytes", "bandwidth")
    work = work.hstack(taken(facts, row_of(trace.kernels.rename({"event": "id"}), work["id"])))
    sort = pl.col("name").cast(pl.String).str.replace(r"\s*\(.*$", "").str.strip_chars().fill_null("")
    sorts = work.select("name").unique().with_columns(sort=sort)
    sorts = sorts.with_columns(lane=pl.col("sort").rank("dense").cast(pl.Int64) - 1)
    measured = pl.when(pl.col("dur") > 0).then(pl.col("bytes") / pl.col("dur"))
    return work.join(sorts, on="name", how="left", nulls_equal=True, maintain_order="left").with_columns(
        gbps=pl.coalesce("bandwidth", measured)
    )
