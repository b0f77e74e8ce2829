"""Blocking copies and launches: calls that submit GPU activity and return only after waiting for it or its stream.

A call waits for its copy if its API is synchronous (cudaMemcpy, hipMemcpyWithStream) or if it copies to pageable host
memory (CUDA Runtime API, "API synchronization behavior"). A copy from pageable memory first waits for its stream and
returns once the data is staged, perhaps before the copy ends. For other calls the times decide: the call outlasts the
work queued before the copy, and the copy.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import polars as pl

from etloom.core import arrays, categories, nesting, text_codes
from etloom.core.arrays import rows_of_ids
from etloom.core.trace import Trace

SYNCHRONOUS_COPY = r"(?i)(?:^|@)(?:cuda|cu|hip|musa|mu|cnrt|aclrt|top|tx)Memcpy"
"""Names of copying calls that wait unless they also match `ASYNCHRONOUS`; profilers may put a prefix and @ before."""

ASYNCHRONOUS = r"(?i)Async|Memcpy(?:DtoD|Peer)"

_TO_PAGEABLE = r"(?i)->\s*Pageable"
_FROM_PAGEABLE = r"(?i)Pageable\s*->"
_NEVER_WAITS = r"(?i)Pinned|DtoD|PtoP|Device\s*->\s*Device|DeviceToDevice"
"""Copies that an asynchronous call never waits for."""

SKEW_NS = 50_000
"""An activity may seem to end this long after the call that waited for it returned: the clocks differ."""

MIN_WAIT_NS = 20_000
"""A call that outlasts the work queued before it by chance does so for less."""

SOON_NS = 20_000
"""A copy that waited for another stream starts at most this long after that stream is done."""

BLOCKING_SHARE = 0.9
"""If at least this share of the long activities ends within the launch call, all launches are taken to wait for their
activity, as with CUDA_LAUNCH_BLOCKING=1."""

_MIN_LONG_ACTIVITIES = 5
"""Fewer long activities do not show how launches behave."""


def find_blocking_calls(
    trace: Trace, is_explained: np.ndarray
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, str]]:
    """Infer dependencies of calls that block until the GPU activity they submit, or its stream, is done.

    Args:
        trace: The Trace, with `launches`.
        is_explained: Mask of the events that are calls whose waits are recorded.

    Returns:
        event, on and sync, as row numbers, and kind, as in the table `sync_dependencies`.
    """
    submissions = _collect_submissions(trace.events, trace.launches, is_explained)
    waits_for_copy, waits_for_stream = submissions.find_copies()
    blocking_launches = submissions.find_blocking_launches() & ~waits_for_copy
    waits_for_stream &= ~waits_for_copy & ~blocking_launches
    other_stream = submissions.find_other_stream_waits(waits_for_copy | waits_for_stream)
    ordered = other_stream >= 0
    parts = [
        (submissions.call, submissions.work, waits_for_copy, "Blocking Copy"),
        (submissions.call, submissions.before, waits_for_stream, "Blocking Copy"),
        (submissions.call, submissions.work, blocking_launches, "Blocking Launch"),
        (submissions.work, other_stream, ordered, "Blocking Copy"),
    ]
    return [(event[mask], on[mask], submissions.call[mask], kind) for event, on, mask, kind in parts]


def list_blocking_copies(trace: Trace) -> pl.Series:
    """Return the ids of the memcpy calls that certainly block until the copy ends, whatever the recorded times."""
    events, launches = trace.events, trace.launches
    work = rows_of_ids(events, launches["device_event"])
    is_copy = arrays.select_values(
        categories.mask_events(events, categories.MEMCPY_CATEGORIES), work, absent=False
    )
    submissions = _collect_submissions(events, launches.filter(pl.Series(is_copy)))
    ids: pl.Series = trace.events["id"][submissions.call[submissions.certain]]
    return ids


def _collect_submissions(
    events: pl.DataFrame, launches: pl.DataFrame, is_explained: np.ndarray | None = None
) -> _Submissions:
    """Pair each GPU activity that has times with the launch call that submitted it, unless that is explained."""
    work, call = (rows_of_ids(events, launches[name]) for name in ("device_event", "launch"))
    timed = (work >= 0) & (call >= 0)
    for name in ("ts", "dur"):
        timed[timed] &= arrays.is_present(arrays.take_rows(events[name], work[timed]))
    if is_explained is not None:
        timed[timed] &= ~is_explained[call[timed]]
    return _Submissions(events, work[timed], call[timed])


def _match(texts: pl.Series, *patterns: str) -> list[np.ndarray]:
    """Return one mask per regular expression: the texts that contain a match."""
    column = text_codes.CodedColumn(texts)
    return [column.match_pattern(pattern) for pattern in patterns]


class _Submissions:
    """GPU activities paired with the host calls that submitted them, and the times of both.

    Rows ``work`` and ``call``; ``before``: the row of the last activity to end among those that start earlier on the
    stream (-1 for none), with its end ``ready``.
    """

    def __init__(self, events: pl.DataFrame, work: np.ndarray, call: np.ndarray) -> None:
        self.events, self.work, self.call = events, work, call
        self.starts = arrays.to_array(events["ts"], 0)
        self.start, self.called = self.starts[work], self.starts[call]
        self.end, self.returned = (
            self.starts[rows] + np.maximum(arrays.to_array(arrays.take_rows(events["dur"], rows), 0), 0)
            for rows in (work, call)
        )
        name = events["name"]
        is_synchronous, self.is_asynchronous = _match(
            arrays.take_rows(name, call), SYNCHRONOUS_COPY, ASYNCHRONOUS
        )
        self.is_synchronous = is_synchronous & ~self.is_asynchronous
        self.from_pageable, self.to_pageable, self.never_waits = _match(
            arrays.take_rows(name, work), _FROM_PAGEABLE, _TO_PAGEABLE, _NEVER_WAITS
        )
        self.is_copy = categories.mask_events(events, categories.MEMCPY_CATEGORIES)[work]

    @cached_property
    def ends(self) -> np.ndarray:
        """The end of each event, ns."""
        ends: np.ndarray = self.starts + np.maximum(arrays.to_array(self.events["dur"], 0), 0)
        return ends

    @cached_property
    def ready(self) -> np.ndarray:
        return np.where(self.before >= 0, self.ends[self.before], np.iinfo(np.int64).min // 2)

    @property
    def certain(self) -> np.ndarray:
        """Mask of the copies whose call certainly blocks until they end, whatever the recorded times."""
        certain: np.ndarray = self.is_copy & ((self.is_synchronous & ~self.from_pageable) | self.to_pageable)
        return certain

    @cached_property
    def is_activity(self) -> np.ndarray:
        """Mask of the events that are GPU activity."""
        return categories.mask_events(self.events, categories.DEVICE_CATEGORIES)

    @cached_property
    def activities(self) -> np.ndarray:
        """The rows of GPU activity, sorted by end time."""
        rows = np.flatnonzero(self.is_activity)
        by_end: np.ndarray = rows[np.argsort(self.ends[rows], kind="stable")]
        return by_end

    @cached_property
    def before(self) -> np.ndarray:
        """For each activity, the row of the activity that ends last among earlier starts on its stream; -1 for none."""
        rows = np.flatnonzero(self.is_activity)
        rows = rows[arrays.sort_rows(self.starts[rows], self.ends[rows])]
        keys = self.events.select("pid", "device", pl.coalesce("stream", "tid").alias("stream"))
        keys = arrays.take_rows(keys, rows)
        before = np.full(self.events.height + 1, -1, np.int64)
        for part in nesting.group_by_track(nesting.track_codes(keys, ("pid", "device", "stream"))):
            stream_rows = rows[part]
            ends = self.ends[stream_rows]
            is_last = ends == np.maximum.accumulate(ends)
            last = np.maximum.accumulate(np.where(is_last, np.arange(part.size), 0))
            before[stream_rows[1:]] = stream_rows[last[:-1]]
        preceding: np.ndarray = before[self.work]
        return preceding

    def find_copies(self) -> tuple[np.ndarray, np.ndarray]:
        """Return two masks: copies whose call waits for the copy, and copies whose call waits for earlier stream
        work.
        """
        certain, from_pageable = self.certain, self.from_pageable
        never = self.is_asynchronous & self.never_waits
        begun = self.start <= self.returned
        # Times that show a wait: the call outlasts both the work queued before the copy, and the copy.
        skew = np.where(certain, SKEW_NS, 0)
        outlasts_queue = (self.ready - self.called > MIN_WAIT_NS) & (self.returned >= self.ready - skew)
        late = self.end - self.returned
        shown = (late <= 0) | (outlasts_queue & (late <= SKEW_NS) & ~from_pageable)
        waits_for_copy = self.is_copy & begun & np.where(certain, late <= SKEW_NS, shown & ~never)
        staged = from_pageable | certain
        starts_soon = self.start - self.returned <= SKEW_NS
        return waits_for_copy, self.is_copy & staged & outlasts_queue & starts_soon

    def find_other_stream_waits(self, blocking: np.ndarray) -> np.ndarray:
        """Return, for each synchronous copy, the row of the activity on another stream that it waited for.

        Such copies run on the default stream, which waits for other streams. -1 for none.
        """
        other = np.full(len(self.work), -1, np.int64)
        copies = np.flatnonzero(blocking & self.is_synchronous)
        if not copies.size:
            return other
        device = arrays.to_array(self.events["device"], -1)
        for number in np.unique(device[self.work[copies]]):
            rows = self.activities[device[self.activities] == number]
            here = copies[device[self.work[copies]] == number]
            at = np.searchsorted(self.ends[rows], self.start[here], side="right") - 1
            last = rows[np.maximum(at, 0)]
            waited = (at >= 0) & (self.start[here] - self.ends[last] <= SOON_NS)
            waited &= (self.ends[last] > self.ready[here]) & (
                self.ends[last] - self.called[here] > MIN_WAIT_NS
            )
            other[here[waited]] = last[waited]
        return other

    def find_blocking_launches(self) -> np.ndarray:
        """Return a mask of activities that ran within their launch call; all False unless launches block.

        Launches are taken to block if nearly all long activities end within their launch call.
        """
        within: np.ndarray = (self.start >= self.called) & (self.end <= self.returned)
        long = (self.end - self.start > MIN_WAIT_NS) & ~self.is_copy
        if long.sum() < _MIN_LONG_ACTIVITIES or within[long].mean() < BLOCKING_SHARE:
            return np.zeros(len(self.work), bool)
        return within
