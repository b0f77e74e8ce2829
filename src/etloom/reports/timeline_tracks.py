"""Lays out the timeline of the report: tracks, rows without overlap, and the events to draw if there are too many.

A track is a stream, a thread or its Python frames; a row is a line of a track in which no two events overlap. Host
events lie at their nesting depth, GPU events on the first free row. The GPU tracks are on top.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom._native import draw_lines
from etloom.core import categories
from etloom.core.arrays import to_array
from etloom.core.trace import Trace

BUCKETS = 2000
"""Time buckets in which the events of a track compete for a place if there are too many."""
MAX_ROWS = 64
"""Rows of a track; events that overlap even more share the last row."""


PYTHON, HOST_STACK, HOST_OFF_STACK, GPU_ANNOTATIONS, GPU, RECORDER = range(6)
"""Classes of tracks: Python frames, host call stacks without them, host events off the stacks, GPU annotations, GPU
activities, and the recorder's own events (one track per rank)."""


def add_track_key(events: pl.DataFrame) -> pl.DataFrame:
    """Add the columns _pid, _tid and _class to events; together they identify the track of an event.

    On threads with Python frames, depth becomes 0: it counts both the frames and the events they call, which lie on
    different tracks.
    """
    track_class = (
        pl.when(categories.is_profiler_internal())
        .then(RECORDER)
        .when(pl.col("depth").is_not_null() & pl.col("cat").is_in(categories.PYTHON_CATEGORIES))
        .then(PYTHON)
        .when(pl.col("depth").is_not_null())
        .then(HOST_STACK)
        .when(pl.col("cat") == "gpu_user_annotation")
        .then(GPU_ANNOTATIONS)
        .when(pl.col("stream").is_not_null() | pl.col("device").is_not_null())
        .then(GPU)
        .otherwise(HOST_OFF_STACK)
    )
    classified = events.with_columns(track_class.alias("_class"))
    by_thread = pl.when(pl.col("_class") != RECORDER)
    has_frames = (pl.col("_class") == PYTHON).any().over("pid", "tid")
    return classified.with_columns(
        by_thread.then("pid").alias("_pid"),
        by_thread.then("tid").alias("_tid"),
        pl.when(has_frames).then(pl.col("depth") * 0).otherwise("depth").alias("depth"),
    )


def list_tracks(trace: Trace, events: pl.DataFrame) -> pl.DataFrame:
    """Return the tracks, the top track first: _pid, _tid, _class, _total (events), _track (number) and _name.

    Args:
        trace: the rank.
        events: its events, as `add_track_key` returns them.
    """
    tracks = events.group_by("_pid", "_tid", "_class").agg(pl.len().alias("_total"))
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
    tracks = (
        tracks.join(process, on="_pid", how="left", nulls_equal=True)
        .join(thread, on=["_pid", "_tid"], how="left", nulls_equal=True)
        .sort(
            pl.col("_class") == RECORDER,
            ~pl.col("_class").is_in([GPU_ANNOTATIONS, GPU]),
            "_psort",
            *("_pid", "_tsort", "_tid", "_class"),
            nulls_last=True,
        )
        .with_row_index("_track")
    )
    keys = tracks.select("_pid", "_tid", "_class").rows()
    stacked = {(pid, tid) for pid, tid, track_class in keys if track_class == HOST_STACK}
    names = [_track_name(row, (row["_pid"], row["_tid"]) in stacked) for row in tracks.iter_rows(named=True)]
    return tracks.with_columns(pl.Series("_name", names, pl.String))


def _track_name(row: dict[str, Any], stacked: bool) -> str:
    track_class, tid = row["_class"], row["_tid"]
    if track_class == RECORDER:
        return "recorder"
    # A negative number replaces a name in the file.
    number = None if tid is None or tid < 0 else tid
    name = row["_thread"] or (
        (f"stream {number}" if track_class >= GPU_ANNOTATIONS else f"thread {number}")
        if number is not None
        else None
    )
    if track_class >= GPU_ANNOTATIONS and row["_labels"]:
        name = f"{row['_labels']} {name or ''}".strip()
    name = name or row["_process"] or "other"
    suffixes = {
        PYTHON: ", Python",
        HOST_OFF_STACK: ", off the stack" if stacked else "",
        GPU_ANNOTATIONS: ", annotations",
    }
    return f"{name}{suffixes.get(track_class, '')}"


def keep_longest(events: pl.DataFrame, max_events: int) -> pl.DataFrame:
    """Select at most ``max_events`` events: those on the critical path, then the longest per track and time bucket."""
    if events.height <= max_events:
        return events
    start, stop = events.select(pl.col("ts").min(), pl.col("ts").max().alias("stop")).row(0)
    width = (stop - start) // BUCKETS + 1
    longest = pl.col("dur").fill_null(0)
    return (
        events.with_columns(((pl.col("ts") - start) // width).alias("_bucket"))
        .with_columns(longest.rank("ordinal", descending=True).over("_track", "_bucket").alias("_place"))
        .sort(~pl.col("_critical"), "_place", longest * -1, "id")
        .head(max_events)
        .sort("id")
        .drop("_bucket", "_place")
    )


def assign_rows(events: pl.DataFrame) -> tuple[NDArray[np.int64], int]:
    """Assign each event to a row of its track; return the rows, and the number of events that share the last row.

    Events are ordered by start, the longest first; each takes the first row, from its depth on, whose last event has
    ended.
    """
    starts = events["ts"].to_numpy()
    return draw_lines(
        events["_track"].to_numpy().astype(np.int64),
        starts,
        starts + np.maximum(to_array(events["dur"], 0), 1),
        np.clip(to_array(events["depth"], 0).astype(np.int64), 0, MAX_ROWS - 1),
        MAX_ROWS,
    )


def track_headers(tracks: pl.DataFrame, plotted: pl.DataFrame) -> list[dict[str, Any]]:
    """Return the header of each drawn track: name, class, first event of each row, and number of omitted events.

    The tracks of a thread whose events nest have the same number ``stack``; others have none.
    Python frames are folded at first, unless the rank has nothing else to show.
    """
    counts = plotted.group_by("_track", "_row").agg(pl.len()).sort("_track", "_row")
    sizes: dict[int, dict[int, int]] = {}
    for track, row, size in counts.rows():
        sizes.setdefault(track, {})[row] = size
    has_work = not {PYTHON, RECORDER}.issuperset(tracks["_class"])
    stacks: dict[tuple[int | None, int | None], int] = {}
    headers, index = [], 0
    for track in tracks.iter_rows(named=True):
        rows = sizes.get(track["_track"])
        if rows is None:
            continue
        bounds = [index]
        for row in range(max(rows) + 1):
            index += rows.get(row, 0)
            bounds.append(index)
        omitted = track["_total"] - track["_drawn"]
        headers.append(
            {
                "name": track["_name"],
                "work": track["_class"] not in (HOST_OFF_STACK, RECORDER),
                "host": track["_class"] == HOST_STACK,
                "gpu": track["_class"] in (GPU_ANNOTATIONS, GPU),
                "stack": stacks.setdefault((track["_pid"], track["_tid"]), len(stacks))
                if track["_class"] in (PYTHON, HOST_STACK)
                else None,
                "folded": track["_class"] == PYTHON and has_work,
                "rows": bounds,
                "omitted": omitted,
            }
        )
    return headers
