"""What a job would have taken with other lags.

A lag has a min_latency, which a change changes, and an unexplained, which nothing explains. What a change takes from a min_latency is
sure, as far as the graph is right; an unexplained up to the 95 % quantile of its kind may go with its cause; what lies above
stays in any case. So the answer is an interval, and the unexplained that it rests on is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from etloom.core.errors import EtloomError
from etloom.core.trace import Job, Trace
from etloom.graphs import DependencyGraph, algorithms, build_graph, critical_paths, quality
from etloom.graphs.algorithms import REMOVED_LAG
from etloom.graphs.graph import EdgeKind, Graph, Int64Array
from etloom.simulator.changes import AnyChange, Change, Network, NoStraggler, RemoveSync
from etloom.simulator.edge_selection import EdgeSelector

QUANTILE = 0.95


@dataclass(frozen=True, eq=False, repr=False)
class Simulated:
    """The times of all points: recorded, and with the changes if unexplained stays (``cautious``) or goes with its cause as
    far as its kind usually has it (``hopeful``). ``kept_ns``: unexplained on changed edges that stays even so.
    ``removed_ns``: unexplained that went with edges that were removed. ``lag``: of each edge, where unexplained stays."""

    found: DependencyGraph
    job: Job
    changes: tuple[AnyChange, ...]
    upper_bound: Int64Array
    lower_bound: Int64Array
    kept_delay_ns: int
    removed_delay_ns: int
    lag: Int64Array

    @property
    def recorded(self) -> Int64Array:
        return self.found.graph.time

    @property
    def table(self) -> pl.DataFrame:
        """A row for the job, for each rank, and for each step of each rank; times in ns."""
        return summarize_simulation(self)

    @property
    def reasons(self) -> list[str]:
        """What a reader must know of the answer: what bounds it, what it rests on, what it leaves out."""
        return explain_simulation(self)

    def __repr__(self) -> str:
        graph = self.found.graph
        before, after, best = (
            algorithms.compute_makespan(graph, time) / 1e6
            for time in (self.recorded, self.upper_bound, self.lower_bound)
        )
        times = f"{before:,.3f} ms before, {after:,.3f} ms after, {best:,.3f} ms at best"
        return f"<Simulated: {times}; .table has all, .reasons what it rests on>"


def simulate(job: Job, changes: Sequence[AnyChange], found: DependencyGraph | None = None) -> Simulated:
    """The job with these changes, in their order. Raises LinkError for a job that is not linked, EtloomError for a
    change that is about nothing."""
    found = found or build_graph(job)
    graph = found.graph
    edges = EdgeSelector(graph, job)
    min_latency = graph.min_latency.copy()
    unexplained = {"cautious": graph.unexplained.copy(), "hopeful": graph.unexplained.copy()}
    usual = _usual_delays(graph.kind, graph.unexplained)
    kept = removed = 0
    for change in changes:
        if isinstance(change, (RemoveSync, NoStraggler)):
            gone = (
                edges.waits_in(change.name) if isinstance(change, RemoveSync) else _mask_late_arrivals(edges)
            )
            min_latency[gone] = REMOVED_LAG
            removed += int(unexplained["cautious"][gone].sum())
            for lags in unexplained.values():
                lags[gone] = 0
            continue
        mask = edges.communication if isinstance(change, Network) else edges.chosen(change)
        mask = mask & (min_latency != REMOVED_LAG)  # what was removed stays so
        goes = np.minimum(unexplained["hopeful"][mask], usual[graph.kind[mask]])
        stays = unexplained["hopeful"][mask] - goes
        kept += int(stays.sum())
        unexplained["hopeful"][mask] = _scale_removable_delay(change, goes) + stays
        min_latency[mask] = _changed_latencies(change, edges, mask, min_latency)
        _check_range(change, min_latency, unexplained["hopeful"])
    start = _start_times(graph)
    return Simulated(
        found,
        job,
        tuple(changes),
        algorithms.compute_times(graph, min_latency + unexplained["cautious"], start),
        algorithms.compute_times(graph, min_latency + unexplained["hopeful"], start),
        kept,
        removed,
        min_latency + unexplained["cautious"],
    )


def _check_range(change: AnyChange, min_latency: Int64Array, unexplained: Int64Array) -> None:
    """Raise EtloomError where sums of the lags would not fit 64 bits."""
    if float(np.maximum(min_latency, 0).sum(dtype=np.float64) + unexplained.sum(dtype=np.float64)) > -float(REMOVED_LAG):
        raise EtloomError(f"{change.text!r} makes times that no clock holds", remedy="ask for less")


def _scale_removable_delay(change: Change | Network, unexplained: Int64Array) -> Int64Array:
    """What is left of an unexplained that shares the fate of its min_latency."""
    if isinstance(change, Network) or change.plus_ns is not None:
        return unexplained
    return scale_lags(unexplained, change.times or 0.0)


def _changed_latencies(
    change: Change | Network, edges: EdgeSelector, mask: np.ndarray, min_latency: Int64Array
) -> Int64Array:
    """The min_latencies of the chosen edges after the change."""
    before = min_latency[mask]
    if isinstance(change, Network):
        latency = (
            _measure_network_latency(edges, mask, min_latency) if change.latency_ns is None else change.latency_ns
        )
        least = np.minimum(before, latency)
        return np.asarray(least + scale_lags(before - least, 1 / change.bandwidth))
    if change.times is not None:
        return scale_lags(before, change.times)
    if change.to_ns is not None:
        return np.full(len(before), change.to_ns, np.int64)
    return np.asarray(np.maximum(before + (change.plus_ns or 0), 0))


def scale_lags(lag: Int64Array, times: float) -> Int64Array:
    """Times, to the nanosecond; at most what `_check` refuses."""
    return np.asarray(np.round(np.minimum(lag * times, 2.0**62)), dtype=np.int64)


def _measure_network_latency(edges: EdgeSelector, mask: np.ndarray, min_latency: Int64Array) -> Int64Array:
    """Of each chosen edge the least that one of its collective and group took: what no bandwidth shortens."""
    codes = edges.groups()[mask]
    before = min_latency[mask]
    known = before > 0
    least = np.zeros(int(codes.max()) + 2 if codes.size else 1, np.int64)
    least[:] = np.iinfo(np.int64).max
    np.minimum.at(least, codes[known], before[known])
    return np.where(known, least[codes], 0)


def _usual_delays(kind: np.ndarray, unexplained: Int64Array) -> Int64Array:
    """By kind, the unexplained that 95 % of its edges do not surpass, of those that have any."""
    found = np.zeros(len(EdgeKind), np.int64)
    for one in EdgeKind:
        some = unexplained[(kind == one) & (unexplained > 0)]
        if some.size:
            found[one] = int(np.quantile(some, QUANTILE, method="lower"))
    return found


def _mask_late_arrivals(edges: EdgeSelector) -> np.ndarray:
    """The edges by which later ranks hold up a communication: all but that of the first to come."""
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
    """Times of points: those of sources as recorded; of a point all of whose edges may go, its rank's first."""
    start = np.full(len(graph), graph.time.min() if len(graph) else 0, np.int64)
    start[graph.sources] = graph.time[graph.sources]
    return start


