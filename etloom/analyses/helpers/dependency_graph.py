"""The dependency graph of a job, and warnings if it leaves too much delay unexplained."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.core.trace import Job
from etloom.graphs import DependencyGraph, build_graph, check_timed

MAX_KEPT_EVENTS = 12_000_000
"""The graph of a larger job takes too much memory to be kept between analyses."""


def build_dependencies(job: Job) -> DependencyGraph:
    """Build the dependency graph, once for all questions; raise AnalysisError if the job has no timed event."""
    return job.compute_once(_build) if is_kept(job) else _build(job)


def is_kept(job: Job) -> bool:
    """Return whether the graph of a job stays in memory with it: about 90 bytes per event."""
    return sum(trace.rows("events") for trace in job.values()) <= MAX_KEPT_EVENTS


def _build(job: Job) -> DependencyGraph:
    dependencies = build_graph(job)
    check_timed(dependencies, job)
    return dependencies


def warn_if_unexplained(table: pl.DataFrame, subject: str) -> Iterator[str]:
    """Yield a warning if the column explainable of a result is false."""
    if not table["explainable"].all():
        yield f"do not rely on {subject}: the graph does not explain the recording; see etloom analyze graph-quality"
