"""What the files of a run, beside each other, give reason to doubt: rows of stats, never a failure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

import polars as pl

from etloom.collectives import matching
from etloom.core import categories
from etloom.core.schema import Stat
from etloom.core.text import format_ranges
from etloom.core.trace import Trace
from etloom.loading.rank_discovery import find_rank_in_name

TRUNCATION_STATS = ("read.truncated", "read.compression")
"""Rows of stats of a file that ends early."""
_MAX_SEARCHED_RANKS = 10_000
"""Of the ranks that are missing; a file may speak of any world."""
GPU_CUT_OFF = "read.device_work_cut_off"


def flag_missing_gpu_events(trace: Trace) -> Trace:
    """The trace with a row of stats where its file names a device and ends before the device's work.

    Such a trace would pass for one of the host alone: files list the work of the device last.
    """
    stats = trace.table("stats")["name"]
    if not stats.is_in(TRUNCATION_STATS).any() or stats.is_in([GPU_CUT_OFF]).any():
        return trace
    if not (names := list_device_names(trace)):
        return trace
    on_device = trace.scan("events").filter(pl.col("cat").is_in(list(categories.DEVICE_CATEGORIES))).head(1)
    if on_device.select(pl.len()).collect(engine=trace.engine).item():
        return trace
    example = f"the file ends before the work of {', '.join(names)}: times are of the host alone"
    return trace.count(GPU_CUT_OFF, 1, example, "error")


def list_device_names(trace: Trace) -> list[str]:
    """The kinds of devices that the head of the file names."""
    properties = [one for one in trace.meta.get("device_properties", ()) if isinstance(one, dict)]
    return sorted({str(one["name"]) for one in properties if one.get("name")})


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


def check_files(traces: Sequence[Trace]) -> list[Stat]:
    """What speaks against linking these traces to each other: they are of several processes, or of several ranks."""
    return _check_file_ranks(traces) or check_processes(traces)


def check_processes(traces: Sequence[Trace]) -> list[Stat]:
    """Whether an execution trace and a Kineto trace name different processes.

    Both ask the system for their own number, so in one process they say the same; and two runs of one program may be
    alike in everything that is linked by.
    """
    told = {trace: _find_recorded_processes(trace) for trace in traces}
    of_nodes = {
        one: at
        for trace in traces
        for one, at in told[trace].items()
        if _has_format(trace, "execution_trace")
    }
    of_times = {
        one: at for trace in traces for one, at in told[trace].items() if _has_format(trace, "kineto")
    }
    if not of_nodes or not of_times or of_nodes.keys() & of_times.keys():
        return []
    (first, nodes), (second, times) = (next(iter(one.items())) for one in (of_nodes, of_times))
    example = (
        f"the execution trace is of process {first}{nodes}, the Kineto trace of process {second}{times}: operators, "
        "shapes and sizes are of one run and times of another"
    )
    return [Stat("link.processes_differ", "error", 1, example)]


def _has_format(trace: Trace, format: str) -> bool:
    return list(trace.meta.get("formats", ())) == [format]


def _find_recorded_processes(trace: Trace) -> dict[int, str]:
    """The processes whose operators a file of one format holds, and when it was recorded, as far as it says."""
    if _has_format(trace, "execution_trace"):
        said = trace.meta.get("header", {}).get("execution_trace")
        if isinstance(said, dict) and type(pid := said.get("pid")) is int:
            return {pid: f", recorded {said['time']}" if isinstance(said.get("time"), str) else ""}
    elif _has_format(trace, "kineto"):
        operators = trace.scan("events").filter(pl.col("cat").is_in(list(categories.OPERATOR_CATEGORIES)))
        found = operators.group_by("pid").agg(pl.col("ts").min()).drop_nulls().sort("ts")
        epoch = trace.meta.get("clock") == "epoch"
        return {
            pid: _format_time(ts) if epoch else ""
            for pid, ts in found.collect(engine=trace.engine).iter_rows()
        }
    return {}


def _format_time(ns: int) -> str:
    return f", recorded {datetime.fromtimestamp(ns // 10**9, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"


def _check_file_ranks(traces: Sequence[Trace]) -> list[Stat]:
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
