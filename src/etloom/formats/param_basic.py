"""PARAM's basic communication traces: a JSON list with the calls of one rank, in order.

Each entry has ``comms`` and, if applicable, ``req``, ``in_msg_size`` and ``out_msg_size`` (elements), ``dtype``,
``in_split``, ``out_split``, ``root``, ``src_rank``, ``dst_rank``, ``pg_id``, ``global_ranks``, ``world_size`` and
``startTime_ns``. A call is asynchronous if a later ``wait`` has its ``req``. Entries of computation, markers
and anything unknown are counted.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl

from etloom.core import categories
from etloom.core.errors import ReadError
from etloom.core.schema import Stat
from etloom.core.trace import Trace
from etloom.formats.io.compression import SizeLimit, read_content
from etloom.formats.io.json_text import load_json
from etloom.formats.tables.building import build_frame, build_trace

_ENTRY = re.compile(rb'^\s*\[\s*\{[^{}]*"(?:comms|compute|markers?)"\s*:')
_SPECIAL_CALLS = {"wait": "wait", "init": "init", **dict.fromkeys(("noop", "pt2pt", "batch_isend_irecv"))}
"""Calls that are not collectives; a batch only triggers messages that have their own entries."""
_DTYPES = {
    "int": "int",
    "long": "long int",
    "float": "float",
    "double": "double",
    "half": "half",
    "bool": "bool",
}


def sniff(head: bytes) -> bool:
    """Return whether a file is a JSON list of PARAM's communication calls, judging from its first bytes ``head``."""
    return _ENTRY.match(head) is not None


def read(
    path: Path,
    *,
    limit: SizeLimit = 1 << 30,
) -> Trace:
    """Read the calls of one rank as host events and rows of comms; without ``startTime_ns``, events have no time.

    Raises:
        ReadError: If the file is not such a list.
        LimitError: If the file is too large.
    """
    data, damage = read_content(path, limit)
    try:
        entries = load_json(data)
    except (ValueError, RecursionError) as error:
        raise ReadError(f"is not valid JSON: {damage or str(error)[:80]}", where=path) from error
    if not isinstance(entries, list):
        raise ReadError("is not a list of calls", where=path, remedy="PARAM's basic traces are JSON lists")
    stats: list[Stat] = [Stat("read.entries", "info", len(entries), "entries in the file")]
    skipped: Counter[str] = Counter()
    groups: dict[str, list[int]] = {}
    calls: list[tuple[dict[str, Any], str]] = []
    for entry in entries:
        recorded_name = entry.get("comms") if isinstance(entry, dict) else None
        name = _normalize_call_name(recorded_name) if isinstance(recorded_name, str) else None
        if (
            isinstance(entry, dict)
            and entry.get("pg_id") is not None
            and _is_int_list(entry.get("global_ranks"))
        ):
            groups[str(entry["pg_id"])] = entry["global_ranks"]
        if name is None:
            skipped[_describe_entry(entry)] += 1
        elif name != "init":
            calls.append((entry, name))
    stats += [Stat("read.skipped_entries", "info", count, text) for text, count in skipped.most_common(8)]
    waited = {str(entry.get("req")) for entry, name in calls if name == "wait"}
    worlds = {size for entry, _ in calls if isinstance(size := entry.get("world_size"), int)}
    tables = {}
    if calls:
        events = [_build_event(row, entry) for row, (entry, _) in enumerate(calls)]
        comms = [_build_comm(row, entry, name, groups, waited) for row, (entry, name) in enumerate(calls)]
        # A call without a time, such as a wait, keeps its place after the one before it.
        timed = build_frame("events", events, stats).with_columns(pl.col("ts").cum_max().forward_fill())
        tables = {"events": timed, "comms": build_frame("comms", comms, stats)}
    meta = {
        "formats": ["param-basic"],
        "files": [str(path)],
        "clock": "relative",
        "world_size": max(worlds) if worlds else None,
    }
    return build_trace(tables, meta, stats)


def _normalize_call_name(name: str) -> str | None:
    return _SPECIAL_CALLS[name] if name in _SPECIAL_CALLS else categories.parse_collective(name.lower())


def _describe_entry(entry: Any) -> str:
    if not isinstance(entry, dict):
        return "not an object"
    key = next((key for key in ("comms", "compute", "markers", "marker") if key in entry), None)
    return f"{key}: {str(entry[key])[:40]}" if key else "not a call"


def _build_event(row: int, entry: dict[str, Any]) -> dict[str, Any]:
    start = entry.get("startTime_ns")
    return {
        "id": row, "ph": "i", "cat": "cpu_op", "name": f"param::{entry['comms']}", "pid": 0, "tid": 0, "position": row,
        "ts": start if type(start) is int else None,
    }  # fmt: skip


def _build_comm(
    row: int, entry: dict[str, Any], name: str, groups: dict[str, list[int]], waited: set[str]
) -> dict[str, Any]:
    group = str(entry["pg_id"]) if entry.get("pg_id") is not None else None
    ranks = groups.get(group or "")
    root, req = entry.get("root"), entry.get("req")
    is_async = str(req) in waited
    dtype = entry.get("dtype")
    return {
        "id": row, "event": row, "collective": name, "pg_name": group,
        "ranks": json.dumps(ranks) if ranks else None, "group_size": len(ranks) if ranks else None,
        "seq": req if is_async and type(req) is int else None, "is_async": is_async,
        "dtype": _DTYPES.get(dtype.lower(), dtype) if isinstance(dtype, str) else None,
        "in_nelems": entry.get("in_msg_size"), "out_nelems": entry.get("out_msg_size"),
        "in_split": _encode_ints(entry.get("in_split")), "out_split": _encode_ints(entry.get("out_split")),
        "root": root if type(root) is int else None,
        "peer": entry.get("dst_rank" if name == "send" else "src_rank") if name in ("send", "recv") else None,
    }  # fmt: skip


def _encode_ints(values: Any) -> str | None:
    return json.dumps(values) if _is_int_list(values) else None


def _is_int_list(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(type(value) is int for value in values)
