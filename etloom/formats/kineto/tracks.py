"""The lanes of a timeline: which processes and threads there are, what they are called, and what fits on one.

Perfetto drops a slice that begins inside another of its lane and outlasts it. Such slices are real: kernels of one
stream that overlap, records that end on another thread than they began on. Each goes to the first sub-lane of
its thread or stream on which it fits.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import polars as pl

from etloom.core.trace import Trace

TRACK_KEY = ("pid", "tid", "lane")


def assign_sub_tracks(events: pl.DataFrame) -> pl.Series:
    """For each event the number of its sub-lane, 0 for the lane itself.

    events: columns pid, tid, ts, dur, sorted by ts and then the longest first. Of the slices on one sub-lane,
    any two are apart or one holds the other.
    """
    lanes = np.zeros(events.height, np.int32)
    slices = events.with_row_index("row").filter(pl.col("dur") >= 0)
    slices = slices.with_columns(end=pl.col("ts") + pl.col("dur"))
    latest = pl.col("end").cum_max().shift().over("pid", "tid")
    # Nothing to do on lanes where no slice begins before an earlier one ends, or outlasts all before it.
    crowded = (pl.col("ts") < latest) & (pl.col("dur") > 0)
    slices = slices.filter(crowded.any().over("pid", "tid"))
    for _, lane in slices.group_by("pid", "tid", maintain_order=True):
        lanes[lane["row"].to_numpy()] = _assign_first_fit(lane["ts"].to_list(), lane["end"].to_list())
    return pl.Series("lane", lanes)


def _assign_first_fit(starts: list[int], ends: list[int]) -> list[int]:
    """The sub-lane of each slice of one lane; a sub-lane is the stack of the ends of its open slices."""
    open_ends: list[list[int]] = []
    chosen = []
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
        chosen.append(number)
    return chosen


def build_track_table(trace: Trace, placed: pl.DataFrame, rank: int | None, first_pid: int) -> pl.DataFrame:
    """The lanes of a rank: `KEY` and, as JSON, what to write for them (``pid_text``, ``tid_text``), and ``name``.

    placed: pid, tid, lane of every event. With a rank, processes are numbered on from ``first_pid``; without,
    they keep their numbers, and those that the file named by a text keep that.
    """
    first = pl.lit(0, pl.Int32).alias("lane")
    others = [trace.table(name).select("pid", "tid", first) for name in ("memory", "flows")] + [
        trace.threads.drop_nulls("tid").select("pid", "tid", first)
    ]
    lanes = pl.concat([placed.select(TRACK_KEY), *others]).unique().sort(TRACK_KEY, nulls_last=True)
    names = {(pid, tid): name for pid, tid, name in trace.threads.select("pid", "tid", "name").iter_rows()}
    pids = {pid: first_pid + at for at, pid in enumerate(list_processes(trace))} if rank is not None else {}
    next_tid: dict[int, int] = {}
    for pid, tid in lanes.select("pid", "tid").iter_rows():
        next_tid[pid] = max(next_tid.get(pid, 0), (tid or 0) + 1)
    rows = []
    for pid, tid, lane in lanes.iter_rows():
        name = names.get((pid, tid))
        tid_text = _format_track_id(tid, name or names.get((tid, None)))
        if lane:
            name, tid_text = f"{name or tid} ({lane + 1})", str(next_tid[pid])
            next_tid[pid] += 1
        rows.append(
            (
                pid,
                tid,
                lane,
                str(pids[pid]) if pids else _format_track_id(pid, names.get((pid, None))),
                tid_text,
                name,
            )
        )
    texts = ("pid_text", "tid_text", "name")
    schema: dict[str, Any] = dict(lanes.schema) | dict.fromkeys(texts, pl.String)
    return pl.DataFrame(rows, schema=schema, orient="row")


def list_processes(trace: Trace) -> list[int]:
    """The processes of a rank, in order."""
    tables = ("events", "memory", "flows", "counters", "threads")
    return sorted({pid for name in tables for pid in trace.table(name)["pid"].drop_nulls().unique()})


def _format_track_id(number: int | None, name: str | None) -> str:
    """What stands in the file: the number, or the text that it had in place of one."""
    return json.dumps(name or "") if number is not None and number < -(1 << 31) else str(number or 0)
