"""Moves the events of recorded traces to simulated times.

Events with points get the times of these. Events without (instants, synchronization records, GPU annotations, Python
frames) move with their track: interpolated between its two nearest points. Tracks without any point, counters and
allocations move with all points of their rank.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from etloom.core.arrays import to_array
from etloom.core.schema import TABLES
from etloom.core.trace import Job, Trace
from etloom.graphs.graph import Graph, Int64Array, PointRole

_TIMED_TABLES = ("memory", "counters", "flows")


def retime_job(job: Job, graph: Graph, time: Int64Array) -> Job:
    """Return the job with its events moved to new point times (ns); interpolated events are counted in stats."""
    return Job({rank: retime_rank(trace, graph, time, rank) for rank, trace in job.items()}, job.meta)


def retime_rank(trace: Trace, graph: Graph, time: Int64Array, rank: int) -> Trace:
    """Return a trace with its events moved to ``time`` (ns, per graph point); ``rank``: its rank number in the
    graph."""
    has_event = (graph.rank == rank) & (graph.event >= 0)
    points = pl.DataFrame(
        {
            "id": graph.event[has_event].astype(np.uint32),
            "role": graph.role[has_event],
            "at": graph.time[has_event],
            "now": time[has_event],
        }
    )
    # Shifts, not times: the points of a clamped or skewed event differ slightly from its times.
    shift = pl.col("now") - pl.col("at")
    starts = (
        points.filter(pl.col("role") == PointRole.START).unique("id", keep="first").select("id", start=shift)
    )
    ends = points.filter(pl.col("role") == PointRole.END).unique("id", keep="last").select("id", end=shift)
    events = trace.events.join(starts, on="id", how="left", maintain_order="left").join(
        ends, on="id", how="left", maintain_order="left"
    )
    maps = _TimeMaps(events, points)
    interpolated = events["start"].is_null() & events["ts"].is_not_null()
    finish = events.select("pid", "tid", ts=pl.col("ts") + pl.col("dur").fill_null(0))
    new_start = pl.coalesce(pl.col("ts") + pl.col("start"), pl.Series(maps.map_column(events, "ts")))
    new_end = pl.coalesce(finish["ts"] + pl.col("end"), pl.Series(maps.map_column(finish, "ts")))
    events = events.with_columns(
        ts=pl.when(pl.col("ts").is_not_null()).then(new_start),
        dur=pl.when(pl.col("dur").is_not_null()).then((new_end - new_start).clip(0)),
    ).drop("start", "end")
    tables = {
        name: _retime_table(trace.table(name), maps) for name in _TIMED_TABLES if trace.table(name).height
    }
    renumbered = _reorder_events(trace.replace(None, events=events, **tables))
    meta = {**trace.meta, "simulated": True}
    return renumbered.replace(meta=meta).count(
        "simulate.interpolated",
        int(interpolated.sum()),
        "events without a point in the graph moved with their track",
    )


class _TimeMaps:
    """Maps recorded to new times by track (thread, stream): piecewise linear between graph points, never decreasing."""

    def __init__(self, events: pl.DataFrame, points: pl.DataFrame) -> None:
        placed = points.join(events.select("id", "pid", "tid"), on="id", how="left")
        self._tracks = {
            key: _time_map(rows)
            for key, rows in placed.partition_by("pid", "tid", as_dict=True, maintain_order=True).items()
        }
        self._rank = _time_map(points)

    def map_column(self, rows: pl.DataFrame, column: str) -> np.ndarray:
        """Return the new times of a column of times, for rows with the columns pid and tid (their track)."""
        times = rows[column].fill_null(0).to_numpy().astype(np.int64)
        moved = _map_times(self._rank, times)
        numbered = rows.select("pid", "tid").with_row_index("row")
        for key, rows in numbered.partition_by("pid", "tid", as_dict=True).items():
            if key in self._tracks:
                recorded = rows["row"].to_numpy()
                moved[recorded] = _map_times(self._tracks[key], times[recorded])
        return moved

    def map_rank_times(self, times: np.ndarray) -> np.ndarray:
        """Return the new times of ``times``, interpolated between all points of the rank."""
        return _map_times(self._rank, times)


def _time_map(points: pl.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    curve = points.group_by("at").agg(pl.col("now").max()).sort("at")
    return curve["at"].to_numpy(), np.maximum.accumulate(curve["now"].to_numpy())


def _map_times(curve: tuple[np.ndarray, np.ndarray], times: np.ndarray) -> np.ndarray:
    """Map times along a piecewise linear curve; times outside of it shift with its nearest end. Exact in integers."""
    recorded, new_times = curve
    if not len(recorded):
        return times.copy()
    index = np.clip(np.searchsorted(recorded, times, side="right") - 1, 0, len(recorded) - 1)
    after = np.minimum(index + 1, len(recorded) - 1)
    span = np.maximum(recorded[after] - recorded[index], 1)
    inside = (times >= recorded[0]) & (times <= recorded[-1])
    share = np.where(inside, (times - recorded[index]) / span, 0.0)
    moved = new_times[index] + np.round(share * (new_times[after] - new_times[index])).astype(np.int64)
    outside = np.where(
        times < recorded[0], times - recorded[0] + new_times[0], times - recorded[-1] + new_times[-1]
    )
    return np.asarray(np.where(inside, moved, outside))


def _retime_table(table: pl.DataFrame, maps: _TimeMaps) -> pl.DataFrame:
    has_track = {"pid", "tid"} <= set(table.columns)
    times = (
        maps.map_column(table, "ts")
        if has_track
        else maps.map_rank_times(to_array(table["ts"], 0).astype(np.int64))
    )
    return table.with_columns(ts=pl.when(pl.col("ts").is_not_null()).then(pl.Series(times)))


def _reorder_events(trace: Trace) -> Trace:
    """Sort the events by start and update every reference to them."""
    events = trace.events.with_columns(old="id").sort(
        "ts",
        pl.col("dur").fill_null(-1),
        "old",
        descending=(False, True, False),
        nulls_last=True,
        maintain_order=True,
    )
    events = events.with_columns(id=pl.int_range(pl.len(), dtype=pl.UInt32))
    new_times = events.select("old", new="id")
    tables = {"events": events.drop("old")}
    for name, table in TABLES.items():
        frame = tables.get(name, trace.table(name))
        for column in table.columns:
            if column.refers == "events" and frame.height:
                frame = (
                    frame.join(
                        new_times, left_on=column.name, right_on="old", how="left", maintain_order="left"
                    )
                    .with_columns(pl.col("new").alias(column.name))
                    .drop("new")
                )
                # A damaged file may name events that it lacks.
                tables[name] = frame.drop_nulls(table.required)
    return trace.replace(None, **tables)
