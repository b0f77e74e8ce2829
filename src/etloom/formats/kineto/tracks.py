"""The tracks of a Chrome trace: processes, threads, their names, and sub-tracks for overlapping slices.

Perfetto drops a slice that begins inside another slice of its track and ends after it. Such slices exist: overlapping
kernels of one stream, records that end on another thread than they began on. Each such slice goes to the first
sub-track of its thread or stream on which it fits.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import polars as pl

from etloom.core.arrays import to_series
from etloom.core.trace import Trace

TRACK_KEY = ("pid", "tid", "sub_track")


def assign_sub_tracks(events: pl.DataFrame) -> pl.Series:
    """Assign each event a sub-track number (0: the track itself), so that no slices on a sub-track partly overlap.

    Any two slices on a sub-track are disjoint or nested.

    Args:
        events: Columns pid, tid, ts, dur, sorted by ts and then the longest first.
    """
    sub_tracks = np.zeros(events.height, np.int32)
    slices = events.with_row_index("row").filter(pl.col("ts").is_not_null() & (pl.col("dur") >= 0))
    slices = slices.with_columns(end=pl.col("ts") + pl.col("dur"))
    latest = pl.col("end").cum_max().shift().over("pid", "tid")
    # Tracks on which no slice begins before an earlier one ends, or ends after all before it, need no sub-tracks.
    crowded = (pl.col("ts") < latest) & (pl.col("dur") > 0)
    slices = slices.filter(crowded.any().over("pid", "tid"))
    for _, track in slices.group_by("pid", "tid", maintain_order=True):
        sub_tracks[track["row"].to_numpy()] = _assign_first_fit(track["ts"].to_list(), track["end"].to_list())
    return to_series(sub_tracks, "sub_track")


def _assign_first_fit(starts: list[int], ends: list[int]) -> list[int]:
    """Return, for each slice of one track, the first sub-track on which it partly overlaps no other slice."""
    open_ends: list[list[int]] = []
    sub_tracks = []
    for start, end in zip(starts, ends, strict=True):
        number = 0
        while number < len(open_ends):
            stack = open_ends[number]
            while stack and stack[-1] <= start:
                stack.pop()
            if not stack or stack[-1] >= end:
                break
            number += 1
        else:
            open_ends.append([])
        open_ends[number].append(end)
        sub_tracks.append(number)
    return sub_tracks


def build_track_table(trace: Trace, placed: pl.DataFrame, rank: int | None, first_pid: int) -> pl.DataFrame:
    """Build a table with one row per track of a rank: `TRACK_KEY`, JSON ids (``pid_text``, ``tid_text``) and ``name``.

    Args:
        trace: The trace of the rank.
        placed: pid, tid and sub-track of every event.
        rank: Number the processes from ``first_pid`` on; if None, processes keep their ids, numbers or texts.
        first_pid: The number of the first process.
    """
    first = pl.lit(0, pl.Int32).alias("sub_track")
    others = [trace.table(name).select("pid", "tid", first) for name in ("memory", "flows")] + [
        trace.threads.drop_nulls("tid").select("pid", "tid", first)
    ]
    tracks = pl.concat([placed.select(TRACK_KEY), *others]).unique().sort(TRACK_KEY, nulls_last=True)
    names = {(pid, tid): name for pid, tid, name in trace.threads.select("pid", "tid", "name").iter_rows()}
    pids = {pid: first_pid + at for at, pid in enumerate(list_processes(trace))} if rank is not None else {}
    next_tid: dict[int, int] = {}
    for pid, tid in tracks.select("pid", "tid").iter_rows():
        next_tid[pid] = max(next_tid.get(pid, 0), (tid or 0) + 1)
    rows = []
    for pid, tid, sub_track in tracks.iter_rows():
        name = names.get((pid, tid))
        tid_text = format_track_id(tid, name or names.get((tid, None)))
        if sub_track:
            label = name or ("no thread" if tid is None or tid < 0 else tid)
            name, tid_text = f"{label} ({sub_track + 1})", str(next_tid[pid])
            next_tid[pid] += 1
        rows.append(
            (
                pid,
                tid,
                sub_track,
                str(pids[pid]) if pids else format_track_id(pid, names.get((pid, None))),
                tid_text,
                name,
            )
        )
    texts = ("pid_text", "tid_text", "name")
    schema: dict[str, Any] = dict(tracks.schema) | dict.fromkeys(texts, pl.String)
    return pl.DataFrame(rows, schema=schema, orient="row")


def list_processes(trace: Trace) -> list[int | None]:
    """Return the sorted process ids in a rank's tables; None comes last, if some rows have no process."""
    tables = ("events", "memory", "flows", "counters", "threads")
    pids = {pid for name in tables for pid in trace.table(name)["pid"].unique()}
    return sorted(pids, key=lambda pid: (pid is None, pid))


def format_track_id(number: int | None, name: str | None) -> str:
    """Return the JSON of a process or thread id: the number, or its name if the original file had a text id."""
    return json.dumps(name or "") if number is not None and number < -(1 << 31) else str(number or 0)
