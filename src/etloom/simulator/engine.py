"""Predicts the times of a job after changes of lags (the times on the edges of its dependency graph).

A lag has a minimum latency, which a change modifies, and an unexplained delay. The change of a minimum latency is
certain if the graph is right. An unexplained delay up to the 95 % quantile of its kind may shrink with its cause; the
part above always stays. The prediction is therefore an interval, and the delay that it depends on is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape

import numpy as np
import polars as pl

from etloom.core.errors import EtloomError, InvalidValue
from etloom.core.trace import Job
from etloom.graphs import DependencyGraph, algorithms
from etloom.graphs.algorithms import REMOVED_LAG
from etloom.graphs.contraction import ChainLags
from etloom.graphs.graph import Int64Array
from etloom.graphs.peers import PeerTimes, compute_peer_times
from etloom.simulator.changed_lags import ChangedLags, Lags, LagStep, ScaleLags, SetLags, resize_calls
from etloom.simulator.changes import AnyChange, Change, LikePeers, Network, NoStraggler, RemoveSync
from etloom.simulator.edge_selection import HOST_TARGETS, no_communication_error
from etloom.simulator.network import apply_network, resolve_change
from etloom.simulator.recorded_run import RecordedRun, get_recorded_run
from etloom.simulator.reproduction import require_models
from etloom.simulator.retiming import retime_job

MAX_CHANGES = 1000
"""The largest accepted number of changes of a simulation, each of which costs time and memory."""


@dataclass(frozen=True, eq=False, repr=False)
class Simulated:
    """The result of `simulate`: a job's predicted times after changes, as an interval between two bounds.

    ``job``: the job at its upper bound, which every verb takes. ``table``: the figures. ``reasons``: what the
    prediction depends on.

    ``recorded_job`` and ``graph``: the input; ``recording``: what all questions share. ``changes``: as applied, and the
    ``lags`` that they lead to. ``upper_lags`` and ``lower_lags``: those of the chains of ``recording.contraction`` if
    unexplained delays stay, and if they disappear with their cause as far as is usual for their kind; ``start``: per
    kept point. ``residual_delay_ns``: unexplained delay on changed edges that stays even in the lower bound.
    ``removed_delay_ns``: unexplained delay of removed edges. ``network_notes``: sentences on the network model, if a
    change is of the network. ``peers``: of each change that makes ranks work like their peers, what it changed.
    """

    recording: RecordedRun
    recorded_job: Job
    changes: tuple[AnyChange, ...]
    lags: ChangedLags
    upper_lags: ChainLags
    lower_lags: ChainLags
    start: Int64Array
    residual_delay_ns: int
    removed_delay_ns: int
    network_notes: tuple[str, ...] = ()
    peers: tuple[PeerTimes, ...] = ()

    @property
    def graph(self) -> DependencyGraph:
        """The dependency graph of the recorded job."""
        return self.recording.graph

    @property
    def recorded(self) -> Int64Array:
        """The recorded time of each point of the dependency graph, ns."""
        return self.graph.graph.time

    @cached_property
    def upper_times(self) -> Int64Array:
        """The time of each point of the contracted graph at the upper bound (all unexplained delays stay), ns."""
        return self.recording.contraction.compute_times(self.upper_lags, self.start)

    @cached_property
    def lower_times(self) -> Int64Array:
        """The time of each point of the contracted graph at the lower bound (delays shrink with their cause), ns."""
        return self.recording.contraction.compute_times(self.lower_lags, self.start)

    @cached_property
    def lag(self) -> Int64Array:
        """The lag of each edge at the upper bound, ns: minimum latency plus unexplained delay; computed on first
        access."""
        lags = self.lags.read_all()
        return lags.min_latency + lags.upper

    @cached_property
    def upper_bound(self) -> Int64Array:
        """The time of each point of the graph if all unexplained delays stay, ns; computed on first access."""
        return self._compute_all_times(self.lag)

    @cached_property
    def lower_bound(self) -> Int64Array:
        """The time of each point of the graph if unexplained delays shrink with their cause, ns; computed on first
        access."""
        lags = self.lags.read_all()
        return self._compute_all_times(lags.min_latency + lags.lower)

    def _compute_all_times(self, lag: Int64Array) -> Int64Array:
        graph = self.graph.graph
        return algorithms.compute_times(graph, lag, self.recording.expand_starts(self.start))

    @cached_property
    def job(self) -> Job:
        """The recorded job with the event times of the upper bound (the slowest prediction); computed on first
        access."""
        return retime_job(self.recorded_job, self.graph.graph, self.upper_bound)

    @cached_property
    def table(self) -> pl.DataFrame:
        """One row for the job, each rank, and each step of each rank: recorded and predicted durations
        (SUMMARY_SCHEMA)."""
        from etloom.simulator.summary_table import summarize_simulation

        return summarize_simulation(self)

    @cached_property
    def reasons(self) -> list[str]:
        """Sentences that explain the prediction: what limits the time, what it depends on, and what is not modelled."""
        from etloom.simulator.reasons import explain_simulation

        return explain_simulation(self)

    def _makespans_ms(self) -> tuple[float, float, float]:
        """Return the recorded makespan, and the upper and the lower bound of the predicted makespan, in ms."""
        recorded, upper, lower = (
            self.graph.makespan(time) / 1e6 for time in (self.recorded, self.upper_times, self.lower_times)
        )
        return recorded, max(upper, lower), min(upper, lower)

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
    """Predict the times of a job after what-if changes, which are applied in order.

    Args:
        job: linked traces.
        graph: the graph of the job, if already built.

    Raises:
        LinkError: a trace is not linked.
        AnalysisError: the job has no timed event, or the graph or the fitted network is too far from the recording
            (`etloom.simulator.reproduction`).
        EtloomError: a change matches nothing, or its times exceed 64 bits; there are more than `MAX_CHANGES`.
    """
    if len(changes) > MAX_CHANGES:
        raise InvalidValue(
            f"expected at most {MAX_CHANGES:,} changes, got {len(changes):,}",
            remedy="use patterns that match many names, such as kernel:*gemm*",
        )
    recording = get_recorded_run(job, graph)
    if changes:
        # Other changes of a network keep each transfer as far from the fitted network as it was recorded.
        has_rate = any(isinstance(c, Network) and c.bytes_per_second is not None for c in changes)
        require_models(recording, needs_network=has_rate)
    schedule = _Schedule(recording, job)
    for change in changes:
        schedule.apply(change)
    return Simulated(
        recording,
        job,
        tuple(changes),
        schedule.lags,
        schedule.upper,
        schedule.lower,
        schedule.start,
        schedule.residual_ns,
        schedule.removed_ns,
        tuple(schedule.network_notes),
        tuple(schedule.peers),
    )


class _Schedule:
    """The lags and start times of a graph while changes are applied to them.

    ``lags``: of its edges. ``upper``, ``lower`` and ``start``: of its contraction, for either bound. ``residual_ns``,
    ``removed_ns``, ``network_notes``, ``peers``: see `Simulated`.
    """

    def __init__(self, recording: RecordedRun, job: Job) -> None:
        self.recording, self.graph, self.job = recording, recording.graph.graph, job
        self.contraction, self.edges = recording.contraction, recording.edges
        self.lags = ChangedLags(self.graph)
        self.upper = self.contraction.recorded.copy(for_paths=True)
        self.lower = self.contraction.recorded.copy(for_paths=False)
        self.start = recording.kept_starts.copy()
        self.total_upper = self.total_lower = recording.total_lag
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

    def _add(self, step: LagStep) -> None:
        """Append a change of lags, and update the chain lags and the sums that `Simulated` reports."""
        for edges, before, after in self.lags.add(step):
            for chains, old, new in (
                (self.upper, before.min_latency + before.upper, after.min_latency + after.upper),
                (self.lower, before.min_latency + before.lower, after.min_latency + after.lower),
            ):
                self.contraction.change(chains, edges, new - old, new)
            self.total_upper += after.sum_times(upper=True) - before.sum_times(upper=True)
            self.total_lower += after.sum_times() - before.sum_times()
            if isinstance(step, ScaleLags):
                residual = before.lower - step.get_removable(before, edges)
                self.residual_ns += int(residual[before.min_latency != REMOVED_LAG].sum())

    def _remove_syncs(self, change: RemoveSync) -> None:
        removed = self.edges.select_syncs_in(change.name)
        zeros = np.zeros(len(removed), np.int64)
        self.removed_ns += int(self.lags.read(removed).upper.sum())
        self._add(SetLags(removed, Lags(np.full_like(zeros, REMOVED_LAG), zeros, zeros)))

    def _follow_peers(self, change: NoStraggler | LikePeers) -> None:
        ranks = change.ranks if isinstance(change, LikePeers) else None
        lags = self.lags.read_all()
        communication = self.edges.communication
        peers = compute_peer_times(self.graph, self.job, lags.min_latency + lags.upper, communication, ranks)
        order = np.argsort(peers.edges)
        zeros = np.zeros(len(order), np.int64)
        edges = peers.edges[order].astype(np.int32)
        self._add(SetLags(edges, Lags(np.asarray(peers.lag[order], np.int64), zeros, zeros)))
        self.start[self.contraction.find_positions(peers.points)] = peers.start
        self.peers.append(peers)

    def _change_network(self, change: Network) -> None:
        """Replace transfer times by those on another network, for the upper and the lower bound."""
        if not self.edges.communication.any():
            raise no_communication_error(change)
        recorded, fit = self.recording.scenario, self.recording.network_fit
        target = resolve_change(change, fit)
        assert target.model is not None, "only without a target"
        lags, start = self.lags.read_all(), self.recording.expand_starts(self.start)
        bounds = (
            recorded.replace(lag=lags.min_latency + delay, start=start) for delay in (lags.upper, lags.lower)
        )
        # A factor leaves each transfer as far from the fitted network as it was recorded; a rate replaces its time.
        fitted = fit.model if fit is not None and change.bytes_per_second is None else None
        upper, lower = (apply_network(bound, target.model, target.basis, fitted) for bound in bounds)
        changed = np.flatnonzero(upper.basis != recorded.basis)
        if not changed.size:
            raise EtloomError(
                f"{change.text!r}: no communication of this run states its size and its process group's size",
                remedy="scale recorded times instead: --set 'comm x0.5'",
            )
        least = np.minimum(upper.lag, lower.lag)[changed]
        changed_lags = Lags(least, upper.lag[changed] - least, lower.lag[changed] - least)
        self._add(SetLags(changed.astype(np.int32), changed_lags))
        self.network_notes += [*target.notes, *upper.notes]
        _check_range(change, self.total_upper)

    def _change_lags(self, change: Change) -> None:
        selection = self.edges.select(change)
        if change.target in HOST_TARGETS and change.times is None:
            edges = selection.edges
            calls = self.edges.find_calls(change, edges)
            self._add(resize_calls(change, calls, edges, self.lags.read(edges)))
            _check_range(change, self.total_lower)
            return
        step = ScaleLags(selection, change, self.graph.kind, self.recording.usual_delays)
        if self.lags.is_recorded:
            groups = self.recording.group_target(change.target) if selection.is_whole else None
            self.residual_ns, longer = step.change_recorded(self.contraction, self.upper, self.lower, groups)
            self.total_lower += longer
            self.lags.append(step)
        else:
            self._add(step)
        _check_range(change, self.total_lower)


def _check_range(change: AnyChange, total: float) -> None:
    """Raise EtloomError if the sum of all lags, ``total`` (ns), is too large for 64-bit times."""
    if total > -float(REMOVED_LAG):
        raise EtloomError(
            f"{change.text!r} makes times exceed 64 bits", remedy="use a smaller factor or time"
        )
