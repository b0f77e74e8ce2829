"""Builds the tables of a run from the activities and calls that ROCm's profilers recorded, whatever file holds them.

Categories and names are Kineto's, except that HSA calls, which lie below HIP's, are `cuda_driver`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from etloom.core.schema import Stat
from etloom.core.trace import Job, Trace
from etloom.formats.io.sqlite_file import SqliteFile
from etloom.formats.tables.building import build_trace, sort_events
from etloom.formats.tables.processes import build_device_tracks

I64, TEXT = pl.Int64, pl.String
_LATEST = 1 << 61

CALL_COLUMNS = {"domain": TEXT, "name": TEXT, "start": I64, "end": I64, "tid": I64, "correlation": I64}
"""Columns of calls and markers: ``domain`` is the API, such as HIP_RUNTIME_API or MARKER_CORE_API."""
_GEOMETRY = [f"{shape}_{axis}" for shape in ("work", "block") for axis in "xyz"]
ACTIVITY_COLUMNS = {
    "cat": TEXT,
    "name": TEXT,
    **dict.fromkeys(("start", "end", "device", "stream", "queue", "correlation"), I64),
    **dict.fromkeys((*_GEOMETRY, "shared_mem", "bytes"), I64),
}
"""Columns of kernels and copies: ``work`` is the number of work-items of a grid, ``block`` those of a workgroup."""
_PLACES = {"HOST": "H", "DEVICE": "D"}


@dataclass(eq=False)
class Process:
    """The recording of one process: calls have `CALL_COLUMNS`, activities have `ACTIVITY_COLUMNS`."""

    pid: int
    calls: pl.DataFrame
    activities: pl.DataFrame
    rank: int | None = None
    devices: list[dict[str, Any]] = field(default_factory=list)
    """Properties of devices, with Kineto's keys."""
    stats: list[Stat] = field(default_factory=list)


def name_copy(direction: pl.Expr) -> pl.Expr:
    """Return Kineto's name of a copy from that of rocprofiler (MEMORY_COPY_HOST_TO_DEVICE, CopyHostToDevice)."""
    words = (
        direction.str.replace_all("([a-z])([A-Z])", "${1}_${2}")
        .str.to_uppercase()
        .str.extract_groups("(HOST|DEVICE)_TO_(HOST|DEVICE)")
    )
    source, target = words.struct[0], words.struct[1]
    letters = (side.replace_strict(_PLACES, default=None, return_dtype=TEXT) for side in (source, target))
    named = pl.format(
        "Memcpy {}to{} ({} -> {})", *letters, source.str.to_titlecase(), target.str.to_titlecase()
    )
    return pl.coalesce(named, direction)


def describe_device(number: int | None, name: str | None, agent: dict[str, Any]) -> dict[str, Any]:
    """Return the properties of a device with Kineto's keys, from an agent of rocprofiler."""
    properties = {
        "id": number,
        "name": name,
        "numSms": agent.get("cu_count"),
        "warpSize": agent.get("wave_front_size"),
        "totalGlobalMem": agent.get("local_mem_size") or None,
    }
    return {
        key: value
        for key, value in properties.items()
        if isinstance(value, str if key == "name" else int) and not isinstance(value, bool)
    }


def number_agents(agents: dict[int, dict[str, Any]], column: str) -> pl.Expr:
    """Return the number among the GPUs of the agents in a column; null for those that are not GPUs."""
    gpus = {key: agent["number"] for key, agent in agents.items() if agent["is_gpu"]}
    if not gpus:
        return pl.lit(None, dtype=I64)
    return pl.col(column).replace_strict(list(gpus), list(gpus.values()), default=None, return_dtype=I64)


def count_unread(source: SqliteFile, tables: Iterable[str]) -> Stat:
    """Return the number of rows in the tables of ROCm's profilers among ``tables``, which are not read."""
    counts = {table: source.count_rows(table) for table in sorted(tables) if table.startswith("rocpd_")}
    example = ", ".join(f"{table} {count:,}" for table, count in counts.items() if count)
    return Stat("read.rocprof_not_read", "info", sum(counts.values()), f"rows in {example}")


def build_run(
    processes: list[Process], header: Mapping[str, Any], stats: list[Stat], *, all_processes: bool
) -> Trace | Job:
    """Build a Trace of the only process with GPU activity, or a Job of several.

    Args:
        processes: What the file holds, at least one process.
        header: Meta of the run: formats, files, header.
        stats: What concerns the whole file; it is stated for the first rank.
        all_processes: Also read processes without GPU activity, if another has some.
    """
    working = [process for process in processes if process.activities.height]
    selected = processes if all_processes or not working else working
    idle = [process for process in processes if process not in selected]
    names = ", ".join(f"pid {process.pid}" for process in idle)
    rows = sum(process.calls.height for process in idle)
    example = f"skipped processes without GPU activity: {names}; read with all_processes=True"
    stats = [*stats, Stat("read.rocprof_idle_process", "data_loss", rows, example)]
    ranks = [process.rank for process in selected]
    if len(selected) > 1 and (None in ranks or len(set(ranks)) < len(ranks)):
        selected = sorted(selected, key=lambda process: process.pid)
        ranks = list(range(len(selected)))
        example = ", ".join(f"pid {process.pid} is rank {rank}" for rank, process in enumerate(selected[:4]))
        stats.append(Stat("read.rocprof_inferred_rank", "info", len(selected), example))
    traces: dict[int | None, Trace] = {}
    base = {"formats": ["rocprof"], "clock": "relative", "base_ns": 0, **header}
    world = len(selected) if len(selected) > 1 else None
    for rank, process in sorted(zip(ranks, selected, strict=True), key=lambda pair: pair[0] or 0):
        meta = {**base, "rank": rank, "world_size": world, "pid": process.pid}
        more = [] if traces else stats
        traces[rank] = _build_rank(process, {**meta, "device_properties": process.devices}, more)
    if len(traces) == 1:
        return next(iter(traces.values()))
    return Job(
        {rank: trace for rank, trace in traces.items() if rank is not None}, {**base, "world_size": world}
    )


