"""Kineto and Chrome trace JSON: what torch.profiler writes, of any age and vendor.

An object with ``traceEvents`` anywhere in it, or a bare array of events; plain, gzip or zstd. Every phase is read:
complete events and instants (X, i, I, R), begin/end pairs (B, E), asynchronous ones (b, n, e, kept as they stand),
counters (C), flows (s, t, f) and names (M). Times become ns: of the Unix epoch where ``baseTimeNanoseconds`` says
what they are relative to, or where they are absolute already, as older files have them.

Format: https://github.com/pytorch/kineto/blob/main/libkineto/src/output_json.cpp and the Trace Event Format.
"""

from __future__ import annotations

import json
import re
from os import PathLike
from pathlib import Path
from typing import Any

import polars as pl

from etloom import _native
from etloom.core import arrays
from etloom.core.errors import ReadError
from etloom.core.schema import Stat
from etloom.core.trace import Trace
from etloom.formats.io.native_parser import FIRST_TEXT_ID, ParsedFile, Progress, parse_file
from etloom.formats.tables import comms_table

_EPOCH_NS = 10**18
"""No relative time is that large (31 years), and every absolute one since 2001 is."""

_TRACK_KEYS = ("name", "labels", "sort_index")
_MAX_KEPT_METADATA = 1000
"""How many of the metadata events that no table holds a Trace keeps in its meta."""


def sniff(head: bytes) -> bool:
    """Whether these are the first bytes of a Chrome trace."""
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text[:1] == b"[":
        return re.match(rb"\[\s*(?:\{|\]|$)", text) is not None and (
            b'"ph"' in text or re.match(rb"\[\s*(?:\]|$)", text) is not None
        )
    if text[:1] != b"{":
        return False
    if b'"traceEvents"' in text:
        return True
    # deviceProperties or pg_config can fill the head before traceEvents comes
    return b'"schemaVersion"' in text or b'"deviceProperties"' in text or b'"distributedInfo"' in text


def read(source: str | PathLike[str], *, progress: Progress | None = None) -> Trace:
    """The Trace of one file; nothing in it is linked yet (no parent, depth, step or launch).

    progress: called with the number of bytes of the file as they are read.

    Raises ReadError for a file that cannot be read or holds no trace, LimitError for a gzip bomb.
    """
    path = Path(source)
    return to_trace(parse_file(_native.kineto_parser(), path, progress), path)


def to_trace(parsed: ParsedFile, path: Path, first_ts: int | None = None) -> Trace:
    """The Trace of parsed tables: named, numbered, on one clock.

    first_ts: the earliest time in the file, where the tables do not hold all of it.

    Raises ReadError for a file into which several ranks were exported.
    """
    if "mergedRanks" in parsed.header:
        raise ReadError(
            "holds several ranks drawn as one for a viewer: what belongs to which cannot be told apart",
            where=path,
            remedy="open the run that it was exported from, or export that as Parquet",
        )
    stats = list(parsed.stats)
    tables = normalize_tables(parsed.tables, stats)
    threads, others = _build_threads(tables.pop("metadata"), tables.pop("lanes"))
    if others:
        severity = "info" if len(others) <= _MAX_KEPT_METADATA else "data_loss"
        example = f"no table holds them; meta keeps the first {_MAX_KEPT_METADATA}: {others[0]['name']}"
        stats.append(Stat("read.other_metadata", severity, len(others), example))
    first = tables["events"]["ts"].min() if first_ts is None else first_ts
    first = first if isinstance(first, int) else 0
    meta = _build_meta(parsed.header, path)
    base = _read_base_ns(parsed.header, first, stats)
    if others:
        meta["metadata_events"] = others[:_MAX_KEPT_METADATA]
    meta["base_ns"] = base
    meta["clock"] = "epoch" if base or first > _EPOCH_NS else "relative"
    for name in ("events", "memory", "counters", "flows"):
        table = tables[name].with_columns(pl.col("ts") + base) if base else tables[name]
        tables[name] = table.with_row_index("id")
    tables["comms"] = tables["comms"].with_row_index("id")
    tables["groups"] = comms_table.build_groups(meta["distributed"].get("pg_config"))
    stats.append(Stat("read.events", "info", parsed.rows, "rows of traceEvents in the file"))
    return Trace({**tables, "threads": threads}, meta).with_stats(stats)


def normalize_tables(tables: dict[str, pl.DataFrame], stats: list[Stat]) -> dict[str, pl.DataFrame]:
    """The parser's tables with ranges closed and communication in the field's words."""
    tables = close_ranges(tables, stats)
    return {**tables, "comms": comms_table.convert_event_comms(tables["comms"], stats)}


def _build_meta(header: dict[str, Any], path: Path) -> dict[str, Any]:
    distributed = header.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    properties = header.get("deviceProperties")
    meta = {
        "rank": _to_int(distributed.get("rank")),
        "world_size": _to_int(distributed.get("world_size")),
        "files": [str(path)],
        "formats": ["kineto"],
        "host": header.get("host_name"),
        "kineto_schema_version": header.get("schemaVersion"),
        "device_properties": properties if isinstance(properties, list) else [],
        "distributed": distributed,
        "header": {
            key: value for key, value in header.items() if key not in ("distributedInfo", "deviceProperties")
        },
    }
    return {key: value for key, value in meta.items() if value is not None}


