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
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import polars as pl

from etloom.core.calls import Call, DumpedCalls, find_call_site, get_state, name_group
from etloom.core.categories import itemsize, parse_collective
from etloom.core.errors import ReadError
from etloom.core.schema import Stat
from etloom.core.trace import Trace
from etloom.formats.io import safe_values
from etloom.formats.io.compression import SizeLimit, read_content
from etloom.formats.io.json_text import load_json, replace_surrogates
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


# Parses the contents of a Flight Recorder dump: its members, its process groups and its entries (recorded calls).

_MAX_DIMENSIONS = 64
_MAX_DIGITS = 19
_MAX_ELEMENTS = 1 << 56
"""Their bytes fit 64 bits whatever the type."""
_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1
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


def load_dump(path: Path, limit: int, stats: list[Stat]) -> dict[str, Any]:
    """Load a dump, JSON or pickle, as a dictionary of its members; report damage as rows appended to ``stats``.

    Args:
        path: the file.
        limit: the largest accepted size of the decompressed file in bytes.
        stats: list to which rows are appended.

    Raises:
        ReadError: the file cannot be read or is not a dump.
        LimitError: the file is too large.
    """
    data, damage = read_content(path, limit)
    if data[:1] == b"\x80":
        dump = safe_values.load_plain_values(data, path)
    else:
        try:
            dump = load_json(data)
        except (ValueError, RecursionError) as error:
            dump = replace_surrogates(_recover_entries(data.decode("utf-8", "replace")))
            example = f"{damage or error}: {len(dump.get('entries', ()))} complete entries were read"
            stats.append(Stat("read.truncated", "data_loss", 1, example))
    if not isinstance(dump, dict) or not {"entries", "pg_config"} & dump.keys():
        raise ReadError("is not a Flight Recorder dump: no entries, no pg_config", where=path)
    return dump


def list_entries(dump: dict[str, Any], path: Path) -> list[Any]:
    """Return the list of entries of a dump without validating them. Raises ReadError if it is not a list."""
    entries = dump.get("entries", [])
    if not isinstance(entries, list):
        raise ReadError("is not a Flight Recorder dump: entries is not a list", where=path)
    return entries


