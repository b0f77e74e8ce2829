"""Step annotations: the one definition of which events and nodes delimit a training step.

torch.profiler wraps step N in an annotation named ``ProfilerStep#N``; etloom's own collector writes the same name. The
collector has a copy of it (it imports nothing but errors), as has native/.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.core.arrays import match_text
from etloom.core.trace import Job

STEP_PREFIX = "ProfilerStep#"
STEP_PATTERN = rf"^{STEP_PREFIX}(\d+)$"
"""Matches a step annotation and captures its number, in the syntax of both re and polars."""

NUMBERED_STEP_PATTERN = r"#step_num=(\d+)$"
"""Matches a step annotation of JAX (StepTraceAnnotation), and captures its number."""

ALL_STEPS = f"{STEP_PREFIX}*"
"""The common name of all steps where they are counted together."""


def format_step(number: int) -> str:
    """Return the name of the annotation of a step."""
    return f"{STEP_PREFIX}{number}"


def is_step(name: pl.Expr | None = None) -> pl.Expr:
    """Return an expression that is true for the names of step annotations (default: of the column ``name``)."""
    return _as_text(name).str.contains(STEP_PATTERN)


def parse_step(name: pl.Expr | None = None) -> pl.Expr:
    """Return an expression for the number (Int64) in the name of a step annotation.

    Args:
        name: Expression of text (default: the column ``name``).

    Returns:
        Null for other names, and for a number beyond 64 bits.
    """
    return _as_text(name).str.extract(STEP_PATTERN).cast(pl.Int64, strict=False)


def match_steps(names: pl.Series, within: NDArray[np.bool_] | None = None) -> NDArray[np.bool_]:
    """Return a mask of the names that are step annotations, evaluated once per distinct name.

    Args:
        names: A text column.
        within: Mask of the rows to look at (default: all); the others do not match.
    """
    matches: NDArray[np.bool_] = match_text(names, STEP_PATTERN, within)
    return matches


def _as_text(name: pl.Expr | None) -> pl.Expr:
    return (pl.col("name") if name is None else name).cast(pl.String)


# The step time before a recording, which `etloom collect` notes in run.json.


@dataclass(frozen=True)
class StepBefore:
    """The step time before the recording (median over ranks, ns), and the least number of steps timed on a rank."""

    step_ns: int
    steps: int


def find_step_before(job: Job) -> StepBefore | None:
    """Return the step time before the recording, from run.json; None if it is not known."""
    run = job.meta.get("run")
    ranks = run.get("ranks") if isinstance(run, dict) else None
    valid_ranks = [rank for rank in ranks if isinstance(rank, dict)] if isinstance(ranks, list) else []
    facts = [rank.get("unrecorded") for rank in valid_ranks if not _has_host_times_only(rank)]
    pairs = [(fact.get("step_ns"), fact.get("steps")) for fact in facts if isinstance(fact, dict)]
    valid = [pair for pair in pairs if all(type(number) is int and 0 < number < 1 << 53 for number in pair)]
    if not valid:
        return None
    times, steps = zip(*valid, strict=True)
    return StepBefore(int(statistics.median(times)), min(steps))


def _has_host_times_only(rank: dict[str, Any]) -> bool:
    """Return whether a rank with a CUDA device timed its steps on the host only, which may run ahead of the device."""
    fact = rank.get("unrecorded")
    return (
        isinstance(fact, dict) and fact.get("clock") == "host" and str(rank.get("device")).startswith("cuda")
    )
