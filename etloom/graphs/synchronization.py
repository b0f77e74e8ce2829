"""Who waits for device work: blocking calls until it ends, streams before they go on."""

from __future__ import annotations

import numpy as np
import polars as pl

from etloom.core import categories
from etloom.core.trace import Trace
from etloom.graphs.algorithms import EdgeKind, Int64Array
from etloom.graphs.draft import GraphDraft
from etloom.graphs.event_arrays import EventArrays
from etloom.graphs.gpu_activities import GpuActivities
from etloom.graphs.host_threads import HostThreads
from etloom.graphs.minimum_latencies import MinimumLatencies, low_quantile

SKEW_NS = 50_000
"""So long after the return of a waiting call may the work it waited for end: two clocks."""


LATE_NS = 20_000
"""Work that starts so long after its launch and what its stream did before waited for something else."""

SOON_NS = 20_000
"""Work that waited for another stream starts at most so long after that is done."""

QUEUE_CAPACITY = 1000
"""So much work in line, and a call that hands over more waits for room: CUDA's queue holds 1,024."""

MIN_BLOCKED_NS = 20_000
"""A call that hands over work and takes less did not wait for room."""

MAX_QUEUE_DELAY_NS = 100_000
"""A call that waited for room returns at most so long after some work has ended."""

_STREAM_WAIT_NAME = r"StreamWaitEvent"
_MAX_CANDIDATES = 8
"""How many ends of other work before a late start are looked at."""


