"""Device work with the call that launched it and the operator around that call, or why there is none."""

from __future__ import annotations

import polars as pl

from etloom.analyses.helpers import require_linked
from etloom.core.errors import AnalysisError
from etloom.core.trace import Trace
from etloom.timeline import activity
from etloom.timeline.activity import describe_rank, has_device_events


def select_launched_work(trace: Trace, *columns: str) -> pl.DataFrame:
    """`etloom.timeline.activity.select_launched_events`; raises AnalysisError for a trace without device work, or one that is not linked."""
    require_linked(trace)
    if not has_device_events(trace):
        raise AnalysisError(
            "the trace holds no device work",
            where=describe_rank(trace),
            remedy="record it with the profiler's CUDA activity",
        )
    return activity.select_launched_events(trace, *columns)
