"""Times without activity on any stream of a rank, and their causes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.core import categories
from etloom.core.arrays import join_columns, make_frame, select_values, take_rows, to_array
from etloom.core.intervals import Intervals, union
from etloom.core.schema import TIME_LIMIT
from etloom.timeline.activity import MAX_LAUNCH_LATENCY_NS, find_unknown_time

if TYPE_CHECKING:
    from etloom.analyses.findings.rank_view import RankView

CAUSES = (
    *("data", "tokenizer", "save", "compile", "profiler", "compute", "allocator"),
    *("copy", "sync", "pause", "call", "launch", "device", "unrecorded"),
)
"""Causes of a gap between activities, which is shared among them by their overlap with it in time.

In this order, the host:

- was loading data, tokenizing text, saving a checkpoint, compiling, held up by the profiler, computing itself
  (operators that launch nothing), or allocating device memory;
- returned, after the device had become idle, from a copy out of pageable memory or from another call that synchronizes;
- ran no operator for `LONG_PAUSE_NS` or more within an annotated step, or was in one call of the runtime for that long;
- launched late (or nothing more) for another reason.

Next is the device: the work was launched in time and started late (the stream waited, or launch delay).

A launch explains a gap until its call returned, also if the call began before the device had become idle, and the usual
launch latency thereafter: a longer rest is a gap of its own, of the device.

The last cause is what the recording lacks: before its first activity, if that started long after its launch, the device
worked for what was launched before; after its last one, calls may have launched work that was not recorded.

