"""Predicts the times of a job after a change of lags, the times on the edges of its dependency graph.

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
from etloom.graphs import DependencyGraph, algorithms
from etloom.graphs.algorithms import REMOVED_LAG
from etloom.graphs.graph import Int64Array
from etloom.graphs.peers import PeerTimes, compute_peer_times
from etloom.simulator.changes import AnyChange, Change, LikePeers, Network, NoStraggler, RemoveSync
from etloom.simulator.edge_selection import no_communication_error
from etloom.simulator.network import apply_network, resolve_change
from etloom.simulator.recorded_run import RecordedRun, get_recorded_run
from etloom.simulator.retiming import retime_job


@dataclass(frozen=True, eq=False, repr=False)
class Simulated:
    """The prediction for a job with changes.

    ``job``: the job at its upper bound, which every verb takes. ``table``: the figures. ``reasons``: what the
    prediction depends on.

    ``recorded_job`` and ``graph``: the input; ``recording``: what all questions share. ``changes``: as applied.
    ``upper_bound`` and ``lower_bound``: times of all points if unexplained delays stay, and if they disappear with
    their cause as far as is usual for their kind.
    ``residual_delay_ns``: unexplained delay on changed edges that stays even in the lower bound.
    ``removed_delay_ns``: unexplained delay of removed edges. ``lag``: per edge, of the upper bound.
    ``network_notes``: sentences on the network model, if a change is of the network.
    ``peers``: of each change that makes ranks work like their peers, what it changed.
    """

    recording: RecordedRun
    recorded_job: Job
    changes: tuple[AnyChange, ...]
    upper_bound: Int64Array
    lower_bound: Int64Array
    residual_delay_ns: int
    removed_delay_ns: int
    lag: Int64Array
    network_notes: tuple[str, ...] = ()
    peers: tuple[PeerTimes, ...] = ()

    @property
    def graph(self) -> DependencyGraph:
        """The dependency graph of the recorded job."""
        return self.recording.graph

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
        AnalysisError: the job has no timed event.
        EtloomError: a change matches nothing, or its times exceed 64 bits.
    """
    recording = get_recorded_run(job, graph)
    schedule = _Schedule(recording, job)
    for change in changes:
        schedule.apply(change)
    upper_lag = schedule.min_latency + schedule.upper
    points = recording.graph.graph
    return Simulated(
        recording,
        job,
        tuple(changes),
        algorithms.compute_times(points, upper_lag, schedule.start),
        algorithms.compute_times(points, schedule.min_latency + schedule.lower, schedule.start),
        schedule.residual_ns,
        schedule.removed_ns,
        upper_lag,
        tuple(schedule.network_notes),
        tuple(schedule.peers),
    )


