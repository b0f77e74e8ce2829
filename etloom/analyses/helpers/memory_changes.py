"""Predict the memory that the ranks of a job need under other settings of PyTorch's caching allocator."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from etloom.core.trace import Job
from etloom.timeline.memory.program import find_programs
from etloom.timeline.memory.what_if import compare_changes, parse_change


def check_changes(changes: Sequence[str]) -> None:
    """Raise InvalidValue if a change names an unknown setting, or has an invalid value."""
    for change in changes:
        parse_change(change)


def simulate_memory(job: Job, changes: Sequence[str]) -> pl.DataFrame:
    """Return the rows of `compare_changes` of each rank and device with a history of its allocator, after its rank.

    Raises:
        InvalidValue: A change names an unknown setting, or has an invalid value.
        AnalysisError: No rank has such a history.
    """
    check_changes(changes)
    ranks = [rank for rank, trace in job.items() if trace.allocator.height] or list(job)[:1]
    tables = [
        compare_changes(program, changes).insert_column(0, pl.lit(rank, pl.Int64).alias("rank"))
        for rank in ranks
        for program in find_programs(job[rank])
    ]
    return pl.concat(tables)
