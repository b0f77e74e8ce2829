"""What the files of a run, beside each other, give reason to doubt: rows of stats, never a failure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import polars as pl

from etloom.collectives import matching
from etloom.core.schema import Stat
from etloom.core.text import format_ranges
from etloom.core.trace import Trace
from etloom.loading.rank_discovery import find_rank_in_name

_MAX_SEARCHED_RANKS = 10_000
"""Of the ranks that are missing; a file may speak of any world."""


def check_ranks(traces: Mapping[int, Trace]) -> list[Stat]:
    """What the files say of their rank and world against where they stand."""
    stats: list[Stat] = []
    wrong = [(rank, trace.rank) for rank, trace in traces.items() if trace.rank not in (None, rank)]
    if wrong:
        example = f"a file in the place of rank {wrong[0][0]} says it is rank {wrong[0][1]}"
        stats.append(Stat("job.rank_disagrees", "error", len(wrong), example))
    worlds = {world for trace in traces.values() if (world := trace.meta.get("world_size")) is not None}
    if len(worlds) > 1:
        stats.append(Stat("job.world_size_disagrees", "error", len(worlds), f"world sizes {sorted(worlds)}"))
    elif worlds:
        (world,) = worlds
        beyond = [rank for rank in traces if rank >= world]
        if beyond:
            example = f"rank {beyond[0]} of a world of {world} ranks"
            stats.append(Stat("job.world_size_disagrees", "error", len(beyond), example))
        missing = world - (len(traces) - len(beyond))
        if missing > 0:
            absent = (rank for rank in itertools.count() if rank not in traces)
            some = format_ranges(itertools.islice(absent, min(missing, _MAX_SEARCHED_RANKS)))
            more = ", ..." if missing > _MAX_SEARCHED_RANKS and not some.endswith("...") else ""
            stats.append(
                Stat("job.missing_ranks", "info", missing, f"no trace of rank {some}{more} of {world}")
            )
    return [*stats, *_check_common_time(traces), *_check_group_sizes(traces)]


def _check_group_sizes(traces: Mapping[int, Trace]) -> list[Stat]:
    """Groups in which more ranks did something together than they have: one name for several groups."""
    if len(traces) < 2:
        return []
    facts = dict.fromkeys(("collective", "pg_name", "ranks"), pl.String) | {"group_size": pl.Int64}
    calls = []
    for rank, trace in traces.items():
        own = trace.scan("comms").filter(pl.col("pg_name").is_not_null() & ~pl.col("is_p2p").fill_null(False))
        found = own.group_by(*facts).agg(start=pl.col("id").min().cast(pl.Int64))
        calls.append(
            found.collect(engine=trace.engine).cast(facts).with_columns(rank=pl.lit(rank), event="start")  # type: ignore[arg-type]
        )
    beyond = matching.find_ambiguous_groups(pl.concat(calls)).sort("group", "rank")
    if not beyond.height:
        return []
    group, size = beyond.select("group", "group_size").row(0)
    names = beyond["group"].n_unique()
    example = (
        f"group {group} of {size} ranks: more ranks use its name, or name theirs each in its own way, and who is in "
        "which was not recorded: what they did together is not matched"
    )
    return [Stat("job.ranks_beyond_group", "data_loss", names, example)]


def _check_common_time(traces: Mapping[int, Trace]) -> list[Stat]:
    """Whether a rank, by its clock, had ended before another began: a clock is off, or they are of two runs."""
    spans = {}
    for rank, trace in traces.items():
        if trace.meta.get("clock") == "epoch":
            end = (pl.col("ts") + pl.col("dur").fill_null(0)).max()
            times = trace.scan("events").select(first=pl.col("ts").min(), last=end)
            first, last = times.collect(engine=trace.engine).row(0)
            if first is not None:
                spans[rank] = (first, last)
    if len(spans) < 2:
        return []
    late = max(spans, key=lambda rank: spans[rank][0])
    early = min(spans, key=lambda rank: spans[rank][1])
    gap_ns = spans[late][0] - spans[early][1]
    if gap_ns <= 0:
        return []
    on = {rank: f" on {host}" if (host := traces[rank].meta.get("host")) else "" for rank in (early, late)}
    example = (
        f"rank {late}{on[late]} began {gap_ns / 1e9:,.3f} s after rank {early}{on[early]} had ended: their clocks "
        "differ (etloom analyze clocks), or they are of two runs; times across ranks are wrong by as much"
    )
    return [Stat("job.no_common_moment", "error", 1, example)]


def check_file_ranks(traces: Sequence[Trace]) -> list[Stat]:
    """Whether traces to be linked to each other are of different ranks, by what they say or else by their names.

    Where both say it themselves, the linker tells.
    """
    known: dict[int, str] = {}
    worlds = [world for trace in traces if (world := trace.meta.get("world_size")) is not None]
    for trace in traces:
        for file in map(Path, trace.meta.get("files", ())):
            rank = find_rank_in_name(file) if trace.rank is None else trace.rank
            # A number beyond the world counts something else, such as steps.
            if rank is not None and (trace.rank is not None or rank < min(worlds, default=rank + 1)):
                how = "its name" if trace.rank is None else "what it says"
                known.setdefault(rank, f"{file.name} is of rank {rank} by {how}")
    by_name = any(text.endswith("its name") for text in known.values())
    if len(known) < 2 or not by_name:
        return []
    example = f"{'; '.join(known.values())}: their ids may agree, their times do not belong together"
    return [Stat("link.ranks_differ", "error", 1, example)]
