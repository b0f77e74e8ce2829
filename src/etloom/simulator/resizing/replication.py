"""Builds the graph and the communications of new ranks, which are copies of recorded ranks.

One axis of the process mesh changes its size. Every point and edge of a rank is copied once for each new rank that
repeats it. Collectives are copied in two ways: if all ranks of a collective have the same position on the axis (for
data parallelism: are in one replica), its arrival point is copied for each new position; if its ranks differ in this
position, it stays one point, at which the copies of all participants arrive. Copies keep the order of the recorded
points, so that every edge goes forward again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from etloom.core.errors import EtloomError
from etloom.graphs.graph import Graph, Int64Array
from etloom.simulator.scenario import INSTANCE_COLUMNS, PARTICIPATION_COLUMNS, Communications, Scenario

_UNUSED = -1

MAX_POINTS = 50_000_000
"""The largest graph, of about 6 GB."""


@dataclass(frozen=True)
class _Copies:
    """Number and positions of the copies of each recorded point and edge in the graph of the new ranks.

    ``count`` copies of each point, the first with number ``first``; ``edge_count`` copies of each edge, the first at
    ``place``, the others at a distance of ``stride`` each.
    """

    count: Int64Array
    first: Int64Array
    edge_count: Int64Array
    place: Int64Array
    stride: Int64Array


def replicate(
    scenario: Scenario, template: np.ndarray, copy: np.ndarray, replica: np.ndarray, *, pairwise: bool = False
) -> Scenario:
    """Return the scenario of the new ranks, each of which is a copy of a rank of ``scenario``.

    Args:
        scenario: its ranks are numbered from 0.
        template: new rank -> rank of the scenario.
        copy: new rank -> number of this copy of that rank.
        replica: rank of the scenario -> its place on the axis.
        pairwise: messages along the axis are copied with their ranks, instead of meeting at one point.

    Raises:
        EtloomError: the graph would be too large.

    Returns:
        The scenario; its ``communications.instances`` have a further column recorded_size, the recorded group_size.
    """
    graph = scenario.graph
    copies_of_rank = np.bincount(template, minlength=len(replica))
    pairs = _find_messages(scenario.communications, len(graph)) if pairwise else np.zeros(len(graph), bool)
    count = _count_copies(graph, copies_of_rank, replica, pairs)
    if int(count.sum()) > MAX_POINTS:
        raise EtloomError(
            f"cannot predict {len(template):,} ranks: their graph would have {int(count.sum()):,} points, more than "
            f"{MAX_POINTS:,}",
            remedy="predict fewer ranks, or record or select fewer steps",
        )
    first = np.concatenate([[0], np.cumsum(count)[:-1]])
    target = graph.target
    edge_count = np.maximum(count[graph.source], count[target])
    edge_count[(count[graph.source] == 0) | (count[target] == 0)] = 0
    new_first, place, stride = _place_edges(graph, count, first, edge_count, target)
    copies = _Copies(count, first, edge_count, place, stride)
    number = np.full((len(replica), max(int(copies_of_rank.max()), 1)), _UNUSED, np.int32)
    number[template, copy] = np.arange(len(template))
    grown, lag, basis = _build_graph(scenario, copies, new_first, number)
    return scenario.replace(
        graph=grown,
        lag=lag,
        start=np.repeat(scenario.start, count),
        basis=basis,
        communications=_copy_communications(
            scenario.communications, copies, number, replica, grown, pairwise
        ),
        template={new: scenario.template[old] for new, old in enumerate(template.tolist())},
    )


def _find_messages(communications: Communications, points: int) -> np.ndarray:
    """Return a mask of the arrival points (graph points) of point-to-point messages."""
    instances = communications.instances
    messages = instances.filter((pl.col("collective") == "message") & (pl.col("instance") < points))
    mask = np.zeros(points, bool)
    mask[messages["instance"].to_numpy()] = True
    return mask


def _count_copies(
    graph: Graph, copies_of_rank: np.ndarray, replica: np.ndarray, pairs: np.ndarray
) -> Int64Array:
    """Return the number of copies of each point: as many as its rank has. An arrival has as many as its replica, or a
    single copy if its ranks belong to several replicas.

    pairs: arrivals that are copied with their ranks in any case.
    """
    arrivals = graph.rank < 0
    count = np.where(arrivals, 0, copies_of_rank[graph.rank])
    target = graph.target
    for outer, arrival in ((graph.source, target), (target, graph.source)):
        edges = np.flatnonzero(arrivals[arrival])
        np.maximum.at(count, arrival[edges], count[outer[edges]])
    low, high = np.full(len(graph), len(replica)), np.full(len(graph), -1)
    for outer, arrival in ((graph.source, target), (target, graph.source)):
        edges = np.flatnonzero(arrivals[arrival])
        at = replica[graph.rank[outer[edges]]]
        np.minimum.at(low, arrival[edges], at)
        np.maximum.at(high, arrival[edges], at)
    return np.where(arrivals & (low < high) & ~pairs, np.minimum(count, 1), count).astype(np.int64)


def _place_edges(
    graph: Graph, count: Int64Array, first: Int64Array, edge_count: Int64Array, target: np.ndarray
) -> tuple[np.ndarray, Int64Array, Int64Array]:
    """Return the new graph's ``first`` (edges into each new point), and position and stride of each edge's copies.

    The edges into the copies of a point are stored copy by copy; those into a single point edge by edge.
    """
    single = count[target] == 1
    kept = edge_count > 0
    width = np.where(single, edge_count, kept)
    before = np.concatenate([[0], np.cumsum(width)])
    per_copy = before[graph.first[1:]] - before[graph.first[:-1]]
    new_first = np.concatenate([[0], np.cumsum(np.repeat(per_copy, count))])
    place = new_first[first[target]] + before[:-1] - before[graph.first[target]]
    return new_first.astype(np.int32), place, np.where(single, 1, per_copy[target])


def _build_graph(
    scenario: Scenario, copies: _Copies, new_first: np.ndarray, number: np.ndarray
) -> tuple[Graph, Int64Array, np.ndarray]:
    """Return the new graph with the lag and the basis of its edges. ``number``: rank of each copy of a rank."""
    graph, count = scenario.graph, copies.count
    point = np.repeat(np.arange(len(graph), dtype=np.int32), count)
    copy = _number_within(count)
    rank = np.where(graph.rank[point] >= 0, number[graph.rank[point], copy], -1).astype(np.int32)
    edge = np.repeat(np.arange(len(graph.source), dtype=np.int32), copies.edge_count)
    edge_copy = _number_within(copies.edge_count)
    position = copies.place[edge] + edge_copy * copies.stride[edge]
    order = np.empty(len(edge), np.int32)
    order[position] = edge
    source = np.empty(len(edge), np.int32)
    source_point = graph.source[edge]
    source[position] = copies.first[source_point] + np.where(count[source_point] > 1, edge_copy, 0)
    del edge, edge_copy, position, source_point
    grown = Graph(
        time=graph.time[point],
        event=graph.event[point],
        role=graph.role[point],
        rank=rank,
        first=new_first,
        source=source,
        min_latency=graph.min_latency[order],
        kind=graph.kind[order],
        owner=graph.owner[order],
        dropped=graph.dropped,
    )
    return grown, scenario.lag[order], scenario.basis[order]


def _number_within(count: Int64Array) -> np.ndarray:
    """Return the numbers 0 to n - 1 for each entry n of ``count``, concatenated."""
    total = np.cumsum(count)
    return np.arange(int(total[-1]) if len(total) else 0, dtype=np.int32) - np.repeat(
        (total - count).astype(np.int32), count
    )


def _copy_communications(
    communications: Communications,
    copies: _Copies,
    number: np.ndarray,
    replica: np.ndarray,
    grown: Graph,
    pairwise: bool,
) -> Communications:
    """Return the communications of the copied ranks; ``instances`` also has the recorded group size, recorded_size."""
    rows = communications.participations
    count = copies.count[rows["begin"].to_numpy()]
    row = np.repeat(np.arange(rows.height), count)
    copy = _number_within(count)
    columns = {name: rows[name].to_numpy()[row] for name in PARTICIPATION_COLUMNS}
    # An instance that matches across ranks has the number of its arrival point.
    recorded = rows["instance"].to_numpy()
    is_matched = recorded < len(copies.count)
    merged = np.zeros(len(recorded), bool)
    merged[is_matched] = copies.count[recorded[is_matched]] == 1
    instance = columns["instance"]
    known = instance < len(copies.count)
    arrival = copies.first[np.where(known, instance, 0)] + np.where(merged[row], 0, copy)
    spread = max(int(count.max()), 1) if len(count) else 1
    alone = len(grown) + (instance - len(copies.count)) * spread + copy
    new_instance = np.where(known, arrival, alone)

    def point_copy(name: str) -> np.ndarray:
        return np.asarray(copies.first[columns[name]] + copy)

    def edge_copy(name: str) -> np.ndarray:
        edge = columns[name]
        return np.where(edge >= 0, copies.place[edge] + copy * copies.stride[edge], -1)

    participations = pl.DataFrame(
        {
            "instance": new_instance,
            "rank": number[columns["rank"], copy],
            "begin": point_copy("begin"),
            "finish": point_copy("finish"),
            "own_edge": edge_copy("own_edge"),
            "transfer_edge": edge_copy("transfer_edge"),
        }
    )
    sources = pl.DataFrame({"instance": new_instance, "recorded": instance, "copy": copy}).unique(
        "instance", maintain_order=True
    )
    instances = sources.rename({"instance": "new"}).join(
        communications.instances, left_on="recorded", right_on="instance", how="left", maintain_order="left"
    )
    instances = _copy_members(instances.rename({"new": "instance"}), number, replica, pairwise)
    return Communications(
        instances.select(
            *(pl.col(name).cast(dtype) for name, dtype in INSTANCE_COLUMNS.items()), "recorded_size"
        ),
        participations.select(pl.col(name).cast(dtype) for name, dtype in PARTICIPATION_COLUMNS.items()),
    )


def _copy_members(
    instances: pl.DataFrame, number: np.ndarray, replica: np.ndarray, pairwise: bool
) -> pl.DataFrame:
    """Return the communications with their groups' new members and sizes, and the recorded size (recorded_size)."""
    within: list[dict[str, object]] = []
    across: list[dict[str, object]] = []
    for members in instances["ranks"].unique(maintain_order=True).drop_nulls().to_list():
        recorded = np.array([rank for rank in members if 0 <= rank < len(replica)], np.int64)
        new = number[recorded]
        if len(set(replica[recorded])) > 1:
            across.append({"ranks": members, "everyone": np.sort(new[new >= 0]).tolist()})
            if not pairwise:
                continue
        for copy in range(number.shape[1]):
            of_copy = [rank for rank in new[:, copy].tolist() if rank >= 0]
            within.append({"ranks": members, "copy": copy, "own": of_copy})
    ranks = pl.List(pl.Int64)
    joined = instances.join(
        pl.DataFrame(within, schema={"ranks": ranks, "copy": pl.Int32, "own": ranks}),
        on=("ranks", "copy"),
        how="left",
        maintain_order="left",
    ).join(
        pl.DataFrame(across, schema={"ranks": ranks, "everyone": ranks}),
        on="ranks",
        how="left",
        maintain_order="left",
    )
    is_pair = pl.lit(pairwise) & (pl.col("collective") == "message").fill_null(False)
    new_ranks = pl.when(is_pair).then("own").otherwise(pl.coalesce("everyone", "own"))
    joined = joined.with_columns(new_ranks=new_ranks).drop("everyone", "own")
    # A group of which other ranks were not recorded keeps its size.
    is_whole = pl.col("group_size") == pl.col("ranks").list.len()
    size = pl.when(is_whole).then(pl.col("new_ranks").list.len().cast(pl.Int64)).otherwise("group_size")
    return joined.with_columns(recorded_size="group_size", group_size=size, ranks="new_ranks").drop(
        "new_ranks"
    )
