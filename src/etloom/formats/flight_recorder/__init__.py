"""PyTorch Flight Recorder dumps: the last collectives of a rank, as JSON or as the pickle written after a hang.

Supported: entries (each a row of comms, and an event at its creation time, or from start to end if the backend
discovered both), process groups, and the state of each group (``meta["pg_status"]``). Pickles are read without running
any code. The dump does not contain its rank; that is in the name of the file. From damaged or truncated JSON the
complete entries are read.

Format: torch/csrc/distributed/c10d/FlightRecorder.hpp, versions 2.x.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl

from etloom.core.schema import Stat
from etloom.core.trace import Trace
from etloom.formats.flight_recorder.calls import read_calls
from etloom.formats.flight_recorder.dump import (
    build_row,
    explain_unnumbered,
    list_entries,
    load_dump,
    read_groups,
    read_status,
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
