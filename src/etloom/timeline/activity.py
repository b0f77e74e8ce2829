"""Compute busy intervals of a rank by kernel type: on the device, or on the host if it has no GPU activity.

basis "device": the kernels, memcpys and memsets of all streams. Synchronizations do not count, and collectives that
the host itself executes (gloo) are not included.

basis "host": the operators of all threads. Communication is the time in a communication call (c10d::, ...) or in a
backend's range of one (gloo:, ...) on any thread. Computation is the time in which some thread is in another operator
and not in a communication call. A backend's range does not stop its thread from computing: it belongs to an
asynchronous operation, which Kineto draws where it was started. The rest is idle, or Python between operators.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.core import categories
from etloom.core.arrays import join_columns, rows_of_ids, take_rows
from etloom.core.errors import AnalysisError
from etloom.core.intervals import EMPTY, Intervals, union
from etloom.core.iterations import find_step_events
from etloom.core.steps import parse_step
from etloom.core.trace import Trace

RowArray = NDArray[np.int64]

MAX_LAUNCH_LATENCY_NS = 50_000
"""Longest time from the return of a launch to the start of the activity that counts as part of launching, in ns: about
5 us on an idle device, several times that for large graphs and with a profiler."""


@dataclass(frozen=True)
class Activity:
    basis: str  # "device" | "host"
    times: Mapping[str, Intervals]  # by kind, all of kinds.KINDS

    @property
    def busy(self) -> Intervals:
        return union(self.times.values())


def compute_activity(trace: Trace) -> Activity:
    """Return the busy intervals of each kernel type, on the device or, without GPU activity, on the host; cached.

    Raises:
        AnalysisError: The trace has neither GPU activity nor operators.
    """
    return trace.compute_once(build_activity)


def build_activity(trace: Trace) -> Activity:
    """Compute the busy intervals of each kernel type, without the cache of `compute_activity`."""
    device = select_device_events(trace, "kind", "ts", "dur")
    if device.height:
        times = {kind: to_intervals(type_events) for (kind,), type_events in device.group_by("kind")}
        return Activity("device", {kind: times.get(kind, EMPTY) for kind in categories.KERNEL_TYPES})
    calls = select_host_calls(trace)
    computes = pl.col("kind") == "computation"
    computation = union(
        to_intervals(thread.filter(computes)) - to_intervals(thread.filter(~computes & ~pl.col("backend")))
        for thread in calls.partition_by("pid", "tid")
    )
    communication = to_intervals(calls.filter(~computes))
    times = {"computation": computation, "communication": communication}
    return Activity("host", {kind: times.get(kind, EMPTY) for kind in categories.KERNEL_TYPES})


def select_device_events(trace: Trace, *columns: str) -> pl.DataFrame:
    """Return ``columns`` of the device events that have a duration; default: all, and the kernel type ``kind``."""
    rows = trace.compute_once(_find_device_rows)
    if columns:
        return join_columns([trace.compute_once(_device_column, name) for name in columns])
    return trace.events[rows].with_columns(trace.compute_once(_device_column, "kind"))


def select_launched_events(trace: Trace, *columns: str) -> pl.DataFrame:
    """Return ``columns`` of each GPU activity and of its launch call as a table, sorted by start of the activity.

    Args:
        trace: A linked trace.
        columns: Columns of events; kind and end; columns of the launch call: launch (id), api, launch_ts, launch_end,
            operator (id), null if the call is outside of the trace.
    """
    return join_columns(trace.compute_once(_launched_column, name) for name in columns)


def _device_column(trace: Trace, column: str) -> pl.Series:
    """Return a column of the device events that have a duration; the column ``kind`` is the kernel type."""
    rows = trace.compute_once(_find_device_rows)
    if column == "kind":
        return categories.add_kernel_type(trace.events.select("cat", "name")[rows])["kind"]
    return trace.events[column][rows]


def _launched_column(trace: Trace, column: str) -> pl.Series:
    """Return a column of `select_launched_events`, a value per GPU activity, sorted by start of the activity."""
    values = _compute_launched_column(trace, column)
    start = trace.compute_once(_device_column, "ts")
    return values if start.is_sorted() else values[np.argsort(start.to_numpy(), kind="stable")]


def _compute_launched_column(trace: Trace, column: str) -> pl.Series:
    """Return a column of `select_launched_events`, a value per GPU activity, in the order of the table `events`."""
    if column == "end":
        return (trace.compute_once(_device_column, "ts") + trace.compute_once(_device_column, "dur")).alias(
            column
        )
    if column not in _CALL_COLUMNS:
        return trace.compute_once(_device_column, column)
    pair, call = trace.compute_once(_find_launch_rows)
    if column in ("launch", "operator"):
        return take_rows(trace.launches[column], pair)
    call_values = take_rows(trace.events[_CALL_COLUMNS[column]], call).alias(column)
    return (
        call_values + take_rows(trace.events["dur"], call).fill_null(0)
        if column == "launch_end"
        else call_values
    )


_CALL_COLUMNS = {
    "launch": "launch",
    "operator": "operator",
    "api": "name",
    "launch_ts": "ts",
    "launch_end": "ts",
}
"""Column of `select_launched_events` about the launch call -> column of launches or events with its values."""


def _find_launch_rows(trace: Trace) -> tuple[RowArray, RowArray]:
    """Return the row in `launches` of each device event, and the row in `events` of its launch call.

    Of several launches the first.

    Both are -1 if the call is outside of the trace.
    """
    work, launches = select_device_events(trace, "id"), trace.launches
    pair = np.full(work.height, -1, dtype=np.int64)
    work_rows = rows_of_ids(work, launches["device_event"])
    matched = np.flatnonzero(work_rows >= 0)[::-1]
    pair[work_rows[matched]] = matched
    call = rows_of_ids(trace.events, take_rows(launches["launch"], pair))
    pair[call < 0] = -1
    return pair, call


def has_device_events(trace: Trace) -> bool:
    """Return whether the trace has a GPU activity with a duration."""
    return trace.compute_once(_find_device_rows).size > 0


def _find_device_rows(trace: Trace) -> RowArray:
    is_work = (
        pl.col("cat").is_in(list(categories.DEVICE_CATEGORIES)).fill_null(False) & pl.col("dur").is_not_null()
    )
    return np.flatnonzero(trace.events.select(is_work).to_series().to_numpy())


def select_host_calls(trace: Trace) -> pl.DataFrame:
    """Return the operators and the ranges of communication backends (gloo:*) that have a duration.

    Meant for traces without GPU activity. Columns: id, cat, name, ts, dur, pid, tid, step, their type ``kind``, and
    ``backend``, true for the range of a backend.

    Raises:
        AnalysisError: There are none.
    """
    host = (
        pl.col("cat").is_in(list(categories.OPERATOR_CATEGORIES | categories.ANNOTATION_CATEGORIES))
        & pl.col("dur").is_not_null()
    )
    columns = ("id", "cat", "name", "ts", "dur", "pid", "tid", "step")
    events = trace.events.lazy().filter(host).select(columns).collect()
    kernel_types = (
        events.select("name")
        .unique()
        .with_columns(
            pl.when(categories.is_communication())
            .then(pl.lit("communication"))
            .otherwise(pl.lit("computation"))
            .cast(categories.KERNEL_TYPE_DTYPE)
            .alias("kind"),
            categories.is_backend_range().alias("backend"),
        )
    )
    calls = events.join(kernel_types, on="name", how="left", maintain_order="left").filter(
        pl.col("cat").is_in(list(categories.OPERATOR_CATEGORIES)) | pl.col("backend")
    )
    if not calls.height:
        raise (
            explain_missing_times(trace)
            or _explain_snapshot(trace)
            or AnalysisError(
                "the trace contains no GPU activity and no operators",
                where=describe_rank(trace),
                remedy="record it with torch.profiler and its CPU activity",
            )
        )
    return calls


def to_intervals(events: pl.DataFrame) -> Intervals:
    """Return the union of the time intervals of events (columns ts and dur, ns)."""
    starts = events["ts"].to_numpy()
    return Intervals.of(starts, starts + events["dur"].to_numpy())


def find_steps(trace: Trace) -> pl.DataFrame:
    """Return a table of the annotated steps: step (number), start and end (ns); empty without annotations."""
    return trace.compute_once(compute_steps).clone()


def compute_steps(trace: Trace) -> pl.DataFrame:
    """Compute the table of annotated steps (step, start and end in ns), without the cache of `find_steps`."""
    return (
        find_step_events(trace.events, trace.meta.get("step_name"))
        .group_by("step")
        .agg(pl.col("ts").min().alias("start"), pl.col("end").max())
        .drop_nulls("step")  # a number that no integer holds
        .sort("step")
    )


def find_window(trace: Trace) -> tuple[int, int] | None:
    """Return start and end (ns) of the time in which a rank should be busy, so that gaps count as idle.

    None without activity.

    From the first activity, its launch or the start of the first annotated step, to the last activity or the end of
    the last step. Without GPU activity, only the annotated steps count, if there are any: a backend's range that was
    still open then lasts until the recording was stopped.
    """
    return trace.compute_once(compute_window)


def compute_window(trace: Trace) -> tuple[int, int] | None:
    """Compute start and end (ns) of the time in which gaps count as idle, without the cache of `find_window`."""
    activity, steps = compute_activity(trace), find_steps(trace)
    if activity.busy.span is None:
        return None
    start, end = activity.busy.span
    if activity.basis == "device":
        first_launch = select_launched_events(trace, "launch_ts")["launch_ts"][0]
        start = min(start, start if first_launch is None else int(first_launch))
    if not steps.height:
        return start, end
    if activity.basis == "host":
        return int(steps["start"].to_numpy().min()), int(steps["end"].to_numpy().max())
    return min(start, int(steps["start"].to_numpy().min())), max(end, int(steps["end"].to_numpy().max()))


def find_unknown_time(trace: Trace) -> int:
    """Return how long (ns), from the start of `find_window`, the recording does not show whether the device worked.

    This is the time before the first activity: the device may have run work that was launched before the recording. It
    is 0 if the first activity started soon after its launch, because the device was idle then.
    """
    window = find_window(trace)
    if window is None or compute_activity(trace).basis != "device":
        return 0
    start, launched = select_launched_events(trace, "ts", "launch_end").row(0)
    is_behind = launched is None or start - launched > MAX_LAUNCH_LATENCY_NS
    return max(start - window[0], 0) if is_behind else 0


def find_first_time(trace: Trace) -> int | None:
    """Return the start of the earliest event, ns; None if no event has a time."""
    first: int | None = trace.compute_once(categories.count_events)["first_ts"].min()  # type: ignore[assignment]
    return first


def find_step_nodes(nodes: pl.DataFrame) -> pl.DataFrame:
    """Return the execution-trace nodes that are step annotations: columns id and step (the number)."""
    return nodes.select("id", step=parse_step()).drop_nulls("step")


def _explain_snapshot(trace: Trace) -> AnalysisError | None:
    """Return an error that names what a memory snapshot does answer; None if the trace is none."""
    if not trace.rows("allocator"):
        return None
    return AnalysisError(
        "a memory snapshot has no times of operators",
        where=describe_rank(trace),
        remedy="use `memory-findings`, `memory-holders` or `allocator`, or add the profiler's trace of the same steps "
        "to the folder",
    )


def explain_missing_times(trace: Trace) -> AnalysisError | None:
    """Return an error that explains why a trace has no timed events; None if it has some."""
    if trace.rows("events"):
        return None
    if not trace.rows("nodes"):
        return _explain_snapshot(trace) or AnalysisError(
            "the trace contains no events", where=describe_rank(trace), remedy="record it again"
        )
    return AnalysisError(
        "the operators of an execution trace have no times",
        where=describe_rank(trace),
        remedy="use `flops`, `unique-args` or `etloom replay compute`, which need no times, or add the profiler's "
        "trace of the same steps to the folder",
    )


def describe_rank(trace: Trace) -> str | None:
    """Return the rank of a trace as text for error messages, such as "rank 3"; None if it is unknown."""
    return None if trace.rank is None else f"rank {trace.rank}"


def is_launched_before_recording() -> pl.Expr:
    """Return a polars expression: true for GPU activities that were launched before the recording began.

    They have no recorded launch and start before the first activity of their stream (or, if it has none, of any
    stream) that has one. They belong to none of the recorded steps, whatever the host does meanwhile. Columns:
    ``launched``, device, stream, ts.
    """
    start = pl.when("launched").then("ts")
    first = pl.coalesce(start.min().over("device", "stream"), start.min())
    return (~pl.col("launched") & (pl.col("ts") < first)).fill_null(False)
