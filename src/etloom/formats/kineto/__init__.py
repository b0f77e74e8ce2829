"""Kineto and Chrome trace JSON, as written by torch.profiler of any version and vendor.

An object with ``traceEvents`` anywhere in it, or a bare array of events; plain, gzip or zstd. All phases are read:
complete events and instants (X, i, I, R), begin/end pairs (B, E), asynchronous events (b, n, e; kept unchanged),
counters (C), flows (s, t, f) and names (M). Times become ns: of the Unix epoch if ``baseTimeNanoseconds`` gives the
base, or if they are absolute already, as in older files; otherwise relative.

Format: https://github.com/pytorch/kineto/blob/main/libkineto/src/output_json.cpp and the Trace Event Format.
"""

from __future__ import annotations

import json
import re
from os import PathLike
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import polars as pl

from etloom import _native
from etloom.core import arrays
from etloom.core.categories import DEVICE_CATEGORIES, OPERATOR_CATEGORIES, mask_events
from etloom.core.errors import ReadError
from etloom.core.schema import TIME_LIMIT, Stat
from etloom.core.steps import match_steps
from etloom.core.trace import Trace
from etloom.formats.io.compression import DECOMPRESSION_ERRORS, open_decompressed, read_chunks
from etloom.formats.io.json_text import NestingError, load_json
from etloom.formats.io.native_parser import FIRST_TEXT_ID, ParsedFile, Progress, parse_file
from etloom.formats.kineto import ascend, ray, unitrace
from etloom.formats.tables import comms_table
from etloom.formats.tables.recorder_problems import list_header_problems, state_problems

_EPOCH_NS = 10**18
"""Larger than any relative time (31 years), and smaller than any absolute time since 2001."""

_DISTRIBUTED_INFO = re.compile(rb'"distributedInfo"\s*:\s*(?=\{)')
_MAX_DISTRIBUTED_BYTES = 1 << 24
"""Bytes of distributedInfo that are searched for a rank that follows the process groups."""
_MERGED_RANKS = "mergedRanks"
_HEAD_BYTES = 1 << 16
_JSON = json.JSONDecoder()
_RANK_INSIDE = re.compile(rb'"distributedInfo"\s*:\s*\{[^{}\[]{0,4096}?"rank"\s*:\s*"?(\d{1,9})')

_DEVICE = re.compile(rb'"device"\s*:\s*"?(\d{1,4})(?=\D)')
"""The device of an activity, in its arguments."""

_NUMBER = r': ?"?(0x[0-9a-fA-F]{1,16}|\d{1,18})\b'
_QUEUES = (r'"(?:sycl )?queue(?:[ _]id)?"' + _NUMBER, '"l0 queue"' + _NUMBER)
"""The queue of an activity, in its other arguments."""

_XLA_DEVICE = r"^/device:(?:GPU|TPU):\d"
"""The name of the process of a device in the JSON files of XLA's profiler."""

_LONGEST_RECORDING = 10**17
"""Three years: times that follow the first one by more are not of one recording."""

_MPI_CALL = re.compile(rb'"name"\s*:\s*"MPI_[A-Z]')
_MPI_ARGUMENT = re.compile(rb'"(?:comm|datatype|dest|source)"\s*:\s*"?(?:0x)?\d')
_OPERATOR = re.compile(rb'"cat"\s*:\s*"(?:cpu|gpu)_op"')
_TRACK_KEYS = ("name", "labels", "sort_index")
_MIN_NUMBERED = 500
_MIN_RECORDED = 0.05
"""A file with less than this share of the operators that its numbers (External ids) state is a sample: other threads,
and ids of communications, took up to 93 % of the numbers of complete recordings."""
_MAX_OTHER_METADATA = 1000
"""The number of metadata events without a table that are stored in the meta of the Trace."""


def sniff(head: bytes) -> bool:
    """Return whether a file is a Chrome trace that no other reader reads, judging from its first bytes ``head``."""
    return is_chrome_trace(head) and not is_mpi_trace(head)


