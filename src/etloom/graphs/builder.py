"""Build the dependency graph of a linked Trace or Job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import ArrayLike, NDArray

from etloom import collectives
from etloom.collectives.matching import get_roles
from etloom.core import categories
from etloom.core.errors import AnalysisError
from etloom.core.machine import run_both
from etloom.core.trace import Job, Trace
from etloom.graphs import algorithms, async_ranges, critical_paths, gpu_activities
from etloom.graphs.async_ranges import AsyncRanges, mask_async
from etloom.graphs.draft import GraphDraft
from etloom.graphs.event_arrays import EventArrays, Mask
from etloom.graphs.gpu_activities import GpuActivities
from etloom.graphs.graph import EdgeKind, Graph, Int32Array, Int64Array, PointRole
from etloom.graphs.host_threads import (
    HostThreads,
    add_host_threads,
    add_inter_thread_edges,
    find_rests,
    mark_thread_events,
    mask_idle_segments,
)
from etloom.graphs.minimum_latencies import MinimumLatencies
from etloom.graphs.waits import (
    StreamWaits,
    SynchronizationEdges,
    advance_blocking_calls,
    find_blocking_calls,
    find_stream_waits,
)
from etloom.linker import check_linked
from etloom.timeline.activity import explain_missing_times

_WORK_CATEGORIES = (
    categories.OPERATOR_CATEGORIES | categories.RUNTIME_CATEGORIES | categories.DEVICE_CATEGORIES
)
"""Categories of events that do something: annotations, Python functions or memory alone predict nothing."""


@dataclass(frozen=True, eq=False)
class DependencyGraph:
    """The dependency graph of a job, with its algorithms as methods.

    ``graph``: the arrays. ``min_latencies``: by rank, the minimum latencies it was built with. ``counts``: rank ->
    name -> number of events that did not fit, or that were inferred:

    ``threads_aside``: threads left out since they only poll or run Python. ``launches_without_point``. ``lost_waits``,
    ``skewed_waits``. ``inferred_waits``: not recorded but inferred from calls and times. ``handoffs``: dependencies
    between threads, inferred from their pauses. ``matched_communications``. ``local_communications``: not matched with
    other ranks. ``completion_waits``: rests that end after an asynchronous range does. ``hidden_communications``:
    ended while the host was busy, so that what waits for them is inferred.
    """

    graph: Graph
    min_latencies: Mapping[int, MinimumLatencies]
    counts: Mapping[int, Mapping[str, int]]

    def critical_path(self, end: int | None = None, begin_ns: int | None = None) -> pl.DataFrame:
        """Return the edges of the critical (zero-slack) path to the point ``end``, by time.

        Args:
            end: a point; default: the last point of the graph.
            begin_ns: stop looking back at this time; default: the first time of the graph.

        Returns:
            One row per edge: rank, kind, event (id in `events` of the rank), start_ns, time_ns, unexplained_ns. The
            times sum to that of ``end`` minus ``begin_ns``.
        """
        return critical_paths.find_critical_path(self.graph, end, begin_ns)

    def makespan(self, time: Int64Array | None = None) -> int:
        """Return the time from the earliest to the latest point of the graph, ns.

        ``time``: default: as recorded.
        """
        return algorithms.compute_makespan(self.graph, time)

    def compute_times(self, lag: Int64Array | None = None, start: Int64Array | None = None) -> Int64Array:
        """Return the time of each point, ns, after changes of edge lags or starts; see `algorithms.compute_times`."""
        return algorithms.compute_times(self.graph, lag, start)

    def slack(self, ends: ArrayLike | None = None) -> Int64Array:
        """Return the slack of each point, int64 ns: how much later the point could be without increasing the makespan.

        Args:
            ends: points that must not come later; default: no point may come after the last one.
        """
        return algorithms.compute_slack(self.graph, ends)

    def reachable(self, points: ArrayLike, *, backward: bool = False) -> NDArray[np.bool_]:
        """Return a mask of ``points`` and all points reachable from them along edges (``backward``: against edges)."""
        return algorithms.mark_reachable(self.graph, points, backward=backward)


def build_graph(
    job: Job | Trace, min_latencies: MinimumLatencies | Mapping[int, MinimumLatencies] | None = None
) -> DependencyGraph:
    """Build the dependency graph of all ranks of a job, or of one rank.

    Args:
        job: linked traces.
        min_latencies: known minimum latencies, for all ranks or by rank; those of other ranks are measured.

    Raises:
        LinkError: a trace is not linked.
    """
    traces: Mapping[int, Trace] = job if isinstance(job, Job) else {job.rank or 0: job}
    draft = GraphDraft()
    used_latencies: dict[int, MinimumLatencies] = {}
    counts: dict[int, dict[str, int]] = {}
    drafted: dict[int, _RankParts] = {}
    for rank, trace in traces.items():
        check_linked(trace, rank)
        provided = (
            min_latencies if isinstance(min_latencies, MinimumLatencies) else (min_latencies or {}).get(rank)
        )
        drafted[rank], used_latencies[rank], counts[rank] = _add_rank(
            draft, trace, rank, provided, len(traces) > 1
        )
    async_ranges.mark_range_waits([(parts.threads, parts.range_rests) for parts in drafted.values()])
    if len(traces) > 1:
        _add_collectives(draft, drafted, counts)
    for rank in traces:
        drafted.pop(rank).add_edges(draft)
    return DependencyGraph(draft.build(), used_latencies, counts)


def check_timed(dependencies: DependencyGraph, job: Job) -> None:
    """Raise AnalysisError if the job has no timed operators, calls or GPU activity, or none with a duration."""
    has_work = any(categories.mask_events(trace.events, _WORK_CATEGORIES).any() for trace in job.values())
    if not len(dependencies.graph) or not has_work:
        raise next(filter(None, map(explain_missing_times, job.values())), None) or AnalysisError(
            "the run contains no timed operators and no GPU activity",
            remedy="record with torch.profiler and CPU activity",
        )
    if not dependencies.makespan():
        raise AnalysisError(
            "all events of the run begin and end at the same time", remedy="record it again, with durations"
        )


class _RankParts(NamedTuple):
    """A rank's host threads, GPU activities and asynchronous ranges, whose edges are added to the graph last.

    Other ranks may still change them before.
    """

    ids: Int32Array
    threads: HostThreads
    activities: GpuActivities
    ranges: AsyncRanges
    range_rests: pl.DataFrame
    participations: pl.DataFrame | None

    def add_edges(self, draft: GraphDraft) -> None:
        """Add the edges along host threads, and from start to end of GPU activities and ranges, to the graph draft."""
        self.threads.add_edges(draft, self.ids)
        self.activities.add_edges(draft, self.ids)
        self.ranges.add_edges(draft)


def _add_collectives(
    draft: GraphDraft, drafted: Mapping[int, _RankParts], counts: Mapping[int, dict[str, int]]
) -> None:
    """Add edges between ranks for matching communications; count matched and local communications of each rank."""
    participations = pl.concat(
        parts.participations for parts in drafted.values() if parts.participations is not None
    )
    latencies: dict[tuple[int, str], Int64Array] = {}
    for rank, parts in drafted.items():
        latencies[rank, "device"] = parts.activities.min_latency
        latencies[rank, "host"] = parts.ranges.min_latency
    matches = add_collective_edges(draft, participations, latencies)
    for row in matches.iter_rows(named=True):
        counts[row["rank"]]["matched_communications"] = row["matched"]
        counts[row["rank"]]["local_communications"] = row["local"]


def _add_rank(
    draft: GraphDraft, trace: Trace, rank: int, provided: MinimumLatencies | None, has_peers: bool
) -> tuple[_RankParts, MinimumLatencies, dict[str, int]]:
    """Add the points of a rank and the edges between its threads and streams to the draft of the graph.

    Edges within threads and GPU activities follow in `_RankParts.add_edges`. ``provided`` latencies are not measured.
    """
    events = EventArrays(trace.events)
    (activities, submission, delay, stream_waits), (marked, excluded_threads) = run_both(
        lambda: _collect_submissions(trace, events, provided), lambda: mark_thread_events(events), len(events)
    )
    threads = add_host_threads(draft, events, marked, activities.calls, submission, rank)
    gpu_activities.add_gpu_points(draft, events, activities, rank)
    waits = SynchronizationEdges(trace, events, threads, activities)
    latencies = provided
    if latencies is None:
        launch, stream = gpu_activities.measure_latencies(activities, submission)
        latencies = MinimumLatencies(
            delay, launch, stream, waits.measure_sync(threads), waits.measure_entries(events, threads)
        )
    (idle, rests), _ = run_both(
        lambda: _find_idle_segments(events, threads),
        lambda: waits.infer_queue_waits(events, threads, activities),
        len(events),
    )
    launches_without_point = gpu_activities.add_stream_edges(draft, events, activities, threads, latencies)
    handoffs = add_inter_thread_edges(draft, events, threads, idle, rests)
    participations = find_participations(trace, events, rank, has_peers)
    ranges = async_ranges.add_async_ranges(draft, events, threads, participations, rank)
    range_rests, hidden = async_ranges.add_range_waits(draft, trace, events, threads, idle, ranges)
    waits.add_edges(draft, events, threads, activities, latencies, rank)
    stream_waits.add_edges(draft, events, activities, latencies)
    if participations is not None:
        participations = locate_participations(participations, events, activities, ranges)
    counts = {
        "threads_aside": excluded_threads,
        "launches_without_point": launches_without_point,
        "lost_waits": waits.lost,
        "inferred_waits": waits.inferred + stream_waits.inferred,
        "skewed_waits": int(waits.skewed.sum()),
        "handoffs": handoffs,
        "completion_waits": range_rests.height,
        "hidden_communications": hidden,
        "matched_communications": 0,
        "local_communications": int(gpu_activities.mask_communication(events, activities).sum())
        if participations is None
        else participations.height,
    }
    parts = _RankParts(events.id, threads, activities, ranges, range_rests, participations)
    return parts, latencies, counts


def _collect_submissions(
    trace: Trace, events: EventArrays, provided: MinimumLatencies | None
) -> tuple[GpuActivities, Int64Array, int, StreamWaits]:
    """Return a rank's GPU activities, the time at which each launch call submitted its work, the assumed delay from
    submission to start, and the waits between streams. All times in ns."""
    activities = gpu_activities.collect_gpu_activities(trace, events)
    submission, delay = gpu_activities.estimate_submissions(events, activities, provided)
    blocking = find_blocking_calls(trace, events, activities)
    earliest = submission.copy()
    earliest[blocking] = events.start[activities.calls[blocking]]
    stream_waits = find_stream_waits(trace, events, activities, earliest)
    submission = advance_blocking_calls(events, activities, submission, blocking, stream_waits)
    return activities, submission, delay, stream_waits


def _find_idle_segments(events: EventArrays, threads: HostThreads) -> tuple[Mask, Int64Array]:
    """Return a mask of possibly idle thread segments, and the points at which pauses longer than `MIN_REST_NS` end."""
    idle = mask_idle_segments(events, threads)
    return idle, find_rests(threads, idle)


# Add edges between ranks for collectives: every rank arrives, then the data is transferred.
#
# `etloom.collectives` matches the participations. A collective instance is accepted if the last participation that
# others wait for starts before the first one that waits for it ends; other participations stay local to their rank.


def find_participations(trace: Trace, events: EventArrays, rank: int, has_peers: bool) -> pl.DataFrame | None:
    """Return a table of the communications in which a rank takes part; None if the graph does not need them.

    The graph needs them if the job has several ranks, or the rank has asynchronous ranges.
    """
    is_needed = has_peers or mask_async(events).any()
    return trace.compute_once(collectives.list_participations, rank) if is_needed else None


def locate_participations(
    participations: pl.DataFrame, events: EventArrays, activities: GpuActivities, ranges: AsyncRanges
) -> pl.DataFrame:
    """Return the communications of a rank that have points in the graph, with these points and their times.

    Adds the points ``begin`` and ``finish``, their times ``start`` and ``end``, and ``place``: the index in the
    ``min_latency`` of the activities or the ranges.
    """
    row = events.rows(participations["event"])
    ranged = np.full(len(events), -1, np.int64)
    ranged[ranges.row] = np.arange(len(ranges.row))
    frames = []
    for side, source, place in (("device", activities, activities.place[row]), ("host", ranges, ranged[row])):
        has = place >= 0
        place = place[has].astype(np.int64)
        frames.append(
            participations.filter(has).with_columns(
                where=pl.lit(side),
                place=place,
                start=source.start[place],
                end=source.end[place],
                begin=source.begin[place],
                finish=source.finish[place],
            )
        )
    return pl.concat(frames)


def add_collective_edges(
    draft: GraphDraft, participations: pl.DataFrame, min_latencies: Mapping[tuple[int, str], Int64Array]
) -> pl.DataFrame:
    """Add arrival and transfer edges between ranks for communications that match across ranks.

    Args:
        min_latencies: by rank and where ("host", "device"), the minimum latencies from start to end; lowered in place.

    Returns:
        rank, matched, local: number of participations that were matched, and that stay local.
    """
    issuers = collectives.match_participations(participations).select("rank", "event", "instance")
    table = _check_instances(participations.join(issuers, on=("rank", "event"), maintain_order="left"))
    matched = table.filter("accepted").sort("instance", "rank", "start", maintain_order=True)
    instances = matched.group_by("instance", maintain_order=True).agg(
        pl.col("arrival").first(),
        least=pl.when(pl.all_horizontal(pl.col("sends", "receives").all()))
        .then((pl.col("end") - pl.col("start")).min())
        .otherwise(0),
    )
    points = draft.add_points(instances["arrival"], -1, PointRole.ARRIVE, -1)
    matched = matched.join(
        instances.select("instance", "least", point=points), on="instance", maintain_order="left"
    )
    senders, receivers = matched.filter("sends"), matched.filter("receives")
    draft.add_edges(EdgeKind.ARRIVAL, senders["begin"], senders["point"], 0, senders["event"])
    kind = np.where(
        (receivers["collective"] == "message").fill_null(False), EdgeKind.MESSAGE, EdgeKind.TRANSFER
    )
    draft.add_edges(
        kind,
        receivers["point"],
        receivers["finish"],
        (receivers["end"] - receivers["arrival"]).clip(0),
        receivers["event"],
    )
    for (rank, side), rows in receivers.partition_by("rank", "where", as_dict=True).items():
        min_latencies[rank, side][rows["place"].to_numpy()] = rows["least"].to_numpy()
    return table.group_by("rank").agg(matched=pl.col("accepted").sum(), local=(~pl.col("accepted")).sum())


def _check_instances(participations: pl.DataFrame) -> pl.DataFrame:
    """Add ``sends``, ``receives``, ``arrival`` (of the last rank, ns) and ``accepted`` to a table of communications.

    ``accepted``: the communication is matched and the times of all participants are consistent.

    ``sends``: others cannot end before it starts. ``receives``: it cannot end before those start.
    """
    role_pairs = [
        get_roles(*row) for row in participations.select("rank", "source", "root", "collective").iter_rows()
    ]
    sends, receives = (pl.Series([pair[i] for pair in role_pairs], dtype=pl.Boolean) for i in (0, 1))
    # gloo and NCCL do not move a message before its receive buffer exists.
    message = (participations["collective"] == "message").fill_null(False)
    arrival = pl.col("start").filter(pl.col("sends")).max().over("instance")
    participations = participations.with_columns(
        sends=sends | message, receives=receives | message
    ).with_columns(arrival=pl.coalesce(arrival, pl.col("start").max().over("instance")))
    leaves = pl.col("end").filter(pl.col("receives")).min().over("instance")
    is_consistent = (leaves >= pl.col("arrival")).fill_null(True)
    return participations.with_columns(accepted=pl.col("instance").is_not_null() & is_consistent)
