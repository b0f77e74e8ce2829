"""What the recorder costs the host of a job, from the step time before the recording.

Every operator and call that is recorded takes longer, at its start and at its end, so each piece of time of the host
between two such instants is longer by about the same amount. It is chosen such that the dependency graph of the
recording, without it, has the steps that `etloom collect` timed before the recording began.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np

from etloom.core.trace import Job
from etloom.graphs.contraction import ChainLags, ContractedGraph
from etloom.graphs.graph import EdgeKind, Graph, Int32Array, Int64Array
from etloom.timeline.activity import find_steps

MIN_RATIO, MIN_RATIO_OF_FEW, FEW_STEPS = 1.1, 1.25, 3
"""Recorded steps that are longer by less than this factor are those of the job; times of few steps before vary more."""
MAX_ERROR = 0.15
"""Without the overhead that is found, steps may be longer than before the recording by at most this share."""
_MAX_QUANTILE = 0.9
_ROUNDS = 16


@dataclass(frozen=True)
class RecorderOverhead:
    """The overhead per piece of host time, ns, and the edges that are such pieces."""

    overhead_ns: int
    edges: Int32Array

    def take_from(self, graph: Graph, edges: Int32Array, lag: Int64Array) -> Int64Array:
        """Return the lags of edges of the graph without the overhead."""
        is_piece = (graph.kind[edges] == EdgeKind.SEGMENT) & (graph.owner[edges] >= 0)
        return np.where(is_piece, np.maximum(lag - self.overhead_ns, 0), lag)


@dataclass(frozen=True)
class StepBefore:
    """The step time before the recording, ns, the median of the ranks, and the least number of steps it is based on."""

    step_ns: int
    steps: int


def find_step_before(job: Job) -> StepBefore | None:
    """Return the step time before the recording, from run.json; None if it is not known."""
    run = job.meta.get("run")
    ranks = run.get("ranks") if isinstance(run, dict) else None
    facts = (
        [rank.get("unrecorded") for rank in ranks if isinstance(rank, dict)]
        if isinstance(ranks, list)
        else []
    )
    pairs = [(fact.get("step_ns"), fact.get("steps")) for fact in facts if isinstance(fact, dict)]
    valid = [pair for pair in pairs if all(type(number) is int and 0 < number < 1 << 53 for number in pair)]
    if not valid:
        return None
    times, steps = zip(*valid, strict=True)
    return StepBefore(int(statistics.median(times)), min(steps))


def find_step_ends(job: Job, end: int) -> tuple[int, int] | None:
    """Return when the host ended the first of at least two steps, and how many follow it; None for fewer.

    Args:
        end: The end of the time that counts.
    """
    marks = [find_steps(trace) for trace in job.values()]
    ends = sorted(max(times) for times in zip(*(mark["end"].to_list() for mark in marks), strict=False))
    return (ends[0], len(ends) - 1) if len(ends) > 1 and ends[0] < end else None


class StepModel:
    """The mean time of all steps but the first, of a graph with changed lags.

    Args:
        contraction: A graph whose kept points include those that can be the last of the groups.
        is_first: Of its kept points, those up to the end of the first step.
        counts: The kept points that count.
        steps: Number of the other steps.
    """

    def __init__(self, contraction: ContractedGraph, is_first: slice, counts: slice, steps: int) -> None:
        self._contraction, self._is_first, self._counts, self._steps = contraction, is_first, counts, steps

    def compute_step(self, lags: ChainLags) -> float:
        """Return the mean step time, ns."""
        time = self._contraction.compute_times(lags, self._contraction.recorded_times)
        return float(time[self._counts].max() - time[self._is_first].max()) / self._steps


def fit_overhead(
    graph: Graph, contraction: ContractedGraph, model: StepModel, before: StepBefore
) -> RecorderOverhead | None:
    """Return the overhead without which steps take as long as before; None if the recorder costs nothing that counts.

    Host work that does not limit the job has no effect on its steps, so the smallest overhead is chosen.
    """
    recorded, step_ns = contraction.recorded, before.step_ns
    least_ratio = MIN_RATIO if before.steps >= FEW_STEPS else MIN_RATIO_OF_FEW
    if model.compute_step(recorded) <= least_ratio * step_ns:
        return None
    edges = np.flatnonzero((graph.kind == EdgeKind.SEGMENT) & (graph.owner >= 0)).astype(np.int32)
    lag = graph.lag_of(edges)
    edges, lag = edges[lag > 0], lag[lag > 0]
    if not edges.size:
        return None

    def compute_step(overhead_ns: int) -> float:
        lags = recorded.copy(for_paths=False)
        shorter = np.minimum(lag, overhead_ns)
        contraction.change(lags, edges, -shorter, lag - shorter)
        return model.compute_step(lags)

    low, high = 0, int(np.quantile(lag, _MAX_QUANTILE)) + 1
    least = compute_step(high)
    if least > (1 + MAX_ERROR) * step_ns:
        return None  # something else than the recorder made these steps longer
    target = max(float(step_ns), 1.01 * least)
    for _ in range(_ROUNDS):
        middle = (low + high) // 2
        low, high = (low, middle) if compute_step(middle) <= target else (middle, high)
    return RecorderOverhead(high, edges) if high else None
