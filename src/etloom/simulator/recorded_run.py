"""The recorded run: its dependency graph and the values that all predictions of a job share, cached with the job."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cached_property

import numpy as np
import polars as pl

from etloom.analyses.helpers.dependency_graph import build_dependencies, is_kept
from etloom.collectives import list_participations
from etloom.core.trace import Job
from etloom.graphs import DependencyGraph, build_graph, check_timed, critical_paths
from etloom.graphs.algorithms import TRANSFER_KINDS
from etloom.graphs.contraction import (
    ChainLags,
    ContractedGraph,
    GroupedEdges,
    contract_graph,
)
from etloom.graphs.graph import EdgeKind, Graph, Int32Array, Int64Array, PointRole
from etloom.simulator.chains import ChainScenario, contract_scenario
from etloom.simulator.changes import TARGETS
from etloom.simulator.durations import PointSpans
from etloom.simulator.edge_selection import HOST_KINDS, EdgeSelector
from etloom.simulator.extremes import Extremes, find_extremes, renumber_extremes
from etloom.simulator.network import NetworkFit, apply_network, try_fit
from etloom.simulator.scenario import (
    INSTANCE_COLUMNS,
    PARTICIPATION_COLUMNS,
    Basis,
    Communications,
    Scenario,
)

MIN_GROUPED_EDGES = 500_000
"""Edges of a target that are grouped by chains, for changes by a factor."""
QUANTILE = 0.95
"""Quantile of the unexplained delays of a kind up to which a delay may disappear with its cause."""


def get_recorded_run(job: Job, graph: DependencyGraph | None = None) -> RecordedRun:
    """Return the `RecordedRun` of a job, cached with the job unless ``graph`` is passed or the job's graph is too
    large.

    Raises:
        LinkError: a trace is not linked.
        AnalysisError: the job has no timed event.
    """
    return job.compute_once(RecordedRun) if graph is None and is_kept(job) else RecordedRun(job, graph)


class RecordedRun:
    """A job with its dependency graph and values derived from both. Callers must not modify its arrays."""

    def __init__(self, job: Job, graph: DependencyGraph | None = None) -> None:
        self.graph = graph or build_dependencies(job)
        check_timed(self.graph, job)
        self._groups: dict[str, GroupedEdges | None] = {}
        self.job = job.replace({})  # the job itself may keep this object: a cycle would outlive it

    def prepare(self) -> None:
        """Compute in advance the values that the first prediction would otherwise have to wait for."""
        self.edges.prepare()
        for target in TARGETS:
            self.group_target(target)
        for name in ("usual_delays", "kept_starts", "total_lag", "recorded_spans", "critical_path"):
            getattr(self, name)

    @cached_property
    def edges(self) -> EdgeSelector:
        """The `EdgeSelector`, which selects graph edges by the events to which their times belong."""
        return EdgeSelector(self.graph.graph, self.job)

    def group_target(self, target: str) -> GroupedEdges | None:
        """Group the graph edges that a change of ``target`` affects by the chain of edges that each was merged into.

        Returns None if there are fewer than `MIN_GROUPED_EDGES`, too few for grouping to save time.
        """
        if target not in self._groups:
            edges = self.edges.select_target(target)
            is_large = len(edges) >= MIN_GROUPED_EDGES
            self._groups[target] = (
                GroupedEdges.group(self.contraction, edges, self.edges.owner_rows) if is_large else None
            )
        return self._groups[target]

    @cached_property
    def starts(self) -> Int64Array:
        """The earliest possible start of each point of the graph, ns; see `recorded_starts`."""
        return recorded_starts(self.graph.graph)

    @cached_property
    def usual_delays(self) -> Int64Array:
        """For each kind of edge, the 95 % quantile of its positive unexplained delays, ns; 0 if it has none."""
        kinds, unexplained = self.graph.graph.kind, self.graph.graph.unexplained
        delays = np.zeros(len(EdgeKind), np.int64)
        for kind in EdgeKind:
            positive = unexplained[(kinds == kind) & (unexplained > 0)]
            if positive.size:
                delays[kind] = int(np.quantile(positive, QUANTILE, method="lower"))
        return delays

    @cached_property
    def total_lag(self) -> float:
        """The sum of the recorded lags of all edges, ns."""
        graph = self.graph.graph
        return float(graph.min_latency.sum(dtype=np.float64) + graph.unexplained.sum(dtype=np.float64))

    @cached_property
    def makespan(self) -> int:
        """The recorded time from the first to the last point of the graph, ns."""
        return self.graph.makespan()

    @cached_property
    def contraction(self) -> ContractedGraph:
        """The contracted graph, which retains all points that can be the first or last of the run, a rank or a step."""
        return contract_graph(self.graph.graph, self._extremes.mask)

    @cached_property
    def kept_starts(self) -> Int64Array:
        """The earliest possible start of each point of the contracted graph, ns. Not to be modified."""
        return self.starts[self.contraction.points]

    def expand_starts(self, starts: Int64Array) -> Int64Array:
        """Return start times (ns) of all points of the graph, with ``starts`` for points of the contracted graph."""
        start = self.starts.copy()
        start[self.contraction.points] = starts
        return start

    @cached_property
    def critical_path(self) -> str:
        """The recorded critical path as text: the share of each kind of work and wait, in percent."""
        contraction = self.contraction
        return self.describe_path(contraction.recorded_times, contraction.recorded, self.graph.graph.lag_of)

    def describe_path(
        self, time: Int64Array, lags: ChainLags, read: Callable[[Int32Array], Int64Array]
    ) -> str:
        """Describe the critical path as text (percent per kind of work and wait), for point times and chain lags.

        Args:
            time: of the kept points; lags: of the chains; read: returns the lags of edges.
        """
        end = self.contraction.find_last_point(time, lags, read)
        path = self.contraction.find_longest_path(end, time, lags)
        lag = read(path)
        before = int(time.max() - time.min()) - int(lag.sum()) if path.size else 0
        table = critical_paths.summarize_path(self.graph.graph, self.job, path, lag, before)
        return ", ".join(critical_paths.format_path_shares(table, digits=0, most=4, least_pct=0.5))

    @cached_property
    def host_share(self) -> float:
        """The share of the recorded critical path that is work of the host."""
        contraction, graph = self.contraction, self.graph.graph
        end = contraction.find_last_point(contraction.recorded_times, contraction.recorded, graph.lag_of)
        path = contraction.find_longest_path(end, contraction.recorded_times, contraction.recorded)
        lag = graph.lag_of(path)
        return float(lag[np.isin(graph.kind[path], HOST_KINDS)].sum() / max(lag.sum(), 1))

    @cached_property
    def scenario(self) -> Scenario:
        """The recording as a scenario, from which predictions start."""
        return describe_recording(self.job, self.graph)

    @cached_property
    def chains(self) -> ChainScenario:
        """The recording as a scenario on a contracted graph, from which predictions start."""
        return self.contract(self.scenario)

    def contract(self, scenario: Scenario) -> ChainScenario:
        """Contract the graph of a scenario; for the recorded graph, the extreme points (first, last) are reused."""
        return contract_scenario(scenario, self._extremes if scenario.graph is self.graph.graph else None)

    @cached_property
    def spans(self) -> tuple[PointSpans, PointSpans]:
        """The contracted graph's points grouped by rank, and by rank and step (only steps with more than one point)."""
        kept = renumber_extremes(self._extremes, self.contraction)
        by_step = kept.by_step.filter(pl.col("count") > 1)
        return PointSpans(kept.by_rank, "rank"), PointSpans(by_step, "rank", "step")

    @cached_property
    def recorded_spans(self) -> list[list[int]]:
        """The recorded duration of each rank, and of each step of each rank, in the order of `spans`, ns."""
        return [spans.measure(self.contraction.recorded_times).tolist() for spans in self.spans]

    @cached_property
    def _extremes(self) -> Extremes:
        """The points that can be the first or the last ones of the run, of a rank, and of a step of a rank."""
        return find_extremes(self.graph.graph, self.job, {rank: rank for rank in self.job})

    @cached_property
    def wait_and_transfer_ns(self) -> tuple[int, int]:
        """The recorded sums of waits for the last rank and of transfers, ns; see `sum_wait_and_transfer`."""
        return sum_wait_and_transfer(self.graph.graph, self.graph.graph.time)

    @cached_property
    def network_fit(self) -> NetworkFit | None:
        """The network model fitted to the recorded communications; None if none states its size and process group."""
        return try_fit(self.scenario)

    @cached_property
    def reproduced(self) -> Scenario | None:
        """The recorded scenario, contracted, with transfer times on the fitted network; None without such a network."""
        fit = self.network_fit
        return None if fit is None else apply_network(self.chains.scenario, fit.model, Basis.FITTED)

    @cached_property
    def reproduction_error(self) -> float | None:
        """The relative error with which the fitted network reproduces the step (or run) time; None if unknown."""
        if self.reproduced is None:
            return None
        durations = self.chains.durations
        row = min(1, durations.rows["scope"].to_list().count("step time"))
        recorded = durations.measure(self.chains.scenario.graph.time)[row]
        if not recorded:
            return None
        return float(durations.measure(self.reproduced.compute_times())[row] / recorded - 1)

    @cached_property
    def variation(self) -> float:
        """The relative standard error of the recorded step time, from the spread of the steps; at least 0.015 with 4 or
        more steps."""
        durations = self.chains.durations
        measured = durations.measure(self.chains.scenario.graph.time)
        steps = measured[(durations.rows["scope"] == "step").to_numpy()]
        if len(steps) < 4:
            return 0.03
        low, middle, high = np.quantile(steps, [0.25, 0.5, 0.75])
        return float(max(0.015, (high - low) / 1.35 / max(middle, 1) / np.sqrt(len(steps))))


