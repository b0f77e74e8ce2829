"""Simulate how much time a job would save without the time losses of its ranks, on the job's dependency graph.

A loss is time that disappears from tracks of a rank: each edge of the graph becomes shorter by the part of it that lies
in that time. What other ranks, streams or threads do at the same time then limits what the job gains: a rank that only
waits less for a late one gains nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.analyses.findings.finding import BOTH, DEVICE, HOST, Finding
from etloom.analyses.helpers.dependency_graph import build_dependencies
from etloom.core.errors import AnalysisError
from etloom.core.intervals import Intervals, union
from etloom.core.steps import StepBefore, find_step_before
from etloom.core.trace import Job
from etloom.graphs import quality
from etloom.graphs.algorithms import edges_by_rank, mask_transfers
from etloom.graphs.contraction import ChainLags, ContractedGraph, contract_graph, mark_extremes
from etloom.graphs.graph import EdgeKind, Graph, Int32Array, Int64Array, UInt8Array
from etloom.timeline.activity import find_steps, find_window

MAX_EVENTS = 8_000_000
"""The gain in a larger job is not simulated: its graph takes too much memory."""
DEVICE_KINDS = (
    EdgeKind.KERNEL,
    EdgeKind.COMPLETE,
    EdgeKind.TRANSFER,
    EdgeKind.MESSAGE,
    EdgeKind.STREAM,
    EdgeKind.OVERLAP,
)
"""Edges of device tracks and of communication."""


class JobGains:
    """Simulates how much time a job would save without the time losses of findings.

    ``duration_ns``: the time that counts, from the start of the first annotated step (else of the recording) to the
    end of the last activity or step; null if the graph does not explain the recording, and then all gains are null.
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    @cached_property
    def is_too_large(self) -> bool:
        """True if the job has more than `MAX_EVENTS` events, too many to simulate gains."""
        return sum(trace.rows("events") for trace in self._job.values()) > MAX_EVENTS

    @cached_property
    def _graph(self) -> Graph | None:
        job = self._job
        if self.is_too_large:
            return None
        try:
            graph = build_dependencies(job).graph
        except AnalysisError:
            return None
        return None if quality.find_unexplained_ranks(graph, job) else graph

    @cached_property
    def _begin(self) -> int:
        starts = [find_steps(trace)["start"] for trace in self._job.values()]
        assert self._graph is not None
        return min((int(start[0]) for start in starts if len(start)), default=int(self._graph.time.min()))

    @cached_property
    def _end(self) -> int:
        assert self._graph is not None
        ends = [window[1] for trace in self._job.values() if (window := find_window(trace))]
        return min(int(self._graph.time.max()), max(ends, default=int(self._graph.time.max())))

    @cached_property
    def duration_ns(self) -> int | None:
        """The job duration without the recorder's overhead, ns; None if no graph explains the recording."""
        if self._graph is None:
            return None
        recorded_end = int(self._graph.time[self._counts].max())
        return self._end - self._begin - (recorded_end - self._baseline_end)

    @cached_property
    def recorder(self) -> RecorderOverhead | None:
        """The overhead of the recorder on the host; None if it is unknown or negligible."""
        before = find_step_before(self._job)
        if self._graph is None or before is None or self._step_ends.size < 2:
            return None
        points = np.searchsorted(self._graph.time, self._step_ends, side="right")
        model = StepModel(self._contraction, np.searchsorted(self._contraction.points, points))
        return fit_overhead(self._graph, self._contraction, model, before, self._begin)

    def compute_gain(self, findings: Iterable[tuple[int, Finding]]) -> int | None:
        """Return the time (ns) that the job would save without the losses of findings, as (rank, finding) pairs; None
        if unknown."""
        graph = self._graph
        if graph is None:
            return None
        parts, gains = [np.zeros(0, np.int32)], [np.zeros(0, np.int64)]
        for rank, tracks, lost, share in _merge_losses(findings):
            edges, lost = self._edges[rank][tracks], lost.clip(self._begin, self._end)
            source, target = graph.source[edges], self._target[edges]
            if 4 * edges.size < graph.time.size:  # of many ranks: only its part of the graph
                shorter = lost.covered(graph.time[source], graph.time[target])
            else:
                before = lost.before(graph.time)
                shorter = before[target] - before[source]
            affected = np.flatnonzero(shorter)
            parts.append(edges[affected].astype(np.int32))
            gains.append(np.round(share * shorter[affected]).astype(np.int64))
        return self._compare_end(*_sum_by_edge(parts, gains))

    @cached_property
    def transfer_gain(self) -> int | None:
        """The time (ns) that the job saves if transferring data takes no time, as `simulate --set "comm x0"`."""
        graph = self._graph
        if graph is None:
            return None
        edges = np.flatnonzero(mask_transfers(graph, self._job)).astype(np.int32)
        return self._compare_end(edges, graph.lag_of(edges))

    @cached_property
    def _step_ends(self) -> Int64Array:
        return find_step_ends(self._job, self._end)

    def _compare_end(self, edges: Int32Array, gain: Int64Array) -> int:
        """Return how much earlier the job ends (ns, at least 0) if the lags of the graph edges ``edges`` are reduced by
        ``gain`` (ns each)."""
        graph, contraction = self._graph, self._contraction
        assert graph is not None
        before = graph.lag_of(edges)
        if self.recorder is not None:
            before = self.recorder.take_from(graph, edges, before)
        shorter = np.minimum(gain, before)
        lags = self._baseline.copy(for_paths=False)
        contraction.change(lags, edges, -shorter, before - shorter)
        return self._baseline_end - self._find_end(lags)

    @cached_property
    def _baseline(self) -> ChainLags:
        """The recorded lags of the graph's edges, without the overhead of the recorder."""
        graph, contraction, recorder = self._graph, self._contraction, self.recorder
        assert graph is not None
        if recorder is None:
            return contraction.recorded
        lags, before = contraction.recorded.copy(for_paths=False), graph.lag_of(recorder.edges)
        after = recorder.take_from(graph, recorder.edges, before)
        contraction.change(lags, recorder.edges, after - before, after)
        return lags

    @cached_property
    def _baseline_end(self) -> int:
        assert self._graph is not None
        if self.recorder is None:
            return int(self._graph.time[self._counts].max())
        return self._find_end(self._baseline)

    def _find_end(self, lags: ChainLags) -> int:
        """Return the time (ns) at which the job ends if the edges of its dependency graph have the lags ``lags``."""
        time = self._contraction.compute_times(lags, self._contraction.recorded_times)
        return int(time[self._counted_points].max())

    @cached_property
    def _counted_points(self) -> slice:
        """The graph points (starts and ends of events) of the contracted graph up to the end of the job, as a slice."""
        return slice(int(np.searchsorted(self._contraction.points, self._counts.stop)))

    @cached_property
    def _contraction(self) -> ContractedGraph:
        """The contracted dependency graph, with every graph point (start or end of an event) that can be the last of
        the job or a step."""
        graph = self._graph
        assert graph is not None
        counts = np.full(len(graph), -1, np.int32)
        counts[self._counts] = np.searchsorted(self._step_ends, graph.time[self._counts], side="left")
        return contract_graph(graph, mark_extremes(graph, counts)[0] > 0)

    @cached_property
    def _counts(self) -> slice:
        """The graph points (starts and ends of events) up to the end of the job, as a slice of all points in time
        order."""
        assert self._graph is not None
        return slice(int(np.searchsorted(self._graph.time, self._end, side="right")))

    @cached_property
    def _target(self) -> NDArray[np.int32]:
        assert self._graph is not None
        return self._graph.target

    @cached_property
    def _edges(self) -> dict[int, dict[str, Int64Array]]:
        """The graph edges that can be shortened, as edge indices by rank and track type (host, device or both)."""
        graph = self._graph
        assert graph is not None
        has_lag = (graph.lag > 0) & (graph.time[graph.source] < graph.time[self._target])
        is_device = np.isin(graph.kind, DEVICE_KINDS)
        return {
            rank: {BOTH: edges, DEVICE: edges[is_device[edges]], HOST: edges[~is_device[edges]]}
            for rank, rank_edges in edges_by_rank(graph, self._job)
            for edges in (rank_edges[has_lag[rank_edges]],)
        }


