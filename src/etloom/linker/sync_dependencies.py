"""Synchronization dependencies: host calls, streams and blocking copies that waited for GPU activity.

They come from `syncs` if the device tracer recorded them (cuda_sync events name the stream, and the call that
recorded the event waited for), else from the calls and their times; ``sync_dependencies.how`` distinguishes the two.
Waiting for a stream means waiting for the last activity launched on it before: a stream is first in, first out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom._native import number_pairs
from etloom.core import arrays, categories, text_codes
from etloom.core.arrays import (
    find_in_group,
    find_values,
    is_present,
    rows_of_ids,
    select_values,
    sort_rows,
    take_rows,
    to_array,
)
from etloom.core.schema import TABLES, Stat
from etloom.core.trace import Trace
from etloom.linker.blocking_calls import find_blocking_calls, list_blocking_copies
from etloom.linker.launches import find_calls

_RUNTIMES = "cuda|hip|cu|musa|mu|mtia|xpu"
_CALL_PATTERNS = {
    "Context Sync": rf"^(?:{_RUNTIMES})DeviceSynchronize|^(?:cu|hip|mu)CtxSynchronize",
    "Stream Sync": rf"^(?:{_RUNTIMES})StreamSynchronize",
    "Event Sync": rf"^(?:{_RUNTIMES})EventSynchronize",
    "Stream Wait Event": rf"^(?:{_RUNTIMES})StreamWaitEvent",
}
_RECORD_PATTERN = rf"^(?:{_RUNTIMES})EventRecord"
_CONTEXT, _STREAM, _EVENT, _BETWEEN = range(len(_CALL_PATTERNS))
_KINDS = (*_CALL_PATTERNS, "Blocking Copy", "Blocking Launch")
_SOURCES = ("inferred", "recorded")
_NONE = np.iinfo(np.int64).min


class Waits(NamedTuple):
    """Dependencies of one kind, as rows of the table ``events``; see the columns of `sync_dependencies`."""

    event: Numbers
    on: Numbers
    sync: Numbers
    kind: str
    source: str = "inferred"


def add_sync_dependencies(trace: Trace) -> Trace:
    """Return the Trace with the table `sync_dependencies`: which call or stream waited for which GPU activity."""
    if not trace.rows("launches") or not (work := order_by_launch(trace)).rows.size:
        return trace.replace(sync_dependencies=trace.table("sync_dependencies").clear())
    recorded, explained_calls, vague = _from_sync_events(trace, work)
    calls = _find_sync_calls(trace.events)
    calls = calls.select(~explained_calls[calls.rows])
    waits = [*recorded, *(Waits(*part) for part in find_blocking_calls(trace, explained_calls))]
    for kind, infer in _INFER.items():
        if (selected_calls := calls.select(calls.kinds == kind)).rows.size:
            waits.append(Waits(*infer(trace, selected_calls, work), _KINDS[kind]))
    is_explained = np.zeros(trace.events.height, np.bool_)
    for part in waits:
        is_explained[part.sync] = True
    unknown = int(np.count_nonzero(~is_explained[calls.rows]))
    return trace.replace(sync_dependencies=_build_table(trace.events, waits)).with_stats(
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


def _build_table(events: pl.DataFrame, waits: Sequence[Waits]) -> pl.DataFrame:
    """Return the rows of `sync_dependencies`, sorted and without repetitions."""
    ids, kinds = events["id"].to_numpy(), sorted(_KINDS)
    sizes = [part.on.size for part in waits]
    columns = [
        *(ids[np.concatenate([getattr(part, name) for part in waits])] for name in ("event", "on")),
        np.repeat([kinds.index(part.kind) for part in waits], sizes),
        ids[np.concatenate([part.sync for part in waits])],
        np.repeat([_SOURCES.index(part.source) for part in waits], sizes),
    ]
    order = np.lexsort(columns[::-1])
    columns = [column[order] for column in columns]
    changes = [column[1:] != column[:-1] for column in columns]
    rows = np.flatnonzero(np.append(True, np.logical_or.reduce(changes))[: order.size])
    event, on, kind, sync, source = (column[rows] for column in columns)
    return TABLES["sync_dependencies"].conform(
        arrays.make_frame(
            {
                "event": event,
                "on": on,
                "kind": arrays.take_rows(pl.Series(kinds, dtype=pl.Categorical), kind),
                "sync": sync,
                "how": arrays.take_rows(pl.Series(_SOURCES, dtype=pl.Categorical), source),
            }
        )
    )


def list_waiting_calls(trace: Trace) -> pl.Series:
    """Return the ids of all calls of a kind that blocks for GPU activity, even if it is unknown for which."""
    calls = _find_sync_calls(trace.events)
    ids = trace.events["id"][pl.Series(calls.rows[calls.kinds != _BETWEEN].astype(np.uint32))]
    return pl.concat([ids, list_blocking_copies(trace)]).unique()


@dataclass(frozen=True)
class _Calls:
    """Calls that synchronize, by start: row, index in `_KINDS`, thread, start and end (ns)."""

    rows: Numbers
    kinds: Numbers
    pids: Numbers
    tids: Numbers
    starts: Numbers
    ends: Numbers

    def select(self, selected: NDArray[np.bool_] | NDArray[np.intp]) -> _Calls:
        columns = (self.rows, self.kinds, self.pids, self.tids, self.starts, self.ends)
        return _Calls(*(column[selected] for column in columns))


def _find_sync_calls(events: pl.DataFrame) -> _Calls:
    """Return the calls that synchronize, in order of their start."""
    numbers = text_codes.compute_numbers(events["name"], _number_kind)
    rows = np.flatnonzero((numbers > 0) & categories.mask_events(events, categories.RUNTIME_CATEGORIES))
    pids, tids, starts, durations = (
        to_array(arrays.take_rows(events[name], rows), null)
        for name, null in (("pid", -1), ("tid", -1), ("ts", 0), ("dur", 0))
    )
    calls = _Calls(rows, numbers[rows].astype(np.int64) - 1, pids, tids, starts, starts + durations)
    return calls.select(np.argsort(starts, kind="stable"))


def _number_kind(name: pl.Expr) -> pl.Expr:
    """Return an expression for the number from 1 of the first of `_CALL_PATTERNS` that a name matches; 0 for none."""
    number = pl.lit(0)
    for place, pattern in reversed(list(enumerate(_CALL_PATTERNS.values(), 1))):
        number = pl.when(name.str.contains(pattern)).then(place).otherwise(number)
    return number


@dataclass(frozen=True)
class _SyncEvents:
    """Recorded cuda_sync events, one per row of the table `syncs`."""

    rows: Numbers
    calls: Numbers
    """Row of the host call that waited, -1 if it is not recorded."""
    kinds: pl.Series
    devices: Numbers
    waiting: Numbers
    """The stream of the event itself."""
    streams: Numbers
    """The stream waited for, `_NONE` if it is not stated."""
    starts: Numbers
    """Start and end (ns) of the host call, else of the event."""
    ends: Numbers
    recorded: Numbers
    """When the CUDA event waited for was recorded, ns; `_NONE` if that call is not in the trace."""

    def find(self, kind: str) -> Numbers:
        """Return the indices of the events of a kind."""
        return np.flatnonzero(arrays.is_in(self.kinds, (kind,)))


def _read_sync_events(trace: Trace) -> _SyncEvents | None:
    """Return the recorded cuda_sync events except queries, which never block; None without any."""
    events, table = trace.events, trace.syncs
    is_sync = categories.mask_events(events, ("cuda_sync",))
    if not is_sync.any():
        return None
    rows = arrays.rows_of_ids(events, table["event"])
    table, rows = table.filter(pl.Series(is_sync[rows] & (rows >= 0))), rows[is_sync[rows] & (rows >= 0)]
    calls, _ = find_calls(events, rows)
    is_wait = (calls < 0) | ~categories.match_names(events, "EventQuery")[calls]
    table, rows, calls = table.filter(pl.Series(is_wait)), rows[is_wait], calls[is_wait]
    starts, durations = to_array(events["ts"], 0), to_array(events["dur"], 0)
    timed = np.where(calls >= 0, calls, rows)
    tracks = events.select("device", "pid", "stream", "tid")[pl.Series(rows.astype(np.uint32))]
    device, pid, stream = tracks["device"], to_array(tracks["pid"], 0), tracks["stream"]
    # Kineto records the device as pid; without either it is device 0, as of activities.
    pid = np.where((pid >= 0) & (pid <= np.iinfo(np.int32).max), pid, 0)
    numbers = to_array(events["correlation"], 0)
    makers = np.flatnonzero(categories.mask_events(events, categories.RUNTIME_CATEGORIES) & (numbers > 0))
    maker, _ = arrays.find_unique(numbers[makers], to_array(table["record_correlation"], 0))
    return _SyncEvents(
        rows,
        calls,
        table["kind"],
        np.where(arrays.is_present(device), to_array(device, 0), pid).astype(np.int64),
        np.where(arrays.is_present(stream), to_array(stream, 0), to_array(tracks["tid"], _NONE)),
        to_array(table["wait_stream"], _NONE),
        starts[timed],
        starts[timed] + durations[timed],
        np.append(starts[makers], _NONE)[maker],
    )


def _from_sync_events(trace: Trace, work: LaunchedWork) -> tuple[list[Waits], NDArray[np.bool_], int]:
    """Return the dependencies that recorded cuda_sync events state, and a mask of the calls that they explain.

    Also returns the number of cuda_sync events that wait for an event recorded outside of the trace.
    """
    is_explained = np.zeros(trace.events.height, np.bool_)
    if (syncs := _read_sync_events(trace)) is None:
        return [], is_explained, 0
    is_explained[syncs.calls[syncs.calls >= 0]] = True
    blocked = np.where(syncs.calls >= 0, syncs.calls, syncs.rows)

    def find_last(at: Numbers, streams: Numbers, times: Numbers) -> Numbers:
        return work.find_last_before(syncs.devices[at], streams, times, syncs.ends[at])

    def select(event: Numbers, at: Numbers, last: Numbers, kind: str) -> Waits:
        ok = last >= 0
        return Waits(event[at[ok]], work.rows[last[ok]], syncs.rows[at[ok]], kind, "recorded")

    devices, streams = work.list_streams()
    context = syncs.find("Context Sync")
    indices, stream_indices = arrays.pair_equal(syncs.devices[context], devices)
    context = context[indices]
    stream = syncs.find("Stream Sync")
    stated = syncs.streams[stream]
    waits = [
        select(
            blocked,
            context,
            find_last(context, streams[stream_indices], syncs.starts[context]),
            "Context Sync",
        ),
        select(
            blocked,
            stream,
            find_last(stream, np.where(stated >= 0, stated, syncs.waiting[stream]), syncs.starts[stream]),
            "Stream Sync",
        ),
    ]
    is_vague = (syncs.recorded == _NONE) | (syncs.streams == _NONE)
    host, device = syncs.find("Event Sync"), syncs.find("Stream Wait Event")
    vague = int(np.count_nonzero(is_vague[host]) + np.count_nonzero(is_vague[device]))
    host, device = host[~is_vague[host]], device[~is_vague[device]]
    last = find_last(host, syncs.streams[host], syncs.recorded[host])
    waits.append(select(blocked, host, last, "Event Sync"))
    last = find_last(device, syncs.streams[device], syncs.recorded[device])
    first = work.find_first_after(syncs.devices[device], syncs.waiting[device], syncs.starts[device])
    delayed = np.full(syncs.rows.size, -1)
    delayed[device] = np.append(work.rows, -1)[first]
    waits.append(select(delayed, device, np.where(first >= 0, last, -1), "Stream Wait Event"))
    return waits, is_explained, vague


def _wait_for_all_streams(
    trace: Trace, calls: _Calls, work: LaunchedWork
) -> tuple[Numbers, Numbers, Numbers]:
    """Infer that a device-wide synchronization waits for the last activity launched before on each stream."""
    devices, streams = work.list_streams()
    at = np.repeat(np.arange(calls.rows.size), streams.size)
    devices, streams = (np.tile(column, calls.rows.size) for column in (devices, streams))
    last = work.find_last_before(devices, streams, calls.starts[at], calls.ends[at])
    ok = last >= 0
    return calls.rows[at[ok]], work.rows[last[ok]], calls.rows[at[ok]]


def _wait_for_completed(trace: Trace, calls: _Calls, work: LaunchedWork) -> tuple[Numbers, Numbers, Numbers]:
    """Infer that a stream or event synchronization waits for the last activity to end within the call.

    Only activity that was launched before the call counts.
    """
    by_end = arrays.sort_rows(work.ends, work.starts)
    last = np.searchsorted(work.ends[by_end], calls.ends, side="right") - 1
    last, ok = by_end[last], last >= 0
    ok &= work.ends[last] >= calls.starts
    ok &= (work.launched[last] <= calls.starts) | ~work.has_launch[last]
    return calls.rows[ok], work.rows[last[ok]], calls.rows[ok]


def _wait_between_streams(
    trace: Trace, calls: _Calls, work: LaunchedWork
) -> tuple[Numbers, Numbers, Numbers]:
    """Infer which GPU activity a stream waited for (StreamWaitEvent) if the tracer did not record the event.

    The waiting activity is the next one that the thread launches. The event is the last one that the thread
    recorded, and stands for the last activity launched before that on another stream. Left out if the activity did
    not wait for it.
    """
    events = trace.events
    runtime = categories.mask_events(events, categories.RUNTIME_CATEGORIES)
    records = np.flatnonzero(categories.match_names(events, _RECORD_PATTERN, runtime))
    called = np.flatnonzero(work.calls >= 0)
    pids, tids, times = (to_array(events[name], null) for name, null in (("pid", -1), ("tid", -1), ("ts", 0)))
    records = records[np.argsort(times[records], kind="stable")]
    rows = np.concatenate([calls.rows, records, work.calls[called]])
    sizes = np.cumsum([calls.rows.size, records.size])
    caller, recorder, launcher = np.split(number_pairs(pids[rows], tids[rows]), sizes)
    record = find_in_group(recorder, times[records], caller, calls.starts)
    next_work = find_in_group(launcher, work.launched[called], caller, calls.starts, after=True)
    ok = (record >= 0) & (next_work >= 0)
    rows, noted, waiting = calls.rows[ok], times[records[record[ok]]], called[next_work[ok]]

    streams = number_pairs(work.devices, work.streams)
    last = np.searchsorted(work.launched, noted, side="right") - 1
    # The last activity of another stream: that before the run of activities of one stream.
    edges = np.flatnonzero(np.diff(streams, prepend=-1))
    run_start = edges[np.searchsorted(edges, last, side="right") - 1]
    last = np.where((last >= 0) & (streams[last] == streams[waiting]), run_start - 1, last)
    ok = (last >= 0) & (work.ends[last] <= work.starts[waiting])
    return work.rows[waiting[ok]], work.rows[last[ok]], rows[ok]


_INFER = {
    _CONTEXT: _wait_for_all_streams,
    _STREAM: _wait_for_completed,
    _EVENT: _wait_for_completed,
    _BETWEEN: _wait_between_streams,
}


# GPU activity in order of launch: the last one launched on a stream before a time, and the first one after it.

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class LaunchedWork:
    """GPU activities in order of launch, start and end.

    Attributes:
        rows: Row of each activity in the table ``events``.
        calls: Row of its launch call, -1 if the table does not have it.
        devices: Its device, 0 if none is recorded.
        streams: Its stream; if none is recorded its thread, else 0.
        starts: Its start, ns.
        ends: Its end, ns.
        launched: The start of its launch call, ns. An activity without one, which was mostly launched before the
            recording, counts as launched when it starts.
        has_launch: Mask of the activities whose launch is recorded.
    """

    rows: Numbers
    calls: Numbers
    devices: Numbers
    streams: Numbers
    starts: Numbers
    ends: Numbers
    launched: Numbers
    has_launch: NDArray[np.bool_]

    def list_streams(self) -> tuple[Numbers, Numbers]:
        """Return the device and the stream of each stream that has an activity."""
        _, firsts, _ = find_values(number_pairs(self.devices, self.streams))
        return self.devices[firsts], self.streams[firsts]

    def find_last_before(self, devices: Numbers, streams: Numbers, times: Numbers, until: Numbers) -> Numbers:
        """Return the index of the last activity launched on each stream before a time, -1 for none.

        Args:
            devices: The device of each stream.
            streams: The streams.
            times: The time for each stream, ns.
            until: The end of the wait, ns: an activity without a recorded launch counts if it ends before.
        """
        numbers, groups = self._number_streams(devices, streams)
        launched, hidden = np.flatnonzero(self.has_launch), np.flatnonzero(~self.has_launch)
        last = select_values(
            launched, find_in_group(groups[launched], self.launched[launched], numbers, times)
        )
        if hidden.size:
            hidden = hidden[np.argsort(self.ends[hidden], kind="stable")]
            other = select_values(hidden, find_in_group(groups[hidden], self.ends[hidden], numbers, until))
            is_later = (other >= 0) & ((last < 0) | (self.starts[other] > self.starts[last]))
            last = np.where(is_later, other, last)
        return last

    def find_first_after(self, devices: Numbers, streams: Numbers, times: Numbers) -> Numbers:
        """Return the index of the first activity launched on each stream at or after a time (ns), -1 for none."""
        numbers, groups = self._number_streams(devices, streams)
        return find_in_group(groups, self.launched, numbers, times, after=True)

    def _number_streams(
        self, devices: Numbers, streams: Numbers
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return a number for each of the given streams, and for the stream of each activity."""
        numbers = number_pairs(np.append(devices, self.devices), np.append(streams, self.streams))
        return numbers[: len(devices)], numbers[len(devices) :]


def order_by_launch(trace: Trace) -> LaunchedWork:
    """Return the GPU activities in the table `launches`, in order of launch."""
    events, launches = trace.events, trace.launches
    rows = rows_of_ids(events, launches["device_event"])
    listed = np.flatnonzero(rows >= 0)
    rows, calls = rows[listed], rows_of_ids(events, launches["launch"])[listed]
    times, durations = to_array(events["ts"], 0), to_array(events["dur"], 0)
    starts, ends = times[rows], times[rows] + durations[rows]
    launched = np.where(calls >= 0, times[calls], starts) if rows.size else starts
    order = sort_rows(launched, starts, ends)
    rows = rows[order]
    stream = take_rows(events["stream"], rows)
    return LaunchedWork(
        rows,
        calls[order],
        to_array(events["device"], 0)[rows].astype(np.int64),
        np.where(is_present(stream), to_array(stream, 0), to_array(events["tid"], 0)[rows]).astype(np.int64),
        starts[order],
        ends[order],
        launched[order],
        is_present(launches["launch"])[listed][order],
    )