def sum_wait_and_transfer(graph: Graph, time: Int64Array) -> tuple[int, int]:
    """Return the total time (ns) of waits for the last rank of communications, and the total time of transfers."""
    sums = []
    for kinds in ((EdgeKind.ARRIVAL,), TRANSFER_KINDS):
        edges = np.flatnonzero(np.isin(graph.kind, kinds))
        target = np.searchsorted(graph.first, edges, side="right") - 1
        sums.append(int((time[target] - time[graph.source[edges]]).sum()))
    return sums[0], sums[1]


# Converts a recorded job to the scenario from which predictions start, and finds its communications.

_DURATION_KINDS = (EdgeKind.KERNEL, EdgeKind.COMPLETE)
_TRANSFER_KINDS = (EdgeKind.TRANSFER, EdgeKind.MESSAGE)


def describe_recording(job: Job, dependencies: DependencyGraph | None = None) -> Scenario:
    """Return the recorded job as a scenario, whose times are the recorded ones.

    Args:
        job: linked traces.
        dependencies: the graph of the job, if already built.

    Raises:
        LinkError: a trace is not linked.
        AnalysisError: the job has no timed event.
    """
    dependencies = dependencies or build_graph(job)
    check_timed(dependencies, job)
    graph = dependencies.graph
    return Scenario(
        recorded=job,
        graph=graph,
        lag=graph.lag,
        start=recorded_starts(graph),
        basis=np.full(len(graph.source), Basis.RECORDED, np.uint8),
        communications=find_communications(job, graph),
        template={rank: rank for rank in job},
    )


