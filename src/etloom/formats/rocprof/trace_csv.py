"""Reads rocprofv3's CSV: a file per kind of record, next to each other; names begin with the process.

They state neither the bytes of copies nor the environment of a process.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import polars as pl

from etloom.core.schema import Stat
from etloom.formats.io.csv_columns import read_text_columns
from etloom.formats.io.other_formats import read_header
from etloom.formats.rocprof.activities import (
    ACTIVITY_COLUMNS,
    CALL_COLUMNS,
    I64,
    TEXT,
    Process,
    describe_device,
    name_copy,
)
from etloom.formats.tables.building import select_columns

_CALLS = ("hip_api_trace", "hsa_api_trace", "marker_api_trace", "rccl_api_trace")
_KERNELS, _COPIES, _AGENTS = "kernel_trace", "memory_copy_trace", "agent_info"
_NAME = re.compile(
    rf"(?:(?P<process>.*)_)?(?P<kind>{'|'.join((*_CALLS, _KERNELS, _COPIES, _AGENTS))}"
    r"|[a-z]+_api_trace|memory_allocation_trace|scratch_memory_trace|counter_collection)\.csv"
)
_HEADER = frozenset({"kernel_name", "correlation_id", "start_timestamp", "end_timestamp"})
_OTHER_TRACES = (".db", ".rpd", ".json", ".gz", ".zst", ".sqlite")
_TIMES = {"start": "start_timestamp", "end": "end_timestamp", "correlation": "correlation_id"}
_NUMBER = r"^\s*(-?\d+)\s*$"


def sniff(head: bytes) -> bool:
    """Return whether a file is a table of kernels, which is read with the files next to it."""
    columns = read_header(head)
    return columns >= _HEADER and "counter_name" not in columns


def sniff_folder(path: Path) -> bool:
    """Return whether a folder has tables of kernels or of HIP's calls, and no trace of another form."""
    kinds, others = set(), False
    for file in path.iterdir():
        match = _NAME.fullmatch(file.name)
        kinds.add(match["kind"] if match else "")
        others |= file.name.lower().endswith(_OTHER_TRACES)
    return bool(kinds & {_KERNELS, _CALLS[0]}) and not others


def read_processes(path: Path) -> tuple[list[Process], list[Stat]]:
    """Read the processes of a folder, or that of a file with the files next to it.

    Raises:
        ReadError: A table cannot be read.
        LimitError: The tables are too large.
    """
    folder = path if path.is_dir() else path.parent
    selected = None if path.is_dir() else _NAME.fullmatch(path.name)
    groups: dict[str, dict[str, Path]] = {}
    for file in sorted(folder.iterdir()):
        match = _NAME.fullmatch(file.name)
        if match and (path.is_dir() or (selected and match["process"] == selected["process"])):
            groups.setdefault(match["process"] or "", {})[match["kind"]] = file
    if not groups:
        groups[""] = {_KERNELS: path}
    stats: list[Stat] = []
    tables = {name: _Tables(files, stats) for name, files in groups.items()}
    return [group.read_process(name) for name, group in tables.items()], stats


