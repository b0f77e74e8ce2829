"""Reads XPlane profiles (.xplane.pb), which jax.profiler, XLA and TensorFlow write for GPUs, TPUs and CPUs.

Read: kernels and copies on streams, XLA operations on TPU cores, host threads with runtime calls, Python frames, and
step annotations. Values of an event or of its operation (hlo_op, hlo_module, flops, bytes_accessed, source, ...) are
in ``events.args``; of a GPU's kernels, flops and bytes_accessed are estimated from the programs in the file. Lines that
summarize others are events of a separate category. Not read: planes other than those of devices and the host.

One device is one rank: a profile of a process with several busy devices is a Job. A call on the host belongs to the
rank of the device that it launched on, as does its thread; all other threads belong to the lowest rank.

Times are rounded down to ns (the file has picoseconds).

Format: tsl/profiler/protobuf/xplane.proto of openxla/xla, read by field number.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import polars as pl

from etloom.core.errors import ReadError
from etloom.core.schema import Stat
from etloom.core.trace import Job, Trace
from etloom.formats.io.compression import read_content
from etloom.formats.io.protobuf_fields import LENGTH, MessageData
from etloom.formats.tables.building import build_trace, sort_events
from etloom.formats.xplane.event_tables import EventTables, build_tables, parse_device
from etloom.formats.xplane.planes import Plane, Space, decode_space

_MAX_BYTES = 1 << 36
_EPOCH_NS = 10**17
"""Times beyond this (in 1973) are since the epoch; smaller ones since the start of the profile."""
_PLANE_NAME = re.compile(rb"/host:|/device:|Task Environment$|#Chip")
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def sniff(head: bytes) -> bool:
    """Return whether the file starts with a plane of an XSpace, such as /host:CPU or /device:GPU:0."""
    if head[:1] != b"\x0a":
        return False
    messages = MessageData(head[1:12])
    length, start = _read_length(messages)
    if not length:
        return False
    content = MessageData(head[1 + start : 1 + start + min(length, 512)])
    names = content.scan_all().select(2, LENGTH)
    return any(
        _PLANE_NAME.match(content.data[begin:end])
        for begin, end in zip(names.start.tolist(), names.ends.tolist(), strict=True)
    )


def _read_length(messages: MessageData) -> tuple[int, int]:
    """Return the varint at the start of the data and the offset after it; (0, 0) if there is none."""
    value = 0
    for i, byte in enumerate(messages.data[:5]):
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return value, i + 1
    return 0, 0


def read(path: Path) -> Trace | Job:
    """Read a Trace if at most one device was busy, or a Job with one rank per busy device.

    Raises:
        ReadError: The file has no event of a device or of the host.
        LimitError: The file is too large, or a decompression bomb.
    """
    content, truncation = read_content(path, _MAX_BYTES)
    messages = MessageData(content, path)
    space = decode_space(messages, path)
    tables = build_tables(space.planes, space.programs)
    if tables.events.is_empty() and (truncation or messages.truncated):
        raise ReadError("ends before its first event", where=path, remedy="copy or record it again")
    if tables.events.is_empty():
        raise ReadError(
            "has no event of a device or of the host",
            where=path,
            remedy="record with jax.profiler.trace, and wait for the results (block_until_ready) inside it",
        )
    stats = [*tables.stats, *_describe_file(space, messages, truncation)]
    meta = _read_meta(space, tables.events, path)
    tables.events = tables.events.with_columns(pl.col("ts") + meta.pop("offset_ns"))
    tables.events, is_step = _choose_steps(tables.events)
    owner = _assign_ranks(tables.events)
    ranks = sorted(owner.unique().to_list())
    traces = {
        rank: _build_rank(tables, (owner == rank) | is_step, meta, stats if rank == ranks[0] else [])
        for rank in ranks
    }
    if len(ranks) == 1:
        return traces[ranks[0]]
    return Job({rank: trace.replace(meta={"rank": rank}) for rank, trace in traces.items()}, meta)


def _describe_file(space: Space, messages: MessageData, truncation: str | None) -> list[Stat]:
    idle = [plane.name for plane in space.planes if parse_device(plane) and plane.events.is_empty()]
    is_truncated = truncation is not None or messages.truncated
    return [
        Stat(
            "read.truncated",
            "data_loss",
            int(is_truncated),
            truncation or "the end of the last plane is missing",
        ),
        Stat("read.xplane_damaged", "data_loss", messages.damaged, "a field that exceeds its message"),
        Stat("read.xplane_idle_device", "info", len(idle), ", ".join(idle[:8])),
        Stat("read.xplane_problem", "data_loss", len(space.problems), "; ".join(space.problems)[:500]),
    ]


def _read_meta(space: Space, events: pl.DataFrame, path: Path) -> dict[str, Any]:
    """Return the file's metadata, with ``offset_ns``, which is added to times to get ns since the epoch."""
    environment = next((plane.stats for plane in space.planes if plane.name == "Task Environment"), {})
    start = environment.get("profile_start_time")
    first = events["ts"].min()
    is_absolute = isinstance(first, int) and first > _EPOCH_NS
    has_base = isinstance(start, int) and _EPOCH_NS < start < 1 << 61
    offset = start if has_base and not is_absolute else 0
    return {
        "formats": ["xplane"],
        "files": [str(path)],
        "clock": "epoch" if is_absolute or has_base else "relative",
        "base_ns": offset,
        "offset_ns": offset,
        "host": space.hosts[0] if space.hosts else None,
        "device_properties": [
            properties for plane in space.planes if (properties := _describe_device(plane)) is not None
        ],
        "header": {"planes": {plane.name: plane.stats for plane in space.planes if plane.stats}},
    }


