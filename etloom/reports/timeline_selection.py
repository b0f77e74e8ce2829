"""Selects the ranks whose timelines the report draws, their time origins, and notes on what is omitted."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from etloom.core import categories
from etloom.core.machine import run_in_parallel
from etloom.core.text import count_noun, format_ranges, format_ranks
from etloom.core.trace import Job, Trace
from etloom.reports.timeline_data import PackedTimeline, pack_timeline
from etloom.reports.timeline_path import select_pieces

MAX_TOTAL_EVENTS = 1_200_000
"""Events drawn for all ranks together: a browser still opens the file quickly, and it fits into a mail."""
OPEN_RANKS = 8
"""Ranks that are unfolded when the page opens, the first ones; with more ranks, those that findings name come first."""
MAX_RANK_NOTES = 4
"""Up to this number of ranks, each rank has its own note; of more ranks, one note has the sums."""


@dataclass(frozen=True)
class Timelines:
    """The timelines of the report: the packed data of each drawn rank, and the times shown as zero.

    Attributes:
        packed: One per rank, from the top.
        zeros: The time that the page shows as zero, by rank.
        common_clock: Whether times of different ranks can be compared.
        notes: What the timelines omit.
    """

    packed: list[PackedTimeline]
    zeros: Mapping[int, int]
    common_clock: bool
    notes: list[str]


def pack_timelines(
    job: Job, max_events: int, max_ranks: int, path: pl.DataFrame, named_ranks: Sequence[int] = ()
) -> Timelines:
    """Select the ranks of a job to draw, and pack their timelines for the HTML report.

    Args:
        max_events: events drawn per rank.
        max_ranks: ranks drawn.
        path: the critical path by edge.
        named_ranks: ranks that findings name; of many ranks they are drawn first.
    """
    ranks = job.rank_facts.filter(pl.col("events") > 0)["rank"].to_list()
    notes = []
    if empty := sorted(set(job) - set(ranks)):
        notes.append(f"No profiler events were read for {format_ranks(empty)}: there is no timeline.")
    if len(ranks) > OPEN_RANKS:
        has_events = set(ranks)
        first = [rank for rank in named_ranks if rank in has_events]
        ranks = list(dict.fromkeys((*first, *ranks)))
        if first:
            notes.append(f"The ranks that the findings name are at the top: {format_ranges(first)}.")
    if len(ranks) > max_ranks:
        rest = sorted(ranks[max_ranks:])
        notes.append(
            f"The timelines of {count_noun(len(rest), 'rank')} ({format_ranges(rest)}) are omitted; "
            "the tables cover them."
        )
    timed = {rank: job[rank] for rank in ranks[:max_ranks]}
    starts = find_origins(timed)
    zeros = find_first_work(timed, starts)
    common_clock = len(set(starts.values())) <= 1
    if not common_clock:
        notes.append("The ranks have no common clock: each timeline starts at its own zero.")
    max_per_rank = min(max_events, MAX_TOTAL_EVENTS // max(1, len(timed)))

    def pack(rank: int) -> PackedTimeline:
        pieces, trace = select_pieces(path, rank), timed[rank]
        return pack_timeline(
            trace, rank=rank, origin=starts[rank], zero=zeros[rank], max_events=max_per_rank, pieces=pieces
        )

    # Compression and polars release the interpreter's lock.
    packed = list(run_in_parallel(pack, list(timed), os.cpu_count() or 1).values())
    return Timelines(packed, zeros, common_clock, [*notes, *_describe_omissions(packed)])


def _describe_omissions(packed: list[PackedTimeline]) -> Iterator[str]:
    for total, omitted, crowded, subject in _summarize_omissions(packed):
        if omitted:
            yield (
                f"{subject}: {omitted:,} of {total:,} events are omitted from the timeline; "
                "the longest of each track and time are drawn. The tables include all."
            )
        if crowded:
            yield f"{subject}: {crowded:,} events overlap so many others that they share a row."


def _summarize_omissions(packed: list[PackedTimeline]) -> list[tuple[int, int, int, str]]:
    """Return (events, omitted events, events that share a row, subject of the note) per rank, or summed over many."""
    if len(packed) <= MAX_RANK_NOTES:
        return [
            (timeline.total, timeline.omitted, timeline.sharing_last_row, f"Rank {timeline.rank}")
            for timeline in packed
        ]
    total, omitted, crowded = (
        sum(values)
        for values in zip(
            *((timeline.total, timeline.omitted, timeline.sharing_last_row) for timeline in packed),
            strict=True,
        )
    )
    return [(total, omitted, crowded, f"All {len(packed):,} ranks together")]


def find_origins(traces: Mapping[int, Trace]) -> dict[int, int]:
    """Return {rank: time origin in ns}: the first event of the rank, or of all ranks if they share a clock.

    They share a clock if each file states its base time and the ranks ran at the same time; otherwise a rank would
    appear as a dot far away from the others.
    """
    bounds = pl.col("first_ts").min(), pl.col("last_ts").max()
    spans = {
        rank: trace.compute_once(categories.count_events).select(bounds).row(0)
        for rank, trace in traces.items()
    }
    starts = {rank: start or 0 for rank, (start, _) in spans.items()}
    if not spans:
        return {}
    is_absolute = all(trace.meta.get("clock") == "epoch" for trace in traces.values())
    is_concurrent = max(starts.values()) <= min(end or 0 for _, end in spans.values())
    if is_absolute and is_concurrent:
        return dict.fromkeys(spans, min(starts.values()))
    return starts


def find_first_work(traces: Mapping[int, Trace], starts: Mapping[int, int]) -> dict[int, int]:
    """Return {rank: time shown as zero, ns}: the earliest start of work on all ranks with the same time origin.

    The recorder's own span may begin seconds earlier: see `etloom.core.categories`.
    """
    first_starts: dict[int, Any] = {
        rank: trace.compute_once(categories.count_events)["work_start"].min()
        for rank, trace in traces.items()
    }
    starts_or_origin = {rank: starts[rank] if at is None else at for rank, at in first_starts.items()}
    first = {
        start: min(at for rank, at in starts_or_origin.items() if starts[rank] == start)
        for start in set(starts.values())
    }
    return {rank: first[start] for rank, start in starts.items()}