def is_mpi_trace(head: bytes) -> bool:
    """Return whether a Chrome trace is of MPI calls alone, which `etloom.formats.mpi_trace` reads."""
    return (
        _MPI_CALL.search(head) is not None
        and _MPI_ARGUMENT.search(head) is not None
        and _OPERATOR.search(head) is None
    )


def is_chrome_trace(head: bytes) -> bool:
    """Return whether a file is a Chrome trace, but not of NCCL's profiler, judging from its first bytes ``head``."""
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text[:1] == b"[":
        is_list = re.match(rb"\[\s*(?:\{|\]|$)", text) is not None and (
            b'"ph"' in text or re.match(rb"\[\s*(?:\]|$)", text) is not None
        )
        return is_list and not is_nccl_profile(text)
    if text[:1] != b"{":
        return False
    if b'"traceEvents"' in text:
        return True
    # deviceProperties or pg_config can fill the head before traceEvents
    return b'"schemaVersion"' in text or b'"deviceProperties"' in text or b'"distributedInfo"' in text


def is_nccl_profile(text: bytes) -> bool:
    """Return whether a trace's events are from NCCL's profiler plugin, which `etloom.formats.nccl_profiler` reads."""
    return b'"CommHash"' in text or b'"cat": "GROUP", "ph": "b"' in text[:512]


def read(
    source: str | PathLike[str],
    *,
    progress: Annotated[
        Progress | None, "Called with the number of bytes of the file as they are read."
    ] = None,
) -> Trace:
    """Read a Kineto or Chrome trace file as an unlinked Trace: without parent, depth, step and launches.

    Raises:
        ReadError: If the file cannot be read or is not a trace.
        LimitError: For a decompression bomb.
    """
    path = Path(source)
    trace = to_trace(parse_file(_native.kineto_parser(), path, progress), path)
    trace = trace.with_stats([_name_xla_profile(trace, path)])
    if ray.is_timeline(trace):
        return ray.categorize(trace)
    if unitrace.is_timeline(trace):
        return unitrace.categorize(trace)
    if not (trace.threads["name"].cast(pl.String).str.strip_chars() == ascend.HARDWARE).any():
        return trace
    if trace.events.is_empty():
        with ascend.unquote_times(path) as plain:
            trace = to_trace(parse_file(_native.kineto_parser(), plain, None), path)
    return ascend.categorize(trace)


def _name_xla_profile(trace: Trace, path: Path) -> Stat:
    """Return the stat that names the .xplane.pb of a JSON file that XLA's profiler wrote: it has no categories."""
    devices = trace.threads.filter(pl.col("name").cast(pl.String).str.contains(_XLA_DEVICE))["pid"]
    count = trace.events.filter(pl.col("pid").is_in(devices.implode()), pl.col("cat").is_null()).height
    profile = path.with_name(path.name.partition(".trace.json")[0] + ".xplane.pb")
    source = str(profile) if profile.is_file() else "the .xplane.pb that the profiler writes next to it"
    example = f"XLA's copy of a profile, without launches and kinds of device activity: open {source}"
    return Stat("read.xla_copy", "data_loss", count, example)


def is_merged(path: Path) -> bool:
    """Return whether a file is an export of several ranks for a viewer, which its begin states. Raises ReadError."""
    return _begins_with(path, re.compile(re.escape(_MERGED_RANKS.encode())))


def is_of_unitrace(path: Path) -> bool:
    """Return whether the begin of a file names a process as unitrace does. Raises ReadError."""
    return _begins_with(path, unitrace.PROCESS)


def _begins_with(path: Path, pattern: re.Pattern[bytes]) -> bool:
    with open_decompressed(path, _HEAD_BYTES) as stream:
        try:
            return pattern.search(stream.read(_HEAD_BYTES)) is not None
        except DECOMPRESSION_ERRORS:
            return False
        except OSError as error:
            raise ReadError(f"cannot be read: {error.strerror or error}", where=path) from None


