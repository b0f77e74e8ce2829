"""JSON lines of the NCCL Inspector plugin: one line per finished collective of a process, over all its communicators.

A collective is an event of category ``nccl_collective`` and a row of comms: communicator, sequence number, ranks in the
communicator; in ``args`` its message size and both bandwidths as the Inspector computed them, and algorithm, protocol
and channels where it states them. Its duration is the execution time. It has a start only if the Inspector ran with
NCCL_INSPECTOR_DUMP_VERBOSE=1: without it a line has the time of the dump, which is later than the collective.

The rank is that in the largest communicator. Format: ext-profiler/inspector of NCCL (README.md), format v4.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl

from etloom.core.errors import ReadError
from etloom.core.schema import Stat
from etloom.core.trace import Trace
from etloom.formats.io.compression import read_content
from etloom.formats.io.json_text import load_json, to_natural
from etloom.formats.tables.building import build_trace
from etloom.formats.tables.nccl_tables import build_communication_tables, format_hash
from etloom.formats.tables.recorder_problems import list_losses

_MAX_BYTES = 1 << 34
_DUMP_STATS = "dump_stats"
_to_natural = partial(to_natural, limit=1 << 51)
_RECORDS = {"coll_perf": "coll", "p2p_perf": "p2p"}
"""Member of a line -> prefix of the names of its values."""


def sniff(head: bytes) -> bool:
    """Return whether the first line is an object with ``header`` and ``coll_perf``, ``p2p_perf`` or ``dump_stats``."""
    line = head.lstrip().partition(b"\n")[0]
    return (
        line[:1] == b"{"
        and b'"header"' in line
        and any(f'"{key}"'.encode() in line for key in (*_RECORDS, _DUMP_STATS))
    )


def read(path: Path) -> Trace:
    """Read the collectives and point-to-point calls of one process as events and rows of comms.

    Raises:
        ReadError: The file has no communication.
        LimitError: The file is too large.
    """
    content, truncation = read_content(path, _MAX_BYTES)
    rows: list[dict[str, Any]] = []
    headers: list[dict[str, Any]] = []
    damaged = 0
    problems: list[str] = []
    lost = 0
    for position, line in enumerate(_parse_lines(content)):
        if line is not None and isinstance(line.get(_DUMP_STATS), dict):
            counts = list_losses(line[_DUMP_STATS])
            problems += [f"{key}: {count:,}" for key, count in counts.items()]
            lost += sum(counts.values())
            continue
        row = None if line is None else _build_row(line, position)
        if line is None or row is None:
            damaged += 1
            continue
        rows.append(row)
        headers.append(line)
    if not rows:
        raise ReadError("contains no complete line of the NCCL Inspector", where=path)
    untimed = sum(row["ts"] is None for row in rows)
    stats = [
        Stat("read.truncated", "data_loss", int(truncation is not None), truncation),
        Stat("read.damaged_entry", "data_loss", damaged, "a line that is not a communication"),
        Stat("read.nccl_lost", "data_loss", lost, "dump_stats: " + ", ".join(problems)),
        _count_holes(rows),
        Stat(
            "read.nccl_no_start", "info", untimed, "no start time; record with NCCL_INSPECTOR_DUMP_VERBOSE=1"
        ),
    ]
    metadata = headers[0].get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    meta = {
        "formats": ["nccl-inspector"],
        "files": [str(path)],
        "clock": "epoch",
        "base_ns": 0,
        "schema_version": metadata.get("inspector_output_format_version"),
        "host": metadata.get("hostname"),
        "pid": metadata.get("pid"),
        "rank": _choose_rank(headers),
    }
    return build_trace(build_communication_tables(rows, pl.DataFrame(), stats), meta, stats)


def find_rank(path: Path) -> int | None:
    """Return the rank of the process within the largest communicator in the file; None if no line states a rank."""
    content, _ = read_content(path, _MAX_BYTES)
    return _choose_rank([line for line in _parse_lines(content) if line is not None])


def _parse_lines(content: bytes) -> Iterator[dict[str, Any] | None]:
    """Yield the JSON object of each non-empty line; None for a line that is not an object with a header."""
    for text in content.decode("utf-8", "replace").splitlines():
        if not text.strip():
            continue
        try:
            line = load_json(text)
        except (ValueError, RecursionError):
            line = None
        yield line if isinstance(line, dict) and isinstance(line.get("header"), dict) else None


def _count_holes(rows: list[dict[str, Any]]) -> Stat:
    """Count the sequence numbers that lie between those of a communicator's collectives, but have no line."""
    numbers: dict[tuple[Any, ...], set[int]] = {}
    for row in rows:
        if row["seq"] is not None:
            numbers.setdefault((row["pg_name"], row["name"]), set()).add(row["seq"])
    holes = {key: max(seqs) - min(seqs) + 1 - len(seqs) for key, seqs in numbers.items()}
    count = sum(holes.values())
    key = max(holes, key=lambda key: holes[key], default=None)
    example = None if key is None else f"{key[1]} of {key[0]}: {holes[key]:,} sequence numbers have no line"
    return Stat("read.nccl_lost", "data_loss", count, example)


