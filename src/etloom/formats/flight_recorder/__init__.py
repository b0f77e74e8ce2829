"""PyTorch Flight Recorder dumps: the last collectives of a rank, as JSON or as the pickle written after a hang.

Supported: entries (each a row of comms, and an event at its creation time, or from start to end if the backend
discovered both), process groups, and the state of each group (``meta["pg_status"]``). Pickles are read without running
any code. The dump does not contain its rank; that is in the name of the file. From damaged or truncated JSON the
complete entries are read.

Format: torch/csrc/distributed/c10d/FlightRecorder.hpp, versions 2.x.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl

from etloom.core.calls import Call, DumpedCalls, find_call_site, get_state, name_group
from etloom.core.categories import parse_collective
from etloom.core.schema import Stat
from etloom.core.trace import Trace
from etloom.formats.flight_recorder.dump import (
    build_row,
    count_elements,
    explain_unnumbered,
    find_group,
    find_peer,
    format_frames,
    list_entries,
    load_dump,
    parse_ranks,
    read_groups,
    read_status,
    split_group,
    to_int,
)
from etloom.formats.io.compression import SizeLimit
from etloom.formats.tables.building import build_trace, sort_events

__all__ = ["read", "read_calls", "sniff"]


def sniff(head: bytes) -> bool:
    """Return whether a file is a Flight Recorder dump, judging from its first bytes ``head``; no pickle is loaded."""
    if head[:1] == b"\x80":
        return b"entries" in head and (b"profiling_name" in head or b"pg_config" in head)
    if head.lstrip()[:1] != b"{":
        return False
    has_entry = b'"collective_seq_id"' in head and b'"profiling_name"' in head
    return has_entry or (b'"pg_status"' in head and b'"entries"' in head)  # of a rank that has called nothing


def read(
    path: Path,
    *,
    limit: SizeLimit = 256 << 20,
) -> Trace:
    """Read the dump of one rank as a Trace with events, comms and process groups.

    Raises:
        ReadError: If the file cannot be read or is not a dump.
        LimitError: If the file is too large.
    """
    stats: list[Stat] = []
    dump = load_dump(path, limit, stats)
    entries = list_entries(dump, path)
    groups = read_groups(dump.get("pg_config"))
    rows: list[dict[str, Any]] = []
    damaged = 0
    for position, entry in enumerate(entries):
        row = build_row(entry, groups) if isinstance(entry, dict) else None
        if row is None:
            damaged += 1
        else:
            rows.append({"position": position, **row})
    reason = "an entry without profiling_name or time_created_ns"
    stats.append(Stat("read.damaged_entry", "data_loss", damaged, reason))
    stats.append(explain_unnumbered(sum(row["seq"] is None for row in rows)))
    meta = {
        "formats": ["flight_recorder"],
        "files": [str(path)],
        "clock": "epoch",
        "base_ns": 0,
        "schema_version": str(dump.get("version", "")),
        "rank": to_int(dump.get("rank")),
        "pg_status": read_status(dump.get("pg_status")),
    }
    return build_trace(_build_tables(rows, groups), meta, stats)


_TEXT = ("ph", "name", "args", "collective", "pg_name", "pg_desc", "ranks", "dtype")
_EVENT = ("ph", "name", "ts", "dur", "tid", "args", "position")


def _build_tables(rows: list[dict[str, Any]], groups: dict[str, dict[str, Any]]) -> dict[str, pl.DataFrame]:
    columns = {
        name: pl.String if name in _TEXT else pl.Boolean if name == "is_p2p" else pl.Int64
        for name in (rows[0] if rows else {"position": 0})
    }
    both = pl.DataFrame(rows, schema=columns, orient="row", strict=False)
    if both.is_empty():
        return {"groups": _build_group_table(groups)}
    ordered = sort_events(both).with_row_index("id")
    return {
        # Kineto's category for records of collectives that are not GPU activities.
        "events": ordered.select("id", *_EVENT, cat=pl.lit("collective_comm")),
        "comms": ordered.select("id", pl.exclude("id", *_EVENT), event="id"),
        "groups": _build_group_table(groups),
    }


def _build_group_table(groups: dict[str, dict[str, Any]]) -> pl.DataFrame:
    schema = {**dict.fromkeys(("pg_name", "pg_desc", "ranks"), pl.String), "size": pl.Int64}
    return pl.DataFrame(list(groups.values()), schema=schema, orient="row")


# Reads the calls in Flight Recorder dumps as tuples, without tables, to compare thousands of ranks in seconds.


def read_calls(path: Path, *, limit: int = 256 << 20) -> DumpedCalls:
    """Read the collective and point-to-point calls, the process groups and the process facts in one rank's dump.

    Args:
        path: the dump.
        limit: the largest accepted size of the decompressed file in bytes.

    Raises:
        ReadError: the file cannot be read or is not a dump.
        LimitError: the file is too large.
    """
    stats: list[Stat] = []
    dump = load_dump(path, limit, stats)
    groups = read_groups(dump.get("pg_config"))
    members: dict[str, tuple[int, ...]] = {}
    rows, damaged = [], 0
    for entry in list_entries(dump, path):
        row = _build_call(entry, groups, members) if isinstance(entry, dict) else None
        if row is None:
            damaged += 1
        else:
            rows.append(row)
    if unnumbered := sum(row[1] is None for row in rows):
        stats.append(explain_unnumbered(unnumbered))
    if damaged:
        reason = "an entry without profiling_name or time_created_ns"
        stats.append(Stat("read.damaged_entry", "data_loss", damaged, reason))
    process, invalid = read_process_facts(dump.get("process"))
    if invalid:
        stats.append(
            Stat(
                "read.damaged_entry",
                "data_loss",
                invalid,
                "a fact about the process that has an unexpected type",
            )
        )
    return DumpedCalls(rows, members, process, stats)


def _build_call(
    entry: dict[str, Any], groups: dict[str, dict[str, Any]], members: dict[str, tuple[int, ...]]
) -> Call | None:
    """Convert a dump's entry to a `CALL_COLUMNS` tuple and add its group to ``members``; None without name or time."""
    name, created = entry.get("profiling_name"), to_int(entry.get("time_created_ns"))
    if not isinstance(name, str) or not created:
        return None
    pg_name, pg_desc = split_group(entry.get("process_group"))
    group = name_group(*(text if isinstance(text, str) else None for text in (pg_name, pg_desc)))
    if group not in members and (ranks := find_group(pg_name, pg_desc, groups).get("ranks")):
        members[group] = parse_ranks(ranks)
    is_p2p = bool(entry.get("is_p2p"))
    dtypes, frames = entry.get("input_dtypes"), entry.get("frames")
    return (
        group,
        to_int(entry.get("p2p_seq_id" if is_p2p else "collective_seq_id")),
        is_p2p,
        parse_collective(name),
        dtypes[0] if isinstance(dtypes, list) and dtypes and isinstance(dtypes[0], str) else None,
        count_elements(entry.get("input_sizes")),
        count_elements(entry.get("output_sizes")),
        find_peer(name) if is_p2p else None,
        get_state(name, entry.get("state"), entry.get("retired")),
        created,
        find_call_site(format_frames(frames)) if frames else None,
    )


