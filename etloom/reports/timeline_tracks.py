"""Where the report's timeline draws what: lanes, rows that hide nothing, and which events of too many.

A lane is a thread or a stream; a row is a line of a lane in which no two events overlap. Host events sit at their
nesting depth, device events on the first free row.
"""

from __future__ import annotations

from typing import Any

import polars as pl

from etloom.core import categories
from etloom.core.trace import Trace

BUCKETS = 2000
"""Pieces of time among which the events of a lane compete for a place when there are too many."""
MAX_ROWS = 64
"""Rows of a lane; events that overlap even more share the last one."""


HOST_STACK, HOST_OFF_STACK, GPU_ANNOTATIONS, GPU, RECORDER = range(5)
"""Classes of lanes: call stacks of the host, its events off them, annotations seen from the device, device work, and
what the recorder says of itself, one lane a rank."""


def add_track_key(events: pl.DataFrame) -> pl.DataFrame:
    """The events with _pid, _tid, _class, which together name a lane."""
    kind = (
        pl.when(categories.is_profiler_internal())
        .then(RECORDER)
        .when(pl.col("depth").is_not_null())
        .then(HOST_STACK)
        .when(pl.col("cat") == "gpu_user_annotation")
        .then(GPU_ANNOTATIONS)
        .when(pl.col("stream").is_not_null() | pl.col("device").is_not_null())
        .then(GPU)
        .otherwise(HOST_OFF_STACK)
    )
    known = events.with_columns(kind.alias("_class"))
    of_thread = pl.when(pl.col("_class") != RECORDER)
    return known.with_columns(
        of_thread.then("pid").alias("_pid"), of_thread.then("tid").alias("_tid"), "_class"
    )


def list_tracks(trace: Trace) -> pl.DataFrame:
    """_pid, _tid, _class, _total, _lane (place from the top), _name; in the order that the file asks for."""
    lanes = add_track_key(trace.events).group_by("_pid", "_tid", "_class").agg(pl.len().alias("_total"))
    threads = trace.threads

    def last(column: str) -> pl.Expr:
        return pl.col(column).drop_nulls().last()

    process = (
        threads.filter(pl.col("tid").is_null())
        .group_by(_pid="pid")
        .agg(
            last("name").alias("_process"),
            last("labels").alias("_labels"),
            last("sort_index").alias("_psort"),
        )
    )
    thread = (
        threads.filter(pl.col("tid").is_not_null())
        .group_by(_pid="pid", _tid="tid")
        .agg(last("name").alias("_thread"), last("sort_index").alias("_tsort"))
    )
    lanes = (
        lanes.join(process, on="_pid", how="left")
        .join(thread, on=["_pid", "_tid"], how="left")
        .sort(
            pl.col("_class") == RECORDER,
            "_psort",
            pl.col("_class") >= GPU_ANNOTATIONS,
            *("_pid", "_tsort", "_tid", "_class"),
            nulls_last=True,
        )
        .with_row_index("_lane")
    )
    keys = lanes.select("_pid", "_tid", "_class").rows()
    stacked = {(pid, tid) for pid, tid, kind in keys if kind == HOST_STACK}
    names = [_track_name(row, (row["_pid"], row["_tid"]) in stacked) for row in lanes.iter_rows(named=True)]
    return lanes.with_columns(pl.Series("_name", names, pl.String))


def _track_name(row: dict[str, Any], stacked: bool) -> str:
    kind, tid = row["_class"], row["_tid"]
    if kind == RECORDER:
        return "recorder"
    # A negative number stands for a name that the file used in place of one.
    number = None if tid is None or tid < 0 else tid
    name = row["_thread"] or (
        (f"stream {number}" if kind >= GPU_ANNOTATIONS else f"thread {number}")
        if number is not None
        else None
    )
    if kind >= GPU_ANNOTATIONS and row["_labels"]:
        name = f"{row['_labels']} {name or ''}".strip()
    name = name or row["_process"] or "other"
    suffix = {HOST_OFF_STACK: ", off the stack" if stacked else "", GPU_ANNOTATIONS: ", annotations"}.get(
        kind, ""
    )
    return f"{name}{suffix}"


def keep_longest(events: pl.DataFrame, max_events: int) -> pl.DataFrame:
    if events.height <= max_events:
        return events
    start, stop = events.select(pl.col("ts").min(), pl.col("ts").max().alias("stop")).row(0)
    width = (stop - start) // BUCKETS + 1
    longest = pl.col("dur").fill_null(0)
    return (
        events.with_columns(((pl.col("ts") - start) // width).alias("_bucket"))
        .with_columns(longest.rank("ordinal", descending=True).over("_lane", "_bucket").alias("_place"))
        .sort(~pl.col("_critical"), "_place", longest * -1, "id")
        .head(max_events)
        .sort("id")
        .drop("_bucket", "_place")
    )


def assign_rows(events: pl.DataFrame) -> tuple[list[int], int]:
    """The row of each event in its lane, and how many had to share the last one.

    Events come by start, the longest first; each takes the first row, from its depth on, whose last event has ended.
    """
    free: dict[int, list[int]] = {}
    rows, crowded = [], 0
    columns = events.select(
        "_lane", "ts", pl.col("dur").fill_null(0).clip(1), pl.col("depth").fill_null(0).clip(0)
    )
    for lane, ts, dur, depth in columns.iter_rows():
        ends = free.setdefault(lane, [])
        row = min(depth, MAX_ROWS - 1)
        while row < len(ends) and ends[row] > ts:
            row += 1
        if row >= MAX_ROWS:
            row = MAX_ROWS - 1
            crowded += 1
            ends[row] = max(ends[row], ts + dur)
        else:
            ends.extend([0] * (row + 1 - len(ends)))
            ends[row] = ts + dur
        rows.append(row)
    return rows, crowded


def track_headers(lanes: pl.DataFrame, kept: pl.DataFrame) -> list[dict[str, Any]]:
    """Per lane its name and the index at which each of its rows begins, and at last ends."""
    counts = kept.group_by("_lane", "_row").agg(pl.len()).sort("_lane", "_row")
    sizes: dict[int, dict[int, int]] = {}
    for lane, row, size in counts.rows():
        sizes.setdefault(lane, {})[row] = size
    headers, at = [], 0
    for lane in lanes.iter_rows(named=True):
        rows = sizes.get(lane["_lane"])
        if rows is None:
            continue
        bounds = [at]
        for row in range(max(rows) + 1):
            at += rows.get(row, 0)
            bounds.append(at)
        left_out = lane["_total"] - lane["_kept"]
        headers.append(
            {
                "name": lane["_name"],
                "work": lane["_class"] not in (HOST_OFF_STACK, RECORDER),
                "rows": bounds,
                "left_out": left_out,
            }
        )
    return headers
