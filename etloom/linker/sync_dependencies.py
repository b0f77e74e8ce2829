"""Synchronization dependencies: host calls, streams and blocking copies that waited for GPU activity.

They come from `syncs` if the device tracer recorded them (cuda_sync events name the stream, and the call that
recorded the event waited for), else from the calls and their times; ``sync_dependencies.how`` distinguishes the two.
Waiting for a stream means waiting for the last activity launched on it before: a stream is first in, first out.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from etloom.core import arrays, categories, nesting
from etloom.core.arrays import rows_of_ids, take_rows
from etloom.core.schema import TABLES, Stat
from etloom.core.trace import Trace
from etloom.linker.blocking_calls import find_blocking_calls, list_blocking_copies
from etloom.linker.launches import find_calls
from etloom.linker.placement import get_ids

_THREAD = (pl.col("pid").fill_null(-1), pl.col("tid").fill_null(-1))
"""The thread of an event as keys of a join, which would lose nulls."""
_RUNTIMES = "cuda|hip|cu|musa|mu|mtia|xpu"

_CALL_PATTERNS = {
    "Context Sync": rf"^(?:{_RUNTIMES})DeviceSynchronize|^(?:cu|hip|mu)CtxSynchronize",
    "Stream Sync": rf"^(?:{_RUNTIMES})StreamSynchronize",
    "Event Sync": rf"^(?:{_RUNTIMES})EventSynchronize",
    "Stream Wait Event": rf"^(?:{_RUNTIMES})StreamWaitEvent",
}
_RECORD_PATTERN = rf"^(?:{_RUNTIMES})EventRecord"

_COLUMNS = ("event", "on", "kind", "sync", "how")


def add_sync_dependencies(trace: Trace) -> Trace:
    """Return the Trace with the table `sync_dependencies`: which call or stream waited for which GPU activity."""
    events = trace.events
    work = order_by_launch(trace)
    if not work.height:
        return trace.replace(sync_dependencies=trace.table("sync_dependencies").clear())
    recorded, explained_calls, vague = _from_sync_events(trace, work)
    calls = _find_sync_calls(events).join(explained_calls, on="call", how="anti")
    context, stream, event, between = (calls.filter(pl.col("kind") == kind) for kind in _CALL_PATTERNS)
    parts = [*recorded, find_blocking_calls(trace, explained_calls)]
    if context.height:
        parts.append(_wait_for_all_streams(context, work))
    if stream.height or event.height:
        parts.append(_wait_for_completed(pl.concat([stream, event]), work))
    if between.height:
        parts.append(_wait_between_streams(trace, between, work))
    waits = pl.concat([frame.select(_COLUMNS) for frame in parts], how="vertical_relaxed")
    waits = TABLES["sync_dependencies"].conform(waits.unique().sort("event", "on", "kind", "sync", "how"))
    unknown = calls.join(waits, left_on="call", right_on="sync", how="anti").height
    return trace.replace(sync_dependencies=waits).with_stats(
        [
            Stat(
                "link.syncs_without_record",
                "info",
                vague,
                "the call that recorded the event is not in the trace",
            ),
            Stat(
                "link.syncs_without_activity",
                "info",
                unknown,
                "synchronizing calls that waited for no visible GPU activity",
            ),
        ]
    )


def list_waiting_calls(trace: Trace) -> pl.Series:
    """Return the ids of all calls of a kind that blocks for GPU activity, even if it is unknown for which."""
    calls = _find_sync_calls(trace.events).filter(pl.col("kind") != "Stream Wait Event")["call"]
    return pl.concat([calls, list_blocking_copies(trace)]).unique()


def _find_sync_calls(events: pl.DataFrame) -> pl.DataFrame:
    """Return the calls that synchronize: call (id), kind, pid, tid, at (start, ns), until (end, ns)."""
    runtime = np.flatnonzero(categories.mask_events(events, categories.RUNTIME_CATEGORIES))
    names = events["name"][runtime]
    kinds = np.full(runtime.size, -1)
    for number, pattern in reversed(
        list(enumerate(_CALL_PATTERNS.values()))
    ):  # the first that matches counts
        kinds[arrays.match_text(names, pattern)] = number
    is_sync = kinds >= 0
    calls: pl.DataFrame = events.select("id", *_THREAD, "ts", "dur")[runtime[is_sync]]
    return calls.select(
        pl.col("id").alias("call"),
        pl.Series("kind", list(_CALL_PATTERNS), pl.String)[kinds[is_sync]],
        "pid",
        "tid",
        pl.col("ts").alias("at"),
        (pl.col("ts") + pl.col("dur").fill_null(0)).alias("until"),
    ).sort("at")


def _match_name(events: pl.DataFrame, pattern: str) -> np.ndarray:
    return arrays.match_text(events["name"], pattern)


def _from_sync_events(trace: Trace, work: pl.DataFrame) -> tuple[list[pl.DataFrame], pl.DataFrame, int]:
    """Return the dependencies that recorded cuda_sync events state, and the calls that they explain.

    Also returns the number of cuda_sync events that wait for an event recorded outside of the trace.
    """
    events = trace.events
    rows = np.flatnonzero(categories.mask_events(events, ("cuda_sync",)))
    if not rows.size:
        return [], events.select(pl.col("id").alias("call")).clear(), 0
    call, _ = find_calls(events, rows)
    asks = _match_name(events, "EventQuery")  # and never blocks
    rows, call = rows[(call < 0) | ~asks[call]], call[(call < 0) | ~asks[call]]
    syncs = _describe_syncs(trace, rows, call)
    explained_calls = syncs.select("call").drop_nulls().unique()
    context = _wait_for_all_streams(
        syncs.filter(pl.col("kind") == "Context Sync"), work, on=["device"], sync="sync", source="recorded"
    )
    stream = find_last_before(
        syncs.filter(pl.col("kind") == "Stream Sync").with_columns(
            pl.coalesce(pl.when(pl.col("wait_stream") >= 0).then(pl.col("wait_stream")), "waiting").alias(
                "stream"
            )
        ),
        work,
    )
    calls = events.select("correlation", "ts").filter(
        pl.Series(categories.mask_events(events, categories.RUNTIME_CATEGORIES)), pl.col("correlation") > 0
    )
    event_syncs = (
        syncs.filter(pl.col("kind").is_in(["Event Sync", "Stream Wait Event"]))
        .join(
            calls.unique("correlation", keep="none").select(
                pl.col("correlation").alias("record_correlation"), pl.col("ts").alias("noted")
            ),
            on="record_correlation",
            how="left",
        )
        .with_columns(pl.col("wait_stream").alias("stream"))
    )
    vague = event_syncs.filter(pl.col("noted").is_null() | pl.col("stream").is_null()).height
    waited = find_last_before(
        event_syncs.drop_nulls(["noted", "stream"]).drop("at").rename({"noted": "at"}), work
    )
    host = waited.filter(pl.col("kind") == "Event Sync")
    device = find_first_after(
        waited.filter(pl.col("kind") == "Stream Wait Event")
        .drop("event", "stream", "at")
        .join(syncs.select("sync", "at"), on="sync")
        .rename({"waiting": "stream"}),
        work,
    )
    frames = [
        context,
        *(frame.with_columns(pl.lit("recorded").alias("how")) for frame in (stream, host, device)),
    ]
    return frames, explained_calls, vague


def _describe_syncs(trace: Trace, rows: np.ndarray, call: np.ndarray) -> pl.DataFrame:
    """Return a table of cuda_sync events (at row numbers ``rows``): host call, streams and times (ns) of each."""
    events = trace.events
    record = trace.syncs.select("event", "kind", "wait_stream", "record_correlation")
    return (
        events[rows]
        .select(
            pl.col("id").alias("sync"),
            # Kineto records the device as pid; without either it is device 0, as of activities.
            pl.col("device")
            .fill_null(pl.when(pl.col("pid") >= 0).then(pl.col("pid").cast(pl.Int32, strict=False)))
            .fill_null(0),
            pl.col("stream").fill_null(pl.col("tid")).alias("waiting"),
            pl.col("ts").alias("seen"),
            (pl.col("ts") + pl.col("dur").fill_null(0)).alias("over"),
            get_ids(events, call).alias("call"),
        )
        .join(record.with_columns(pl.col("kind").cast(pl.String)), left_on="sync", right_on="event")
        .join(
            events.select(
                pl.col("id").alias("call"),
                pl.col("ts").alias("at"),
                (pl.col("ts") + pl.col("dur").fill_null(0)).alias("until"),
            ),
            on="call",
            how="left",
        )
        .with_columns(
            pl.col("at").fill_null(pl.col("seen")),
            pl.col("until").fill_null(pl.col("over")),
            pl.col("call").fill_null(pl.col("sync")).alias("event"),
        )
    )


def _wait_for_all_streams(
    syncs: pl.DataFrame,
    work: pl.DataFrame,
    *,
    on: list[str] | None = None,
    sync: str = "call",
    source: str = "inferred",
) -> pl.DataFrame:
    """Return dependencies of device-wide synchronizations on the last activity launched before on each stream.

    ``on``: ["device"] for the streams of the synchronized device only.
    """
    streams = work.select("device", "stream").unique()
    sync_calls = syncs.drop("device", strict=False) if on is None else syncs
    every = sync_calls.join(streams, on=on, how="inner") if on else sync_calls.join(streams, how="cross")
    every = every if "event" in every.columns else every.with_columns(pl.col("call").alias("event"))
    return find_last_before(every, work).with_columns(pl.col(sync).alias("sync"), pl.lit(source).alias("how"))


def _wait_for_completed(calls: pl.DataFrame, work: pl.DataFrame) -> pl.DataFrame:
    """Return dependencies of stream and event synchronizations on the last activity to end within the call.

    Only activity that was launched before the call counts.
    """
    ends = work.sort("end", "ts").select("end", "launched", "known", "on")
    return (
        calls.sort("until")
        .join_asof(ends, left_on="until", right_on="end", check_sortedness=False)
        .filter((pl.col("end") >= pl.col("at")) & ((pl.col("launched") <= pl.col("at")) | ~pl.col("known")))
        .with_columns(
            pl.col("call").alias("event"), pl.col("call").alias("sync"), pl.lit("inferred").alias("how")
        )
    )


def _wait_between_streams(trace: Trace, calls: pl.DataFrame, work: pl.DataFrame) -> pl.DataFrame:
    """Infer which GPU activity a stream waited for (StreamWaitEvent) if the tracer did not record the event.

    The waiting activity is the next one that the thread launches. The event is the last one that the thread
    recorded, and stands for the last activity launched before that on another stream. Left out if the activity did
    not wait for it.
    """
    events = trace.events
    runtime = categories.mask_events(events, categories.RUNTIME_CATEGORIES)
    record_calls = np.flatnonzero(arrays.match_text(events["name"], _RECORD_PATTERN, runtime))
    records = events.select("pid", "tid", noted="ts")[record_calls].with_columns(*_THREAD)
    launch = rows_of_ids(events, work["launch"])
    launched = work.select(pl.col("on").alias("event"), "device", "stream", "ts", then="launched")
    threads = events.select("pid", "tid")[launch[launch >= 0]].with_columns(*_THREAD)
    launched = launched.filter(pl.Series(launch >= 0)).hstack(threads)
    thread = ["pid", "tid"]
    waits = (
        calls.join_asof(
            records.sort("noted"), left_on="at", right_on="noted", by=thread, check_sortedness=False
        )
        .join_asof(
            launched, left_on="at", right_on="then", by=thread, strategy="forward", check_sortedness=False
        )
        .drop_nulls(["noted", "event"])
    )
    streams = nesting.track_codes(
        pl.concat([frame.select("device", "stream") for frame in (work, waits)]), ("device", "stream")
    )
    work_streams, wait_streams = streams[: work.height], streams[work.height :]
    at = work["launched"].search_sorted(waits["noted"], side="right").to_numpy().astype(np.int64) - 1
    edges = np.flatnonzero(np.diff(work_streams, prepend=-1))
    run_start = edges[np.searchsorted(edges, at, side="right") - 1]
    at = np.where((at >= 0) & (work_streams[at] == wait_streams), run_start - 1, at)
    last_work = work[np.maximum(at, 0)].select("on", "end")
    return (
        waits.with_columns(
            last_work["on"], last_work["end"], pl.col("call").alias("sync"), pl.lit("inferred").alias("how")
        )
        .filter(pl.Series(at >= 0))
        .filter(pl.col("end") <= pl.col("ts"))
    )


def order_by_launch(trace: Trace) -> pl.DataFrame:
    """Return GPU activity by launch time: on (id), launch, device, stream, ts, end, launched (all ns), known.

    ``known`` is true if the launch is recorded.

    Activity whose launch is not recorded, mostly before the trace began, uses its own start as launch.
    """
    events = trace.events
    launches = trace.launches.select("launch", pl.col("device_event").alias("on"))
    row = rows_of_ids(events, launches["on"])
    launches, row = launches.filter(pl.Series(row >= 0)), row[row >= 0]
    work = events.select("device", "stream", "tid", "ts", "dur")[row]
    call = rows_of_ids(events, launches["launch"])
    return (
        launches.hstack(work)
        .select(
            "on",
            "launch",
            pl.col("device").fill_null(0),
            pl.coalesce("stream", "tid", pl.lit(0)).alias("stream"),
            "ts",
            (pl.col("ts") + pl.col("dur").fill_null(0)).alias("end"),
            take_rows(events["ts"], call).alias("launched").fill_null(work["ts"]),
            pl.col("launch").is_not_null().alias("known"),
        )
        .sort("launched", "ts", "end")
    )


def find_last_before(syncs: pl.DataFrame, work: pl.DataFrame) -> pl.DataFrame:
    """Add to each synchronization the id of the last activity launched before on its stream (``on``).

    ``syncs``: at, until, device, stream. Rows without such activity are dropped.

    Activity without a recorded launch counts if it ended before the call did.
    """
    stream = ["device", "stream"]
    launched_in_trace, hidden = (
        work.filter(has_launch) for has_launch in (pl.col("known"), ~pl.col("known"))
    )
    matches = syncs.sort("at").join_asof(
        launched_in_trace.select(*stream, "launched", "on", pl.col("ts").alias("began")),
        left_on="at",
        right_on="launched",
        by=stream,
        check_sortedness=False,
    )
    if hidden.height:
        matches = matches.sort("until").join_asof(
            hidden.sort("end").select(
                *stream, "end", pl.col("on").alias("other"), pl.col("ts").alias("other_began")
            ),
            left_on="until",
            right_on="end",
            by=stream,
            check_sortedness=False,
        )
        later = pl.col("began").is_null() | (pl.col("other_began") > pl.col("began"))
        matches = matches.with_columns(pl.when(later).then("other").otherwise("on").alias("on"))
    return matches.drop_nulls("on")


def find_first_after(syncs: pl.DataFrame, work: pl.DataFrame) -> pl.DataFrame:
    """Add to each synchronization the id of the first activity launched after it on its stream (``event``).

    ``syncs``: at, device, stream. Rows without such activity are dropped.
    """
    return (
        syncs.sort("at")
        .join_asof(
            work.select("device", "stream", "launched", pl.col("on").alias("event")),
            left_on="at",
            right_on="launched",
            by=["device", "stream"],
            strategy="forward",
            check_sortedness=False,
        )
        .drop_nulls("event")
    )