# Reads the facts about a rank's process that `etloom collect --watch` adds to the rank's Flight Recorder dump.

_MAX_INTERVAL_S = 1e6


def read_process_facts(process: Any) -> tuple[dict[str, Any], int]:
    """Return the process facts in a dump that have the expected type, and the number of facts of another type.

    Args:
        process: the member ``process`` of a dump.
    """
    if not isinstance(process, dict):
        return {}, 0 if process is None else 1
    stated = {name: value for name, value in process.items() if name in _CHECKS and value is not None}
    facts = {name: value for name, value in stated.items() if _CHECKS[name](value)}
    return facts, len(stated) - len(facts)


def _is_integer(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_interval(value: Any) -> bool:
    is_number = type(value) in (int, float)
    return is_number and math.isfinite(value) and 0 <= value <= _MAX_INTERVAL_S


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_list_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(check, value))


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "pid": _is_integer,
    "host": _is_text,
    "written_ns": _is_integer,
    "interval_s": _is_interval,
    "world_size": _is_integer,
    "steps": _is_integer,
    "step_ends_ns": _is_list_of(_is_integer),
    "frames": _is_list_of(_is_text),
    "addresses": _is_list_of(_is_text),
    "unacknowledged": _is_list_of(_is_text),
    "finished": lambda value: isinstance(value, bool),
    "error": _is_text,
}