def find_rank(path: Path) -> int | None:
    """Search the whole file for the rank in distributedInfo, or in unitrace's names of processes; None if absent.

    Raises:
        ReadError: The file cannot be read.
        LimitError: It is a decompression bomb.
    """
    buffer = b""
    try:
        for chunk in read_chunks(path):
            buffer += chunk
            if (match := unitrace.RANK.search(buffer)) is not None:
                return int(match[1])
            if (begin := _DISTRIBUTED_INFO.search(buffer)) is None:
                buffer = buffer[-64:]
                continue
            buffer = buffer[begin.start() :]
            if (match := _RANK_INSIDE.match(buffer)) is not None:
                return int(match[1])
            try:
                info, _ = _JSON.raw_decode(buffer.partition(b":")[2].decode("utf-8", "replace").lstrip())
            except (ValueError, RecursionError):
                if len(buffer) > _MAX_DISTRIBUTED_BYTES:
                    return None
                continue
            rank = str(info.get("rank"))
            return int(rank) if rank.isdecimal() and len(rank) < 10 else None
    except DECOMPRESSION_ERRORS:
        return None  # reading the trace itself reports what is wrong
    except OSError as error:
        raise ReadError(f"cannot be read: {error.strerror or error}", where=path) from None
    return None


def find_device(path: Path) -> int | None:
    """Return the device of the first GPU activity in a file; None if there is none, or the file is damaged."""
    buffer = b""
    try:
        for chunk in read_chunks(path):
            buffer += chunk
            if (match := _DEVICE.search(buffer)) is not None:
                return int(match[1])
            buffer = buffer[-64:]
    except DECOMPRESSION_ERRORS + (OSError,):  # noqa: RUF005 - mypy does not follow the unpacking
        return None
    return None


def to_trace(parsed: ParsedFile, path: Path, first_ts: int | None = None) -> Trace:
    """Build the Trace of a parsed file: name threads, number the rows, add the file's base time to times (ns).

    Args:
        parsed: The tables of the file.
        path: The file.
        first_ts: The earliest time in the file, if the tables do not have all of it.

    Raises:
        ReadError: If several ranks were exported to the file.
    """
    if _MERGED_RANKS in parsed.header:
        raise ReadError(
            "several ranks were merged in this file for a viewer and cannot be separated",
            where=path,
            remedy="open the run that it was exported from, or export that as Parquet",
        )
    stats = list(parsed.stats)
    tables = normalize_tables(parsed.tables, stats)
    threads, others = _build_threads(tables.pop("metadata"), tables.pop("tracks"), stats)
    if others:
        severity = "info" if len(others) <= _MAX_OTHER_METADATA else "data_loss"
        example = f"without a table; meta has the first {_MAX_OTHER_METADATA}: {others[0]['name']}"
        stats.append(Stat("read.other_metadata", severity, len(others), example))
    first = find_first_time(tables["events"]["ts"]) if first_ts is None else first_ts
    meta = _build_meta(parsed.header, path)
    base = _read_base_ns(parsed.header, first, stats)
    if others:
        meta["metadata_events"] = others[:_MAX_OTHER_METADATA]
    meta["base_ns"] = base
    meta["clock"] = "epoch" if base or first > _EPOCH_NS else "relative"
    for name in ("events", "memory", "counters", "flows"):
        table = tables[name].with_columns(pl.col("ts") + base) if base else tables[name]
        tables[name] = table.with_row_index("id")
    tables["comms"] = tables["comms"].with_row_index("id")
    tables["groups"] = comms_table.build_groups(meta["distributed"].get("pg_config"))
    stats.append(state_missing_operators(tables["events"]))
    stats.append(state_problems("read.profiler_problem", list_header_problems(parsed.header)))
    stats.append(Stat("read.events", "info", parsed.rows, "rows of traceEvents in the file"))
    return Trace({**tables, "threads": threads}, meta).with_stats(stats)


