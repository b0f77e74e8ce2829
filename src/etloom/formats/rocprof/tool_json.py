"""Reads rocprofv3's JSON: an object per process, whose records state names by number of a kind and of an operation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from etloom.core.errors import ReadError
from etloom.core.schema import Stat
from etloom.formats.io.compression import read_content
from etloom.formats.io.json_text import load_json
from etloom.formats.io.limits import check_rows
from etloom.formats.rocprof.activities import (
    ACTIVITY_COLUMNS,
    CALL_COLUMNS,
    I64,
    TEXT,
    Process,
    describe_device,
    name_copy,
    number_agents,
)
from etloom.formats.tables.building import build_series, select_columns

KEY = "rocprofiler-sdk-tool"
_CALLS = ("hip_api", "hsa_api", "marker_api", "rccl_api")
_READ = (*_CALLS, "kernel_dispatch", "memory_copy")
_GPU = 2
_NAMES = ("formatted_kernel_name", "demangled_kernel_name", "truncated_kernel_name", "kernel_name")


def sniff(head: bytes) -> bool:
    """Return whether a file is rocprofv3's JSON, judging from its first bytes ``head``."""
    return head.lstrip()[:1] == b"{" and b'"' + KEY.encode() + b'"' in head[:4096]


def read_processes(path: Path, limit: int) -> tuple[list[Process], list[Stat]]:
    """Read the processes of a file, and what concerns the file as a whole.

    Raises:
        ReadError: The file is not complete JSON of rocprofv3.
        LimitError: The file has more than ``limit`` bytes.
    """
    data, damage = read_content(path, limit)
    try:
        document = load_json(data)
    except ValueError as error:
        reason = damage or str(error).partition("\n")[0]
        remedy = "copy the file again, or record with --output-format rocpd"
        raise ReadError(f"is not complete JSON: {reason}", where=path, remedy=remedy) from None
    del data
    recordings = document.get(KEY) if isinstance(document, dict) else None
    objects = [item for item in recordings if isinstance(item, dict)] if isinstance(recordings, list) else []
    if not objects:
        raise ReadError(f"has no recording below {KEY!r}", where=path, remedy="record again with rocprofv3")
    recordings = [_Recording(item) for item in objects]
    check_rows(sum(recording.count_records() for recording in recordings), path)
    stats: list[Stat] = []
    processes = [recording.read_process(stats) for recording in recordings]
    return processes, stats


