"""Tables about a run that comparisons need: the number of steps of its ranks and the basis of its categories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import polars as pl

from etloom.analyses.helpers.run_tables import RunTable
from etloom.core.trace import Job, Trace
from etloom.timeline.activity import compute_activity, find_steps


def _count_steps(job: Job) -> pl.DataFrame:
    counts = [find_steps(trace).height for trace in job.values()]
    return pl.DataFrame([(min(counts), max(counts))], schema=STEPS.schema, orient="row")


def _list_bases(job: Job) -> pl.DataFrame:
    return pl.DataFrame({"basis": sorted({compute_activity(trace).basis for trace in job.values()})})


STEPS = RunTable(
    "compared-steps", {"least": pl.Int64, "most": pl.Int64}, _count_steps, has_nulls=False, rows=1
)
"""The least and the largest number of steps of a rank."""
BASES = RunTable("compared-bases", {"basis": pl.String}, _list_bases, has_nulls=False)
"""What the categories of the ranks refer to: device, host."""


def has_steps(job: Job) -> bool:
    """Return whether every rank of a job has step annotations; if not, the run is compared as a whole."""
    return bool(STEPS.read(job)["least"].item())


def is_stepped(trace: Trace, stepped: bool | None) -> bool:
    """Return ``stepped`` unless it is None, else whether the rank has step annotations."""
    return bool(find_steps(trace).height) if stepped is None else stepped


def measure_rank(trace: Trace, function: Callable[..., Any], stepped: bool) -> Any:
    """Return ``function(trace, stepped)``, taken from the run's store if the result is stored there.

    A store contains ``function(trace, None)``, which divides by the number of steps of the rank if it has any.
    """
    return trace.compute_once(function, None if stepped == is_stepped(trace, None) else stepped)
