"""Estimate how much the recorder slows the host of a job, from the step time before the recording.

Every operator and call that is recorded takes longer, at its start and at its end, so each piece of time of the host
between two such instants is longer by about the same amount. It is chosen such that the dependency graph of the
recording, without it, has the steps that `etloom collect` timed before the recording began.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.core.step_before import StepBefore
from etloom.core.trace import Job
from etloom.graphs.contraction import ChainLags, ContractedGraph
from etloom.graphs.graph import EdgeKind, Graph, Int32Array, Int64Array, UInt8Array
from etloom.timeline.activity import find_steps

MIN_RATIO, MIN_RATIO_OF_FEW, FEW_STEPS = 1.1, 1.25, 3
"""Recorded steps that are longer by less than this factor are those of the job; times of few steps before vary more."""
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