class _Recording:
    """The object of one process."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self._records = _get(document, "buffer_records")
        self._lost = 0

    def count_records(self) -> int:
        return sum(len(self._list(name)) for name in _READ)

    def _list(self, name: str) -> list[Any]:
        records = _get(self._records, name)
        return records if isinstance(records, list) else []

    def _build(self, records: Sequence[Any], columns: dict[str, tuple[str, ...]]) -> pl.DataFrame:
        series = []
        for name, keys in columns.items():
            column, lost = build_series(name, [_get(record, *keys) for record in records], I64)
            series.append(column)
            self._lost += lost
        return pl.DataFrame(series)

    def read_process(self, stats: list[Stat]) -> Process:
        agents = self._read_agents()
        activities = pl.concat([self._read_kernels(agents), self._read_copies(agents)])
        calls = pl.concat([self._read_calls(name) for name in _CALLS])
        pid = _get(self._document, "metadata", "pid")
        others = {
            name: len(records)
            for name, records in (self._records.items() if isinstance(self._records, dict) else ())
            if name not in _READ and isinstance(records, list)
        }
        example = ", ".join(f"{name} {count:,}" for name, count in others.items() if count)
        stats += [
            Stat("read.rocprof_not_read", "info", sum(others.values()), f"records in {example}"),
            Stat("read.wrong_type", "data_loss", self._lost, "numbers of records: now null"),
        ]
        devices = [agent["properties"] for agent in agents.values() if agent["properties"]]
        return Process(pid if _is_number(pid) else 0, calls, activities, None, devices)

    def _read_agents(self) -> dict[int, dict[str, Any]]:
        """Return handle of an agent -> is it a GPU, its number among the GPUs, and its properties."""
        agents: dict[int, dict[str, Any]] = {}
        for agent in _list_objects(self._document, "agents"):
            handle, number = _get(agent, "id", "handle"), agent.get("logical_node_type_id")
            is_gpu = agent.get("type") == _GPU
            number = number if _is_number(number) else sum(other["is_gpu"] for other in agents.values())
            name = agent.get("product_name") or agent.get("name")
            if _is_number(handle):
                properties = describe_device(number, name, agent) if is_gpu else None
                agents[handle] = {"is_gpu": is_gpu, "number": number, "properties": properties}
        return agents

    def _read_names(self, records: list[Any]) -> pl.DataFrame:
        """Return the columns ``domain`` and ``name`` of records: of their kind and operation."""
        kinds: list[tuple[str | None, list[Any]]] = []
        listed = _get(self._document, "strings", "buffer_records")
        for kind in listed if isinstance(listed, list) else []:
            operations = _get(kind, "operations")
            kinds.append((_get(kind, "kind"), operations if isinstance(operations, list) else []))
        domains, names = [], []
        for record in records:
            kind, operation = _get(record, "kind"), _get(record, "operation")
            domain, operations = kinds[kind] if _is_number(kind) and 0 <= kind < len(kinds) else (kind, [])
            is_listed = _is_number(operation) and 0 <= operation < len(operations)
            domains.append(domain if isinstance(domain, str) else None)
            name = operations[operation] if is_listed else operation
            names.append(name if isinstance(name, str) else None)
        return pl.DataFrame([build_series("domain", domains, TEXT)[0], build_series("name", names, TEXT)[0]])

    def _read_kernels(self, agents: dict[int, dict[str, Any]]) -> pl.DataFrame:
        symbols = {
            symbol.get("kernel_id"): next(
                (symbol[key] for key in _NAMES if isinstance(symbol.get(key), str)), None
            )
            for symbol in _list_objects(self._document, "kernel_symbols")
            if _is_number(symbol.get("kernel_id"))
        }
        info = "dispatch_info"
        records = self._list("kernel_dispatch")
        rows = self._build(
            records,
            _TIMES
            | {"agent": (info, "agent_id", "handle"), "queue": (info, "queue_id", "handle")}
            | {"kernel": (info, "kernel_id"), "shared_mem": (info, "group_segment_size")}
            | {f"work_{axis}": (info, "grid_size", axis) for axis in "xyz"}
            | {f"block_{axis}": (info, "workgroup_size", axis) for axis in "xyz"},
        )
        names = [symbols.get(kernel) for kernel in rows["kernel"]]
        return select_columns(
            rows.with_columns(build_series("name", names, TEXT)[0]),
            ACTIVITY_COLUMNS,
            cat=pl.lit("kernel"),
            device=number_agents(agents, "agent"),
        )

    def _read_copies(self, agents: dict[int, dict[str, Any]]) -> pl.DataFrame:
        records = self._list("memory_copy")
        sides = {side: (f"{side}_agent_id", "handle") for side in ("src", "dst")}
        rows = self._build(records, _TIMES | sides | {"bytes": ("bytes",)})
        rows = pl.concat([rows, self._read_names(records)], how="horizontal")
        return select_columns(
            rows,
            ACTIVITY_COLUMNS,
            cat=pl.lit("gpu_memcpy"),
            name=name_copy(pl.col("name")),
            device=pl.coalesce(number_agents(agents, "src"), number_agents(agents, "dst")),
        )

    def _read_calls(self, kind: str) -> pl.DataFrame:
        records = self._list(kind)
        rows = pl.concat([self._build(records, _TIMES), self._read_names(records)], how="horizontal")
        default = kind.partition("_")[0].upper()
        if kind == "marker_api":
            texts = {
                entry.get("key"): entry.get("value")
                for entry in _list_objects(self._document, "strings", "marker_api")
                if _is_number(entry.get("key"))
            }
            messages = [texts.get(number) for number in rows["correlation"]]
            message = build_series("message", messages, TEXT)[0]
            rows = rows.with_columns(name=pl.coalesce(message, "name"))
        return select_columns(rows, CALL_COLUMNS, domain=pl.col("domain").fill_null(default))


_TIMES: dict[str, tuple[str, ...]] = {
    "start": ("start_timestamp",),
    "end": ("end_timestamp",),
    "tid": ("thread_id",),
    "correlation": ("correlation_id", "internal"),
    "stream": ("stream_id", "handle"),
}


def _get(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _list_objects(value: Any, *keys: str) -> list[dict[str, Any]]:
    listed = _get(value, *keys)
    return [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(1 << 63) <= value < 1 << 63
