"""The dependency graph of a job, or why there is none."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.core.errors import AnalysisError
from etloom.core.trace import Job
from etloom.graphs import DependencyGraph, build_graph
from etloom.timeline.activity import explain_missing_times


def build_dependencies(job: Job) -> DependencyGraph:
    """`depend`; raises AnalysisError for a job without any timed event."""
    found = build_graph(job)
    if not len(found.graph):
        raise next(filter(None, map(explain_missing_times, job.values())), None) or AnalysisError(
            "the run holds no timed operators and no device work",
            remedy="record it with torch.profiler and its CPU activity",
        )
    return found


def warn_if_unexplained(table: pl.DataFrame, what: str) -> Iterator[str]:
    """What to say of an answer whose column explainable is false."""
    if not table["explainable"].all():
        yield f"do not rely on {what}: the graph does not explain the recording; etloom analyze graph-quality says why"