def _choose_rank(lines: list[dict[str, Any]]) -> int | None:
    places = [(_to_natural(line["header"].get("n_ranks")) or 0, line["header"].get("rank")) for line in lines]
    ranked = [(size, rank) for size, rank in places if _to_natural(rank) is not None]
    return max(ranked, key=lambda place: place[0])[1] if ranked else None


def _build_row(line: dict[str, Any], position: int) -> dict[str, Any] | None:
    member = next((key for key in _RECORDS if isinstance(line.get(key), dict)), None)
    if member is None:
        return None
    prefix, values, header = _RECORDS[member], dict(line[member]), line["header"]
    name, duration_us = values.pop(prefix, None), _number(values.pop(f"{prefix}_exec_time_us", None))
    if not isinstance(name, str) or duration_us is None:
        return None
    size = _to_natural(header.get("n_ranks")) or None
    recorded_bytes = _to_natural(values.pop(f"{prefix}_msg_size_bytes", None))
    algorithm_bandwidth = _number(values.pop(f"{prefix}_algobw_gbs", None))
    times = values.get("event_trace_ts")
    times = times if isinstance(times, dict) else {}
    channels = times.get("kernel_events")
    start = _choose_start(times, prefix)
    metadata = line.get("metadata")
    return {
        "name": name,
        "ts": None if start is None else start * 1000,
        "dur": round(duration_us * 1000),
        "pid": _to_natural(metadata.get("pid")) if isinstance(metadata, dict) else None,
        "tid": 0,
        "position": position,
        "pg_name": format_hash(header.get("id")),
        "seq": _to_natural(values.pop(f"{prefix}_sn", None)),
        "group_size": size,
        "details": {
            "algorithm": values.pop("algorithm", values.pop(f"{prefix}_algo", None)),
            "protocol": values.pop("protocol", values.pop(f"{prefix}_proto", None)),
            "channels": _to_natural(values.pop("n_channels", None))
            or (len(channels) if isinstance(channels, list) and channels else None),
            "message_bytes": _scale_message(recorded_bytes, algorithm_bandwidth, duration_us, size),
            "algo_gb_per_s": algorithm_bandwidth,
            "bus_gb_per_s": _number(values.pop(f"{prefix}_busbw_gbs", None)),
            "timing": values.pop(f"{prefix}_timing_source", None),
            **values,
        },
    }


def _choose_start(times: dict[str, Any], prefix: str) -> int | None:
    """Return the earliest kernel start over all channels, otherwise the start of the call, in us since the epoch."""
    channels = times.get("kernel_events")
    starts = [
        start
        for channel in (channels if isinstance(channels, list) else ())
        if isinstance(channel, dict) and (start := _to_natural(channel.get("kernel_start_ts")))
    ]
    return min(starts, default=None) or _to_natural(times.get(f"{prefix}_start_ts")) or None


def _scale_message(
    recorded: int | None, bandwidth: float | None, duration_us: float, size: int | None
) -> int | None:
    """Return a call's message size (bytes): as recorded, or times the number of ranks if this fits the bandwidth."""
    if recorded is None or bandwidth is None or not size or not recorded:
        return recorded
    ratio = bandwidth * duration_us * 1e3 / recorded
    return recorded * size if abs(ratio - size) < abs(ratio - 1) else recorded


def _number(value: Any) -> float | None:
    return value if type(value) in (int, float) and 0 <= value < 1e15 else None