A stall of the host may take more time than the gap that it causes, because the device still had queued work. Launches
after it are then late because of the stall, until they add up to the time that this work covered. While the device only
communicates, perhaps because another rank is late, the host loses nothing.
"""
MIN_GAP_NS = 1_500
"""A device needs about 1 us between two activities: less is not a gap."""
LONG_PAUSE_NS = 1_000_000
"""Python needs less between two operators of a loop."""
MIN_COMPUTE_NS = 50_000
"""An operator that launches nothing and takes this long itself computes on the host; others only prepare launches."""
PAGEABLE = r"(?i)(?:HtoD|HostToDevice).*pageable"
"""Matches copies from pageable memory to the device, which block the host."""
_USUAL_LATENCY_NS = 5_000
"""Usual time from the return of a launch to the start of the activity on an idle device, in ns."""
_BEGIN_SHARE = 0.01
"""A gap is at the beginning of the recording if less than this share of its length was busy before it."""
_SYNC_RETURN_NS = 5_000
"""A synchronizing call returns slightly later than the work it waited for, in ns."""
_GAP_SCHEMA: dict[str, pl.DataType | type[pl.DataType]] = {
    "start": pl.Int64,
    "end": pl.Int64,
    "gap_ns": pl.Int64,
    "cause": pl.Enum(CAUSES),
    "is_late_effect": pl.Boolean,
    "event": pl.Int64,
    "step": pl.Int64,
    "stream": pl.Int64,
    "name": pl.Categorical,
}


def find_gaps(view: RankView) -> pl.DataFrame:
    """Return the times in which no stream of a rank is active, from the start to the end of its active time.

    Returns:
        start, end, gap_ns, cause (`CAUSES`), is_late_effect (the stall that caused it was over before it began), event
        (the responsible host call: the one that waited, or that launched the activity after the gap), and the step,
        stream and name of that activity; null after the last activity.
    """
    if view.activity.basis != "device" or view.window is None:
        return pl.DataFrame(schema=_GAP_SCHEMA)
    idle = view.busy.gaps(*view.window)
    is_gap = idle.ends - idle.starts >= MIN_GAP_NS
    starts, ends = idle.starts[is_gap], idle.ends[is_gap]
    following = _find_next_activities(view, ends)
    called = _take_following(view, "launch_ts", following, 0)
    launch = _take_following(view, "launch", following, -1)
    returned = _take_following(view, "launch_end", following, TIME_LIMIT)
    # The host is late if its call began after the device had become idle, or returned then, or if no activity follows.
    is_last = ends > view.busy.starts[-1]
    in_call = (launch >= 0) & (called <= starts) & (returned > starts + _USUAL_LATENCY_NS)
    late = ((launch >= 0) & (called > starts)) | is_last | in_call
    until = np.where(is_last, ends, np.where(late & ~in_call, called, starts))
    stalls = dict(view.compute_once(list_stalls))
    cause, responsible = _attribute_gaps(view, stalls, starts, until, late, is_last)
    stalls["sync"] = Intervals.of(view.sync_calls["ts"], view.sync_calls["end"])
    exposed = view.activity.times["communication"] - view.activity.times["computation"]
    blocked = {name: times - exposed for name, times in stalls.items()}
    stall_ns, stall = _measure_stalls(blocked, late & ~is_last & ~in_call, until, view.window[0])
    hidden_ns = np.maximum(stall_ns - union(blocked.values()).covered(starts, until), 0)
    event = np.where(responsible < 0, launch, responsible)
    # A wait that was over before the gap began is the call to name, not the launch that came late.
    waited = _find_last_before(view.sync_calls, until)
    is_waited = (cause == CAUSES.index("launch")) & (stall == CAUSES.index("sync")) & (waited >= 0)
    is_waited &= 2 * hidden_ns > ends - starts
    event[is_waited] = _take(view.sync_calls["id"], waited)[is_waited]
    is_late_effect = np.zeros(len(starts), np.bool_)
    gaps = _Gaps(starts, ends, cause, event, following, stall_ns, hidden_ns, stall, is_late_effect)
    gaps = _split_rows(
        gaps, late & ~is_last & (ends - returned > MAX_LAUNCH_LATENCY_NS), returned, "device", launch
    )
    gaps = _mark_unrecorded(view, gaps)
    gaps = _share_gaps(view, stalls, _extend_stalls(gaps))
    gaps = gaps.select(gaps.end - gaps.start >= MIN_GAP_NS)
    columns: dict[str, np.ndarray | pl.Series] = {
        "start": gaps.start,
        "end": gaps.end,
        "gap_ns": gaps.end - gaps.start,
        "cause": pl.Series(CAUSES, dtype=pl.Enum(CAUSES))[gaps.cause],
        "is_late_effect": gaps.is_late_effect,
        "event": pl.Series(gaps.event).set(pl.Series(gaps.event == -1), None),
    }
    work = take_rows(view.activities[["step", "stream", "name"]], gaps.following)
    table = make_frame(columns).hstack(work)
    return join_columns(table[name].cast(dtype) for name, dtype in _GAP_SCHEMA.items())


@dataclass(frozen=True)
class _Gaps:
    """The gaps of a rank as columns, while their causes are determined; ``cause`` and ``event`` are completed in place.

    Attributes:
        start, end: the time of each gap.
        cause: index in `CAUSES`.
        event: the responsible call, -1 for none.
        following: the row of the activity after the gap, -1 for none.
        stall_ns: how long the host stalled after the late launch that ended the previous gap.
        hidden_ns: the part of that time before the gap, while the device still worked.
        stall: its longest cause.
        is_late_effect: whether the stall that caused the gap was over before it began.
    """

    start: NDArray[np.int64]
    end: NDArray[np.int64]
    cause: NDArray[np.int64]
    event: NDArray[np.int64]
    following: NDArray[np.int64]
    stall_ns: NDArray[np.int64]
    hidden_ns: NDArray[np.int64]
    stall: NDArray[np.int64]
    is_late_effect: NDArray[np.bool_]

    def select(self, rows: NDArray[np.bool_] | NDArray[np.intp]) -> _Gaps:
        """Return some rows."""
        return _Gaps(*(getattr(self, field.name)[rows] for field in fields(self)))

    def cut(self, times: Intervals, cause: int | None) -> _Gaps:
        """Return a row for each of ``times``, which lie in the gaps; ``cause``: default that of the gap."""
        parts = self.select(np.searchsorted(self.start, times.starts, side="right") - 1)
        causes = parts.cause if cause is None else np.full(len(times), cause)
        return replace(parts, start=times.starts, end=times.ends, cause=causes)


def list_stalls(view: RankView) -> dict[str, Intervals]:
    """Return the times at which the host is blocked by something other than the device, by cause."""
    stalls = {
        "data": view.data_loading,
        "tokenizer": Intervals.of(view.tokenizer_calls["ts"], view.tokenizer_calls["end"]),
        "save": view.saving - (view.busy - view.busy_computing),  # its copies were not queued before it
        "compile": view.compiling,
        "profiler": view.profiling,
        "compute": view.host_computing,
        "allocator": view.allocating,
    }
    # No operator runs in many of these either: a pause is what they do not explain.
    return {**stalls, "pause": view.pausing - union(stalls.values()), "call": view.long_calling}


def _attribute_gaps(
    view: RankView,
    stalls: Mapping[str, Intervals],
    starts: NDArray[np.int64],
    until: NDArray[np.int64],
    late: NDArray[np.bool_],
    is_last: NDArray[np.bool_],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the cause of each idle gap (index in `CAUSES`) and the id of the responsible host call (-1: the late
    launch).

    Args:
        stalls: The result of `list_stalls`.
        starts: Start of each gap.
        until: The start of the late launch that ends the gap; of a gap without one, its own start.
        late: True if a late launch ends the gap, or no activity follows.
        is_last: True if nothing ends it.
    """
    half = np.maximum(until - starts, 1)
    wait = _find_last_before(view.sync_calls, until)
    released = _take(view.sync_calls["end"], wait)
    is_synced = (wait >= 0) & (released >= starts - _SYNC_RETURN_NS)
    # A call that begins when the device has been idle for long does not wait for it: the host was late before.
    called = _take(view.sync_calls["ts"], wait)
    is_synced &= called <= starts + MAX_LAUNCH_LATENCY_NS
    # What waits while a graph is captured or compiled belongs to that.
    is_synced &= 2 * view.compiling.covered(called, released) <= np.maximum(released - called, 1)
    # Before the first activity there is nothing to wait for; after the last one, the host launches nothing more.
    is_synced &= (starts >= view.busy.starts[0]) & ~is_last
    allocation = _find_last_before(view.allocations, until)
    holds = {name: times.covered(starts, until) * 2 > half for name, times in stalls.items()}
    holds["allocator"] &= (allocation >= 0) & (_take(view.allocations["end"], allocation) > starts)
    holds["copy"] = is_synced & np.isin(_take(view.sync_calls["id"], wait), _find_pageable_waits(view))
    holds["sync"] = is_synced
    holds["pause"] &= ~is_last
    conditions = [late & holds[name] for name in CAUSES[: len(holds)]]
    cause = np.select([*conditions, late], range(len(conditions) + 1), CAUSES.index("device"))
    responsible = np.full(len(starts), -1)
    for name, calls, rows in (
        ("copy", view.sync_calls, wait),
        ("sync", view.sync_calls, wait),
        ("allocator", view.allocations, allocation),
    ):
        is_cause = cause == CAUSES.index(name)
        responsible[is_cause] = _take(calls["id"], rows)[is_cause]
    return cause, responsible