def summarize_simulation(done: Simulated) -> pl.DataFrame:
    """A row for the job, for each rank, and for each step of each rank (SUMMARY).

    Times are from the first to the last point of its events: a step lasts until the device has ended all that the step
    launched, which may be long after its mark on the host has ended (the ``dur_ns`` of the analysis steps).
    """
    graph = done.found.graph
    rows = [_summary_row("job", None, None, done, np.ones(len(graph), bool))]
    for rank in done.job:
        own = graph.rank == rank
        if own.any() and len(done.job) > 1:
            rows.append(_summary_row("rank", rank, None, done, own))
    for rank, trace in done.job.items():
        for step, points in _iterate_steps(trace, graph, rank):
            rows.append(_summary_row("step", rank, step, done, points))
    return pl.DataFrame(rows, schema=SUMMARY_SCHEMA, orient="row")


SUMMARY_SCHEMA = {
    "of": pl.String,
    "rank": pl.Int64,
    "step": pl.Int64,
    "before_ns": pl.Int64,
    "after_ns": pl.Int64,
    "after_at_best_ns": pl.Int64,
    "change_pct": pl.Float64,
    "change_at_best_pct": pl.Float64,
}


def _summary_row(
    of: str, rank: int | None, step: int | None, done: Simulated, points: np.ndarray
) -> list[object]:
    before, after, best = (
        algorithms.compute_makespan(done.found.graph, time[points])
        for time in (done.recorded, done.upper_bound, done.lower_bound)
    )
    shares = [100 * (one - before) / before if before else None for one in (after, best)]
    return [of, rank, step, before, after, best, *shares]


