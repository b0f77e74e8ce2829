"""What ran when, by kind: on the device or, where a trace holds no device work, on the host.

basis "device": the kernels, copies and sets of all streams. A synchronisation is no work, and collectives that
the host itself carries out (gloo) are not seen.

basis "host": the operators of all threads. Communication is the time in a communication call (c10d::,
...) or in a backend's range of one (gloo:, ...) on any thread. Computation is the time in which some
thread is in another operator but in no communication call. A backend's range does not stop its thread
from computing: it belongs to an asynchronous operation, which Kineto draws where it was started. What is
neither is idle, or Python between operators.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom import kinds
from etloom.errors import AnalysisError
from etloom.intervals import EMPTY, Intervals, union
from etloom.stacks import asked, lane_codes, numbers, row_of, taken
from etloom.trace import Trace

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Activity:
    basis: str  # "device" | "host"
    times: Mapping[str, Intervals]  # by kind, all of kinds.KINDS

    @property
    def busy(self) -> Intervals:
        return union(self.times.values())


def activity(trace: Trace) -> Activity:
    """When each kind of work ran. Raises AnalysisError for a trace of neither device work nor operators."""
    device = device_work(trace, "kind", "ts", "dur")
    if device.height:
        times = {kind: during(own) for (kind,), own in device.group_by("kind")}
        return Activity("device", {kind: times.get(kind, EMPTY) for kind in kinds.KINDS})
    calls = host_work(trace)
    computes = pl.col("kind") == "computation"
    computation = union(
        during(thread.filter(computes)) - during(thread.filter(~computes & ~pl.col("backend")))
        for thread in calls.partition_by("pid", "tid")
    )
    communication = during(calls.filter(~computes))
    times = {"computation": computation, "communication": communication}
    return Activity("host", {kind: times.get(kind, EMPTY) for kind in kinds.KINDS})


def device_work(trace: Trace, *columns: str) -> pl.DataFrame:
    """The device events that have a duration, with their ``kind``; of their columns those asked for, by default all."""
    if columns:
        return pl.DataFrame([trace.once(_of_work, name) for name in columns])
    return trace.events[trace.once(_device_rows)].with_columns(trace.once(_of_work, "kind"))


def launched(trace: Trace, *columns: str) -> pl.DataFrame:
    """Device work by start, with these columns: of events; kind, end; and of its launch call, null where that lies
    outside the trace: launch (id), api, launch_ts, launch_end, operator (id)."""
    return pl.DataFrame([trace.once(_of_launched, name) for name in columns])


def launched_numbers(trace: Trace, column: str, absent: int) -> Rows:
    """A column of `launched` as an array, ``absent`` in place of null."""
    return trace.once(_numbers, column, absent)


def streams(trace: Trace) -> Rows:
    """A number from 0 for the device and stream of each row of `launched`."""
    return trace.once(_streams)


def _of_work(trace: Trace, column: str) -> pl.Series:
    """A column of `device_work`."""
    if column == "kind":
        return kinds.with_kind(device_work(trace, "cat", "name"))["kind"]
    return trace.events[column][trace.once(_device_rows)]


def _of_launched(trace: Trace, column: str) -> pl.Series:
    """A column of `launched`."""
    values = _told(trace, column)
    start = trace.once(_of_work, "ts")
    return values if start.is_sorted() else values[np.argsort(start.to_numpy(), kind="stable")]


def _told(trace: Trace, column: str) -> pl.Series:
    """A column of `launched`, in the order of `device_work`."""
    if column == "end":
        return (trace.once(_of_work, "ts") + trace.once(_of_work, "dur")).alias(column)
    if column not in _CALL:
        return trace.once(_of_work, column)
    pair, call = trace.once(_launch_rows)
    if column in ("launch", "operator"):
        return taken(trace.launches[column], pair)
    said = taken(trace.events[_CALL[column]], call).alias(column)
    return said + taken(trace.events["dur"], call).fill_null(0) if column == "launch_end" else said


_CALL = {"launch": "launch", "operator": "operator", "api": "name", "launch_ts": "ts", "launch_end": "ts"}
"""What `launched` says of a call: the column of launches or events that says it."""


def _launch_rows(trace: Trace) -> tuple[Rows, Rows]:
    """Of each piece of device work the row of launches that tells its launch, the first of several, and the row of
    events of the call; -1 where the call lies outside the trace."""
    work, launches = device_work(trace, "id"), trace.launches
    pair = np.full(work.height, -1, dtype=np.int64)
    of = row_of(work, launches["device_event"])
    told = np.flatnonzero(of >= 0)[::-1]
    pair[of[told]] = told
    call = row_of(trace.events, taken(launches["launch"], pair))
    pair[call < 0] = -1
    return pair, call


def _numbers(trace: Trace, column: str, absent: int) -> Rows:
    return numbers(trace.once(_of_launched, column), absent)


def _streams(trace: Trace) -> Rows:
    return lane_codes(launched(trace, "device", "stream"), ("device", "stream"))


def has_device_work(trace: Trace) -> bool:
    """Whether the trace holds any device event that has a duration."""
    return trace.once(_device_rows).size > 0


def _device_rows(trace: Trace) -> Rows:
    is_work = pl.col("cat").is_in(list(kinds.DEVICE)).fill_null(False) & pl.col("dur").is_not_null()
    return np.flatnonzero(trace.events.select(is_work).to_series().to_numpy())


def host_work(trace: Trace) -> pl.DataFrame:
    """Operators and backends' ranges with a duration: id, cat, name, ts, dur, pid, tid, step, their ``kind`` and
    whether they are a ``backend``'s.

    Raises AnalysisError where there are none; asked only of a trace without device work.
    """
    host = pl.col("cat").is_in(list(kinds.OPERATORS | kinds.ANNOTATIONS)) & pl.col("dur").is_not_null()
    columns = ("id", "cat", "name", "ts", "dur", "pid", "tid", "step")
    events = trace.events.lazy().filter(host).select(columns).collect()
    known = (
        events.select("name")
        .unique()
        .with_columns(
            pl.when(kinds.is_communication())
            .then(pl.lit("communication"))
            .otherwise(pl.lit("computation"))
            .cast(kinds.KIND)
            .alias("kind"),
            kinds.is_backend_range().alias("backend"),
        )
    )
    calls = events.join(known, on="name", how="left", maintain_order="left").filter(
        pl.col("cat").is_in(list(kinds.OPERATORS)) | pl.col("backend")
    )
    if not calls.height:
        raise untimed(trace) or AnalysisError(
            "the trace holds no device work and no operators",
            where=of_rank(trace),
            remedy="record it with torch.profiler and its CPU activity",
        )
    return calls


def during(events: pl.DataFrame) -> Intervals:
    """The time in any of the events (ts, dur)."""
    starts = events["ts"].to_numpy()
    return Intervals.of(starts, starts + events["dur"].to_numpy())


def steps(trace: Trace) -> pl.DataFrame:
    """step, start, end of each step that a ProfilerStep#N marks on the host, in order of N; maybe no rows."""
    return trace.once(_steps).clone()


