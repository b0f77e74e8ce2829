"""Memcpys and memsets with direction, size and bandwidth."""

from __future__ import annotations

import polars as pl

from etloom.analyses.helpers.launched_work import select_launched_work
from etloom.core.arrays import rows_of_ids, take_rows
from etloom.core.errors import AnalysisError
from etloom.core.trace import Trace
from etloom.timeline.activity import describe_rank


def measure_transfers(trace: Trace) -> pl.DataFrame:
    """Return the memcpys and memsets of a trace with direction, size and bandwidth.

    Returns:
        ts, end, dur, step, direction ("Memcpy HtoD", "Memset"), its number (track), bytes, gbps (as recorded, else
        bytes / dur).

    Raises:
        AnalysisError: The trace has no memcpys or memsets.
    """
    work = select_launched_work(trace, "id", "name", "kind", "step", "ts", "end", "dur").filter(
        pl.col("kind") == "memory"
    )
    if not work.height:
        raise AnalysisError(
            "the trace contains no memcpys or memsets",
            where=describe_rank(trace),
            remedy="see kernel-breakdown for its kernels",
        )
    facts = trace.kernels.select("bytes", "bandwidth")
    work = work.hstack(take_rows(facts, rows_of_ids(trace.kernels.rename({"event": "id"}), work["id"])))
    direction = pl.col("name").cast(pl.String).str.replace(r"\s*\(.*$", "").str.strip_chars().fill_null("")
    directions = work.select("name").unique().with_columns(direction=direction)
    directions = directions.with_columns(track=pl.col("direction").rank("dense").cast(pl.Int64) - 1)
    measured = pl.when(pl.col("dur") > 0).then(pl.col("bytes") / pl.col("dur"))
    return work.join(directions, on="name", how="left", nulls_equal=True, maintain_order="left").with_columns(
        gbps=pl.coalesce("bandwidth", measured)
    )
