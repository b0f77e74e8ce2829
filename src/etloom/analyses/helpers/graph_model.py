"""The what-if model of linked traces: a dependency graph whose edges take recorded lags or those of peer edges."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from etloom.analyses.helpers.dependency_graph import build_dependencies
from etloom.analyses.helpers.pipeline_schedule import FloatArray, Mask
from etloom.collectives import list_participations
from etloom.core.trace import Job
from etloom.graphs.algorithms import compute_times, edges_by_rank, mask_owned_edges, mask_transfers
from etloom.graphs.graph import EdgeKind, Int64Array
from etloom.graphs.peers import compute_peer_times, find_peers
from etloom.timeline.activity import find_steps

_WAITS = (
    *(EdgeKind.LAUNCH, EdgeKind.STREAM, EdgeKind.OVERLAP, EdgeKind.STREAM_WAIT, EdgeKind.SYNC),
    *(EdgeKind.HANDOFF, EdgeKind.RETURN, EdgeKind.WAIT),
)


class GraphModel:
    """A what-if model of a linked job: each graph edge takes its recorded time or the mean time of its peer edges.

    Peers are the same edges in other steps, and on other ranks that run the same program; transfers take the median of
    equal collectives.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._graph = build_dependencies(job).graph
        self._transfers = mask_transfers(self._graph, job)
        self._collective = self._name_collectives()
        self._recorded = self._graph.lag
        self._start = self._graph.time.copy()
        self._ideal = self._compute_ideal()
        self.size = len(self._recorded)
        self.steps, points = self._find_step_points()
        self._step_ends = [self._select_extreme(step_points, last=True) for step_points in points]
        self._first_points = self._select_extreme(points[0], last=False) if points else None
        self.span_ns = self._measure_steps(self._graph.time)

    def _compute_ideal(self) -> Int64Array:
        """Return the ideal lag of each graph edge (ns), computed from its peer edges, and set the start times that
        peers share."""
        peers = compute_peer_times(self._graph, self._job, self._recorded, self._transfers, across_steps=True)
        ideal = self._recorded.copy()
        ideal[peers.edges] = peers.lag
        self._start[peers.points] = peers.start
        edges = pl.DataFrame(
            {
                "edge": np.flatnonzero(self._transfers),
                "kind": self._graph.kind[self._transfers],
                "key": self._collective[self._transfers],
                "lag": self._recorded[self._transfers],
            }
        )
        median = pl.col("lag").sort().get((pl.len() - 1) // 2).over("kind", "key")
        known = edges.with_columns(median=median).filter(pl.col("key") != "")
        ideal[known["edge"].to_numpy()] = known["median"].to_numpy()
        return ideal

    def _name_collectives(self) -> np.ndarray:
        """Return collective, size and number of ranks, as text, of each graph edge that transfers data; empty for other
        edges."""
        names = np.full(len(self._graph.source), "", object)
        for rank, edges in edges_by_rank(self._graph, self._job):
            edges = edges[self._transfers[edges]]
            facts = (
                self._job[rank]
                .compute_once(list_participations, rank)
                .select(
                    "event",
                    text=pl.format(
                        "{} {} {}",
                        pl.col("collective").fill_null("communication"),
                        pl.col("bytes").cast(pl.String).fill_null("?"),
                        pl.col("group_size").cast(pl.String).fill_null("?"),
                    ),
                )
            )
            text_at = dict(facts.iter_rows())
            names[edges] = [text_at.get(owner, "") for owner in self._graph.owner[edges].tolist()]
        return names

    def _find_step_points(self) -> tuple[list[int], list[Int64Array]]:
        """Return the steps that all ranks annotate, and for each step the graph points (starts and ends) of its
        events."""
        common = [set(find_steps(trace)["step"].to_list()) for trace in self._job.values()]
        steps = sorted(set.intersection(*common))
        points: dict[int, list[Int64Array]] = {step: [] for step in steps}
        for rank, trace in self._job.items():
            ends = np.flatnonzero((self._graph.rank == rank) & (self._graph.event >= 0))
            number = (
                pl.DataFrame({"id": self._graph.event[ends].astype(np.uint32)})
                .join(trace.events.select("id", "step"), on="id", how="left", maintain_order="left")["step"]
                .fill_null(-1)
                .to_numpy()
            )
            for step in steps:
                points[step].append(ends[number == step])
        return steps or [0], [np.concatenate(points[step]) for step in steps]

    def _measure_steps(self, time: Int64Array) -> FloatArray:
        """Return the time of each step (ns), from the end of the previous step to its end; without steps the total
        time."""
        if self._first_points is None:
            return np.array([float(time.max() - time.min())])
        ends = [time[points].max() for points in self._step_ends]
        return np.diff([time[self._first_points].min(), *ends]).astype(float)

    def _select_extreme(self, points: Int64Array, *, last: bool) -> Int64Array:
        """Select those of the graph points ``points`` that can be the last (or the first) in time, for any lags of the
        edges.

        The others cannot: an edge with a lag of at least 0 leads from each of them to another of the points (or, for
        the first, to it from another one).
        """
        is_member = np.zeros(len(self._graph), bool)
        is_member[points] = True
        source, target = self._graph.source, self._graph.target
        inside = is_member[source] & is_member[target] & (self._recorded >= 0) & (self._ideal >= 0)
        is_member[(source if last else target)[inside]] = False
        return np.flatnonzero(is_member)

    def list_items(self, kind: str) -> dict[str, Mask]:
        """Return a mask of the graph edges that belong to each item (type, worker or stage), by item name."""
        ranks = self._graph.edge_ranks
        if kind == "worker":
            return {str(rank): ranks == rank for rank in self._job}
        if kind == "stage":
            groups = find_peers(self._job)
            numbers = np.array([groups.get(int(rank), -1) for rank in range(max(groups) + 1)] + [-1])
            return {str(group): numbers[ranks] == group for group in sorted(set(groups.values()))}
        return self._list_types() if kind == "type" else {}

    def _list_types(self) -> dict[str, Mask]:
        kinds = self._graph.kind
        is_wait = np.isin(kinds, _WAITS) & ~self._transfers
        is_gpu = (kinds == EdgeKind.KERNEL) & ~self._transfers
        memory = mask_owned_edges(self._graph, self._job, "memory", is_gpu)
        transfers = np.flatnonzero(self._transfers)
        names = np.array([text.partition(" ")[0] for text in self._collective[transfers]])
        types = {}
        for name in sorted(set(names.tolist()) - {""}):
            types[name] = np.zeros(self.size, bool)
            types[name][transfers[names == name]] = True
        types |= {
            "computation": is_gpu & ~memory,
            "memory": memory,
            "waits": is_wait,
            "host": ~(is_gpu | is_wait | self._transfers),
        }
        return {name: mask for name, mask in types.items() if mask.any()}

    def simulate(self, keep: Sequence[Mask]) -> FloatArray:
        """Return the simulated time of each step (ns) for each mask of graph edges, as an array (masks x steps).

        Edges in the mask take their recorded time, the others the time of their peers.
        """
        lag, rows = np.empty_like(self._recorded), []
        for mask in keep:
            np.copyto(lag, self._ideal)
            np.copyto(lag, self._recorded, where=mask)
            rows.append(self._measure_steps(compute_times(self._graph, lag, self._start)))
        return np.array(rows).reshape(len(keep), len(self.steps))