class _Tables:
    """The files of one process, by kind."""

    def __init__(self, files: dict[str, Path], stats: list[Stat]) -> None:
        self._files = files
        self._stats = stats
        others = [
            file.name for kind, file in files.items() if kind not in (*_CALLS, _KERNELS, _COPIES, _AGENTS)
        ]
        stats.append(Stat("read.rocprof_not_read", "info", len(others), f"tables: {', '.join(others)}"))

    def _read(self, kind: str, *columns: str) -> pl.DataFrame:
        """Read columns of a table as text, by their names in lower case; absent ones are null."""
        file = self._files.get(kind)
        if file is None:
            return pl.DataFrame(schema=dict.fromkeys(columns, TEXT))
        return read_text_columns(file, columns)

    def _parse(self, frame: pl.DataFrame, kind: str, *columns: str) -> pl.DataFrame:
        """Convert columns to numbers; other texts become null and are counted."""
        numbers = frame.with_columns(pl.col(columns).str.extract(_NUMBER).cast(I64, strict=False))
        lost = sum(numbers[name].null_count() - frame[name].null_count() for name in columns)
        example = f"numbers of {kind}: now null"
        self._stats.append(Stat("read.wrong_type", "data_loss", lost, example))
        return numbers

    def read_process(self, name: str) -> Process:
        calls = [self._read_calls(kind) for kind in _CALLS]
        devices, numbers = self._read_agents()
        activities = pl.concat([self._read_kernels(numbers), self._read_copies(numbers)])
        pids = pl.concat([frame["pid"] for frame in calls]).drop_nulls()
        pid = int(pids[0]) if pids.len() else int(name) if name.isdecimal() and len(name) < 10 else 0
        return Process(pid, pl.concat(calls).drop("pid"), activities, None, devices)

    def _read_agents(self) -> tuple[list[dict[str, Any]], dict[str, int]]:
        """Return the properties of the GPUs, and the number of each GPU by the names that other tables give it."""
        facts = ("cu_count", "wave_front_size", "local_mem_size")
        frame = self._read(
            _AGENTS, "node_id", "logical_node_id", "agent_type", "name", "product_name", *facts
        )
        frame = self._parse(frame, _AGENTS, "node_id", "logical_node_id", *facts)
        devices, numbers = [], {}
        gpus = frame.filter(pl.col("agent_type") == "GPU").drop_nulls("node_id").sort("node_id")
        for number, row in enumerate(gpus.iter_rows(named=True)):
            devices.append(describe_device(number, row["product_name"] or row["name"], row))
            for key in (f"Agent {row['node_id']}", str(row["node_id"]), f"GPU {number}"):
                numbers[key] = number
        return devices, numbers

    def _number(self, numbers: dict[str, int], column: str) -> pl.Expr:
        """Return the number of the GPU of an agent: of agent_info, else the number that the text ends with."""
        if not numbers:
            is_cpu = pl.col(column).str.starts_with("CPU").fill_null(False)
            return pl.when(~is_cpu).then(pl.col(column).str.extract(r"(\d+)$").cast(I64, strict=False))
        return pl.col(column).replace_strict(
            list(numbers), list(numbers.values()), default=None, return_dtype=I64
        )

    def _read_kernels(self, numbers: dict[str, int]) -> pl.DataFrame:
        sizes = {
            f"{ours}_{axis}": f"{theirs}_size_{axis}"
            for ours, theirs in (("work", "grid"), ("block", "workgroup"))
            for axis in "xyz"
        }
        columns = {
            **_TIMES,
            **sizes,
            "queue": "queue_id",
            "stream": "stream_id",
            "shared_mem": "lds_block_size",
        }
        frame = self._read(_KERNELS, "agent_id", "kernel_name", *columns.values())
        frame = self._parse(frame, _KERNELS, *columns.values())
        return select_columns(
            frame.rename({theirs: ours for ours, theirs in columns.items()}),
            ACTIVITY_COLUMNS,
            cat=pl.lit("kernel"),
            name=pl.col("kernel_name"),
            device=self._number(numbers, "agent_id"),
        )

    def _read_copies(self, numbers: dict[str, int]) -> pl.DataFrame:
        columns = {**_TIMES, "stream": "stream_id"}
        sides = ("source_agent_id", "destination_agent_id")
        frame = self._parse(
            self._read(_COPIES, "direction", *sides, *columns.values()), _COPIES, *columns.values()
        )
        return select_columns(
            frame.rename({theirs: ours for ours, theirs in columns.items()}),
            ACTIVITY_COLUMNS,
            cat=pl.lit("gpu_memcpy"),
            name=name_copy(pl.col("direction")),
            device=pl.coalesce(self._number(numbers, side) for side in sides),
        )

    def _read_calls(self, kind: str) -> pl.DataFrame:
        columns = {**_TIMES, "tid": "thread_id", "pid": "process_id"}
        frame = self._parse(
            self._read(kind, "domain", "function", *columns.values()), kind, *columns.values()
        )
        return select_columns(
            frame.rename({theirs: ours for ours, theirs in columns.items()}),
            CALL_COLUMNS | {"pid": I64},
            name=pl.col("function"),
        )