def _sum_by_edge(parts: list[Int32Array], gains: list[Int64Array]) -> tuple[Int32Array, Int64Array]:
    """Merge several ascending lists of graph edges; return the distinct edges and the total gain (ns) of each."""
    edges, gain = np.concatenate(parts), np.concatenate(gains)
    if max(part.size for part in parts) == edges.size:
        return edges, gain
    order = np.argsort(edges, kind="stable")  # merges the parts
    edges, gain = edges[order], gain[order]
    first = np.flatnonzero(np.append(True, edges[1:] != edges[:-1]))
    return edges[first], np.add.reduceat(gain, first)


def _merge_losses(findings: Iterable[tuple[int, Finding]]) -> Iterator[tuple[int, str, Intervals, float]]:
    """Yield rank, tracks, time intervals and the share of these intervals that is lost, for findings; fully lost
    intervals of a rank and tracks are merged."""
    whole: dict[tuple[int, str], list[Intervals]] = {}
    components = ((rank, part) for rank, finding in findings for part in finding.components or (finding,))
    for rank, finding in components:
        total = finding.lost.total
        if finding.cost_ns >= total:
            whole.setdefault((rank, finding.tracks), []).append(finding.lost)
        else:
            yield rank, finding.tracks, finding.lost, finding.cost_ns / total
    for (rank, tracks), losses in whole.items():
        yield rank, tracks, union(losses), 1.0


