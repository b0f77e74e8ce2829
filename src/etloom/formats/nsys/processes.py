"""The processes, ranks, threads and devices of an Nsight Systems export."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import polars as pl

from etloom.core.schema import Stat
from etloom.formats.nsys.containers import I64, TEXT, ExportFile, int_columns
from etloom.formats.nsys.cuda import read_sm_counts
from etloom.formats.nsys.event_tables import extract_pid, extract_process, extract_tid, resolve_names
from etloom.formats.tables.processes import find_rank

_RANK_IN_NAME = re.compile(r"rank[ _:=#-]?(\d+)", re.IGNORECASE)


def get_pid(process: int) -> int:
    return (process >> 24) & 0xFFFFFF


def assign_ranks(
    source: ExportFile, processes: Iterable[int], nccl_ranks: Mapping[int, tuple[int, int]]
) -> tuple[dict[int, int | None], list[Stat]]:
    """Assign a rank to each process, from NCCL, the environment, process names or the order of pids.

    The sources, in this order: NCCL; the launcher's environment variable, if the export has one process (Nsight records
    the environment of the launched program, which all its children share); the names of the processes; the order of
    the pids, which with torchrun is likely the order of the ranks, but not certain.

    Args:
        source: The export.
        processes: The global pids.
        nccl_ranks: Process -> (rank, number of ranks) as recorded by NCCL.

    Returns:
        Process -> rank, and a stat if the ranks are guessed.
    """
    order = sorted(processes, key=lambda process: (get_pid(process), process))
    ranks: dict[int, int | None] = {
        process: nccl_ranks[process][0] for process in order if process in nccl_ranks
    }
    if len(ranks) == len(order) and len(set(ranks.values())) == len(order):
        return ranks, []
    if len(order) == 1:
        return {order[0]: _read_rank_from_environment(source)}, []
    names = dict(source.read_table("PROCESSES", {"globalPid": I64, "name": TEXT}).drop_nulls().rows())
    matches = {process: _RANK_IN_NAME.search(names.get(process, "")) for process in order}
    ranks = {process: int(match[1]) for process, match in matches.items() if match}
    if len(ranks) == len(order) and len(set(ranks.values())) == len(order):
        return ranks, []
    example = ", ".join(f"pid {get_pid(process)} is rank {rank}" for rank, process in enumerate(order[:4]))
    return {process: rank for rank, process in enumerate(order)}, [
        Stat("read.nsys_inferred_rank", "info", len(order), f"by ascending pid: {example}")
    ]


def _read_rank_from_environment(source: ExportFile) -> int | None:
    rows = source.read_table("META_DATA_CAPTURE", {"name": TEXT, "value": TEXT})
    lines = rows.filter(pl.col("name") == "PROCESS_0:ENVIRONMENT_VARIABLE")["value"].drop_nulls()
    values = {name: value.strip('"') for name, _, value in (line.partition("=") for line in lines)}
    return find_rank(values)


def read_meta(source: ExportFile) -> dict[str, Any]:
    """Read the metadata of a run: clock, base_ns (ns since the epoch), device_properties (Kineto's keys), header."""
    start = source.read_table("TARGET_INFO_SESSION_START_TIME", {"utcEpochNs": I64})[
        "utcEpochNs"
    ].drop_nulls()
    base = int(start[0]) if start.len() else None
    export = dict(
        source.read_table("META_DATA_EXPORT", {"name": TEXT, "value": TEXT})
        .filter(
            pl.col("name").is_in(["EXPORT_PRODUCT_NAME", "EXPORT_PRODUCT_VERSION", "EXPORT_SCHEMA_VERSION"])
        )
        .rows()
    )
    return {
        "formats": ["nsys"],
        "clock": "relative" if base is None else "epoch",
        "base_ns": base or 0,
        "schema_version": export.get("EXPORT_SCHEMA_VERSION"),
        "device_properties": _read_devices(source),
        "header": {
            "product": export.get("EXPORT_PRODUCT_NAME"),
            "version": export.get("EXPORT_PRODUCT_VERSION"),
        },
    }


def _read_devices(source: ExportFile) -> list[dict[str, Any]]:
    numbers = int_columns(
        "id totalMemory computeMajor computeMinor threadsPerWarp memoryBandwidth maxShmemPerSm"
    )
    gpus = source.read_table("TARGET_INFO_GPU", {"name": TEXT} | numbers).drop_nulls("id")
    processors = read_sm_counts(source)
    return [
        {
            key: value
            for key, value in {
                "id": gpu["id"],
                "name": gpu["name"],
                "totalGlobalMem": gpu["totalMemory"],
                "computeMajor": gpu["computeMajor"],
                "computeMinor": gpu["computeMinor"],
                "warpSize": gpu["threadsPerWarp"],
                "numSms": processors.get(gpu["id"]),
                "sharedMemPerMultiprocessor": gpu["maxShmemPerSm"],
                "memoryBandwidth": gpu["memoryBandwidth"],
            }.items()
            if value is not None
        }
        for gpu in gpus.iter_rows(named=True)
    ]


def read_threads(source: ExportFile) -> pl.DataFrame:
    """Read the names of processes and threads as rows of the threads table, plus the column ``process``."""
    processes = source.read_table("PROCESSES", {"globalPid": I64, "name": TEXT}).select(
        process=extract_process("globalPid"),
        pid=extract_pid("globalPid"),
        tid=pl.lit(None, dtype=I64),
        name="name",
    )
    threads = source.read_table("ThreadNames", int_columns("nameId globalTid"))
    threads = resolve_names(source, threads, "nameId").select(
        process=extract_process("globalTid"),
        pid=extract_pid("globalTid"),
        tid=extract_tid("globalTid"),
        name="nameId",
    )
    return pl.concat([processes, threads]).unique(["process", "pid", "tid"], keep="last", maintain_order=True)
