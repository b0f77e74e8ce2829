"""The dependency graph of a job, and warnings if it leaves too much delay unexplained."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.core.errors import AnalysisError
from etloom.core.trace import Job
from etloom.graphs import DependencyGraph, build_graph
from etloom.timeline.activity import explain_missing_times


def build_dependencies(job: Job) -> DependencyGraph:
    """Build the dependency graph; raise AnalysisError if the job has no timed event."""
    dependencies = build_graph(job)
    if not len(dependencies.graph):
        raise next(filter(None, map(explain_missing_times, job.values())), None) or AnalysisError(
            "the run contains no timed operators and no GPU activity",
            remedy="record with torch.profiler and CPU activity",
        )
    return dependencies


def warn_if_unexplained(table: pl.DataFrame, subject: str) -> Iterator[str]:
    """Yield a warning if the column explainable of a result is false."""
    if not table["explainable"].all():
        yield f"do not rely on {subject}: the graph does not explain the recording; see etloom analyze graph-quality"
