"""Build the dependency graph of a job, and warn if the graph leaves too much of the recorded delays unexplained."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.core.errors import AnalysisError
from etloom.core.machine import available_memory
from etloom.core.trace import Job
from etloom.graphs import DependencyGraph, build_graph, check_timed

MAX_KEPT_EVENTS = 12_000_000
"""The graph of a larger job takes too much memory to be kept between analyses."""


_BYTES_PER_EVENT = 400
"""Peak memory of building and using a graph, per event (measured: 365)."""


def build_dependencies(job: Job) -> DependencyGraph:
    """Build the dependency graph of a job once, for all analyses that use it.

    Raises:
        AnalysisError: the job has no timed event, or its graph would exceed the available memory.
    """
    return job.compute_once(_build) if is_kept(job) else _build(job)


def is_kept(job: Job) -> bool:
    """Return whether the dependency graph of a job is cached in memory with it; it takes about 90 bytes per event."""
    return sum(trace.rows("events") for trace in job.values()) <= MAX_KEPT_EVENTS


def _build(job: Job) -> DependencyGraph:
    events = sum(trace.rows("events") for trace in job.values())
    if (size := events * _BYTES_PER_EVENT) > (available := available_memory()):
        raise AnalysisError(
            f"the dependency graph of {events:,} events takes about {size / 1e9:.1f} GB of memory; "
            f"{available / 1e9:.1f} GB are available",
            remedy="analyze some ranks: etloom.analyze(etloom.select(run, rank=[0, 1]), ...)",
        )
    dependencies = build_graph(job)
    check_timed(dependencies, job)
    return dependencies


def warn_if_unexplained(table: pl.DataFrame, subject: str) -> Iterator[str]:
    """Yield a warning if the dependency graph does not explain the recording (column explainable is false)."""
    if not table["explainable"].all():
        yield f"do not rely on {subject}: the graph does not explain the recording; see etloom analyze graph-quality"
