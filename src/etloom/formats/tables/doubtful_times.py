"""Judges the times that a recorder wrote, once and for every format, before anything is computed from them.

Recorders write times that cannot be: zero where they do not know the time, durations that overflowed, clocks of
another epoch. An event whose start is unknown is left out of ``events``: it belongs to no span, gap or graph. A
duration that is impossible becomes null. Both are counted in stats as lost data, with the values that were recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from etloom.core.arrays import is_in, rows_of_ids, to_array, to_series
from etloom.core.categories import ANNOTATION_CATEGORIES, DEVICE_CATEGORIES, mask_events
from etloom.core.schema import TABLES, Stat
from etloom.core.trace import Trace

_SECOND = 10**9
_HOUR, _DAY = 3600 * _SECOND, 86400 * _SECOND
_FAR = 100
"""Times further from the recording than this many times its length (and than an hour or a day) are not of it."""
_FEW = 100
"""One of so many events, or three, are few: a few strays need not be as far away as a second window."""
_CONTAINED = 3
"""Activities of one stream follow each other, or overlap a little: none contains so many of other launches."""
_OFFSETS = (*range(1, 17), *(1 << power for power in range(5, 18)))
"""Distances (rows) of the later activities that are compared: kernels of a device graph share one launch."""
_MIN_ZEROS = 3
"""So many events without a time or duration do not begin a recording by chance."""
_CROWD = 16
"""Least number of events of one thread at the zero, if most events are there, with which a zero means unknown: a few
nested events may begin at one time."""
_SPAN = "PyTorch Profiler"
"""Beginning of the name of the event that spans a recording of Kineto."""
_ANNOTATIONS = ANNOTATION_CATEGORIES | {"gpu_user_annotation"}
_LARGE = 1 << 20
_ROUNDING_NS = 1000
_DEVICE_LIMIT, _LINK_LIMIT = 50_000, 2_000
"""GB/s (bytes per ns) that no memory of a device, and no link between host and device, reaches."""
_LINKS = "HtoD|DtoH|HostToDevice|DeviceToHost"
_ZERO_IS_NULL = frozenset({"nccl-profiler"})
"""Formats whose clock starts long before the first event, so that a time of exactly zero is always unknown."""


@dataclass(frozen=True)
class Recording:
    """The time that a recording covers: what lies outside of ``low`` to ``high`` (ns) is not of it."""

    zero: int
    """The recorder's zero, ns."""
    first: int
    """The first start that is known, ns."""
    low: int
    high: int
    is_zero_far: bool = False
    """The zero is far from the recording, so that a start at the zero is unknown."""
    is_zero_null: bool = False
    """A start at the zero is unknown in any case."""
    stop: int | None = None
    """When the profiler stopped (`find_stop`), ns."""


def judge_times(trace: Trace) -> Trace:
    """Return the trace without unknown starts and impossible durations, which are counted in its stats.

    Tables that are not in memory are left as they are.
    """
    if "events" in trace.loaders or trace.events.is_empty():
        return trace
    events = trace.events
    stats: list[Stat] = []
    zero = trace.meta.get("base_ns") or 0
    is_zero_null = not _ZERO_IS_NULL.isdisjoint(trace.meta.get("formats", ()))
    is_zero_null |= has_crowd(events["ts"], zero, lambda: events.filter(events["ts"] == zero))
    recording = find_recording(events["ts"].drop_nulls(), zero, is_zero_null)
    if (events["cat"] == "Trace").any():
        recording = replace(recording, stop=find_stop([events]))
    judged = judge_events(events, recording, stats)
    if "kernels" not in trace.loaders:
        judged = _clear_impossible_transfers(judged, trace.kernels, stats)
    changed = {} if judged is events else {"events": judged}
    for name in ("memory", "counters", "flows"):
        if name not in trace.loaders:
            table = trace.table(name)
            rest = drop_unknown_starts(name, table, recording, stats)
            changed |= {} if rest is table else {name: rest}
    if judged.height < events.height:
        changed |= drop_orphans({**trace.tables, **changed}, judged["id"])
    if not stats:
        return trace
    return Trace({**trace.tables, **changed}, trace.meta, loaders=trace.loaders).with_stats(stats)