def _build_rank(process: Process, meta: dict[str, Any], stats: list[Stat]) -> Trace:
    stats = [*stats, *process.stats]
    activities = process.activities.with_columns(
        ph=pl.lit("X"), stream=_choose_stream(process.activities)
    ).with_columns(pid="device", tid="stream")
    calls = _categorize_calls(process.calls).with_columns(pid=pl.lit(process.pid, dtype=I64))
    events = pl.concat([activities, calls], how="diagonal").with_row_index("position")
    events = sort_events(_check_times(events, stats)).with_row_index("id")
    nameless = "calls or activities whose name is in no table of the file"
    stats.append(Stat("read.rocprof_no_name", "data_loss", events["name"].null_count(), nameless))
    columns = (
        "id",
        "ph",
        "cat",
        "name",
        "ts",
        "dur",
        "pid",
        "tid",
        "device",
        "stream",
        "correlation",
        "position",
    )
    tables = {"events": events.select(columns), "threads": build_device_tracks(events)}
    kernels = _build_kernels(events.filter(pl.col("device").is_not_null()), process.devices)
    return build_trace({**tables, "kernels": kernels}, meta, stats)


def _choose_stream(activities: pl.DataFrame) -> pl.Expr:
    """Return the stream of HIP; the hardware queue where the recording has no streams, or states 0 for all of them."""
    has_streams = (activities["stream"] > 0).any()
    return pl.col("stream") if has_streams else pl.coalesce("queue", "stream")


def _categorize_calls(calls: pl.DataFrame) -> pl.DataFrame:
    domain = pl.col("domain").str.to_uppercase()
    runtime, driver = domain.str.starts_with("HIP"), domain.str.starts_with("HSA")
    mark = ~(runtime | driver) & (pl.col("end") == pl.col("start"))
    return calls.select(
        pl.exclude("domain", "end", "correlation"),
        end=pl.when(~mark.fill_null(False)).then("end"),
        cat=pl.when(runtime)
        .then(pl.lit("cuda_runtime"))
        .when(driver)
        .then(pl.lit("cuda_driver"))
        .otherwise(pl.lit("user_annotation")),
        ph=pl.when(mark).then(pl.lit("i")).otherwise(pl.lit("X")),
        # The correlation of a range would make it the launch call of the kernels inside of it.
        correlation=pl.when(runtime | driver).then("correlation"),
    )


def _check_times(events: pl.DataFrame, stats: list[Stat]) -> pl.DataFrame:
    """Return the events with a valid start, with ``ts`` and ``dur``; a duration below zero becomes null."""
    timed = (
        pl.col("start").is_between(0, _LATEST) & pl.col("end").fill_null(0).is_between(0, _LATEST)
    ).fill_null(False)
    valid = events.filter(timed).with_columns(ts="start", dur=pl.col("end") - pl.col("start"))
    negative = int((valid["dur"] < 0).sum())
    stats += [
        Stat(
            "read.rocprof_no_time", "data_loss", events.height - valid.height, "events without a valid start"
        ),
        Stat("read.negative_dur", "data_loss", negative, "end before start: the duration is null"),
    ]
    return valid.with_columns(dur=pl.when(pl.col("dur") >= 0).then("dur"))


def _build_kernels(activities: pl.DataFrame, devices: list[dict[str, Any]]) -> pl.DataFrame:
    facts = [*_GEOMETRY, "shared_mem", "bytes"]
    rows = activities.filter(pl.any_horizontal(pl.col(facts).is_not_null()))
    block = {axis: pl.when(pl.col(f"block_{axis}") > 0).then(f"block_{axis}") for axis in "xyz"}
    grid = {f"grid_{axis}": (pl.col(f"work_{axis}") + block[axis] - 1) // block[axis] for axis in "xyz"}
    copied = pl.col("bytes").is_not_null() & (pl.col("dur") > 0)
    properties = pl.DataFrame(
        [[device.get(key) for key in ("id", "numSms", "warpSize")] for device in devices],
        schema={"device": I64, "units": pl.Float64, "wave": pl.Float64},
        orient="row",
        strict=False,
    ).filter(pl.col("units") > 0)
    blocks = pl.col("grid_x") * pl.col("grid_y") * pl.col("grid_z")
    threads = pl.col("block_x") * pl.col("block_y") * pl.col("block_z")
    return (
        rows.with_columns(**grid)
        .join(properties.unique("device"), on="device", how="left", maintain_order="left")
        .select(
            "shared_mem",
            "bytes",
            *(f"{shape}_{axis}" for shape in ("grid", "block") for axis in "xyz"),
            event="id",
            blocks_per_sm=blocks / pl.col("units"),
            warps_per_sm=blocks * (threads / pl.col("wave")) / pl.col("units"),
            bandwidth=pl.when(copied).then(pl.col("bytes") / pl.col("dur")),
        )
    )
