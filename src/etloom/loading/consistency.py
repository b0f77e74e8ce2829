"""Check the files of a run for contradictions and report them in stats; loading never fails because of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from etloom.collectives import matching
from etloom.core.arrays import to_series
from etloom.core.categories import count_events
from etloom.core.schema import Stat
from etloom.core.text import format_ranges
from etloom.core.trace import Trace
from etloom.loading.file_names import find_rank_in_name

_MAX_SEARCHED_RANKS = 10_000
"""Missing ranks that are looked for; a file may state any world size."""


def check_ranks(traces: Mapping[int, Trace]) -> list[Stat]:
    """Check that the ranks of a run have consistent rank numbers, world sizes, clocks and process groups.

    Args:
        traces: rank -> its trace.
    """
    stats: list[Stat] = []
    wrong = [(rank, trace.rank) for rank, trace in traces.items() if trace.rank not in (None, rank)]
    if wrong:
        example = f"a file used for rank {wrong[0][0]} states rank {wrong[0][1]}"
        stats.append(Stat("job.rank_mismatch", "error", len(wrong), example))
    worlds = {world for trace in traces.values() if (world := trace.meta.get("world_size")) is not None}
    if len(worlds) > 1:
        stats.append(Stat("job.world_size_mismatch", "error", len(worlds), f"world sizes {sorted(worlds)}"))
    elif worlds:
        (world,) = worlds
        too_high = [rank for rank in traces if rank >= world]
        if too_high:
            example = f"rank {too_high[0]}, but the world size is {world}"
            stats.append(Stat("job.world_size_mismatch", "error", len(too_high), example))
        missing = world - (len(traces) - len(too_high))
        if missing > 0:
            absent = (rank for rank in itertools.count() if rank not in traces)
            numbers = format_ranges(itertools.islice(absent, min(missing, _MAX_SEARCHED_RANKS)))
            more = ", ..." if missing > _MAX_SEARCHED_RANKS and not numbers.endswith("...") else ""
            stats.append(
                Stat("job.missing_ranks", "info", missing, f"no trace of rank {numbers}{more} of {world}")
            )
    return [*stats, *_check_common_time(traces), *_check_group_sizes(traces)]


def _check_group_sizes(traces: Mapping[int, Trace]) -> list[Stat]:
    """Report process groups whose name more ranks use than the group has members: several groups share the name."""
    if len(traces) < 2:
        return []
    calls = [trace.compute_once(list_first_calls) for trace in traces.values()]
    ranks = np.repeat(np.array(list(traces), np.int32), [table.height for table in calls])
    first_calls = pl.concat(calls).with_columns(to_series(ranks, "rank"), event="start")
    ambiguous = matching.find_ambiguous_groups(first_calls).sort("group", "rank")
    if not ambiguous.height:
        return []
    group, size = ambiguous.select("group", "group_size").row(0)
    names = ambiguous["group"].n_unique()
    example = (
        f"group {group} of {size} ranks: more ranks use its name, or each rank names its groups differently, and the "
        "members were not recorded: its communication is not matched across ranks"
    )
    return [Stat("job.ranks_beyond_group", "data_loss", names, example)]


def list_first_calls(trace: Trace) -> pl.DataFrame:
    """Return the first call of each collective type per process group; ``start`` is the call's id in table `comms`."""
    facts = dict.fromkeys(("collective", "pg_name", "ranks"), pl.String) | {"group_size": pl.Int64}
    in_groups = trace.scan("comms").filter(
        pl.col("pg_name").is_not_null() & ~pl.col("is_p2p").fill_null(False)
    )
    first_calls = in_groups.group_by(*facts).agg(start=pl.col("id").min().cast(pl.Int64))
    return first_calls.sort("start").collect(engine=trace.engine).cast(facts)  # type: ignore[arg-type]


def _check_common_time(traces: Mapping[int, Trace]) -> list[Stat]:
    """Report two ranks whose recordings do not overlap in time: a clock is wrong, or the files belong to two runs.

    Dumps of the Flight Recorder are not checked: each holds a rank's last calls, and ranks of a hang stop at different
    times.
    """
    spans = {}
    if len(traces) < 2:
        return []
    for rank, trace in traces.items():
        if trace.meta.get("clock") == "epoch" and "flight_recorder" not in trace.meta.get("formats", ()):
            counts = trace.compute_once(count_events)
            first: Any = counts["first_ts"].min()
            end: Any = counts["end"].max()
            if first is not None and end is not None:
                spans[rank] = (first, end)
    if len(spans) < 2:
        return []
    late = max(spans, key=lambda rank: spans[rank][0])
    early = min(spans, key=lambda rank: spans[rank][1])
    gap_ns = spans[late][0] - spans[early][1]
    if gap_ns <= 0:
        return []
    hosts = {rank: f" on {host}" if (host := traces[rank].meta.get("host")) else "" for rank in (early, late)}
    example = (
        f"rank {late}{hosts[late]} began {gap_ns / 1e9:,.3f} s after rank {early}{hosts[early]} ended: their clocks "
        "differ (etloom analyze clocks), or the files belong to two runs; times across ranks are wrong by that much"
    )
    return [Stat("job.no_common_time", "error", 1, example)]


def check_file_ranks(traces: Sequence[Trace]) -> list[Stat]:
    """Report traces that are linked to each other although they are of different ranks.

    If both state their rank, the linker reports it.
    """
    facts_by_rank: dict[int, str] = {}
    worlds = [world for trace in traces if (world := trace.meta.get("world_size")) is not None]
    for trace in traces:
        for file in map(Path, trace.meta.get("files", ())):
            rank = find_rank_in_name(file) if trace.rank is None else trace.rank
            # A number beyond the world counts something else, such as steps.
            if rank is not None and (trace.rank is not None or rank < min(worlds, default=rank + 1)):
                evidence = "its name" if trace.rank is None else "its contents"
                facts_by_rank.setdefault(rank, f"{file.name} is of rank {rank} by {evidence}")
    by_name = any(text.endswith("its name") for text in facts_by_rank.values())
    if len(facts_by_rank) < 2 or not by_name:
        return []
    example = f"{'; '.join(facts_by_rank.values())}: their ids may match, but their times are unrelated"
    return [Stat("link.ranks_differ", "error", 1, example)]
