"""Predict the memory that the ranks of a job need under other settings of PyTorch's caching allocator."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from etloom.core.trace import Job
from etloom.timeline.memory.program import Program, find_programs
from etloom.timeline.memory.what_if import compare_changes, parse_change


def check_changes(changes: Sequence[str]) -> None:
    """Raise InvalidValue if a change names an unknown setting, or has an invalid value."""
    for change in changes:
        parse_change(change)


def simulate_memory(job: Job, changes: Sequence[str], other_batch: Job | None = None) -> pl.DataFrame:
    """Return the rows of `compare_changes` of each rank and device with a history of its allocator, after its rank.

    Args:
        job: Ranks with memory snapshots.
        changes: As `etloom.timeline.memory.what_if.parse_change` expects them.
        other_batch: The same program, recorded with another batch; for ``batch``. Of several ranks, the same are used.

    Raises:
        InvalidValue: A change names an unknown setting or module, or has an invalid value.
        AnalysisError: No rank has such a history, or it does not contain what a change needs.
    """
    check_changes(changes)
    ranks = [rank for rank, trace in job.items() if trace.allocator.height] or list(job)[:1]
    tables = []
    for rank in ranks:
        others = {program.device: program for program in _find_programs(other_batch, rank)}
        tables += [
            compare_changes(program, changes, others.get(program.device)).insert_column(
                0, pl.lit(rank, pl.Int64).alias("rank")
            )
            for program in find_programs(job[rank])
        ]
    return pl.concat(tables)


def _find_programs(job: Job | None, rank: int) -> list[Program]:
    if job is None:
        return []
    return find_programs(job[rank if rank in job else next(iter(job))])
