"""Add edges between ranks for collectives: every rank arrives, then the data is transferred.

`etloom.collectives` matches the participations. A collective instance is accepted if the last participation that others
wait for starts before the first one that waits for it ends; other participations stay local to their rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import polars as pl

from etloom import collectives
from etloom.collectives.matching import get_roles
from etloom.core.trace import Trace
from etloom.graphs.async_ranges import AsyncRanges, mask_async
from etloom.graphs.draft import GraphDraft
from etloom.graphs.event_arrays import EventArrays
from etloom.graphs.gpu_activities import GpuActivities
from etloom.graphs.graph import EdgeKind, Int64Array, PointRole


def find_participations(trace: Trace, events: EventArrays, rank: int, has_peers: bool) -> pl.DataFrame | None:
    """Return a table of the communications in which a rank takes part; None if the graph does not need them.

    The graph needs them if the job has several ranks, or the rank has asynchronous ranges.
    """
    is_needed = has_peers or mask_async(events).any()
    return trace.compute_once(collectives.list_participations, rank) if is_needed else None


def locate_participations(
    participations: pl.DataFrame, events: EventArrays, activities: GpuActivities, ranges: AsyncRanges
) -> pl.DataFrame:
    """Return the communications of a rank that have points in the graph, with these points and their times.

    Adds the points ``begin`` and ``finish``, their times ``start`` and ``end``, and ``place``: the index in the
    ``min_latency`` of the activities or the ranges.
    """
    row = events.rows(participations["event"])
    ranged = np.full(len(events), -1, np.int64)
    ranged[ranges.row] = np.arange(len(ranges.row))
    frames = []
    for side, source, place in (("device", activities, activities.place[row]), ("host", ranges, ranged[row])):
        has = place >= 0
        place = place[has].astype(np.int64)
        frames.append(
            participations.filter(has).with_columns(
                where=pl.lit(side),
                place=place,
                start=source.start[place],
                end=source.end[place],
                begin=source.begin[place],
                finish=source.finish[place],
            )
        )
    return pl.concat(frames)


def add_collective_edges(
    draft: GraphDraft, participations: pl.DataFrame, min_latencies: Mapping[tuple[int, str], Int64Array]
) -> pl.DataFrame:
    """Add arrival and transfer edges between ranks for communications that match across ranks.

    Args:
        min_latencies: by rank and where ("host", "device"), the minimum latencies from start to end; lowered in place.

    Returns:
        rank, matched, local: number of participations that were matched, and that stay local.
    """
    issuers = collectives.match_participations(participations).select("rank", "event", "instance")
    table = _check_instances(participations.join(issuers, on=("rank", "event"), maintain_order="left"))
    matched = table.filter("accepted").sort("instance", "rank", "start", maintain_order=True)
    instances = matched.group_by("instance", maintain_order=True).agg(
        pl.col("arrival").first(),
        least=pl.when(pl.all_horizontal(pl.col("sends", "receives").all()))
        .then((pl.col("end") - pl.col("start")).min())
        .otherwise(0),
    )
    points = draft.add_points(instances["arrival"], -1, PointRole.ARRIVE, -1)
    matched = matched.join(
        instances.select("instance", "least", point=points), on="instance", maintain_order="left"
    )
    senders, receivers = matched.filter("sends"), matched.filter("receives")
    draft.add_edges(EdgeKind.ARRIVAL, senders["begin"], senders["point"], 0, senders["event"])
    kind = np.where(
        (receivers["collective"] == "message").fill_null(False), EdgeKind.MESSAGE, EdgeKind.TRANSFER
    )
    draft.add_edges(
        kind,
        receivers["point"],
        receivers["finish"],
        (receivers["end"] - receivers["arrival"]).clip(0),
        receivers["event"],
    )
    for (rank, side), rows in receivers.partition_by("rank", "where", as_dict=True).items():
        min_latencies[rank, side][rows["place"].to_numpy()] = rows["least"].to_numpy()
    return table.group_by("rank").agg(matched=pl.col("accepted").sum(), local=(~pl.col("accepted")).sum())


def _check_instances(participations: pl.DataFrame) -> pl.DataFrame:
    """Add ``sends``, ``receives``, ``arrival`` (of the last rank, ns) and ``accepted`` to a table of communications.

    ``accepted``: the communication is matched and the times of all participants are consistent.

    ``sends``: others cannot end before it starts. ``receives``: it cannot end before those start.
    """
    role_pairs = [
        get_roles(*row) for row in participations.select("rank", "source", "root", "collective").iter_rows()
    ]
    sends, receives = (pl.Series([pair[i] for pair in role_pairs], dtype=pl.Boolean) for i in (0, 1))
    # gloo and NCCL do not move a message before its receive buffer exists.
    message = (participations["collective"] == "message").fill_null(False)
    arrival = pl.col("start").filter(pl.col("sends")).max().over("instance")
    participations = participations.with_columns(
        sends=sends | message, receives=receives | message
    ).with_columns(arrival=pl.coalesce(arrival, pl.col("start").max().over("instance")))
    leaves = pl.col("end").filter(pl.col("receives")).min().over("instance")
    is_consistent = (leaves >= pl.col("arrival")).fill_null(True)
    return participations.with_columns(accepted=pl.col("instance").is_not_null() & is_consistent)
