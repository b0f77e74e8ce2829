"""From a linked Trace or Job to the graph of what waits for what.

    events       the recorded events as arrays
    hosts        threads as chains of points, each piece the time of the innermost open event
    devices      device work, launch, order on a stream
    waits        blocking calls, streams that wait for streams
    threads      threads that work in turns
    collectives  what ranks do together: arrival of all, then transfer
    floors       the least that each kind of edge takes

The definition, and what it does not cover, is in docs/decisions/0020-0023.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import polars as pl

from etloom.core.errors import LinkError
from etloom.core.trace import Job, Trace
from etloom.graphs import collective_edges as together
from etloom.graphs import gpu_activities as device
from etloom.graphs.algorithms import Graph, Int32Array
from etloom.graphs.collective_edges import AsyncRanges
from etloom.graphs.draft import GraphDraft
from etloom.graphs.event_arrays import EventArrays
from etloom.graphs.gpu_activities import GpuActivities
from etloom.graphs.host_threads import HostThreads, add_host_threads, mask_idle_segments
from etloom.graphs.inter_thread import add_inter_thread_edges, find_rests
from etloom.graphs.minimum_latencies import MinimumLatencies
from etloom.graphs.synchronization import SynchronizationEdges

__all__ = ["DependencyGraph", "MinimumLatencies", "build_graph"]


@dataclass(frozen=True, eq=False)
class DependencyGraph:
    """The graph of a job, by rank the floors it was built with, and what did not fit it: rank -> name -> count.

    Counted: ``threads_aside`` (left out: they only ask for events or run Python), ``launches_without_point``,
    ``lost_waits``,
    ``inferred_waits`` (not recorded, but told from calls and times), ``skewed_waits``, ``handoffs`` (told from
    rests), ``local_communications`` (not matched with other ranks), ``matched_communications``,
    ``completion_waits`` (rests that end after an asynchronous range does).
    """

    graph: Graph
    floors: Mapping[int, MinimumLatencies]
    counts: Mapping[int, Mapping[str, int]]


def build_graph(
    job: Job | Trace, floors: MinimumLatencies | Mapping[int, MinimumLatencies] | None = None
) -> DependencyGraph:
    """The dependency graph of all ranks of a job, or of one.

    floors: known floors, of all ranks or by rank; those of other ranks are measured. Raises LinkError for a
    trace that is not linked.
    """
    traces: Mapping[int, Trace] = job if isinstance(job, Job) else {job.rank or 0: job}
    draft = GraphDraft()
    used: dict[int, MinimumLatencies] = {}
    counts: dict[int, dict[str, int]] = {}
    drawn: dict[int, _RankParts] = {}
    for rank, trace in traces.items():
        if not trace.meta.get("linked"):
            raise LinkError("the trace is not linked", where=f"rank {rank}", remedy="etloom.link(trace)")
        given = floors if isinstance(floors, MinimumLatencies) else (floors or {}).get(rank)
        drawn[rank], used[rank], counts[rank] = _add_rank(draft, trace, rank, given, len(traces) > 1)
    if len(traces) > 1:
        parts = pl.concat(one.parts for one in drawn.values() if one.parts is not None)
        places = {
            key: floor
            for rank, one in drawn.items()
            for key, floor in (((rank, "device"), one.work.floor), ((rank, "host"), one.off.floor))
        }
        for row in together.add_collective_edges(draft, parts, places).iter_rows(named=True):
            counts[row["rank"]]["matched_communications"] = row["matched"]
            counts[row["rank"]]["local_communications"] = row["local"]
    for rank in traces:
        drawn.pop(rank).edges(draft)
    return DependencyGraph(draft.graph(), used, counts)


class _RankParts(NamedTuple):
    """What is drawn of a rank, but the pieces of time, which others may still change."""

    ids: Int32Array
    built: HostThreads
    work: GpuActivities
    off: AsyncRanges
    parts: pl.DataFrame | None

    def edges(self, draft: GraphDraft) -> None:
        """Add the pieces of time to the draft."""
        self.built.edges(draft, self.ids)
        self.work.edges(draft, self.ids)
        self.off.edges(draft)


def _add_rank(
    draft: GraphDraft, trace: Trace, rank: int, given: MinimumLatencies | None, others: bool
) -> tuple[_RankParts, MinimumLatencies, dict[str, int]]:
    events = EventArrays(trace.events)
    work = device.collect_gpu_activities(trace, events)
    submission, delay = device.estimate_submissions(events, work, given)
    built, aside = add_host_threads(draft, events, work.calls, submission, rank)
    device.add_gpu_points(draft, events, work, rank)
    waits = SynchronizationEdges(trace, events, built, work)
    waits.tell(events, work, submission)
    if given is None:
        launch, stream = device.measure_latencies(work, submission)
        given = MinimumLatencies(delay, launch, stream, waits.tail(built), waits.entries(events, built))
    waits.queue(events, built, work)
    pointless = device.add_stream_edges(draft, events, work, built, given)
    still = mask_idle_segments(events, built)
    gaps = find_rests(built, still)
    handoffs = add_inter_thread_edges(draft, events, built, still, gaps)
    parts = together.find_participations(trace, events, rank, others)
    off = together.add_async_ranges(draft, events, built, parts, rank)
    awaited = together.add_range_waits(draft, built, gaps, off)
    waits.edges(draft, events, built, work, given)
    if parts is not None:
        parts = together.locate_participations(parts, events, work, off)
    counts = {
        "threads_aside": aside,
        "launches_without_point": pointless,
        "lost_waits": waits.lost,
        "inferred_waits": waits.inferred,
        "skewed_waits": int(waits.skewed.sum()),
        "handoffs": handoffs,
        "completion_waits": awaited,
        "matched_communications": 0,
        "local_communications": together.count_gpu_communications(events, work)
        if parts is None
        else parts.height,
    }
    return _RankParts(events.id, built, work, off, parts), given, counts
