"""Conversion of Kineto files larger than memory to Parquet: parsed in parts, merged by slices of time.

First the rows are written to sorted parts of about a million rows each. Then the time is cut into slices with about
equally many events; the events of a slice are collected from all parts, which Parquet's statistics make cheap, sorted
and numbered. The side tables of events follow their new numbers. At most one part, one slice or one side table is in
memory at a time.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq

from etloom import _native
from etloom.core.schema import TABLES, Stat
from etloom.formats import kineto
from etloom.formats.io.native_parser import ParsedFile, Progress, collect_result, feed_file, take_frames
from etloom.formats.tables.doubtful_times import (
    Recording,
    drop_unknown_starts,
    find_recording,
    find_stop,
    has_crowd,
    judge_events,
)
from etloom.formats.tables.value_checks import check_table, check_values

PART_ROWS = 1_000_000

_DROPPED = (1 << 32) - 1
_EVENT_TABLES = ("arguments", "kernels", "syncs", "frames", "comms")
_TIMED_TABLES = ("memory", "counters", "flows")


def convert_large_file(
    path: Path, folder: Path, *, part_rows: int = PART_ROWS, progress: Progress | None = None
) -> dict[str, Any]:
    """Convert a Kineto file that may exceed memory to the files ``<table>.parquet`` in ``folder``.

    The tables, stats included, are those of `etloom.formats.kineto.read`, except that begin and end events (B, E) in
    different parts are not joined, and are counted.

    Args:
        path: The Kineto file.
        folder: An existing folder.
        part_rows: Rows per part.
        progress: Called with the number of bytes of the file as they are read.

    Returns:
        The meta of the Trace.

    Raises:
        ReadError: If the file cannot be read or is not a trace.
        LimitError: For a decompression bomb.
    """
    with tempfile.TemporaryDirectory(prefix=".parts-", dir=folder) as scratch:
        parts = Path(scratch)
        parsed, offsets = _write_parts(path, parts, part_rows, progress)
        times = _scan_events(parts).select("ts").collect()["ts"]
        trace = kineto.to_trace(parsed, path, kineto.find_first_time(times))
        base = trace.meta["base_ns"]
        at_zero = _scan_events(parts).filter(pl.col("ts") == 0).select("pid", "tid")
        recording = find_recording(times.drop_nulls() + base, base, has_crowd(times, 0, at_zero.collect))
        stop = find_stop(pl.read_parquet(file, glob=False) for file in sorted(parts.glob("events-*.parquet")))
        recording = replace(recording, stop=None if stop is None else stop + base)
        numbered = _scan_events(parts).select("cat", "external_id").drop_nulls("external_id").collect()
        stats = [kineto.state_missing_operators(numbered)]
        new_ids = _merge_events(parts, folder, recording, times, part_rows, stats)
        del times
        for name in (*_EVENT_TABLES, *_TIMED_TABLES):
            pieces = (
                pl.read_parquet(parts / f"{name}-{number:05}.parquet", glob=False)
                for number in range(len(offsets))
            )
            if name in _EVENT_TABLES:
                moved = (
                    piece.with_columns(pl.Series("event", new_ids[piece["event"].to_numpy() + offset]))
                    for piece, offset in zip(pieces, offsets, strict=True)
                )
                table = pl.concat(moved).filter(pl.col("event") != _DROPPED)
                table = table.sort("event", maintain_order=True)
            else:
                table = pl.concat(pieces).sort("ts", maintain_order=True).with_columns(pl.col("ts") + base)
                table = drop_unknown_starts(name, table.with_row_index("id"), recording, stats).drop("id")
            if "id" in TABLES[name].schema:
                table = table.with_row_index("id")
            _write(check_table(name, TABLES[name].conform(table), stats), folder / f"{name}.parquet")
            del table
        trace = check_values(trace.with_stats(stats))
    for name in ("threads", "groups", "stats"):
        _write(trace.table(name), folder / f"{name}.parquet")
    return dict(trace.meta)


def _write_parts(
    path: Path, parts: Path, part_rows: int, progress: Progress | None
) -> tuple[ParsedFile, list[int]]:
    """Parse the file to Parquet parts; return the tables that are not split, and the first event number per part."""
    parser = _native.kineto_parser()
    stats: list[Stat] = []
    metadata: list[pl.DataFrame] = []
    offsets: list[int] = []
    events = rows_in_parts = 0

    def write_part(tables: dict[str, pl.DataFrame]) -> None:
        nonlocal events
        metadata.append(tables.pop("metadata"))
        number = len(offsets)
        offsets.append(events)
        for name, frame in kineto.normalize_tables(tables, stats).items():
            if name == "events":
                frame = frame.with_row_index("row", offset=events)
                events += frame.height
            _write(frame, parts / f"{name}-{number:05}.parquet")

    for _ in feed_file(parser, path, stats, progress):
        if parser.rows - rows_in_parts >= part_rows:
            rows_in_parts = parser.rows
            parser.cut()
            write_part(take_frames(parser))
    parser.finish()
    parsed = collect_result(parser, path, stats)
    write_part(dict(parsed.tables))
    shared = {name: frame.clear() for name, frame in parsed.tables.items()}
    shared |= {"metadata": pl.concat(metadata), "tracks": parsed.tables["tracks"]}
    return ParsedFile(shared, parsed.header, parsed.stats, parsed.rows), offsets


def _merge_events(
    parts: Path, folder: Path, recording: Recording, times: pl.Series, part_rows: int, stats: list[Stat]
) -> np.ndarray:
    """Merge the events of all parts into events.parquet in time order; return the new id of each event of the parts.

    Events of unknown time have the id `_DROPPED`.
    """
    new_ids = np.full(len(times), _DROPPED, np.uint32)
    count = 0
    writer: pq.ParquetWriter | None = None
    for events in _read_time_slices(parts, times, part_rows):
        events = judge_events(events.with_columns(pl.col("ts") + recording.zero), recording, stats)
        new_ids[events["row"].to_numpy()] = np.arange(count, count + events.height, dtype=np.uint32)
        table = events.drop("row").with_row_index("id", offset=count)
        arrow = check_table("events", TABLES["events"].conform(table), stats).to_arrow()
        writer = writer or pq.ParquetWriter(
            folder / "events.parquet", arrow.schema, compression="zstd", compression_level=1
        )
        writer.write_table(arrow)
        count += events.height
    if writer is None:
        _write(TABLES["events"].empty(), folder / "events.parquet")
    else:
        writer.close()
    return new_ids


def _read_time_slices(parts: Path, times: pl.Series, rows: int) -> Iterator[pl.DataFrame]:
    """Yield the events of consecutive time slices of about ``rows`` events, each sorted like the events table."""
    if not len(times):
        return
    at = np.linspace(0, len(times) - 1, max(2, len(times) // rows + 2)).astype(np.int64)
    cuts = np.unique(np.partition(times.to_numpy(), at)[at])
    bounds = [*cuts[:-1].tolist(), int(cuts[-1]) + 1] if len(cuts) > 1 else [int(cuts[0]), int(cuts[0]) + 1]
    scan = _scan_events(parts)
    for low, high in itertools.pairwise(bounds):
        yield (
            scan.filter(pl.col("ts").is_between(low, high, closed="left"))
            .collect()
            .sort("ts", "dur", "position", descending=[False, True, False], nulls_last=True)
        )


def _scan_events(parts: Path) -> pl.LazyFrame:
    return pl.scan_parquet(sorted(parts.glob("events-*.parquet")), glob=False)


def _write(frame: pl.DataFrame, path: Path) -> None:
    frame.write_parquet(path, compression="zstd", compression_level=1)