def _find_pageable_waits(view: RankView) -> NDArray[np.int64]:
    """Return the ids of host calls that wait for a copy from pageable memory: the call that launches it, or another
    wait in the same operator."""
    copies = view.activities.filter(view.match_activities(view.activities, PAGEABLE))["launch"].drop_nulls()
    if copies.is_empty():
        return np.zeros(0, np.int64)
    operators = view.parents[view.find_rows(copies)]
    operators = operators[operators >= 0]
    operators = operators[view.match_categories(categories.OPERATOR_CATEGORIES)[operators]]
    calls = view.sync_calls["id"]
    same_operator = calls.filter(pl.Series(np.isin(view.parents[view.find_rows(calls)], operators)))
    return np.concatenate([copies.to_numpy(), same_operator.to_numpy()]).astype(np.int64)


def _split_rows(
    gaps: _Gaps,
    selected: NDArray[np.bool_],
    at: NDArray[np.int64],
    cause: str,
    event: NDArray[np.int64],
) -> _Gaps:
    """Split each selected gap at a time; the second part gets another cause and event, and no stall before it."""
    split = np.flatnonzero(selected)
    if not split.size:
        return gaps
    end = gaps.end.copy()
    end[split] = at[split]
    launch_cause = np.full(split.size, CAUSES.index("launch"))
    rest = _Gaps(
        at[split],
        gaps.end[split],
        np.full(split.size, CAUSES.index(cause)),
        event[split],
        gaps.following[split],
        np.zeros(split.size, np.int64),
        np.zeros(split.size, np.int64),
        launch_cause,
        np.zeros(split.size, np.bool_),
    )
    return _join_gaps(replace(gaps, end=end), rest)