def has_crowd(starts: pl.Series, zero: int, read_threads: Callable[[], pl.DataFrame]) -> bool:
    """Return whether most events, and `_CROWD` or more of one thread, start at the recorder's zero: it means unknown.

    Args:
        starts: Starts of all events, ns.
        zero: The recorder's zero, ns.
        read_threads: Returns pid and tid of the events at the zero.
    """
    count = int((starts == zero).sum())
    if count < _CROWD or 2 * count <= len(starts):
        return False
    return bool(read_threads().group_by("pid", "tid").len()["len"].max() >= _CROWD)  # type: ignore[operator]


def find_recording(starts: pl.Series, zero: int, is_zero_null: bool = False) -> Recording:
    """Find the time that most events cover.

    Args:
        starts: Starts of the events, ns, without null.
        zero: The recorder's zero, ns.
        is_zero_null: Whether a start at the zero is always unknown.
    """
    smallest, largest = starts.min(), starts.max()
    if isinstance(smallest, int) and isinstance(largest, int) and smallest <= zero <= largest:
        starts = starts.filter(starts != zero)
    if starts.is_empty():  # then nothing contradicts the zeros
        return Recording(zero, zero, zero - _HOUR, zero + _HOUR, is_zero_null=is_zero_null)
    first, last, allowed = _find_window(starts.to_numpy())
    is_far = max(first - zero, zero - last) > max(_SECOND, last - first)
    return Recording(zero, first, first - allowed, last + allowed, is_far, is_zero_null)