class SynchronizationEdges:
    """The `waits` of a linked trace that fit its points; places are of `Hosts` and `Devices`.

    Of the host's: ``end`` (place of the point at which the call returns), ``on`` (place of the work), ``skewed``:
    the work seems to end after the return. Of the device's: ``waiter`` and ``source`` (places of work).
    ``lost``: waits that fit no points, or not even with skew.
    """

    def __init__(self, trace: Trace, events: EventArrays, built: HostThreads, work: GpuActivities) -> None:
        table = trace.sync_dependencies
        event, on = events.rows(table["event"]), events.rows(table["on"])
        source = np.where(on >= 0, work.place[on], -1) if on.size else on
        end = np.where(event >= 0, built.end[event], -1) if event.size else event
        waiter = np.where(event >= 0, work.place[event], -1) if event.size else event
        self.inferred = int((table["how"] == "inferred").sum())
        host = np.flatnonzero((source >= 0) & (end >= 0))
        device = np.flatnonzero((source >= 0) & (waiter >= 0))
        returned = built.time[end[host]] if host.size else np.zeros(0, np.int64)
        ended = work.end[source[host]] if host.size else returned
        # Work that starts after the return was not what the call waited for.
        fits = (ended <= returned + SKEW_NS) & (work.start[source[host]] <= returned)
        host = host[fits]
        self.end, self.on = end[host], source[host]
        self.returned, self.ended = returned[fits], ended[fits]
        self.skewed = self.ended > self.returned
        self.waiter, self.source = waiter[device], source[device]
        self.lost = len(table) - host.size - device.size

    def tell(self, events: EventArrays, work: GpuActivities, submission: Int64Array) -> None:
        """Add what streams waited for where no one recorded it.

        Work starts late, just after work of another stream ended, and between the launches of both the host
        made a stream wait for an event.
        """
        asked = events.start[
            events.names.like(_STREAM_WAIT_NAME) & events.cats.among(categories.RUNTIME_CATEGORIES)
        ]
        launched = work.launch >= 0
        submitted = work.by_call(submission, work.start.min(initial=0))
        waited = launched & (work.start - np.maximum(submitted, work.before) > LATE_NS)
        waited[self.waiter] = False
        late = np.flatnonzero(waited)
        by_end = np.argsort(work.end, kind="stable")
        last = np.searchsorted(work.end[by_end], work.start[late], side="right") - 1
        source = np.full(len(late), -1, np.int64)
        for back in range(_MAX_CANDIDATES):
            near = by_end[np.maximum(last - back, 0)] if len(by_end) else last
            fits = (source < 0) & (last >= back) & (work.stream[near] != work.stream[late])
            fits &= work.start[late] - work.end[near] <= SOON_NS
            fits &= np.searchsorted(asked, submitted[late]) > np.searchsorted(asked, submitted[near])
            source[fits] = near[fits]
        told = source >= 0
        self.waiter = np.append(self.waiter, late[told])
        self.source = np.append(self.source, source[told])
        self.inferred += int(told.sum())

    def queue(self, events: EventArrays, built: HostThreads, work: GpuActivities) -> None:
        """Add calls that waited for room in a full queue of work: for what had ended last when they returned."""
        launched = work.launch[work.launch >= 0]
        # A queue is of a process and its device; with several of them in a rank it is not known how full each is.
        if len(work.row) + len(launched) < QUEUE_CAPACITY or len(np.unique(events.pid[launched])) != 1:
            return
        hands = (
            events.names.as_in(launched) & events.cats.among(categories.RUNTIME_CATEGORIES) & (built.end >= 0)
        )
        calls = np.flatnonzero(hands)
        calls = calls[np.argsort(events.start[calls], kind="stable")]
        by_end = np.argsort(work.end, kind="stable")
        ended = np.searchsorted(work.end[by_end], events.end[calls], side="right")
        out_of_sight = int((work.launch < 0).sum())
        last = by_end[np.maximum(ended - 1, 0)]
        full = out_of_sight + np.arange(len(calls)) - ended >= QUEUE_CAPACITY
        full &= (events.end[calls] - events.start[calls] > MIN_BLOCKED_NS) & (ended > 0)
        full &= (events.end[calls] - work.end[last] <= MAX_QUEUE_DELAY_NS) & (
            work.end[last] > events.start[calls]
        )
        place = built.end[calls[full]]
        full[full] = ~np.isin(place, self.end)
        self.end = np.append(self.end, built.end[calls[full]])
        self.on = np.append(self.on, last[full])
        self.returned = built.time[self.end]
        self.ended = work.end[self.on]
        self.skewed = self.ended > self.returned
        self.inferred += int(full.sum())

    def entries(self, events: EventArrays, built: HostThreads) -> dict[str, int]:
        """By name of call the least time of one that found its work done already."""
        if not self.end.size:
            return {}
        entered = built.time[self.end - 1]
        late = np.zeros(len(built.time), bool)
        late[self.end[self.ended > entered]] = True
        places = np.unique(self.end)
        names = events.table["name"][built.row[places]].cast(pl.String)
        least: dict[str, int] = {}
        for place, name in zip(places, names, strict=True):
            if not late[place]:
                took = int(built.time[place] - built.time[place - 1])
                least[name] = min(took, least.get(name, took))
        return least

    def tail(self, built: HostThreads) -> int:
        """The low quantile from the end of work to the return of a call that waited for it."""
        waited = (self.ended > built.time[self.end - 1]) & ~self.skewed
        return low_quantile((self.returned - self.ended)[waited])

    def edges(
        self,
        draft: GraphDraft,
        events: EventArrays,
        built: HostThreads,
        work: GpuActivities,
        floors: MinimumLatencies,
    ) -> None:
        """Turn the last piece of each blocking call into a wait, and add the edges that end it."""
        ids = events.id
        place = np.unique(self.end)
        names = events.table["name"][built.row[place]].cast(pl.String)
        built.waits(place, np.array([floors.entry_of(name) for name in names], np.int64))
        draft.edges(
            EdgeKind.SYNC,
            np.where(self.skewed, work.begin[self.on], work.finish[self.on]),
            built.base + self.end,
            np.where(self.skewed, self.returned - work.start[self.on], floors.sync),
            ids[built.row[self.end]],
        )
        draft.edges(
            EdgeKind.STREAM_WAIT,
            work.finish[self.source],
            work.begin[self.waiter],
            floors.stream,
            ids[work.row[self.waiter]],
        )