def _join_gaps(*parts: _Gaps) -> _Gaps:
    """Return the rows of several tables of gaps in order of start."""
    order = np.argsort(np.concatenate([part.start for part in parts]), kind="stable")
    names = [field.name for field in fields(_Gaps)]
    return _Gaps(*(np.concatenate([getattr(part, name) for part in parts])[order] for name in names))


def _mark_unrecorded(view: RankView, gaps: _Gaps) -> _Gaps:
    """Return the gaps; those during which the device may have done what was not recorded have the cause ``unrecorded``.

    These are the time before the first activity if it did not start soon after its launch; a gap soon thereafter inside
    a long call that copies, which waits for all earlier work; and the time after the last activity from the first
    launch call on whose activity is missing.
    """
    unrecorded = (gaps.start < view.busy.starts[0]) & (find_unknown_time(view.trace) > 0)
    calls = view.blocking_copies
    if calls.height:
        at = np.searchsorted(calls["ts"].to_numpy(), gaps.start, side="right") - 1
        inside = (at >= 0) & (calls["end"].to_numpy()[at] >= gaps.end)
        begins = view.busy.before(gaps.start) <= _BEGIN_SHARE * (gaps.end - gaps.start)
        unrecorded |= inside & begins & (gaps.cause == CAUSES.index("device"))
    gaps.cause[unrecorded] = CAUSES.index("unrecorded")
    launches = view.unlinked_launches
    launches = launches[launches >= view.busy.ends[-1]]
    if not launches.size:
        return gaps
    is_last = (gaps.start >= view.busy.ends[-1]) & (gaps.end > launches[0])
    return _split_rows(
        gaps, is_last, np.maximum(gaps.start, launches[0]), "unrecorded", np.full(len(gaps.start), -1)
    )


def _share_gaps(view: RankView, stalls: Mapping[str, Intervals], gaps: _Gaps) -> _Gaps:
    """Return the gaps that the host causes divided among its stalls, by the time in which each overlaps them.

    What no stall covers keeps the cause of the gap, unless that is one of the stalls: then the host was launching.
    Without a wait for the device the host would have launched earlier by the time for which it was blocked: a gap
    after the wait is its effect for so long, also while the host pauses, and not longer.
    """
    is_host = (gaps.cause <= CAUSES.index("launch")) & ~gaps.is_late_effect
    host = gaps.select(is_host)
    rest = Intervals.of(host.start, host.end)
    is_released = np.isin(host.cause, (CAUSES.index("copy"), CAUSES.index("sync")))
    blocked = stalls["sync"].covered(np.concatenate(([-TIME_LIMIT], host.end))[:-1], host.end)
    released = Intervals.of(host.start[is_released], np.minimum(host.start + blocked, host.end)[is_released])
    parts = [gaps.select(~is_host)]
    shared = [name for name in CAUSES if name in stalls and name not in ("compute", "sync")]
    for name in shared:
        covered = rest & stalls[name]
        if name in ("pause", "call"):
            covered = covered - released
        parts.append(host.cut(covered, CAUSES.index(name)))
        rest = rest - covered
    parts.append(host.cut(rest & released, None))
    remainder = host.cut(rest - released, None)
    is_stall = np.isin(remainder.cause, [CAUSES.index(name) for name in (*shared, "copy", "sync")])
    remainder.cause[is_stall] = CAUSES.index("launch")
    remainder.event[is_stall] = _take_following(view, "launch", remainder.following, -1)[is_stall]
    return _join_gaps(*parts, remainder)


