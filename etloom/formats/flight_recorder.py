"""PyTorch Flight Recorder dumps: the last collectives of a rank, as JSON or as the pickle that a hang leaves behind.

Read: entries (each a row of comms and an event at the time it was created, or from start to end where the backend
discovered both), process groups, and the state of each group (``meta["pg_status"]``). A pickle is read without
running anything it says. The dump does not say its rank: that is in the name of the file. JSON that was cut off or
damaged gives the entries that are whole.

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

_MOST_DIMENSIONS = 64
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
    """Whether the file begins like a dump. A pickle is looked at, not read."""
    if head[:1] == b"\x80":
        return b"entries" in head and (b"profiling_name" in head or b"pg_config" in head)
    return head.lstrip()[:1] == b"{" and b'"collective_seq_id"' in head and b'"profiling_name"' in head


def read(path: Path, *, limit: int = 256 << 20) -> Trace:
    """The Trace of one rank: events, comms, groups.

    limit: the most bytes that the unpacked file may have. Raises ReadError, LimitError.
    """
    data, cut = read_content(path, limit)
    stats: list[Stat] = []
    dump = _load_dump(data, cut, path, stats)
    entries = dump.get("entries", [])
    if not isinstance(entries, list):
        raise ReadError("is no Flight Recorder dump: entries is no list", where=path)
    groups = _read_groups(dump.get("pg_config"))
    rows: list[dict[str, Any]] = []
    unread = 0
    for position, entry in enumerate(entries):
        row = _build_row(entry, groups) if isinstance(entry, dict) else None
        if row is None:
            unread += 1
        else:
            rows.append({"position": position, **row})
    lost = "an entry without profiling_name or time_created_ns"
    stats.append(Stat("read.damaged_entry", "data_loss", unread, lost))
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


def _load_dump(data: bytes, cut: str | None, path: Path, stats: list[Stat]) -> dict[str, Any]:
    if data[:1] == b"\x80":
        dump = safe_pickle.load_plain_values(data, path)
    else:
        try:
            dump = json.loads(data)
        except (ValueError, RecursionError) as error:
            dump = _recover_entries(data.decode("utf-8", "replace"))
            example = f"{cut or error}: {len(dump.get('entries', ()))} whole entries were read"
            stats.append(Stat("read.truncated", "data_loss", 1, example))
    if not isinstance(dump, dict) or not {"entries", "pg_config"} & dump.keys():
        raise ReadError("is no Flight Recorder dump: no entries, no pg_config", where=path)
    return dump


def _recover_entries(text: str) -> dict[str, Any]:
    """What is whole in a dump that is not: its entries, wherever they are, and the members beside them."""
    decoder = json.JSONDecoder()
    found: dict[str, Any] = {}
    for key in _OTHER_MEMBERS:
        if member := re.search(rf'"{key}"\s*:\s*', text):
            with contextlib.suppress(ValueError, RecursionError):
                found[key], _ = decoder.raw_decode(text, member.end())
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
    return found | {"entries": entries} if found or start >= 0 else {}


def _to_int(value: Any) -> int | None:
    fits = isinstance(value, int) and not isinstance(value, bool) and -(1 << 63) <= value < 1 << 63
    return value if fits else None


def _to_text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _read_groups(config: Any) -> dict[str, dict[str, Any]]:
    """Rows of the groups table by name."""
    found = {}
    for name, group in config.items() if isinstance(config, dict) else ():
        if not isinstance(group, dict) or not isinstance(name, str):
            continue
        ranks = group.get("ranks")
        try:
            listed = json.loads(ranks) if isinstance(ranks, str) else ranks
        except (ValueError, RecursionError):
            listed = None
        plain = isinstance(listed, list) and all(_to_int(rank) is not None for rank in listed)
        # Gloo leaves the list empty: unknown, not a group of nobody.
        known = listed if plain and listed else None
        found[name] = {
            "pg_name": _to_text(group.get("name")) or name,
            "pg_desc": _to_text(group.get("desc")),
            "ranks": json.dumps(known) if known else None,
            "size": len(known) if known else None,
        }
    return found


def _read_status(status: Any) -> dict[str, dict[str, int | None]]:
    """group -> last_enqueued_collective, last_started_collective, last_completed_collective; -1 is none yet."""
    return {
        str(group): {
            str(key): int(value) if str(value).isdecimal() and len(str(value)) < 19 else None
            for key, value in state.items()
        }
        for group, state in (status.items() if isinstance(status, dict) else ())
        if isinstance(state, dict)
    }


def _build_row(entry: dict[str, Any], groups: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Columns of the event and the comm of an entry together; None where it says neither what nor when."""
    name, created = entry.get("profiling_name"), _to_int(entry.get("time_created_ns"))
    if not isinstance(name, str) or not created:
        return None
    # JSON dumps write 0, pickles None, where the backend discovered no start or end.
    started = _to_int(entry.get("time_discovered_started_ns")) or None
    completed = _to_int(entry.get("time_discovered_completed_ns")) or None
    timed = started is not None and completed is not None and completed >= started
    group = entry.get("process_group")
    pg_name, pg_desc = (*(group if isinstance(group, (list, tuple)) else ()), None, None)[:2]
    in_group = groups.get(pg_name, {}) if isinstance(pg_name, str) else {}
    is_p2p = bool(entry.get("is_p2p"))
    dtypes = entry.get("input_dtypes")
    dtype = _to_text(dtypes[0]) if isinstance(dtypes, list) and dtypes else None
    elements = _count_elements(entry.get("input_sizes"))
    size = itemsize(dtype)
    peer = _PEER.search(name) if is_p2p else None
    args = {key: entry[key] for key in _ARGUMENT_KEYS if isinstance(entry.get(key), (str, int, float))}
    if frames := _format_frames(entry.get("frames")):
        args["frames"] = frames
    if not timed:
        args |= {"started_ns": started} if started else {}
        args |= {"completed_ns": completed} if completed else {}
    elif started is not None:
        args["created_ns"] = created
    return {
        "ph": "X" if timed else "i",
        "name": name,
        "ts": started if timed else created,
        "dur": completed - started if timed and completed and started else None,
        "tid": _to_int(int(entry["thread_id"]) if str(entry.get("thread_id", "")).isdecimal() else None),
        "args": json.dumps(args),
        "collective": parse_collective(name),
        "pg_name": _to_text(pg_name),
        "pg_desc": _to_text(pg_desc),
        "ranks": in_group.get("ranks"),
        "group_size": in_group.get("size"),
        "seq": _to_int(entry.get("p2p_seq_id" if is_p2p else "collective_seq_id")),
        "dtype": dtype,
        "in_nelems": elements,
        "out_nelems": _count_elements(entry.get("output_sizes")),
        "peer": int(peer[2]) if peer else None,
        "is_p2p": is_p2p,
        "bytes": elements * size if elements is not None and size else None,
    }


def _count_elements(sizes: Any) -> int | None:
    """Elements of all tensors together; None where there is no tensor or a size is no number."""
    if not isinstance(sizes, (list, tuple)) or not sizes:
        return None
    total = 0
    for shape in sizes:
        if not isinstance(shape, (list, tuple)) or len(shape) > _MOST_DIMENSIONS:
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
        # Kineto's name for records of collectives that are no device work.
        "events": ordered.select("id", *_EVENT, cat=pl.lit("collective_comm")),
        "comms": ordered.select("id", pl.exclude("id", *_EVENT), event="id"),
        "groups": _build_group_table(groups),
    }


def _build_group_table(groups: dict[str, dict[str, Any]]) -> pl.DataFrame:
    schema = {**dict.fromkeys(("pg_name", "pg_desc", "ranks"), pl.String), "size": pl.Int64}
    return pl.DataFrame(list(groups.values()), schema=schema, orient="row")