class _Schedule:
    """The lags and start times of a graph while changes are applied to them.

    ``min_latency``, ``upper`` and ``lower`` (unexplained delays of either bound) per edge, ``start`` per point, all in
    ns. ``residual_ns``, ``removed_ns``, ``network_notes``, ``peers``: see `Simulated`.
    """

    def __init__(self, recording: RecordedRun, job: Job) -> None:
        graph = recording.graph.graph
        self.recording, self.graph, self.job = recording, graph, job
        self.edges = recording.edges
        self.min_latency = graph.min_latency.copy()
        self.upper, self.lower = graph.unexplained.copy(), graph.unexplained.copy()
        self.start = recording.starts.copy()
        self.residual_ns = self.removed_ns = 0
        self.network_notes: list[str] = []
        self.peers: list[PeerTimes] = []

    def apply(self, change: AnyChange) -> None:
        """Apply a change. Raises EtloomError if it matches nothing, or its times exceed 64 bits."""
        if isinstance(change, RemoveSync):
            self._remove_syncs(change)
        elif isinstance(change, (NoStraggler, LikePeers)):
            self._follow_peers(change)
        elif isinstance(change, Network):
            self._change_network(change)
        else:
            self._change_lags(change)

    def _remove_syncs(self, change: RemoveSync) -> None:
        removed = self.edges.select_syncs_in(change.name)
        self.min_latency[removed] = REMOVED_LAG
        self.removed_ns += int(self.upper[removed].sum())
        self.upper[removed] = self.lower[removed] = 0

    def _follow_peers(self, change: NoStraggler | LikePeers) -> None:
        ranks = change.ranks if isinstance(change, LikePeers) else None
        lag = self.min_latency + self.upper
        peers = compute_peer_times(self.graph, self.job, lag, self.edges.communication, ranks)
        self.min_latency[peers.edges] = peers.lag
        self.upper[peers.edges] = self.lower[peers.edges] = 0
        self.start[peers.points] = peers.start
        self.peers.append(peers)

    def _change_network(self, change: Network) -> None:
        """Give transfers the times of another network, under the delays of either bound."""
        if not self.edges.communication.any():
            raise no_communication_error(change)
        recorded, fit = self.recording.scenario, self.recording.network_fit
        target = resolve_change(change, fit)
        assert target.model is not None, "only without a target"
        bounds = (
            recorded.replace(lag=self.min_latency + delay, start=self.start)
            for delay in (self.upper, self.lower)
        )
        # A factor leaves each transfer as far from the fitted network as it was recorded; a rate replaces its time.
        fitted = fit.model if fit is not None and change.bytes_per_second is None else None
        upper, lower = (apply_network(bound, target.model, target.basis, fitted) for bound in bounds)
        if not (upper.basis != recorded.basis).any():
            raise EtloomError(
                f"{change.text!r}: no communication of this run states its size and its process group's size",
                remedy="scale recorded times instead: --set 'comm x0.5'",
            )
        changed = upper.basis != recorded.basis
        self.min_latency[changed] = np.minimum(upper.lag, lower.lag)[changed]
        self.upper[changed] = (upper.lag - self.min_latency)[changed]
        self.lower[changed] = (lower.lag - self.min_latency)[changed]
        self.network_notes += [*target.notes, *upper.notes]
        _check_range(change, self.min_latency, self.upper)

    def _change_lags(self, change: Change) -> None:
        edges, kinds = self.edges, self.graph.kind
        mask = edges.select(change)
        mask = mask & (self.min_latency != REMOVED_LAG)  # a removed edge stays removed
        removable = np.minimum(self.lower[mask], self.recording.usual_delays[kinds[mask]])
        residual = self.lower[mask] - removable
        self.residual_ns += int(residual.sum())
        self.lower[mask] = _scale_removable_delay(change, removable) + residual
        self.min_latency[mask] = _changed_latencies(change, self.min_latency[mask])
        _check_range(change, self.min_latency, self.lower)


def _check_range(change: AnyChange, min_latency: Int64Array, unexplained: Int64Array) -> None:
    """Raise EtloomError if sums of the lags would not fit 64 bits."""
    total = float(np.maximum(min_latency, 0).sum(dtype=np.float64) + unexplained.sum(dtype=np.float64))
    if total > -float(REMOVED_LAG):
        raise EtloomError(
            f"{change.text!r} makes times exceed 64 bits", remedy="use a smaller factor or time"
        )


def _scale_removable_delay(change: Change, unexplained: Int64Array) -> Int64Array:
    """Return the unexplained delay that remains if it changes like its minimum latency."""
    return unexplained if change.plus_ns is not None else scale_lags(unexplained, change.times or 0.0)


def _changed_latencies(change: Change, before: Int64Array) -> Int64Array:
    """Return these minimum latencies after the change."""
    if change.times is not None:
        return scale_lags(before, change.times)
    if change.to_ns is not None:
        return np.full(len(before), change.to_ns, np.int64)
    return np.asarray(np.maximum(before + (change.plus_ns or 0), 0))


def scale_lags(lag: Int64Array, factor: float) -> Int64Array:
    """Multiply lags, rounded to the nanosecond; limited to what `_check_range` refuses."""
    return np.asarray(np.round(np.minimum(lag * factor, 2.0**62)), dtype=np.int64)
