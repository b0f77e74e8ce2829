"""Copies and sets with their sort, size and bandwidth."""

from __future__ import annotations

import polars as pl

from etloom.analyses.helpers.launched_work import select_launched_work
from etloom.core.arrays import rows_of_ids, take_rows
from etloom.core.errors import AnalysisError
from etloom.core.trace import Trace
from etloom.timeline.activity import describe_rank


def measure_transfers(trace: Trace) -> pl.DataFrame:
    """ts, end, dur, step, sort ("Memcpy HtoD", "Memset"), its number (lane), bytes, gbps (bytes / dur where the trace
    states none).

    Raises AnalysisError for a trace without copies.
    """
    work = select_launched_work(trace, "id", "name", "kind", "step", "ts", "end", "dur").filter(
        pl.col("kind") == "memory"
    )
    if not work.height:
        raise AnalysisError(
            "the trace holds no copies and no sets",
            where=describe_rank(trace),
            remedy="kernel-breakdown tells of its kernels",
        )
    facts = trace.kernels.select("bytes", "bandwidth")
    work = work.hstack(take_rows(facts, rows_of_ids(trace.kernels.rename({"event": "id"}), work["id"])))
    sort = pl.col("name").cast(pl.String).str.replace(r"\s*\(.*$", "").str.strip_chars().fill_null("")
    sorts = work.select("name").unique().with_columns(sort=sort)
    sorts = sorts.with_columns(lane=pl.col("sort").rank("dense").cast(pl.Int64) - 1)
    measured = pl.when(pl.col("dur") > 0).then(pl.col("bytes") / pl.col("dur"))
    return work.join(sorts, on="name", how="left", nulls_equal=True, maintain_order="left").with_columns(
        gbps=pl.coalesce("bandwidth", measured)
    )
