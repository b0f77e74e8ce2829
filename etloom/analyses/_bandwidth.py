"""Copies and sets with their sort, size and bandwidth."""

from __future__ import annotations

import polars as pl

from etloom.activity import of_rank
from etloom.analyses._launched import launched
from etloom.errors import AnalysisError
from etloom.trace import Trace


def copies(trace: Trace) -> pl.DataFrame:
    """ts, end, dur, step, sort ("Memcpy HtoD", "Memset"), bytes, gbps (bytes / dur where the trace states none).

    Raises AnalysisError for a trace without copies.
    """
    facts = trace.kernels.select("event", "bytes", "bandwidth").unique("event", keep="first")
    work = (
        launched(trace)
        .filter(pl.col("kind") == "memory")
        .join(facts, left_on="id", right_on="event", how="left")
    )
    if not work.height:
        raise AnalysisError(
            "the trace holds no copies and no sets",
            where=of_rank(trace),
            remedy="kernel-breakdown tells of its kernels",
        )
    sort = pl.col("name").str.replace(r"\s*\(.*$", "").str.strip_chars()
    measured = pl.when(pl.col("dur") > 0).then(pl.col("bytes") / pl.col("dur"))
    return work.with_columns(sort=sort, gbps=pl.coalesce("bandwidth", measured))
