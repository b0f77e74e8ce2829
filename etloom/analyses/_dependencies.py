"""The dependency graph of a job, or why there is none."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.analyses._activity import untimed
from etloom.dependencies import Dependencies, depend
from etloom.errors import AnalysisError
from etloom.trace import Job


def dependencies(job: Job) -> Dependencies:
    """`depend`; raises AnalysisError for a job without any timed event."""
    found = depend(job)
    if not len(found.graph):
        raise next(filter(None, map(untimed, job.values())), None) or AnalysisError(
            "the run holds no timed operators and no device work",
            remedy="record it with torch.profiler and its CPU activity",
        )
    return found


def unexplained(table: pl.DataFrame, what: str) -> Iterator[str]:
    """What to say of an answer whose column explainable is false."""
    if not table["explainable"].all():
        yield f"do not rely on {what}: the graph does not explain the recording; etloom analyze graph-quality says why"
