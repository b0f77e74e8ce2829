"""GPU activities with their launch call and the operator around it."""

from __future__ import annotations

import numpy as np
import polars as pl

from etloom.analyses.helpers import require_linked
from etloom.core import arrays, categories, nesting
from etloom.core.errors import AnalysisError
from etloom.core.steps import is_step
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


def find_annotations(trace: Trace, launches: pl.Series) -> np.ndarray:
    """Return the row of the innermost annotation around each event (ids, may be null), -1 for none.

    Steps and the ranges of communication backends do not count.
    """
    events = trace.events
    is_annotation = categories.mask_events(events, categories.ANNOTATION_CATEGORIES) & ~arrays.match_text(
        events["name"],
        lambda name: is_step(name) | categories.is_backend_range(name),
    )
    parents = arrays.rows_of_ids(events, events["parent"])
    return nesting.find_nearest_ancestor(parents, is_annotation, arrays.rows_of_ids(events, launches))
