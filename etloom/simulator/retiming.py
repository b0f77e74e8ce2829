"""A job with the times that a simulation gives it.

Events that have points get their times. What has none (instants, synchronisation records, annotations of a device,
Python frames) moves with its lane: between the two nearest points of it, in proportion. Lanes without any point, and
counters and allocations, move with their rank's host.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from etloom.core.schema import TABLES
from etloom.core.trace import Job, Trace
from etloom.graphs.graph import Graph, Int64Array, PointRole

_TIMED_TABLES = ("memory", "counters", "flows")


def retime_job(job: Job, graph: Graph, time: Int64Array) -> Job:
    """The job at these times of the graph's points; what was interpolated is counted in stats."""
    return Job({rank: _retime_rank(trace, graph, time, rank) for rank, trace in job.items()}, job.meta)


def _retime_rank(trace: Trace, graph: Graph, time: Int64Array, rank: int) -> Trace:
    own = (graph.rank == rank) & (graph.event >= 0)
    points = pl.DataFrame(
        {
            "id": graph.event[own].astype(np.uint32),
            "role": graph.role[own],
            "at": graph.time[own],
            "now": time[own],
        }
    )
    # By how much it moved: the points of an event that was a little off (clamped, skewed) are not quite its times.
    moved = pl.col("now") - pl.col("at")
    starts = (
        points.filter(pl.col("role") == PointRole.START).unique("id", keep="first").select("id", start=moved)
    )
    ends = points.filter(pl.col("role") == PointRole.END).unique("id", keep="last").select("id", end=moved)
    events = trace.events.join(starts, on="id", how="left", maintain_order="left").join(
        ends, on="id", how="left", maintain_order="left"
    )
    moves = _TimeMaps(events, points)
    without = events["start"].is_null() & events["ts"].is_not_null()
    finish = events.select("pid", "tid", ts=pl.col("ts") + pl.col("dur").fill_null(0))
    begun = pl.coalesce(pl.col("ts") + pl.col("start"), pl.Series(moves.of(events, "ts")))
    done = pl.coalesce(finish["ts"] + pl.col("end"), pl.Series(moves.of(finish, "ts")))
    events = events.with_columns(
        ts=pl.when(pl.col("ts").is_not_null()).then(begun),
        dur=pl.when(pl.col("dur").is_not_null()).then((done - begun).clip(0)),
    ).drop("start", "end")
    tables = {
        name: _retime_table(trace.table(name), moves) for name in _TIMED_TABLES if trace.table(name).height
    }
    renumbered = _sort_events(trace.replace(None, events=events, **tables))
    meta = {**trace.meta, "simulated": True}
    return renumbered.replace(meta=meta).count(
        "simulate.interpolated",
        int(without.sum()),
        "events without a point in the graph moved with their lane",
    )


class _TimeMaps:
    """Where the times of a lane went: piecewise linear between its points, without ever going back."""

    def __init__(self, events: pl.DataFrame, points: pl.DataFrame) -> None:
        placed = points.join(events.select("id", "pid", "tid"), on="id", how="left")
        self._lanes = {
            key: _time_map(own)
            for key, own in placed.partition_by("pid", "tid", as_dict=True, maintain_order=True).items()
        }
        self._rank = _time_map(points)

    def of(self, rows: pl.DataFrame, column: str) -> np.ndarray:
        """The new times of rows (pid, tid, column)."""
        times = rows[column].fill_null(0).to_numpy().astype(np.int64)
        moved = _map_times(self._rank, times)
        numbered = rows.select("pid", "tid").with_row_index("row")
        for key, own in numbered.partition_by("pid", "tid", as_dict=True).items():
            if key in self._lanes:
                at = own["row"].to_numpy()
                moved[at] = _map_times(self._lanes[key], times[at])
        return moved

    def of_rank(self, times: np.ndarray) -> np.ndarray:
        return _map_times(self._rank, times)


def _time_map(points: pl.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    one = points.group_by("at").agg(pl.col("now").max()).sort("at")
    return one["at"].to_numpy(), np.maximum.accumulate(one["now"].to_numpy())


def _map_times(curve: tuple[np.ndarray, np.ndarray], times: np.ndarray) -> np.ndarray:
    """Times moved along a curve; before and after it they keep their distance to its ends. Exact in integers."""
    at, now = curve
    if not len(at):
        return times.copy()
    place = np.clip(np.searchsorted(at, times, side="right") - 1, 0, len(at) - 1)
    after = np.minimum(place + 1, len(at) - 1)
    span = np.maximum(at[after] - at[place], 1)
    inside = (times >= at[0]) & (times <= at[-1])
    share = np.where(inside, (times - at[place]) / span, 0.0)
    moved = now[place] + np.round(share * (now[after] - now[place])).astype(np.int64)
    beyond = np.where(times < at[0], times - at[0] + now[0], times - at[-1] + now[-1])
    return np.asarray(np.where(inside, moved, beyond))


def _retime_table(table: pl.DataFrame, moves: _TimeMaps) -> pl.DataFrame:
    lanes = {"pid", "tid"} <= set(table.columns)
    times = (
        moves.of(table, "ts")
        if lanes
        else moves.of_rank(table["ts"].fill_null(0).to_numpy().astype(np.int64))
    )
    return table.with_columns(ts=pl.when(pl.col("ts").is_not_null()).then(pl.Series(times)))


def _sort_events(trace: Trace) -> Trace:
    """The trace with its events by start again, and every reference to them kept."""
    events = trace.events.with_columns(old="id").sort(
        "ts",
        pl.col("dur").fill_null(-1),
        "old",
        descending=(False, True, False),
        nulls_last=True,
        maintain_order=True,
    )
    events = events.with_columns(id=pl.int_range(pl.len(), dtype=pl.UInt32))
    now = events.select("old", new="id")
    tables = {"events": events.drop("old")}
    for name, table in TABLES.items():
        frame = tables.get(name, trace.table(name))
        for column in table.columns:
            if column.refers == "events" and frame.height:
                frame = (
                    frame.join(now, left_on=column.name, right_on="old", how="left", maintain_order="left")
                    .with_columns(pl.col("new").alias(column.name))
                    .drop("new")
                )
                tables[name] = frame
    return trace.replace(None, **tables)
