"""A recorded call as the code and text of the folder that runs it again, and its recorded time."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from etloom.core import categories
from etloom.core.intervals import Intervals
from etloom.core.trace import Trace


@dataclass
class DescribedCall:
    """A recorded call as the code and text of its folder.

    Attributes:
        template: The script that the code becomes part of.
        name: Operator or collective.
        code: Statements that replace those of the template.
        facts: Lines for the README.
        assumptions: What was not recorded, and is assumed.
        start: Command that runs the script.
    """

    template: str
    name: str
    code: str
    facts: list[str]
    assumptions: list[str]
    start: str = "python repro.py"


def name_operator(trace: Trace, event: int) -> str:
    """Return a hint at an operator that an event contains, or that launched or contains it."""
    events = trace.events.select("id", "parent", pl.col("name", "cat").cast(pl.String))
    operators = events.filter(pl.col("cat").is_in(list(categories.OPERATOR_CATEGORIES)))
    launched = trace.launches.filter(pl.col("device_event") == event)["operator"].drop_nulls()
    above = events.filter(pl.col("id") == event)["parent"].drop_nulls()
    inside = operators.filter(pl.col("parent") == event).head(1)
    around = operators.filter(pl.col("id").is_in((launched if launched.len() else above).implode()))
    for relation, rows in (("contains", inside), ("belongs to", around)):
        for row in rows.head(1).iter_rows(named=True):
            return f"; it {relation} event {row['id']} ({(row['name'] or '')[:60]!r})"
    return ""


def measure_equal_calls(trace: Trace, event: int) -> tuple[int | None, int]:
    """Return the median time in ns of all calls of an operator on the host with equal arguments, and their number."""
    arguments = trace.arguments.select(pl.exclude("event"), id="event")
    calls = trace.events.filter(pl.col("name") == pl.col("name").filter(pl.col("id") == event).first())
    calls = calls.select("id", "dur").join(arguments, on="id", how="left")
    keys = [name for name in arguments.columns if name != "id"]
    equal = calls.join(
        calls.filter(pl.col("id") == event).select(keys), on=keys, nulls_equal=True, how="semi"
    )
    median = equal["dur"].median()
    return (round(median) if isinstance(median, float) else None), equal["dur"].count()


def measure_recorded_time(trace: Trace, event: int) -> tuple[int | None, str]:
    """Return the time in ns of an operator call, and where it was measured: of its GPU activity, else of the host."""
    row = trace.events.filter(pl.col("id") == event).select("ts", "dur", "pid", "tid").row(0, named=True)
    inside = pl.col("id") == event
    if row["ts"] is not None and row["dur"] is not None:
        inside |= (
            (pl.col("pid") == row["pid"])
            & (pl.col("tid") == row["tid"])
            & pl.col("ts").is_between(row["ts"], row["ts"] + row["dur"])
        )
    inner = trace.events.filter(inside).select("id")
    launches = trace.launches.join(inner, left_on="operator", right_on="id", how="semi")
    if trace.events.filter(pl.col("id") == event)["cat"].cast(pl.String)[0] == categories.CAPTURED_OPERATOR:
        first = (
            launches["launch"].drop_nulls().head(1)
        )  # a captured operator runs in each replay of its graph
        launches = launches.join(first.to_frame("launch"), on="launch", how="semi")
    work = trace.events.join(launches, left_on="id", right_on="device_event", how="semi")
    work = work.drop_nulls(["ts", "dur"])
    if work.height:
        starts = work["ts"].to_numpy()
        return Intervals.of(starts, starts + work["dur"].to_numpy()).total, "device"
    return row["dur"], "host"


def format_ns(time_ns: int | None) -> str:
    return "unknown" if time_ns is None else f"{time_ns / 1e3:.3f} us"