def _find_window(starts: np.ndarray) -> tuple[int, int, int]:
    """Return the first and last start of the recording, and the distance (ns) from them that is still plausible."""
    low, high = int(starts.min()), int(starts.max())
    if high - low <= _HOUR:
        return low, high, max(_HOUR, _FAR * (high - low))
    ordered = np.sort(starts)
    cuts = np.concatenate([[0], np.flatnonzero(np.diff(ordered) > _HOUR) + 1, [len(ordered)]])
    largest = int(np.diff(cuts).argmax())
    inside = int(cuts[largest + 1] - cuts[largest])
    if 2 * inside <= len(ordered):  # no part of the file is the recording more than another
        return low, high, _HOUR
    low, high = int(ordered[cuts[largest]]), int(ordered[cuts[largest + 1] - 1])
    is_few = len(ordered) - inside <= max(3, len(ordered) // _FEW)
    return low, high, max(_HOUR if is_few else _DAY, _FAR * (high - low))


def judge_events(events: pl.DataFrame, recording: Recording, stats: list[Stat]) -> pl.DataFrame:
    """Return the events without those of unknown start, and with impossible durations as null.

    Args:
        events: Rows of the table events, by start; the same object is returned if nothing is changed.
        recording: The time that the whole recording covers.
        stats: Receives a row per kind of doubt.
    """
    events = drop_unknown_starts("events", events, recording, stats)
    if recording.stop is not None:
        events = _cut_open_annotations(events, recording.stop, stats)
    ends = events["ts"] + events["dur"]
    latest = ends.max()
    if isinstance(latest, int) and latest > recording.high:
        late = (ends > recording.high).fill_null(False).to_numpy()
        events = _clear_durations(events, late, "ends long after the recording", stats)
    overlong, room = _find_overlong_activities(events)
    if not len(overlong):
        return events
    mask = np.zeros(events.height, bool)
    mask[overlong] = True
    reason = f"contains later activities of its stream; at most {int(room.sum()):,} ns until the next ones"
    return _clear_durations(events, mask, reason, stats)


def drop_orphans(tables: dict[str, pl.DataFrame], ids: pl.Series) -> dict[str, pl.DataFrame]:
    """Return the tables that describe events, without the rows of events that are not among ``ids``."""
    return {
        name: frame.filter(frame["event"].is_null() | frame["event"].is_in(ids.implode()))
        for name, frame in tables.items()
        if any(column.name == "event" and column.refers == "events" for column in TABLES[name].columns)
    }


def drop_unknown_starts(
    name: str, table: pl.DataFrame, recording: Recording, stats: list[Stat]
) -> pl.DataFrame:
    """Remove the rows whose time is the recorder's zero instead of a time, or is not of the recording."""
    starts = table["ts"]
    first, last = starts.min(), starts.max()
    if not isinstance(first, int) or not isinstance(last, int):
        return table
    has_zero = first <= recording.zero <= last and (
        recording.is_zero_null or recording.zero != recording.first
    )
    if not has_zero and recording.low <= first and last <= recording.high:
        return table
    is_unknown = (starts == recording.zero).fill_null(False).to_numpy() & has_zero
    if name == "events":
        is_unknown = is_unknown & _lacks_time(table, recording)
    elif not (recording.is_zero_far or recording.is_zero_null):
        is_unknown = np.zeros_like(is_unknown)
    is_outside = ~is_unknown & ~starts.is_between(recording.low, recording.high).fill_null(True).to_numpy()
    for mask, stat, reason in (
        (is_unknown, "read.unknown_time", "the time is the recorder's zero"),
        (is_outside, "read.outside_recording", "the time is far from that of the other rows"),
    ):
        if mask.any():
            example = f"{name}: {reason}, such as {_describe(table, int(mask.argmax()))}"
            stats.append(Stat(stat, "data_loss", int(mask.sum()), example))
    is_lost = is_unknown | is_outside
    return table.filter(~is_lost) if is_lost.any() else table


def _lacks_time(events: pl.DataFrame, recording: Recording) -> np.ndarray:
    """Return a mask of the events that state no time if they start at the zero: their duration is zero, too.

    A long event may begin at the zero and reach into the recording, and a few that take no time may begin a recording
    that is near to its zero.
    """
    durations = to_array(events["dur"], -1)
    if recording.is_zero_null:
        return np.ones(events.height, np.bool_)
    is_timeless = (durations == 0) & is_in(events["ph"], ["X"])
    is_at_zero = (events["ts"] == recording.zero).fill_null(False).to_numpy()
    if not recording.is_zero_far and np.count_nonzero(is_timeless & is_at_zero) < _MIN_ZEROS:
        return np.zeros(events.height, np.bool_)
    if recording.is_zero_far:
        distance = recording.first - recording.zero
        is_timeless |= ~((0 < distance <= _HOUR) & (durations >= distance))
    return np.asarray(is_timeless)


def _describe(table: pl.DataFrame, row: int) -> str:
    label = table["name"][row] if "name" in table.columns else f"row {table['id'][row]}"
    return f"{label} at {table['ts'][row]:,} ns"


def _clear_durations(events: pl.DataFrame, mask: np.ndarray, reason: str, stats: list[Stat]) -> pl.DataFrame:
    """Set durations to null, and count them with their sum as it was recorded."""
    durations = events["dur"]
    row, total = int(mask.argmax()), int(durations.filter(mask).cast(pl.Float64).sum())
    example = f"{events['name'][row]}: {reason}; {total:,} ns as recorded, now null"
    stats.append(Stat("read.impossible_duration", "data_loss", int(mask.sum()), example))
    return events.with_columns(durations.set(pl.Series(mask), None))


def find_stop(parts: Iterable[pl.DataFrame]) -> int | None:
    """Return the end of the last event that is no annotation, if Kineto states the span of the recording; else None.

    Kineto ends an annotation with its scope, which may be seconds after the profiler stopped.

    Args:
        parts: All events, as one table or several.
    """
    has_span, ends = False, []
    for events in parts:
        spans = events["name"].filter(events["cat"] == "Trace")
        has_span |= spans.cast(pl.String).str.starts_with(_SPAN).any()
        is_annotation = to_series(mask_events(events, _ANNOTATIONS))
        end = (events["ts"] + events["dur"]).filter(~is_annotation).max()
        ends += [end] if isinstance(end, int) else []
    return max(ends, default=None) if has_span else None


def _cut_open_annotations(events: pl.DataFrame, stop: int, stats: list[Stat]) -> pl.DataFrame:
    """Cut annotations that were open when the profiler stopped to the time ``stop`` of `find_stop`."""
    ends = events["ts"] + events["dur"]
    is_annotation = to_series(mask_events(events, _ANNOTATIONS))
    is_open = is_annotation & (ends > stop).fill_null(False) & (events["ts"] < stop)
    if not is_open.any():
        return events
    row = is_open.arg_max() or 0
    example = f"{events['name'][row]}: {ends[row] - stop:,} ns after the last event"
    stats.append(Stat("read.open_annotation", "info", int(is_open.sum()), example))
    return events.with_columns(pl.when(is_open).then(stop - pl.col("ts")).otherwise("dur").alias("dur"))


def _find_overlong_activities(events: pl.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of device activities that contain several later ones of their stream and another launch.

    Also returns the time (ns) of each until the next activity of the stream. Kernels of one graph launch may overlap
    in any way: its branches share the stream.
    """
    none = np.zeros(0, np.int64)
    rows = np.flatnonzero(mask_events(events, DEVICE_CATEGORIES) & (to_array(events["stream"], -1) >= 0))
    if len(rows) <= _CONTAINED:
        return none, none
    starts = to_array(events["ts"], 0)[rows]
    ends = starts + to_array(events["dur"], 0)[rows]
    if not (ends[:-_CONTAINED] > starts[_CONTAINED:]).any():
        return none, none
    stream, device = (to_array(events[name], 0)[rows].astype(np.int64) for name in ("stream", "device"))
    track = stream * (int(device.max()) + 1) + device
    if track.min() >= 0 and track.max() < 1 << 16:
        track = track.astype(np.uint16)  # numpy sorts these without comparing them
    order = np.argsort(track, kind="stable")  # events are in the order of time
    rows, starts, ends, track = (values[order] for values in (rows, starts, ends, track))
    launch = to_array(events["correlation"], -1)[rows]
    launch = np.where(launch > 0, launch, -1 - np.arange(len(launch)))
    candidates = np.flatnonzero(ends[:-_CONTAINED] > starts[_CONTAINED:])
    contained = np.zeros(len(candidates), np.int64)
    room = np.full(len(candidates), np.iinfo(np.int64).max)
    for offset in _OFFSETS:
        later = candidates + offset
        exists = later < len(rows)
        later = np.minimum(later, len(rows) - 1)
        is_inside = (
            exists & (track[later] == track[candidates]) & (launch[later] != launch[candidates])
            & (starts[later] > starts[candidates]) & (ends[later] < ends[candidates])
        )  # fmt: skip
        contained += is_inside
        room = np.where(is_inside, np.minimum(room, starts[later] - starts[candidates]), room)
    overlong = contained >= _CONTAINED
    return rows[candidates[overlong]], room[overlong]


def _clear_impossible_transfers(
    events: pl.DataFrame, kernels: pl.DataFrame, stats: list[Stat]
) -> pl.DataFrame:
    """Set durations to null in which a copy would have been faster than any memory or link."""
    sizes = kernels["bytes"]
    largest = sizes.max()
    if not isinstance(largest, int) or largest < _LARGE:
        return events
    copies = kernels.filter(sizes >= _LARGE)
    rows = rows_of_ids(events, copies["event"])
    is_found = rows >= 0
    rows, moved = rows[is_found], copies["bytes"].to_numpy()[is_found]
    lengths = to_array(events["dur"], -1)[rows]
    is_link = events["name"].gather(rows).cast(pl.String).str.contains(_LINKS).fill_null(False).to_numpy()
    limit = np.where(is_link, _LINK_LIMIT, _DEVICE_LIMIT)
    impossible = rows[(lengths >= 0) & (moved > (lengths + _ROUNDING_NS) * limit.astype(float))]
    if not len(impossible):
        return events
    mask = np.zeros(events.height, bool)
    mask[impossible] = True
    return _clear_durations(events, mask, "more bytes than a link or memory can move in this time", stats)