def state_missing_operators(events: pl.DataFrame) -> Stat:
    """Return the stat on operators that the file lacks, which the profiler numbers one after the other."""
    numbers = events["external_id"].filter(arrays.to_series(mask_events(events, OPERATOR_CATEGORIES)))
    numbers = numbers.drop_nulls().unique().sort()
    cut = len(numbers) // 100  # a stray number does not say how many there are
    numbers = numbers.slice(cut, len(numbers) - 2 * cut)
    if len(numbers) < _MIN_NUMBERED:
        return Stat("read.missing_operators", "data_loss", 0, "")
    numbered = int(numbers[-1]) - int(numbers[0]) + 1
    is_sample = len(numbers) < _MIN_RECORDED * numbered
    example = f"{len(numbers):,} of {numbered:,} operators: the file is a sample, or lacks threads"
    return Stat("read.missing_operators", "data_loss", (numbered - len(numbers)) * is_sample, example)


def find_first_time(times: pl.Series) -> int:
    """Return the earliest time; 0, which recorders write for times that they do not know, only if all are 0."""
    first = times.min()
    if first == 0:
        first = times.filter(times != 0).min()
    return first if isinstance(first, int) else 0


def normalize_tables(tables: dict[str, pl.DataFrame], stats: list[Stat]) -> dict[str, pl.DataFrame]:
    """Join begin and end events, and normalize steps, streams and communication, in the parser's tables."""
    tables = close_ranges(tables, stats)
    return {
        **tables,
        "events": _fill_streams(_annotate_steps(tables["events"], stats)),
        "comms": comms_table.convert_event_comms(tables["comms"], stats),
    }


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
    recorded = header.get("baseTimeNanoseconds")
    base = _to_int(recorded)
    if base and first > _EPOCH_NS:
        stats.append(
            Stat(
                "read.base_ignored",
                "info",
                1,
                "times are absolute although the file states a base (baseTimeNanoseconds)",
            )
        )
        return 0
    if base is not None and abs(base + first) <= TIME_LIMIT - _LONGEST_RECORDING:
        return base
    if recorded is not None:
        example = f"baseTimeNanoseconds is not a time: {str(recorded)[:60]}"
        stats.append(Stat("read.invalid_base", "data_loss", 1, example))
    return 0


def _to_int(value: Any) -> int | None:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) < 1 << 62 else None


def _build_threads(
    metadata: pl.DataFrame, text_ids: pl.DataFrame, stats: list[Stat]
) -> tuple[pl.DataFrame, list[dict[str, Any]]]:
    """Merge metadata events (name, labels, sort index) to a row per process and per thread; also return the others.

    Those that are nested too deeply are counted in ``stats``.
    """
    rows: dict[tuple[int, int | None], dict[str, Any]] = {}
    others: list[dict[str, Any]] = []
    nested: list[str] = []
    for kind, pid, tid, text in metadata.select(
        pl.col("kind").cast(pl.String), "pid", "tid", pl.col("args").cast(pl.String)
    ).iter_rows():
        if text is None:
            continue  # counted as invalid_json
        try:
            args = load_json(text)
        except NestingError as error:
            nested.append(f"{kind}: {error.what}")
            continue
        owner, _, key = (kind or "").partition("_")
        value = args.get(key)
        merged = _to_int(value) if key == "sort_index" else str(value).strip()
        if owner in ("process", "thread") and key in _TRACK_KEYS and pid is not None and key in args:
            rows.setdefault((pid, tid if owner == "thread" else None), {})[key] = merged
            if len(args) == 1 and merged is not None:
                continue
        others.append({"name": kind, "pid": pid, "tid": tid, "args": args})
    if nested:
        stats.append(Stat("read.invalid_json", "data_loss", len(nested), nested[0]))
    # A process or thread that the file identifies by text gets that text as its name.
    for code, name in enumerate(text_ids["name"].cast(pl.String)):
        id = FIRST_TEXT_ID - code
        keys = [key for key in rows if id in key and key[1] in (id, None)]
        for process_and_thread in keys or [(id, None)]:
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


