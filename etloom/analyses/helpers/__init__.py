"""What analyses share: the windows of steps, shares in percent, the declared columns of an answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from etloom.core.errors import AnalysisError
from etloom.core.intervals import Intervals
from etloom.core.trace import Trace
from etloom.timeline.activity import describe_rank, find_steps


def step_windows(trace: Trace, whole: Intervals, step: int | None) -> pl.DataFrame:
    """step, start, end: of each step, then (step null) of the whole; or of the one step asked for.

    Raises AnalysisError for a step that the trace does not hold.
    """
    marked = find_steps(trace)
    if step is not None:
        check_step(trace, step)
        return marked.filter(pl.col("step") == step)
    start, end = whole.span or (0, 0)
    everything = pl.DataFrame({"step": [None], "start": [start], "end": [end]}, schema=marked.schema)
    return pl.concat((marked, everything))


def check_step(trace: Trace, step: int | None) -> None:
    """Raise AnalysisError for a step that the trace does not hold."""
    if step is None:
        return
    known = find_steps(trace)["step"].to_list()
    if step not in known:
        held = " to ".join(map(str, dict.fromkeys((known[0], known[-1])))) if known else ""
        span = f"the trace holds {held}" if known else "no ProfilerStep marks a step"
        raise AnalysisError(f"there is no step {step}", where=describe_rank(trace), remedy=span)


def filter_step(trace: Trace, events: pl.DataFrame, step: int | None) -> pl.DataFrame:
    """The events of a step (device work: of its launch's step), or all of them. Raises as `check_step`."""
    check_step(trace, step)
    return events if step is None else events.filter(pl.col("step") == step)


def percent(part: str, whole: str | pl.Expr) -> pl.Expr:
    """100 part / whole as ``<part>_pct``, the ``_ns`` left out; null where the whole is 0."""
    whole = pl.col(whole) if isinstance(whole, str) else whole
    return pl.when(whole > 0).then(100 * pl.col(part) / whole).alias(f"{part.removesuffix('_ns')}_pct")


def percent_of_all(part: str) -> pl.Expr:
    """`percent` of the sum over all rows."""
    return percent(part, pl.col(part).sum())


def check_top(top: int) -> None:
    """Raise AnalysisError for a number of rows below 1."""
    if top < 1:
        raise AnalysisError(f"{top} rows are no table", remedy="1 or more", option="top")


def conform_columns(table: pl.DataFrame | Mapping[str, Any], columns: Mapping[str, Any]) -> pl.DataFrame:
    """Exactly these columns in their order and types, of a frame or of columns of equal length."""
    # Column by column: most are of their type already, and a query would wait for threads to do nothing.
    return pl.DataFrame([pl.Series(name, table[name]).cast(dtype) for name, dtype in columns.items()])


def require_linked(trace: Trace) -> None:
    """Raise AnalysisError for a trace on which nesting, steps and launches were not worked out."""
    if not trace.meta.get("linked"):
        raise AnalysisError(
            "the trace is not linked", where=describe_rank(trace), remedy="etloom.link(trace), or etloom.open"
        )
