"""PyTorch Flight Recorder dumps: the last collectives of a rank, as JSON or as the pickle written after a hang.

Supported: entries (each a row of comms, and an event at its creation time, or from start to end if the backend
discovered both), process groups, and the state of each group (``meta["pg_status"]``). Pickles are read without running
any code. The dump does not contain its rank; that is in the name of the file. From damaged or truncated JSON the
complete entries are read.

Format: torch/csrc/distributed/c10d/FlightRecorder.hpp, versions 2.x.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from pathlib import Path
from typing import Any

import polars as pl

from etloom.core.categories import itemsize, parse_collective
from etloom.core.errors import ReadError
from etloom.core.schema import Stat
from etloom.core.trace import Trace
from etloom.formats.io import safe_pickle
from etloom.formats.io.compression import read_content
from etloom.formats.tables.building import build_trace, sort_events

_MAX_DIMENSIONS = 64
_PEER = re.compile(r"(\d+)\s*(?:->|<-)\s*(\d+)")
_OBJECT = re.compile(r'\{\s*"')
_OTHER_MEMBERS = ("version", "pg_config", "pg_status", "rank")
_ARGUMENT_KEYS = (
    "state",
    "retired",
    "timeout_ms",
    "record_id",
    "op_id",
    "pg_id",
    "p2p_seq_id",
    "thread_name",
    "duration_ms",
)


def sniff(head: bytes) -> bool:
    """Return whether a file that begins with these bytes is a dump. Pickles are searched, not loaded."""
    if head[:1] == b"\x80":
        return b"entries" in head and (b"profiling_name" in head or b"pg_config" in head)
    return head.lstrip()[:1] == b"{" and b'"collective_seq_id"' in head and b'"profiling_name"' in head


def read(path: Path, *, limit: int = 256 << 20) -> Trace:
    """Read the events, comms and groups of one rank.

    limit: the largest accepted size of the decompressed file in bytes.

    Raises:
        ReadError: If the file cannot be read or is not a dump.
        LimitError: If the file is too large.
    """
    data, damage = read_content(path, limit)
    stats: list[Stat] = []
    dump = _load_dump(data, damage, path, stats)
    entries = dump.get("entries", [])
    if not isinstance(entries, list):
        raise ReadError("is not a Flight Recorder dump: entries is not a list", where=path)
    groups = _read_groups(dump.get("pg_config"))
    rows: list[dict[str, Any]] = []
    damaged = 0
    for position, entry in enumerate(entries):
        row = _build_row(entry, groups) if isinstance(entry, dict) else None
        if row is None:
            damaged += 1
        else:
            rows.append({"position": position, **row})
    reason = "an entry without profiling_name or time_created_ns"
    stats.append(Stat("read.damaged_entry", "data_loss", damaged, reason))
    meta = {
        "formats": ["flight_recorder"],
        "files": [str(path)],
        "clock": "epoch",
        "base_ns": 0,
        "schema_version": str(dump.get("version", "")),
        "rank": _to_int(dump.get("rank")),
        "pg_status": _read_status(dump.get("pg_status")),
    }
    return build_trace(_build_tables(rows, groups), meta, stats)


def _load_dump(data: bytes, damage: str | None, path: Path, stats: list[Stat]) -> dict[str, Any]:
    if data[:1] == b"\x80":
        dump = safe_pickle.load_plain_values(data, path)
    else:
        try:
            dump = json.loads(data)
        except (ValueError, RecursionError) as error:
            dump = _recover_entries(data.decode("utf-8", "replace"))
            example = f"{damage or error}: {len(dump.get('entries', ()))} complete entries were read"
            stats.append(Stat("read.truncated", "data_loss", 1, example))
    if not isinstance(dump, dict) or not {"entries", "pg_config"} & dump.keys():
        raise ReadError("is not a Flight Recorder dump: no entries, no pg_config", where=path)
    return dump


def _recover_entries(text: str) -> dict[str, Any]:
    """Recover the complete entries of a damaged dump, and its other complete members."""
    decoder = json.JSONDecoder()
    members: dict[str, Any] = {}
    for key in _OTHER_MEMBERS:
        if member := re.search(rf'"{key}"\s*:\s*', text):
            with contextlib.suppress(ValueError, RecursionError):
                members[key], _ = decoder.raw_decode(text, member.end())
    entries = []
    start = text.find('"entries"')
    at = max(start, 0)
    while begin := _OBJECT.search(text, at):
        try:
            value, at = decoder.raw_decode(text, begin.start())
        except (ValueError, RecursionError):
            at = begin.end()
        else:
            entries += [value] if "profiling_name" in value else []
    return members | {"entries": entries} if members or start >= 0 else {}


def _to_int(value: Any) -> int | None:
    is_valid = isinstance(value, int) and not isinstance(value, bool) and -(1 << 63) <= value < 1 << 63
    return value if is_valid else None


def _to_text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _read_groups(config: Any) -> dict[str, dict[str, Any]]:
    """Return the rows of the groups table by name."""
    rows = {}
    for name, group in config.items() if isinstance(config, dict) else ():
        if not isinstance(group, dict) or not isinstance(name, str):
            continue
        ranks = group.get("ranks")
        try:
            numbers = json.loads(ranks) if isinstance(ranks, str) else ranks
        except (ValueError, RecursionError):
            numbers = None
        is_valid = isinstance(numbers, list) and all(_to_int(rank) is not None for rank in numbers)
        # Gloo leaves the list empty, which means unknown.
        members = numbers if is_valid and numbers else None
        rows[name] = {
            "pg_name": _to_text(group.get("name")) or name,
            "pg_desc": _to_text(group.get("desc")),
            "ranks": json.dumps(members) if members else None,
            "size": len(members) if members else None,
        }
    return rows


def _read_status(status: Any) -> dict[str, dict[str, int | None]]:
    """Return group -> last_enqueued_collective, last_started_collective, last_completed_collective; -1: none yet."""
    return {
        str(group): {
            str(key): int(value) if str(value).isdecimal() and len(str(value)) < 19 else None
            for key, value in state.items()
        }
        for group, state in (status.items() if isinstance(status, dict) else ())
        if isinstance(state, dict)
    }


def _build_row(entry: dict[str, Any], groups: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Return the columns of the event and of the comm of an entry; None for an entry without name or time."""
    name, created = entry.get("profiling_name"), _to_int(entry.get("time_created_ns"))
    if not isinstance(name, str) or not created:
        return None
    # If the backend discovered no start or end, JSON dumps have 0, pickles have None.
    started = _to_int(entry.get("time_discovered_started_ns")) or None
    completed = _to_int(entry.get("time_discovered_completed_ns")) or None
    has_duration = started is not None and completed is not None and completed >= started
    pg_name, pg_desc = _split_group(entry.get("process_group"))
    group = groups.get(pg_name, {}) if isinstance(pg_name, str) else {}
    is_p2p = bool(entry.get("is_p2p"))
    dtypes = entry.get("input_dtypes")
    dtype = _to_text(dtypes[0]) if isinstance(dtypes, list) and dtypes else None
    elements = _count_elements(entry.get("input_sizes"))
    size = itemsize(dtype)
    peer = _PEER.search(name) if is_p2p else None
    args = {key: entry[key] for key in _ARGUMENT_KEYS if isinstance(entry.get(key), (str, int, float))}
    if frames := _format_frames(entry.get("frames")):
        args["frames"] = frames
    if not has_duration:
        args |= {"started_ns": started} if started else {}
        args |= {"completed_ns": completed} if completed else {}
    elif started is not None:
        args["created_ns"] = created
    return {
        "ph": "X" if has_duration else "i",
        "name": name,
        "ts": started if has_duration else created,
        "dur": completed - started if has_duration and completed and started else None,
        "tid": _to_int(int(entry["thread_id"]) if str(entry.get("thread_id", "")).isdecimal() else None),
        "args": json.dumps(args),
        "collective": parse_collective(name),
        "pg_name": _to_text(pg_name),
        "pg_desc": _to_text(pg_desc),
        "ranks": group.get("ranks"),
        "group_size": group.get("size"),
        "seq": _to_int(entry.get("p2p_seq_id" if is_p2p else "collective_seq_id")),
        "dtype": dtype,
        "in_nelems": elements,
        "out_nelems": _count_elements(entry.get("output_sizes")),
        "peer": int(peer[2]) if peer else None,
        "is_p2p": is_p2p,
        "bytes": elements * size if elements is not None and size else None,
    }


def _split_group(group: Any) -> tuple[Any, Any]:
    """Return the name and the description of the process group of an entry."""
    if not isinstance(group, (list, tuple)):
        return None, None
    return (group[0] if group else None), (group[1] if len(group) > 1 else None)


def _count_elements(sizes: Any) -> int | None:
    """Return the total elements of all tensors; None if there is no tensor or a size is not a number."""
    if not isinstance(sizes, (list, tuple)) or not sizes:
        return None
    total = 0
    for shape in sizes:
        if not isinstance(shape, (list, tuple)) or len(shape) > _MAX_DIMENSIONS:
            return None
        if not all(_to_int(length) is not None for length in shape):
            return None
        total += math.prod(shape)
    return total if total < 1 << 62 else None


def _format_frames(frames: Any) -> list[str]:
    return [
        f"{frame.get('name')} ({frame.get('filename')}:{frame.get('line')})"
        for frame in (frames if isinstance(frames, list) else [])
        if isinstance(frame, dict)
    ]


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