def find_group(name: Any, description: Any, groups: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the row of the groups table for an entry's process group; {} if the dump does not list the group.

    Gloo lists its default group without a name.
    """
    group = groups.get(name) if isinstance(name, str) else None
    if group is None and description == "default_pg":
        group = groups.get("")
    return group or {}


def _recover_entries(text: str) -> dict[str, Any]:
    """Recover the complete entries and the other complete members from the text of a damaged JSON dump."""
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


def to_int(value: Any) -> int | None:
    # JSON and the unpickler make no subclasses of int but bool.
    return value if type(value) is int and _INT64_MIN <= value <= _INT64_MAX else None


def _to_text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def read_groups(config: Any) -> dict[str, dict[str, Any]]:
    """Convert a dump's pg_config to rows of the groups table, by group name."""
    rows = {}
    for name, group in config.items() if isinstance(config, dict) else ():
        if not isinstance(group, dict) or not isinstance(name, str):
            continue
        ranks = group.get("ranks")
        # Gloo leaves the list empty, which means unknown.
        members = parse_ranks(ranks if isinstance(ranks, str) else json.dumps(ranks, default=str))
        rows[name] = {
            "pg_name": _to_text(group.get("name")) or name,
            "pg_desc": _to_text(group.get("desc")),
            "ranks": _format_ranks(members) if members else None,
            "size": len(members) or None,
        }
    return rows


@lru_cache(maxsize=256)
def _parse_digits(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) < _MAX_DIGITS else None


def parse_ranks(text: str) -> tuple[int, ...]:
    """Parse the JSON list of a group's ranks; empty if the text is not a list of integers."""
    try:
        ranks = load_json(text)
    except (ValueError, RecursionError):
        return ()
    is_valid = isinstance(ranks, list) and all(to_int(rank) is not None for rank in ranks)
    return tuple(ranks) if is_valid else ()


@lru_cache(maxsize=256)
def _format_ranks(ranks: tuple[int, ...]) -> str:
    return json.dumps(ranks)


def read_status(status: Any) -> dict[str, dict[str, int | None]]:
    """Return, by process group, the numbers of the last enqueued, started and completed collective; None before any."""
    return {
        str(group): {str(key): _parse_digits(str(value)) for key, value in state.items()}
        for group, state in (status.items() if isinstance(status, dict) else ())
        if isinstance(state, dict)
    }


def build_row(entry: dict[str, Any], groups: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Convert a dump's entry (a call) to a row with columns of events and comms; None if it has no name or no time."""
    name, created = entry.get("profiling_name"), to_int(entry.get("time_created_ns"))
    if not isinstance(name, str) or not created:
        return None
    # If the backend discovered no start or end, JSON dumps have 0, pickles have None.
    started = to_int(entry.get("time_discovered_started_ns")) or None
    completed = to_int(entry.get("time_discovered_completed_ns")) or None
    has_duration = started is not None and completed is not None and 0 <= completed - started <= _INT64_MAX
    pg_name, pg_desc = split_group(entry.get("process_group"))
    group = find_group(pg_name, pg_desc, groups)
    is_p2p = bool(entry.get("is_p2p"))
    dtypes = entry.get("input_dtypes")
    dtype = _to_text(dtypes[0]) if isinstance(dtypes, list) and dtypes else None
    elements = count_elements(entry.get("input_sizes"))
    size = itemsize(dtype)
    peer = find_peer(name) if is_p2p else None
    args = {key: entry[key] for key in _ARGUMENT_KEYS if isinstance(entry.get(key), (str, int, float))}
    if frames := format_frames(entry.get("frames")):
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
        "tid": _parse_digits(str(entry.get("thread_id", ""))),
        "args": json.dumps(args),
        "collective": parse_collective(name),
        "pg_name": _to_text(pg_name),
        "pg_desc": _to_text(pg_desc),
        "ranks": group.get("ranks"),
        "group_size": group.get("size"),
        "seq": to_int(entry.get("p2p_seq_id" if is_p2p else "collective_seq_id")),
        "dtype": dtype,
        "in_nelems": elements,
        "out_nelems": count_elements(entry.get("output_sizes")),
        "peer": peer,
        "is_p2p": is_p2p,
        "bytes": elements * size if elements is not None and size else None,
    }


def explain_unnumbered(count: int) -> Stat:
    """Build the stats row for calls without a sequence number (torch before 2.4), not comparable across ranks."""
    reason = "a call without collective_seq_id or p2p_seq_id is not compared with those of other ranks"
    return Stat("read.unnumbered_call", "data_loss", count, reason)


def find_peer(name: str) -> int | None:
    """Return the peer's rank within the group, parsed from a name such as "nccl:send 0->1"; None if absent."""
    ends = _PEER.search(name)
    return _parse_digits(ends[2]) if ends else None


def split_group(group: Any) -> tuple[Any, Any]:
    """Return the name and the description of an entry's process group; None for an absent value."""
    if not isinstance(group, (list, tuple)):
        return None, None
    return (group[0] if group else None), (group[1] if len(group) > 1 else None)


def count_elements(sizes: Any) -> int | None:
    """Return the total number of elements of tensors, from their shapes; None without tensors or for invalid shapes."""
    if not isinstance(sizes, (list, tuple)) or not sizes:
        return None
    total = 0
    for shape in sizes:
        if not isinstance(shape, (list, tuple)) or len(shape) > _MAX_DIMENSIONS:
            return None
        size = 1
        for length in shape:
            if to_int(length) is None or length < 0:
                return None
            size *= length
        total += size
    return total if total <= _MAX_ELEMENTS else None


def format_frames(frames: Any) -> list[str]:
    return [
        f"{frame.get('name')} ({frame.get('filename')}:{frame.get('line')})"
        for frame in (frames if isinstance(frames, list) else [])
        if isinstance(frame, dict)
    ]