def _iterate_steps(trace: Trace, graph: Graph, rank: int) -> Iterator[tuple[int, np.ndarray]]:
    """(step, its points) of each ProfilerStep: all points of its events."""
    events = trace.events.select("id", "step").drop_nulls("step")
    own = np.flatnonzero((graph.rank == rank) & (graph.event >= 0))
    found = np.full(trace.events.height, -(2**62), np.int64)
    ids = trace.events["id"].to_numpy()
    found[np.searchsorted(ids, events["id"].to_numpy())] = events["step"].to_numpy()
    of_point = found[np.searchsorted(ids, graph.event[own])]
    for step in events["step"].unique().sort().to_list():
        points = np.zeros(len(graph), bool)
        points[own[of_point == step]] = True
        if points.sum() > 1:
            yield step, points


def explain_simulation(done: Simulated) -> list[str]:
    """What a reader must know of the answer: what bounds it, what it rests on, what it leaves out."""
    graph = done.found.graph
    was, becomes = (
        _describe_path(done, graph.time, graph.lag),
        _describe_path(done, done.upper_bound, done.lag),
    )
    said = [*_explain_misfit(done), f"the critical path was {was}", f"it becomes {becomes}"]
    if rests := algorithms.compute_makespan(graph, done.upper_bound) - algorithms.compute_makespan(
        graph, done.lower_bound
    ):
        said.append(
            f"{_format_time(abs(rests))}, what lies between after and at best, rests on delays that nothing recorded explains"
        )
    if done.removed_delay_ns >= 0.001 * algorithms.compute_makespan(graph):
        said.append(f"the waits that were removed hold {_format_time(done.removed_delay_ns)} of such delays")
    if done.kept_delay_ns >= 0.001 * algorithms.compute_makespan(graph):
        said.append(
            f"{_format_time(done.kept_delay_ns)} of delay on what was changed stays, since nothing recorded explains it"
        )
    return said + (_explain_communication(done) if any(map(_changes_communication, done.changes)) else [])


def _explain_misfit(done: Simulated) -> list[str]:
    """Why the answer is not to be believed: of the ranks whose recording the graph does not explain."""
    whys = [
        f"rank {rank}, {why}"
        for rank, why in quality.find_unexplained_ranks(done.found.graph, done.job).items()
    ]
    if not whys:
        return []
    more = f"; {len(whys) - 1} more" if len(whys) > 1 else ""
    return [f"do not rely on this: the graph does not explain the recording ({whys[0]}{more})"]


def _changes_communication(change: AnyChange) -> bool:
    return isinstance(change, (Network, NoStraggler)) or (
        isinstance(change, Change) and change.what == "comm"
    )


def _explain_communication(done: Simulated) -> list[str]:
    said = []
    waits, moves = _sum_wait_and_transfer(done)
    only = {isinstance(change, NoStraggler) for change in done.changes if _changes_communication(change)}
    gains = {
        frozenset({True}): "without stragglers the first goes, the second stays",
        frozenset({False}): "a faster network shortens the second only",
    }.get(frozenset(only), "without stragglers the first goes, a faster network shortens the second")
    if waits > moves:
        said.append(
            f"in communication, ranks wait {_format_time(waits)} for others to come and move data for {_format_time(moves)}: {gains}"
        )
    if local := sum(counts["local_communications"] for counts in done.found.counts.values()):
        said.append(
            f"{local:,} communications were not matched with other ranks: their time may hold waits for these, so that "
            "the saving is an upper bound"
        )
    worlds = [size for trace in done.job.values() if isinstance(size := trace.meta.get("world_size"), int)]
    if worlds and max(worlds) > len(done.job):
        said.append(
            f"{len(done.job)} of {max(worlds)} ranks were recorded: waits for the others count as moving data"
        )
    return said


def _format_time(ns: int) -> str:
    return f"{ns / 1e6:,.3f} ms" if ns >= 1_000_000 else f"{ns / 1e3:,.1f} us"


def _describe_path(done: Simulated, time: Int64Array, lag: Int64Array) -> str:
    """What the critical path at these times consists of, in the words of a report."""
    table = critical_paths.summarize_path_at(done.found.graph, done.job, time, lag)
    return ", ".join(critical_paths.format_path_shares(table, digits=0, most=4, least_pct=0.5))


def _sum_wait_and_transfer(done: Simulated) -> tuple[int, int]:
    """Over all ranks and matched communications: ns from coming to the arrival of the last, and from there on."""
    graph = done.found.graph
    target = graph.target
    arrive = graph.kind == EdgeKind.ARRIVAL
    move = np.isin(graph.kind, (EdgeKind.TRANSFER, EdgeKind.MESSAGE))
    time = graph.time
    return (
        int((time[target] - time[graph.source])[arrive].sum()),
        int((time[target] - time[graph.source])[move].sum()),
    )
