"""Predicts the times of a job with other lags.

A lag has a minimum latency, which a change modifies, and an unexplained delay. What a change takes from a minimum
latency is certain, as far as the graph is right. An unexplained delay up to the 95 % quantile of its kind may disappear
with its cause; the part above always stays. The prediction is therefore an interval, and the delay that it depends on
is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape

import numpy as np
import polars as pl

from etloom.core.errors import EtloomError
from etloom.core.trace import Job
from etloom.graphs import DependencyGraph, algorithms, build_graph
from etloom.graphs.algorithms import REMOVED_LAG
from etloom.graphs.graph import EdgeKind, Graph, Int64Array
from etloom.simulator.changes import AnyChange, Change, Network, NoStraggler, RemoveSync
from etloom.simulator.edge_selection import EdgeSelector
from etloom.simulator.retiming import retime_job

QUANTILE = 0.95
"""Quantile of the unexplained delays of a kind up to which a delay may disappear with its cause."""


@dataclass(frozen=True, eq=False, repr=False)
class Simulated:
    """The prediction for a job with changes.

    ``job``: the job at its upper bound, which every verb takes. ``table``: the figures. ``reasons``: what the
    prediction depends on.

    ``recorded_job`` and ``graph``: the input. ``changes``: as applied. ``upper_bound`` and ``lower_bound``: times of
    all points if unexplained delays stay, and if they disappear with their cause as far as is usual for their kind.
    ``residual_delay_ns``: unexplained delay on changed edges that stays even in the lower bound.
    ``removed_delay_ns``: unexplained delay of removed edges. ``lag``: per edge, of the upper bound.
    """

    graph: DependencyGraph
    recorded_job: Job
    changes: tuple[AnyChange, ...]
    upper_bound: Int64Array
    lower_bound: Int64Array
    residual_delay_ns: int
    removed_delay_ns: int
    lag: Int64Array

    @property
    def recorded(self) -> Int64Array:
        """The recorded times of all points, ns."""
        return self.graph.graph.time

    @cached_property
    def job(self) -> Job:
        """The job with its times at the upper bound; computed on first access."""
        return retime_job(self.recorded_job, self.graph.graph, self.upper_bound)

    @cached_property
    def fastest_job(self) -> Job:
        """The job with its times at the lower bound; computed on first access."""
        return retime_job(self.recorded_job, self.graph.graph, self.lower_bound)

    @cached_property
    def table(self) -> pl.DataFrame:
        """One row for the job, for each rank and for each step of each rank (`summary_table.SUMMARY_SCHEMA`)."""
        from etloom.simulator.summary_table import summarize_simulation

        return summarize_simulation(self)

    @cached_property
    def reasons(self) -> list[str]:
        """Sentences on what bounds the prediction, what it depends on and what it leaves out."""
        from etloom.simulator.reasons import explain_simulation

        return explain_simulation(self)

    def _makespans_ms(self) -> tuple[float, float, float]:
        """Return the recorded makespan, its upper and its lower bound, in ms."""
        recorded, upper, lower = (
            self.graph.makespan(time) / 1e6 for time in (self.recorded, self.upper_bound, self.lower_bound)
        )
        return recorded, upper, lower

    def __repr__(self) -> str:
        recorded, upper, lower = self._makespans_ms()
        times = f"{recorded:,.3f} ms recorded, {lower:,.3f} to {upper:,.3f} ms predicted"
        return f"<Simulated: {times}; see .table, .reasons, .job>"

    def _repr_html_(self) -> str:
        """Return the table and the reasons as HTML for notebooks."""
        recorded, upper, lower = self._makespans_ms()
        changes = escape("; ".join(change.text for change in self.changes))
        lines = "".join(f"<li>{escape(line)}</li>" for line in self.reasons)
        heading = f"{recorded:,.3f} ms recorded, {lower:,.3f} to {upper:,.3f} ms predicted"
        return f"<p><b>{heading}</b> ({changes})</p>{self.table._repr_html_()}<ul>{lines}</ul>"


def simulate(job: Job, changes: Sequence[AnyChange], graph: DependencyGraph | None = None) -> Simulated:
    """Predict the times of a job with these changes, applied in order.

    Args:
        job: linked traces.
        graph: the graph of the job, if already built.

    Raises:
        LinkError: a trace is not linked.
        EtloomError: a change matches nothing, or its times exceed 64 bits.
    """
    graph = graph or build_graph(job)
    arrays = graph.graph
    edges = EdgeSelector(arrays, job)
    min_latency = arrays.min_latency.copy()
    upper, lower = arrays.unexplained.copy(), arrays.unexplained.copy()
    usual = _usual_delays(arrays.kind, arrays.unexplained)
    residual_ns = removed_ns = 0
    for change in changes:
        if isinstance(change, (RemoveSync, NoStraggler)):
            removed = (
                edges.select_syncs_in(change.name)
                if isinstance(change, RemoveSync)
                else _mask_late_arrivals(edges)
            )
            min_latency[removed] = REMOVED_LAG
            removed_ns += int(upper[removed].sum())
            upper[removed] = lower[removed] = 0
            continue
        mask = edges.communication if isinstance(change, Network) else edges.select(change)
        mask = mask & (min_latency != REMOVED_LAG)  # a removed edge stays removed
        removable = np.minimum(lower[mask], usual[arrays.kind[mask]])
        residual = lower[mask] - removable
        residual_ns += int(residual.sum())
        lower[mask] = _scale_removable_delay(change, removable) + residual
        min_latency[mask] = _changed_latencies(change, edges, mask, min_latency)
        _check_range(change, min_latency, lower)
    start = _start_times(arrays)
    return Simulated(
        graph,
        job,
        tuple(changes),
        algorithms.compute_times(arrays, min_latency + upper, start),
        algorithms.compute_times(arrays, min_latency + lower, start),
        residual_ns,
        removed_ns,
        min_latency + upper,
    )


def _check_range(change: AnyChange, min_latency: Int64Array, unexplained: Int64Array) -> None:
    """Raise EtloomError if sums of the lags would not fit 64 bits."""
    total = float(np.maximum(min_latency, 0).sum(dtype=np.float64) + unexplained.sum(dtype=np.float64))
    if total > -float(REMOVED_LAG):
        raise EtloomError(
            f"{change.text!r} makes times exceed 64 bits", remedy="use a smaller factor or time"
        )


def _scale_removable_delay(change: Change | Network, unexplained: Int64Array) -> Int64Array:
    """Return the unexplained delay that remains if it changes like its minimum latency."""
    if isinstance(change, Network) or change.plus_ns is not None:
        return unexplained
    return scale_lags(unexplained, change.times or 0.0)


def _changed_latencies(
    change: Change | Network, edges: EdgeSelector, mask: np.ndarray, min_latency: Int64Array
) -> Int64Array:
    """Return the minimum latencies of the masked edges after the change."""
    before = min_latency[mask]
    if isinstance(change, Network):
        latency = (
            _measure_network_latency(edges, mask, min_latency)
            if change.latency_ns is None
            else change.latency_ns
        )
        fixed = np.minimum(before, latency)
        return np.asarray(fixed + scale_lags(before - fixed, 1 / change.bandwidth))
    if change.times is not None:
        return scale_lags(before, change.times)
    if change.to_ns is not None:
        return np.full(len(before), change.to_ns, np.int64)
    return np.asarray(np.maximum(before + (change.plus_ns or 0), 0))


def scale_lags(lag: Int64Array, factor: float) -> Int64Array:
    """Multiply lags, rounded to the nanosecond; limited to what `_check_range` refuses."""
    return np.asarray(np.round(np.minimum(lag * factor, 2.0**62)), dtype=np.int64)


def _measure_network_latency(edges: EdgeSelector, mask: np.ndarray, min_latency: Int64Array) -> Int64Array:
    """Return for each masked edge the shortest time of its collective and group, which no bandwidth shortens."""
    codes = edges.number_groups()[mask]
    before = min_latency[mask]
    is_positive = before > 0
    shortest = np.zeros(int(codes.max()) + 2 if codes.size else 1, np.int64)
    shortest[:] = np.iinfo(np.int64).max
    np.minimum.at(shortest, codes[is_positive], before[is_positive])
    return np.where(is_positive, shortest[codes], 0)


def _usual_delays(kinds: np.ndarray, unexplained: Int64Array) -> Int64Array:
    """Return by kind the delay that 95 % of its edges with an unexplained delay do not exceed, ns."""
    delays = np.zeros(len(EdgeKind), np.int64)
    for kind in EdgeKind:
        positive = unexplained[(kinds == kind) & (unexplained > 0)]
        if positive.size:
            delays[kind] = int(np.quantile(positive, QUANTILE, method="lower"))
    return delays


def _mask_late_arrivals(edges: EdgeSelector) -> np.ndarray:
    """Mask the edges by which later ranks delay a collective: all arrivals but the first."""
    graph = edges.graph
    arrivals = np.flatnonzero(graph.kind == EdgeKind.ARRIVAL)
    late = np.zeros(len(graph.source), bool)
    late[arrivals] = True
    first: dict[int, int] = {}
    for edge in arrivals[np.argsort(graph.time[graph.source[arrivals]], kind="stable")].tolist():
        first.setdefault(int(edges.target[edge]), edge)
    late[list(first.values())] = False
    return late


def _start_times(graph: Graph) -> Int64Array:
    """Return start times of points: recorded for sources; else the first time, for points that may lose all edges."""
    start = np.full(len(graph), graph.time.min() if len(graph) else 0, np.int64)
    start[graph.sources] = graph.time[graph.sources]
    return start
