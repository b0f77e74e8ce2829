"""Device work with the call that launched it and the operator around that call, or why there is none."""

from __future__ import annotations

import polars as pl

from etloom import activity
from etloom.analyses._activity import has_device_work, of_rank, require_linked
from etloom.errors import AnalysisError
from etloom.trace import Trace


def launched(trace: Trace, *columns: str) -> pl.DataFrame:
    """`etloom.activity.launched`; raises AnalysisError for a trace without device work, or one that is not linked."""
    require_linked(trace)
    if not has_device_work(trace):
        raise AnalysisError(
            "the trace holds no device work",
            where=of_rank(trace),
            remedy="record it with the profiler's CUDA activity",
        )
    return activity.launched(trace, *columns)