def _measure_stalls(
    stalls: dict[str, Intervals], late: NDArray[np.bool_], until: NDArray[np.int64], begin: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return for each gap how long (ns) the host stalled between the previous late launch and the launch of the gap,
    and the longest cause. ``begin``: start of the rank's active time; stalls before it are not counted."""
    stall_ns, stall = np.zeros(len(until), np.int64), np.full(len(until), CAUSES.index("launch"))
    if late.any():
        ends = np.maximum.accumulate(until[late])
        since = np.concatenate(([begin], ends[:-1]))
        covered = np.array([times.covered(since, ends) for times in stalls.values()])
        stall_ns[late] = union(stalls.values()).covered(since, ends)
        stall[late] = np.array([CAUSES.index(name) for name in stalls])[covered.argmax(axis=0)]
    return stall_ns, stall


def _extend_stalls(gaps: _Gaps) -> _Gaps:
    """Attribute gaps that late launches end to an earlier host stall, until they add up to the time of the stall.

    The last of these gaps is split: what exceeds the time of the stall keeps its cause.
    """
    cause, event, gap, stall_ns = gaps.cause.copy(), gaps.event.copy(), gaps.end - gaps.start, gaps.stall_ns
    launch = CAUSES.index("launch")
    # The device may have had work during all of a stall: then no gap is its own.
    is_hidden = (cause == launch) & (2 * gaps.hidden_ns > gap)
    cause[is_hidden] = gaps.stall[is_hidden]
    is_late_effect = is_hidden.copy()
    due_ns = np.where(is_hidden, gaps.hidden_ns, gap)
    is_launched = gaps.following >= 0
    places = np.flatnonzero(cause < launch)
    rest, previous, responsible = 0, -1, -1
    for i, place in enumerate(places.tolist()):
        earlier, own = rest if cause[place] == previous else 0, int(stall_ns[place] - gap[place])
        if earlier <= own:  # else most of the lead was lost at an earlier stall
            responsible = int(event[place])
        rest, previous = max(0, earlier + own), cause[place]
        if not rest:
            continue
        end = int(places[i + 1]) if i + 1 < len(places) else len(gap)
        rows = place + 1 + np.flatnonzero(is_launched[place + 1 : end] & (cause[place + 1 : end] == launch))
        before = np.cumsum(gap[rows]) - gap[rows]
        is_due = before < rest
        due = rows[is_due]
        cause[due], event[due], is_late_effect[due] = cause[place], responsible, True
        due_ns[due] = rest - before[is_due]
        rest = max(0, rest - int(gap[rows].sum()))
    extended = replace(gaps, cause=cause, event=event, is_late_effect=is_late_effect)
    return _split_rows(
        extended, is_late_effect & (gap - due_ns >= MIN_GAP_NS), gaps.start + due_ns, "launch", gaps.event
    )


def _find_next_activities(view: RankView, times: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the row of the first GPU activity that starts at or after each time, -1 for none."""
    following = np.searchsorted(view.activities["ts"].to_numpy(), times)
    return np.where(following == view.activities.height, -1, following)


def _take_following(
    view: RankView, column: str, following: NDArray[np.int64], absent: int
) -> NDArray[np.int64]:
    """Return the values of a column of the table `activities` at the rows ``following``; ``absent`` for nulls and row
    -1."""
    values = to_array(view.activities[column], absent).astype(np.int64)
    return select_values(values, following, absent)


def _find_last_before(calls: pl.DataFrame, until: NDArray[np.int64]) -> NDArray[np.intp]:
    """Return the row of the call that was the last to end before each time ``until`` (calls are sorted by end), -1 for
    none."""
    return np.searchsorted(calls["end"].to_numpy(), until, side="right") - 1


def _take(column: pl.Series, rows: NDArray[np.intp]) -> NDArray[np.int64]:
    """Return the values of a column at the row numbers ``rows``; the value for row -1 is arbitrary."""
    return column.to_numpy().astype(np.int64)[rows] if len(column) else np.zeros(len(rows), np.int64)
