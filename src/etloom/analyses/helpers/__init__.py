"""Helpers for analyses, also those of other packages: time intervals of steps, percentages, and the declared columns.

Example:
    An analysis module that counts GPU activities per step::

        from etloom.analyses.helpers import LaunchStep, conform_columns, filter_step
        from etloom.timeline.activity import select_device_events

        SCOPE = "rank"
        COLUMNS = {"count": pl.Int64}

        def analyze(trace, *, step: LaunchStep = None):
            events = filter_step(trace, select_device_events(trace), step)
            return conform_columns({"count": [events.height]}, COLUMNS)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import polars as pl

from etloom.core.arrays import join_columns
from etloom.core.errors import AnalysisError, InvalidValue
from etloom.core.intervals import Intervals
from etloom.core.trace import Trace
from etloom.linker import is_linked
from etloom.timeline.activity import describe_rank, find_steps

Step = Annotated[int | None, "Only this step."]
"""The option ``step`` of most analyses, with its help."""
LaunchStep = Annotated[int | None, "Only activities launched in this step."]


def step_windows(trace: Trace, busy: Intervals, step: int | None) -> pl.DataFrame:
    """Return the time intervals that an analysis reports: one per step, then one for the whole active time.

    Args:
        trace: The trace of a rank.
        busy: The intervals whose span is the window of everything.
        step: If given, only the window of this step.

    Returns:
        step, start, end (ns); step is null in the last row, the window of everything.

    Raises:
        AnalysisError: The trace does not contain the step.
    """
    steps = find_steps(trace)
    if step is not None:
        check_step(trace, step)
        return steps.filter(pl.col("step") == step)
    start, end = busy.span or (0, 0)
    total_row = join_columns(
        pl.Series(name, [value], steps.schema[name])
        for name, value in (("step", None), ("start", start), ("end", end))
    )
    return steps.vstack(total_row)


def check_step(trace: Trace, step: int | None) -> None:
    """Raise AnalysisError if the trace does not contain the step."""
    if step is None:
        return
    numbers = find_steps(trace)["step"].to_list()
    if step not in numbers:
        available = " to ".join(map(str, dict.fromkeys((numbers[0], numbers[-1])))) if numbers else ""
        remedy = f"available steps: {available}" if numbers else "no step is annotated with ProfilerStep"
        error = None if numbers else explain_unmatched_name(trace)
        raise error or AnalysisError(
            f"the trace contains no step {step}", where=describe_rank(trace), remedy=remedy
        )


def explain_unmatched_name(trace: Trace) -> AnalysisError | None:
    """Return an error for a trace without steps if --step-name was set; None if it was not."""
    pattern = trace.meta.get("step_name")
    if pattern is None:
        return None
    return AnalysisError(
        f"no host event matches --step-name {pattern!r}",
        where=describe_rank(trace),
        remedy="correct the expression; etloom query PATH 'select distinct name from events' lists the names",
    )


def filter_step(trace: Trace, events: pl.DataFrame, step: int | None) -> pl.DataFrame:
    """Return the events of a step, or all events if ``step`` is None.

    GPU activities belong to the step of their launch.

    Raises:
        AnalysisError: The trace does not contain the step.
    """
    check_step(trace, step)
    return events if step is None else events.filter(pl.col("step") == step)


def percent(part: str, total: str | pl.Expr) -> pl.Expr:
    """Return the expression 100 part / total, named ``<part>_pct`` without ``_ns``; null where the total is 0."""
    total = pl.col(total) if isinstance(total, str) else total
    return pl.when(total > 0).then(100.0 * pl.col(part) / total).alias(f"{part.removesuffix('_ns')}_pct")


def percent_of_total(part: str) -> pl.Expr:
    """Return an expression for the share of a column in its sum over all rows, in percent."""
    return percent(part, pl.col(part).sum())


def check_top(top: int) -> None:
    """Raise InvalidValue if the number of rows ``top`` is below 1."""
    if top < 1:
        raise InvalidValue(f"expected at least 1 row, got {top}", remedy="specify 1 or more", option="top")


def check_percentage(value: float, option: str) -> None:
    """Raise InvalidValue unless the value of an option is a percentage."""
    if not 0 <= value <= 100:
        raise InvalidValue(
            f"expected a percentage from 0 to 100, got {value:g}",
            remedy="for example 5 for 5 %",
            option=option,
        )


def conform_columns(table: pl.DataFrame | Mapping[str, Any], columns: Mapping[str, Any]) -> pl.DataFrame:
    """Return a table with exactly the columns ``columns``, in their order and with their types.

    Args:
        table: A frame, or columns of equal length by name.
        columns: Types by column name, as in COLUMNS of an analysis.
    """
    # Column by column, because most have the right type already and a lazy query costs a thread wakeup.
    values = ((pl.Series(name, table[name]), dtype) for name, dtype in columns.items())
    return join_columns(column if column.dtype == dtype else column.cast(dtype) for column, dtype in values)


def require_linked(trace: Trace) -> None:
    """Raise AnalysisError if the trace is not linked: nesting, steps and launches are unknown."""
    if not is_linked(trace):
        raise AnalysisError(
            "the trace is not linked", where=describe_rank(trace), remedy="etloom.link(trace), or etloom.open"
        )