def _read_base_ns(header: dict[str, Any], first: int, stats: list[Stat]) -> int:
    stated = header.get("baseTimeNanoseconds")
    base = _to_int(stated) or 0
    if stated is not None and _to_int(stated) is None:
        example = f"baseTimeNanoseconds is no time: {str(stated)[:60]}"
        stats.append(Stat("read.odd_base", "data_loss", 1, example))
    if base and first > _EPOCH_NS:
        stats.append(
            Stat("read.base_ignored", "info", 1, "times are absolute although the file states a base")
        )
        return 0
    return base


def _to_int(value: Any) -> int | None:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) < 1 << 62 else None


def _build_threads(metadata: pl.DataFrame, lanes: pl.DataFrame) -> tuple[pl.DataFrame, list[dict[str, Any]]]:
    """The names of lanes: metadata events folded to one row a process and a row a thread; and those that say more."""
    rows: dict[tuple[int, int | None], dict[str, Any]] = {}
    others: list[dict[str, Any]] = []
    for kind, pid, tid, text in metadata.select(
        pl.col("kind").cast(pl.String), "pid", "tid", pl.col("args").cast(pl.String)
    ).iter_rows():
        if text is None:
            continue  # counted as odd_json
        args = json.loads(text)
        of, _, key = (kind or "").partition("_")
        value = args.get(key)
        folded = _to_int(value) if key == "sort_index" else str(value).strip()
        if of in ("process", "thread") and key in _TRACK_KEYS and pid is not None and key in args:
            rows.setdefault((pid, tid if of == "thread" else None), {})[key] = folded
            if len(args) == 1 and folded is not None:
                continue
        others.append({"name": kind, "pid": pid, "tid": tid, "args": args})
    # A lane that the file names by a text in place of a number is called by that text.
    for code, name in enumerate(lanes["name"].cast(pl.String)):
        lane = FIRST_TEXT_ID - code
        found = [key for key in rows if lane in key and key[1] in (lane, None)]
        for process_and_thread in found or [(lane, None)]:
            rows.setdefault(process_and_thread, {}).setdefault("name", name)
    threads = pl.DataFrame(
        [{"pid": pid, "tid": tid, **row} for (pid, tid), row in rows.items()],
        schema={
            "pid": pl.Int64,
            "tid": pl.Int64,
            "name": pl.String,
            "labels": pl.String,
            "sort_index": pl.Int64,
        },
    )
    return threads, others


def close_ranges(tables: dict[str, pl.DataFrame], stats: list[Stat]) -> dict[str, pl.DataFrame]:
    """Begin and end events (B, E) joined to complete ones: an E closes the last open B of its thread."""
    halves = arrays.match_text(tables["events"]["ph"], lambda ph: ph.is_in(["B", "E"]))
    if not halves.any():
        return tables
    events = tables["events"].with_columns(pl.col("ph").cast(pl.String)).with_row_index("row")
    ranges = events.filter(halves)
    begun: dict[tuple[int, int], list[tuple[int, int]]] = {}
    durations: dict[int, int] = {}
    lone = 0
    in_order = ranges.sort("ts", "position").select("row", "ph", "pid", "tid", "ts")
    for row, ph, pid, tid, ts in in_order.iter_rows():
        stack = begun.setdefault((pid, tid), [])
        if ph == "B":
            stack.append((row, ts))
        elif stack:
            start_row, start = stack.pop()
            durations[start_row] = ts - start
        else:
            lone += 1
    open_ranges = sum(map(len, begun.values()))
    joined = "begin and end events, joined to one event"
    stats.append(Stat("read.closed_ranges", "info", len(durations), joined))
    for name, count in (("read.end_without_begin", lone), ("read.begin_without_end", open_ranges)):
        if count:
            stats.append(Stat(name, "data_loss", count, "a range of which the file holds one end only"))
    closed = pl.DataFrame(
        list(durations.items()), schema={"row": pl.UInt32, "length": pl.Int64}, orient="row"
    )
    events = (
        events.filter(pl.col("ph") != "E")
        .join(closed, on="row", how="left")
        .with_columns(
            pl.coalesce("length", "dur").alias("dur"),
            pl.when(pl.col("length").is_null()).then("ph").otherwise(pl.lit("X")).alias("ph"),
        )
        .sort("ts", "dur", "position", descending=[False, True, False], nulls_last=True)
    )
    moved = events.select("row").with_row_index("event")
    side = {
        name: frame.rename({"event": "row"}).join(moved, on="row").drop("row").sort("event")
        for name, frame in tables.items()
        if "event" in frame.columns
    }
    return {
        **tables,
        **side,
        "events": events.drop("row", "length").with_columns(pl.col("ph").cast(pl.Categorical)),
    }
