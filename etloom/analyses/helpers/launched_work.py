"""GPU activities with their launch call and the operator around it."""

from __future__ import annotations

import polars as pl

from etloom.analyses.helpers import require_linked
from etloom.core.errors import AnalysisError
from etloom.core.trace import Trace
from etloom.timeline import activity
from etloom.timeline.activity import describe_rank, has_device_events


def select_launched_work(trace: Trace, *columns: str) -> pl.DataFrame:
    """Return GPU activities with their launch call, reduced to the columns ``columns`` (see `select_launched_events`).

    Raises:
        AnalysisError: The trace has no GPU activity, or is not linked.
    """
    require_linked(trace)
    if not has_device_events(trace):
        raise AnalysisError(
            "the trace contains no GPU activity",
            where=describe_rank(trace),
            remedy="record with the profiler's CUDA activity",
        )
    return activity.select_launched_events(trace, *columns)