def recorded_starts(graph: Graph) -> Int64Array:
    """Return the earliest start of each point, ns: for points without incoming edges the recorded time, else the run's
    first time."""
    start = np.full(len(graph), graph.time.min() if len(graph) else 0, np.int64)
    start[graph.sources] = graph.time[graph.sources]
    return start


def find_communications(job: Job, graph: Graph) -> Communications:
    """Find a job's communications in its graph, matched across ranks; each unmatched communication is an instance."""
    facts = pl.concat([_describe_participations(job, rank) for rank in job])
    table = facts.join(_find_own_edges(graph), on=("rank", "event")).join(
        _find_transfers(graph), on=("rank", "event"), how="left", maintain_order="left"
    )
    unmatched = pl.int_range(pl.len()) + len(graph)  # arrival points have smaller numbers
    table = table.with_columns(instance=pl.coalesce("arrival", unmatched).cast(pl.Int64))
    instances = table.group_by("instance", maintain_order=True).agg(
        pl.col("collective").drop_nulls().first(),
        # The rank that sends or receives most determines the time of an all-to-all.
        bytes=pl.when(pl.col("collective").first() == "all_to_all", pl.col("group_size").max() > 1)
        .then(pl.col("moved").max() / (1 - 1 / pl.col("group_size").max()))
        .round()
        .fill_null(pl.col("bytes").max()),
        group_size=pl.col("group_size").max(),
        ranks=pl.when(pl.col("members").list.len().max() > 0)
        .then(pl.col("members").drop_nulls().first())
        .otherwise(pl.col("rank").unique().sort().implode()),
        group=pl.col("pg_name").drop_nulls().first(),
        where=pl.col("where").first(),
    )
    return Communications(
        instances.select(pl.col(name).cast(dtype) for name, dtype in INSTANCE_COLUMNS.items()),
        table.with_columns(pl.col("transfer_edge").fill_null(-1)).select(
            pl.col(name).cast(dtype) for name, dtype in PARTICIPATION_COLUMNS.items()
        ),
    )