def _annotate_steps(events: pl.DataFrame, stats: list[Stat]) -> pl.DataFrame:
    """Set the category user_annotation for step annotations, which torch 1.8 and 1.9 record as operators."""
    steps = match_steps(events["name"], mask_events(events, OPERATOR_CATEGORIES))
    if not steps.any():
        return events
    stats.append(Stat("read.step_operators", "info", int(steps.sum()), events["name"].filter(steps)[0]))
    cat = pl.when(pl.Series(steps)).then(pl.lit("user_annotation")).otherwise(pl.col("cat").cast(pl.String))
    return events.with_columns(cat=cat.cast(events.schema["cat"]))


def _fill_streams(events: pl.DataFrame) -> pl.DataFrame:
    """Set the stream of device activities that state none (Intel GPUs): their queue, else their track."""
    lacking = mask_events(events, DEVICE_CATEGORIES) & ~arrays.is_present(events["stream"])
    if not lacking.any():
        return events
    rows = np.flatnonzero(lacking)
    frame = events.select("tid", pl.col("args").cast(pl.String))[rows]
    track = (
        pl.when(pl.col("tid") >= 0)
        .then("tid")
        .when(pl.col("tid") <= FIRST_TEXT_ID)
        .then(FIRST_TEXT_ID - pl.col("tid"))
    )
    queues = (_to_integer(pl.col("args").str.extract(pattern)) for pattern in _QUEUES)
    return events.with_columns(
        events["stream"].scatter(rows, frame.select(pl.coalesce(*queues, track)).to_series())
    )


def _to_integer(text: pl.Expr) -> pl.Expr:
    """Return an expression for the number that a text states, as decimal or hexadecimal (0x) digits."""
    address = text.str.strip_prefix("0x").str.to_integer(base=16, strict=False)
    return pl.when(text.str.starts_with("0x")).then(address).otherwise(text.cast(pl.Int64, strict=False))


def close_ranges(tables: dict[str, pl.DataFrame], stats: list[Stat]) -> dict[str, pl.DataFrame]:
    """Join begin and end events (B, E) to complete events: an E closes the last open B of its thread."""
    halves = arrays.is_in(tables["events"]["ph"], ["B", "E"])
    if not halves.any():
        return tables
    events = tables["events"].with_columns(pl.col("ph").cast(pl.String)).with_row_index("row")
    ranges = events.filter(halves)
    open_rows: dict[tuple[int, int], list[tuple[int, int]]] = {}
    durations: dict[int, int] = {}
    unmatched_ends = 0
    in_order = ranges.sort("ts", "position").select("row", "ph", "pid", "tid", "ts")
    for row, ph, pid, tid, ts in in_order.iter_rows():
        stack = open_rows.setdefault((pid, tid), [])
        if ph == "B":
            stack.append((row, ts))
        elif stack:
            start_row, start = stack.pop()
            durations[start_row] = ts - start
        else:
            unmatched_ends += 1
    unmatched_begins = sum(map(len, open_rows.values()))
    description = "begin and end events, joined to one event"
    stats.append(Stat("read.paired_ranges", "info", len(durations), description))
    for name, count in (
        ("read.end_without_begin", unmatched_ends),
        ("read.begin_without_end", unmatched_begins),
    ):
        if count:
            stats.append(Stat(name, "data_loss", count, "a range with only one end in the file"))
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
    side_tables = {
        name: frame.rename({"event": "row"}).join(moved, on="row").drop("row").sort("event")
        for name, frame in tables.items()
        if "event" in frame.columns
    }
    return {
        **tables,
        **side_tables,
        "events": events.drop("row", "length").with_columns(pl.col("ph").cast(pl.Categorical)),
    }
