"""The longest call of each operator and kernel, which rows of the report's tables show on the timeline."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import polars as pl

from etloom.core import categories
from etloom.core.trace import Job, Trace
from etloom.timeline.activity import has_device_events, select_device_events

LongestCalls = Mapping[tuple[int, str], str]
"""(rank, name) -> the longest call, as `encode_call` writes it."""


def list_longest_calls(job: Job, table: str, zeros: Mapping[int, int]) -> LongestCalls:
    """Return the longest call of each name.

    Args:
        job: a linked run.
        table: "top-ops" for operators, or "kernel-breakdown" for GPU activities (of a rank without a GPU: operators).
        zeros: the ranks whose timelines are drawn, and the time that each shows as zero, ns.
    """
    return {
        (rank, name): encode_call(rank, event, start - zeros[rank], duration, count)
        for rank in sorted(zeros)
        for name, event, start, duration, count in _find_longest(job[rank], table).iter_rows()
    }


def encode_call(rank: int, event: int, start_ns: int, duration_ns: int, count: int) -> str:
    """Return a call, and of how many it is the longest, as a short text that the page reads (details.js).

    A page has hundreds of them. The start counts from the page's zero.
    """
    return f"{rank}.{event}.{start_ns}.{duration_ns}.{count}"


def pick_calls(frame: pl.DataFrame, calls: LongestCalls) -> list[str]:
    """Return the call of each row of a table with a rank (or max_rank) and a name; empty where no call is drawn."""
    rank = "rank" if "rank" in frame.columns else "max_rank"
    names = frame["name"].cast(pl.String)
    return [calls.get(key, "") for key in zip(frame[rank], names, strict=True)]


def _find_longest(trace: Trace, table: str) -> pl.DataFrame:
    """Return name, id, start and duration of the longest call of each name, the first of several, and their number."""
    columns = ("id", "name", "ts", "dur")
    if table == "kernel-breakdown" and has_device_events(trace):
        events = select_device_events(trace, *columns)
    else:
        kinds: Collection[str] = categories.OPERATOR_CATEGORIES
        events = trace.events.filter(pl.col("cat").is_in(list(kinds))).select(columns)
    timed = events.drop_nulls(("ts", "dur", "name"))
    longest = pl.col("dur").arg_max()
    return (
        timed.group_by("name")
        .agg(pl.col("id", "ts", "dur").get(longest), count=pl.len())
        .select(pl.col("name").cast(pl.String), "id", "ts", "dur", "count")
    )
