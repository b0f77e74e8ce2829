"""Step annotations: the one definition of which events and nodes delimit a training step.

torch.profiler wraps step N in an annotation named ``ProfilerStep#N``; etloom's own collector writes the same name. The
collector has a copy of it (it imports nothing but errors), as has native/.
"""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.core.arrays import match_text

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
