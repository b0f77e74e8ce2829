"""What the files of a run, beside each other, give reason to doubt: rows of stats, never a failure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import polars as pl

from etloom import kinds, readers
from etloom.trace import Stat, Trace

CUT = ("read.truncated", "read.packing")
"""Rows of stats of a file that ends early."""
CUT_DEVICE = "read.device_work_cut_off"


def with_cut_device(trace: Trace) -> Trace:
    """The trace with a row of stats where its file names a device and ends before the device's work.

    Such a trace would pass for one of the host alone: files list the work of the device last.
    """
    stats = trace.table("stats")["name"]
    if not stats.is_in(CUT).any() or stats.is_in([CUT_DEVICE]).any():
        return trace
    if not (names := device_names(trace)):
        return trace
    on_device = trace.scan("events").filter(pl.col("cat").is_in(list(kinds.DEVICE))).head(1)
    if on_device.select(pl.len()).collect(engine=trace.engine).item():
        return trace
    example = f"the file ends before the work of {', '.join(names)}: times are of the host alone"
    return trace.count(CUT_DEVICE, 1, example, "error")


def device_names(trace: Trace) -> list[str]:
    """The kinds of devices that the head of the file names."""
    properties = [one for one in trace.meta.get("device_properties", ()) if isinstance(one, dict)]
    return sorted({str(one["name"]) for one in properties if one.get("name")})


def between_ranks(traces: Mapping[int, Trace]) -> list[Stat]:
    """What the files say of their rank and world against where they stand."""
    stats: list[Stat] = []
    wrong = [(rank, trace.rank) for rank, trace in traces.items() if trace.rank not in (None, rank)]
    if wrong:
        example = f"a file in the place of rank {wrong[0][0]} says it is rank {wrong[0][1]}"
        stats.append(("job.rank_disagrees", "error", len(wrong), example))
    worlds = {world for trace in traces.values() if (world := trace.meta.get("world_size")) is not None}
    if len(worlds) > 1:
        stats.append(("job.world_size_disagrees", "error", len(worlds), f"world sizes {sorted(worlds)}"))
    elif worlds:
        (world,) = worlds
        beyond = [rank for rank in traces if rank >= world]
        if beyond:
            example = f"rank {beyond[0]} of a world of {world} ranks"
            stats.append(("job.world_size_disagrees", "error", len(beyond), example))
        missing = world - (len(traces) - len(beyond))
        if missing > 0:
            first = itertools.islice(
                (rank for rank in itertools.count() if rank not in traces), min(missing, 8)
            )
            some = ", ".join(map(str, first)) + (", ..." if missing > 8 else "")
            stats.append(("job.missing_ranks", "info", missing, f"no trace of rank {some} of {world}"))
    return stats


def between_files(traces: Sequence[Trace]) -> list[Stat]:
    """Whether traces to be linked to each other are of different ranks, by what they say or else by their names.

    Where both say it themselves, the linker tells.
    """
    known: dict[int, str] = {}
    worlds = [world for trace in traces if (world := trace.meta.get("world_size")) is not None]
    for trace in traces:
        for file in map(Path, trace.meta.get("files", ())):
            rank = readers.rank_in_name(file) if trace.rank is None else trace.rank
            # A number beyond the world counts something else, such as steps.
            if rank is not None and (trace.rank is not None or rank < min(worlds, default=rank + 1)):
                how = "its name" if trace.rank is None else "what it says"
                known.setdefault(rank, f"{file.name} is of rank {rank} by {how}")
    by_name = any(text.endswith("its name") for text in known.values())
    if len(known) < 2 or not by_name:
        return []
    example = f"{'; '.join(known.values())}: their ids may agree, their times do not belong together"
    return [("link.ranks_differ", "error", 1, example)]