def _describe_device(plane: Plane) -> dict[str, Any] | None:
    """Return a device's properties under Kineto's keys; None if it is not a device or has fewer than two stats."""
    device = parse_device(plane)
    if device is None or len(plane.stats) < 2:
        return None
    stats = plane.stats
    name = stats.get("device_type_string") or " ".join(
        str(part) for part in (stats.get("device_vendor"), device[0]) if part
    )
    properties = {
        "id": device[1],
        "name": name,
        "totalGlobalMem": stats.get("memory_size"),
        "computeMajor": stats.get("compute_cap_major"),
        "computeMinor": stats.get("compute_cap_minor"),
        "numSms": stats.get("core_count"),
        "memoryBandwidth": stats.get("memory_bandwidth"),
    }
    return {key: value for key, value in properties.items() if value is not None}


def _choose_steps(events: pl.DataFrame) -> tuple[pl.DataFrame, pl.Series]:
    """Return the events, and a mask that selects the host's step annotations, which every rank receives.

    If the host has none, the step events of a device become its step annotations.
    """
    is_host_step = events["cat"] == "user_annotation"
    if not is_host_step.any():
        is_device_step = pl.col("cat") == "gpu_user_annotation"
        events = events.with_columns(
            cat=pl.when(is_device_step).then(pl.lit("user_annotation")).otherwise("cat")
        )
    return events, is_host_step


def _assign_ranks(events: pl.DataFrame) -> pl.Series:
    """Return the rank of each event: its device, else the device its call or thread launched on, else the lowest.

    A thread whose calls all launch on one device belongs to the rank of this device.
    """
    is_work = pl.col("cat").is_in(_DEVICE_WORK)
    working = events.filter(is_work)["device"].unique().sort()
    lowest = int(working[0]) if len(working) else 0
    if len(working) < 2:
        return pl.Series("rank", [lowest], dtype=pl.Int64).new_from_index(0, events.height)
    launched = events.filter(is_work & (pl.col("correlation") > 0))
    by_call = launched.select("correlation", "device").unique().unique("correlation", keep="none")
    hosts = events.filter(pl.col("device").is_null())
    calls = hosts.select("pid", "tid", "correlation").join(by_call, on="correlation", how="inner")
    by_thread = (
        calls.group_by("pid", "tid").agg(pl.col("device").unique()).filter(pl.col("device").list.len() == 1)
    )
    by_thread = by_thread.select("pid", "tid", thread_device=pl.col("device").list.first())
    joined = (
        events.select("pid", "tid", "device", "correlation")
        .join(by_call.rename({"device": "call_device"}), on="correlation", how="left", maintain_order="left")
        .join(by_thread, on=["pid", "tid"], how="left", maintain_order="left")
    )
    device = pl.when(pl.col("device").is_in(working.implode())).then("device")
    return joined.select(
        rank=pl.coalesce(device, "call_device", "thread_device", pl.lit(lowest)).cast(pl.Int64)
    ).to_series()


def _build_rank(tables: EventTables, mask: pl.Series, meta: dict[str, Any], stats: list[Stat]) -> Trace:
    events = sort_events(tables.events.filter(mask)).with_row_index("id")
    ids = events.select("position", event="id")
    kernels = tables.kernels.join(ids, on="position", how="inner").drop("position").sort("event")
    threads = tables.threads.join(events.select("pid", "tid").unique(), on=["pid", "tid"], how="semi")
    processes = tables.threads.filter(pl.col("tid").is_null()).unique(
        "pid", keep="first", maintain_order=True
    )
    processes = processes.filter(pl.col("pid").is_in(events["pid"].unique().implode()))
    return build_trace(
        {"events": events, "kernels": kernels, "threads": pl.concat([processes, threads])}, meta, stats
    )