def _describe_participations(job: Job, rank: int) -> pl.DataFrame:
    """Return a table of the communications in which a rank takes part, with the members of their process groups."""
    trace = job[rank]
    table = trace.compute_once(list_participations, rank)
    world = trace.meta.get("world_size")
    # A communication that names no process group belongs to the default one, which is all ranks.
    world_size = pl.when(pl.col("pg_name").is_null()).then(
        pl.lit(world if isinstance(world, int) else None, pl.Int64)
    )
    members = [
        [source, destination] if None not in (source, destination) else _parse_ranks(ranks)
        for source, destination, ranks in table.select("source", "destination", "ranks").iter_rows()
    ]
    return table.select(
        pl.col("rank").cast(pl.Int64),
        pl.col("event").cast(pl.Int64),
        pl.col("collective", "pg_name", "where", "bytes", "moved"),
        group_size=pl.coalesce(
            pl.when(pl.col("collective") == "message").then(2),
            "group_size",
            pl.col("group_size").max().over("pg_name"),
            world_size,
        ),
        members=pl.Series(members, dtype=pl.List(pl.Int64)),
    )


def _parse_ranks(text: str | None) -> list[int] | None:
    try:
        ranks = json.loads(text) if text else None
    except ValueError:
        return None
    return ranks if isinstance(ranks, list) and ranks and all(type(rank) is int for rank in ranks) else None


def _find_own_edges(graph: Graph) -> pl.DataFrame:
    """Return a table of the edge from begin to finish of each kernel and asynchronous range, with both points."""
    target = graph.target
    edges = np.flatnonzero(np.isin(graph.kind, _DURATION_KINDS) & (graph.role[target] == PointRole.END))
    return pl.DataFrame(
        {
            "rank": graph.rank[target[edges]].astype(np.int64),
            "event": graph.owner[edges].astype(np.int64),
            "begin": graph.source[edges].astype(np.int64),
            "finish": target[edges].astype(np.int64),
            "own_edge": edges.astype(np.int64),
        }
    ).unique(("rank", "event"), keep="first", maintain_order=True)


def _find_transfers(graph: Graph) -> pl.DataFrame:
    """Return for each rank's part in a matched communication its arrival point (of the last rank) and transfer edge."""
    target = graph.target
    frames = []
    for kinds, outside, arrival in (
        ((EdgeKind.ARRIVAL,), graph.source, target),
        (_TRANSFER_KINDS, target, graph.source),
    ):
        edges = np.flatnonzero(np.isin(graph.kind, kinds))
        frames.append(
            pl.DataFrame(
                {
                    "rank": graph.rank[outside[edges]].astype(np.int64),
                    "event": graph.owner[edges].astype(np.int64),
                    "arrival": arrival[edges].astype(np.int64),
                    "transfer_edge": edges if kinds is _TRANSFER_KINDS else np.full(len(edges), -1),
                }
            )
        )
    return (
        pl.concat(frames)
        .group_by("rank", "event")
        .agg(pl.col("arrival").first(), pl.col("transfer_edge").max())
    )
