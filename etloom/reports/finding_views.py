"""The part of the timeline to show for each finding: a time range, an event, and the ranks involved.

A wait for another rank is shown with its cause: the wait on one rank, and on the other what it did meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import polars as pl

from etloom.analyses.helpers.run_tables import ARRIVAL_ORDER
from etloom.core.trace import Job
from etloom.reports.formatting import format_duration

MIN_SHARE = 0.5
"""Share of a finding's time that a wait must cover for the finding to be about that wait."""


@dataclass(frozen=True)
class FindingView:
    """The part of the timeline to show for a finding: rank, time range, event and, for a wait, the other rank.

    Attributes:
        rank: The rank of the finding.
        event: Id of the event to select, null if none is known.
        start_ns: Start of the time to show, on the rank's clock.
        end_ns: Its end.
        peer: The rank that ``rank`` waits for, or that waits for it; None for neither.
        peer_event: Id of the event of the peer.
        late: The one of both that the other waits for.
        caption: What the timeline shows, one sentence.
    """

    rank: int
    event: int | None
    start_ns: int
    end_ns: int
    peer: int | None = None
    peer_event: int | None = None
    late: int | None = None
    caption: str = ""


def find_views(findings: pl.DataFrame, job: Job) -> list[FindingView | None]:
    """Return for each finding the part of the timeline to show; None if the finding has no start and end time."""
    collectives = ARRIVAL_ORDER.read(job)
    return [_find_view(row, collectives) for row in findings.iter_rows(named=True)]


def list_named_ranks(views: list[FindingView | None]) -> list[int]:
    """Return the distinct ranks that timeline views show, and their peer ranks, in the order of the views."""
    ranks = [rank for view in views if view for rank in (view.rank, view.peer) if rank is not None]
    return list(dict.fromkeys(ranks))


def _find_view(row: Mapping[str, Any], collectives: pl.DataFrame) -> FindingView | None:
    start, end = row.get("start_ns"), row.get("end_ns")
    if start is None or end is None:
        return None
    view = FindingView(row["rank"], row["event"], start, end)
    return next(_views_of_waits(view, collectives), view)


def _views_of_waits(view: FindingView, collectives: pl.DataFrame) -> Iterator[FindingView]:
    """Yield the timeline view of a finding with the other rank added, if it shows a wait between two ranks."""
    if collectives.is_empty():
        return
    parts = collectives.filter(pl.col("rank") == view.rank)
    waited_until = pl.min_horizontal(pl.col("own_start") + pl.col("wait"), "own_end")
    covered = pl.min_horizontal(waited_until, pl.lit(view.end_ns)) - pl.max_horizontal(
        "own_start", pl.lit(view.start_ns)
    )
    waits = parts.with_columns(covered=covered).filter(
        pl.col("covered") > MIN_SHARE * (view.end_ns - view.start_ns)
    )
    if waits.height:
        wait = waits.sort("covered", descending=True).row(0, named=True)
        late = _participant(collectives, wait["instance"], wait["size"] - 1)
        yield _with_peer(view, wait, late, wait, late)
        return
    # A rank that is late arrives at the end of the time.
    for arrival in parts.filter(
        (pl.col("own_start") == view.end_ns) & (pl.col("order") == pl.col("size") - 1)
    ).iter_rows(named=True):
        first = _participant(collectives, arrival["instance"], 0)
        wait_start = view.end_ns - (arrival["start"] - first["start"])
        yield _with_peer(
            replace(view, start_ns=min(view.start_ns, wait_start)), arrival, first, first, arrival
        )


def _participant(collectives: pl.DataFrame, instance: int, order: int) -> dict[str, Any]:
    return collectives.filter(instance=instance, order=order).row(0, named=True)


def _with_peer(
    view: FindingView,
    own: Mapping[str, Any],
    peer: Mapping[str, Any],
    waiting: Mapping[str, Any],
    late: Mapping[str, Any],
) -> FindingView:
    wait = format_duration(late["start"] - waiting["start"])
    return replace(
        view,
        event=own["event"],
        peer=peer["rank"],
        peer_event=peer["event"],
        late=late["rank"],
        caption=f"Rank {waiting['rank']} waits {wait} for rank {late['rank']} in {own['collective']}.",
    )
