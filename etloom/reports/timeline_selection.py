"""The timelines of all ranks: which are drawn, from which zero, and what is left out of them."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from etloom.core import categories
from etloom.core.text import format_ranges, format_ranks
from etloom.core.trace import Job, Trace
from etloom.reports.formatting import count_noun
from etloom.reports.timeline_data import PackedTimeline, pack_timeline

MAX_TOTAL_EVENTS = 1_200_000
"""Events drawn of all ranks together: what a browser opens in a blink and a mail carries."""
MAX_RANK_NOTES = 4
"""Ranks each of which may have a note of its own."""


def pack_timelines(
    job: Job, max_events: int, max_ranks: int, critical: pl.DataFrame
) -> tuple[list[PackedTimeline], list[str]]:
    """The packed ranks, and what a reader of the page must be told about what they leave out."""
    drawn = {rank: trace for rank, trace in job.items() if trace.rows("events")}
    notes = []
    if empty := [rank for rank in job if rank not in drawn]:
        notes.append(f"No profiler events were read of {format_ranks(empty)}: there is no timeline to draw.")
    if len(drawn) > max_ranks:
        rest = list(drawn)[max_ranks:]
        notes.append(
            f"The timelines of {count_noun(len(rest), 'rank')} ({format_ranges(rest)}) are left out; the tables cover them."
        )
        drawn = dict(list(drawn.items())[:max_ranks])
    starts = find_origins(drawn)
    zeros = find_first_work(drawn, starts)
    if len(set(starts.values())) > 1:
        notes.append("The ranks share no clock: each timeline starts at its own zero.")
    most = min(max_events, MAX_TOTAL_EVENTS // max(1, len(drawn)))
    packed = [
        pack_timeline(
            trace,
            rank=rank,
            origin=starts[rank],
            zero=zeros[rank],
            max_events=most,
            critical=critical.filter(pl.col("rank") == rank)["event"].drop_nulls(),
        )
        for rank, trace in drawn.items()
    ]
    for total, left_out, crowded, who in _summarize_omissions(packed):
        if left_out:
            notes.append(
                f"{who}: {left_out:,} of {total:,} events are left out of the timeline; "
                "the longest of each lane and time are drawn. The tables count all."
            )
        if crowded:
            notes.append(f"{who}: {crowded:,} events overlap so many others that they share a row.")
    return packed, notes


def _summarize_omissions(packed: list[PackedTimeline]) -> list[tuple[int, int, int, str]]:
    """(events, left out, crowded, of whom): a rank each, or of many ranks their sum."""
    if len(packed) <= MAX_RANK_NOTES:
        return [(one.total, one.left_out, one.sharing_last_row, f"Rank {one.rank}") for one in packed]
    total, left_out, crowded = (
        sum(of) for of in zip(*((p.total, p.left_out, p.sharing_last_row) for p in packed), strict=True)
    )
    return [(total, left_out, crowded, f"All {len(packed):,} ranks together")]


def find_origins(traces: Mapping[int, Trace]) -> dict[int, int]:
    """The time from which starts are counted, per rank: the earliest of all where the ranks share a clock.

    They do where each file says its base and the ranks ran at one time: else a rank would be a speck far from the
    others.
    """
    bounds = pl.col("ts").min().alias("from"), pl.col("ts").max().alias("to")
    spans = {
        rank: trace.scan("events").select(bounds).collect(engine=trace.engine).row(0)
        for rank, trace in traces.items()
    }
    starts = {rank: start for rank, (start, _) in spans.items()}
    if not spans:
        return {}
    absolute = all(trace.meta.get("clock") == "epoch" for trace in traces.values())
    together = max(starts.values()) <= min(end for _, end in spans.values())
    if absolute and together:
        return dict.fromkeys(spans, min(starts.values()))
    return starts


def find_first_work(traces: Mapping[int, Trace], starts: Mapping[int, int]) -> dict[int, int]:
    """The time that is zero on the page, per rank: when the first work began, of all ranks that count from one start.

    The recorder's own span may begin seconds before: see `etloom.core.categories.recorded_extent`.
    """
    began = {
        rank: trace.scan("events").select(categories.recorded_extent()[0]).collect(engine=trace.engine).item()
        for rank, trace in traces.items()
    }
    known = {rank: starts[rank] if at is None else at for rank, at in began.items()}
    first = {
        start: min(at for rank, at in known.items() if starts[rank] == start)
        for start in set(starts.values())
    }
    return {rank: first[start] for rank, start in starts.items()}