def _steps(trace: Trace) -> pl.DataFrame:
    is_mark = pl.col("cat").is_in(list(kinds.ANNOTATIONS)) & pl.col("dur").is_not_null()
    marks = (
        trace.events.lazy().filter(is_mark).select("name", "ts", end=pl.col("ts") + pl.col("dur")).collect()
    )
    marks = marks.filter(pl.Series(asked(marks["name"], lambda name: name.str.contains(kinds.STEP))))
    number = pl.col("name").cast(pl.String).str.extract(kinds.STEP).cast(pl.Int64, strict=False)
    return (
        marks.group_by(number.alias("step"))
        .agg(pl.col("ts").min().alias("start"), pl.col("end").max())
        .drop_nulls("step")  # a number that no integer holds
        .sort("step")
    )


def marks(nodes: pl.DataFrame) -> pl.DataFrame:
    """id, step: of the nodes of an execution trace that mark one."""
    name = pl.col("name").cast(pl.String)
    number = name.str.extract(kinds.STEP).cast(pl.Int64, strict=False)
    return nodes.select("id", step=number).drop_nulls("step")


def untimed(trace: Trace) -> AnalysisError | None:
    """Why nothing of a trace without events has a time; None where there are events."""
    if trace.rows("events"):
        return None
    if not trace.rows("nodes"):
        return AnalysisError("the trace holds no events", where=of_rank(trace), remedy="record it anew")
    return AnalysisError(
        "the operators of an execution trace have no times",
        where=of_rank(trace),
        remedy="`flops`, `unique-args` and `etloom replay compute` work without; for times put the profiler's trace of "
        "the same steps beside it",
    )


def of_rank(trace: Trace) -> str | None:
    """What an error says of where it is."""
    return None if trace.rank is None else f"rank {trace.rank}"