# Estimate how much the recorder slows the host of a job, from the step time before the recording.
#
# Every operator and call that is recorded takes longer, at its start and at its end, so each piece of time of the
# host between two such instants is longer by about the same amount. It is chosen such that the dependency graph of
# the recording, without it, has the steps that `etloom collect` timed before the recording began.

MIN_RATIO, MIN_RATIO_OF_FEW, FEW_STEPS = 1.1, 1.25, 3
"""Recorded steps are corrected only if they are longer by this factor; a higher one if few steps were timed before."""
MAX_ERROR = 0.15
"""Without the overhead that is found, steps may be longer than before the recording by at most this share."""
_MAX_QUANTILE = 0.9
_MAX_OVERHEAD_NS = 100_000
"""torch's execution trace observer costs 45 us an operator."""
_ROUNDS = 16


def _is_piece(kind: UInt8Array, owner: Int32Array) -> NDArray[np.bool_]:
    return np.asarray((kind == EdgeKind.SEGMENT) & (owner >= 0))


@dataclass(frozen=True)
class RecorderOverhead:
    """The time that recording adds to each host segment from ``begin`` on, and the graph edges of these segments.

    Attributes:
        overhead_ns: the added time, the same for each segment.
        edges: the edges of the dependency graph that are such segments.
        begin: ns.
    """

    overhead_ns: int
    edges: Int32Array
    begin: int

    def take_from(self, graph: Graph, edges: Int32Array, lag: Int64Array) -> Int64Array:
        """Return the lags (ns) of graph edges, reduced by the time that recording added to them."""
        is_piece = _is_piece(graph.kind[edges], graph.owner[edges])
        is_piece &= graph.time[graph.source[edges]] >= self.begin
        return np.where(is_piece, np.maximum(lag - self.overhead_ns, 0), lag)


def find_step_ends(job: Job, end: int) -> Int64Array:
    """Return the time (ns) at which each step ended on its last rank, ascending, for the steps that all ranks have.

    Args:
        end: The end of the time that counts, with the work of the last step of all.
    """
    marks = pl.concat([find_steps(trace).select("step", "end") for trace in job.values()])
    steps = marks.group_by("step").agg(pl.len(), pl.col("end").max()).sort("step")
    common = steps.filter(pl.col("len") == len(job))
    ends = common["end"].to_numpy().astype(np.int64)
    if ends.size and common["step"][-1] == steps["step"][-1]:
        ends[-1] = end
    return np.unique(ends[ends <= end])


class StepModel:
    """Computes the step time that a dependency graph predicts if the lags of its edges are changed.

    It is the median of the times between the last activities of consecutive steps.

    Args:
        contraction: A graph whose kept points include those that can be the last between two ends.
        ends: The number of kept points up to each end.
    """

    def __init__(self, contraction: ContractedGraph, ends: Int64Array) -> None:
        self._contraction, self._ends = contraction, ends

    def compute_step(self, lags: ChainLags) -> float:
        """Return the median step time (ns) of the dependency graph if its edges have the lags ``lags``."""
        time = self._contraction.compute_times(lags, self._contraction.recorded_times)
        return float(np.median(np.diff(np.maximum.accumulate(time)[self._ends - 1])))


def fit_overhead(
    graph: Graph, contraction: ContractedGraph, model: StepModel, before: StepBefore, begin: int
) -> RecorderOverhead | None:
    """Return the recorder overhead without which the recorded steps take as long as the steps before the recording.

    None if recording does not lengthen the steps noticeably, or if its overhead cannot explain their length.

    Host work that does not limit the job has no effect on its steps, so the smallest overhead is chosen.

    Args:
        begin: The start of the time that counts; earlier host work keeps its time.
    """
    recorded, step_ns = contraction.recorded, before.step_ns
    least_ratio = MIN_RATIO if before.steps >= FEW_STEPS else MIN_RATIO_OF_FEW
    if model.compute_step(recorded) <= least_ratio * step_ns:
        return None
    edges = np.flatnonzero(_is_piece(graph.kind, graph.owner)).astype(np.int32)
    lag = graph.lag_of(edges)
    counts = (lag > 0) & (graph.time[graph.source[edges]] >= begin)
    edges, lag = edges[counts], lag[counts]
    if not edges.size:
        return None

    def compute_step(overhead_ns: int) -> float:
        lags = recorded.copy(for_paths=False)
        shorter = np.minimum(lag, overhead_ns)
        contraction.change(lags, edges, -shorter, lag - shorter)
        return model.compute_step(lags)

    low, high = 0, min(int(np.quantile(lag, _MAX_QUANTILE)) + 1, _MAX_OVERHEAD_NS)
    least = compute_step(high)
    if least > (1 + MAX_ERROR) * step_ns:
        return None  # something else than the recorder made these steps longer
    target = max(float(step_ns), 1.01 * least)
    for _ in range(_ROUNDS):
        middle = (low + high) // 2
        low, high = (low, middle) if compute_step(middle) <= target else (middle, high)
    return RecorderOverhead(high, edges, begin) if high else None
