"""The recorded run that all predictions of a job share: computed on first use and cached with the job."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import polars as pl

from etloom.analyses.helpers.dependency_graph import build_dependencies, is_kept
from etloom.core.trace import Job, Trace
from etloom.graphs import DependencyGraph, check_timed, critical_paths
from etloom.graphs.event_arrays import rows_of_ids
from etloom.graphs.graph import EdgeKind, Int64Array
from etloom.simulator.durations import Durations, PointSpans
from etloom.simulator.edge_selection import EdgeSelector
from etloom.simulator.network import NetworkFit, apply_network, try_fit
from etloom.simulator.recording import describe_recording, recorded_starts
from etloom.simulator.scenario import Basis, Scenario

QUANTILE = 0.95
"""Quantile of the unexplained delays of a kind up to which a delay may disappear with its cause."""


def get_recorded_run(job: Job, graph: DependencyGraph | None = None) -> RecordedRun:
    """Return the recorded run of a job, cached with it unless a graph is passed or its graph is too large to be kept.

    Raises:
        LinkError: a trace is not linked.
        AnalysisError: the job has no timed event.
    """
    return job.compute_once(RecordedRun) if graph is None and is_kept(job) else RecordedRun(job, graph)


class RecordedRun:
    """A job with its dependency graph, and what follows from these alone. Callers must not modify its arrays."""

    def __init__(self, job: Job, graph: DependencyGraph | None = None) -> None:
        self.graph = graph or build_dependencies(job)
        check_timed(self.graph, job)
        self._job = job.replace({})  # the job itself may keep this object: a cycle would outlive it

    @cached_property
    def edges(self) -> EdgeSelector:
        """Selects edges by the events that own them."""
        return EdgeSelector(self.graph.graph, self._job)

    @cached_property
    def starts(self) -> Int64Array:
        """The start times of points: see `recorded_starts`."""
        return recorded_starts(self.graph.graph)

    @cached_property
    def usual_delays(self) -> Int64Array:
        """By kind of edge, the delay that 95 % of its edges with an unexplained delay do not exceed, ns."""
        kinds, unexplained = self.graph.graph.kind, self.graph.graph.unexplained
        delays = np.zeros(len(EdgeKind), np.int64)
        for kind in EdgeKind:
            positive = unexplained[(kinds == kind) & (unexplained > 0)]
            if positive.size:
                delays[kind] = int(np.quantile(positive, QUANTILE, method="lower"))
        return delays

    @cached_property
    def critical_path(self) -> str:
        """The critical path in the words of a report."""
        return self.describe_path(self.graph.graph.time, self.graph.graph.lag)

    def describe_path(self, time: Int64Array, lag: Int64Array) -> str:
        """Describe the critical path at these times in the words of a report."""
        table = critical_paths.summarize_path_at(self.graph.graph, self._job, time, lag)
        return ", ".join(critical_paths.format_path_shares(table, digits=0, most=4, least_pct=0.5))

    @cached_property
    def scenario(self) -> Scenario:
        """The first scenario of a prediction."""
        return describe_recording(self._job, self.graph)

    @cached_property
    def durations(self) -> Durations:
        """The rows of a prediction's table and their durations in the recording."""
        return Durations(self.scenario)

    @cached_property
    def spans(self) -> tuple[PointSpans, PointSpans]:
        """The points by rank, and by rank and step if a step has more than one."""
        graph = self.graph.graph
        by_rank = pl.DataFrame({"rank": graph.rank}).with_row_index("point").filter(pl.col("rank") >= 0)
        steps = [self._find_step_points(rank, trace) for rank, trace in self._job.items()]
        return PointSpans(by_rank, "rank"), PointSpans(pl.concat(steps), "rank", "step")

    def _find_step_points(self, rank: int, trace: Trace) -> pl.DataFrame:
        """Return the points (rank, step, point) of the events in steps of a rank."""
        graph = self.graph.graph
        points = np.flatnonzero((graph.rank == rank) & (graph.event >= 0))
        rows = rows_of_ids(trace.events, pl.Series(graph.event[points]))
        step = trace.events["step"].gather(rows)
        frame = pl.DataFrame({"step": step.cast(pl.Int64), "point": points}).drop_nulls("step")
        has_span = pl.len().over("step") > 1
        return frame.filter(has_span).select(pl.lit(rank).alias("rank"), "step", "point")

    @cached_property
    def network_fit(self) -> NetworkFit | None:
        """The network fitted to the recording; None if it has no communication to fit."""
        return try_fit(self.scenario)

    @cached_property
    def reproduced(self) -> Scenario | None:
        """The recording as the fitted network reproduces it."""
        fit = self.network_fit
        return None if fit is None else apply_network(self.scenario, fit.model, Basis.FITTED)
