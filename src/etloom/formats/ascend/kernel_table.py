"""Reads kernel_details.csv, the table of an NPU's kernels; waits between kernels and hardware metrics are not read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl

from etloom.core.errors import ReadError
from etloom.core.schema import Stat
from etloom.core.trace import Trace
from etloom.formats.ascend.database import DEVICE_PID
from etloom.formats.io.compression import decompressed_file
from etloom.formats.io.csv_columns import read_text_columns
from etloom.formats.io.other_formats import read_header
from etloom.formats.kineto.ascend import HARDWARE, categorize
from etloom.formats.tables.building import build_trace, sort_events

_NAME, _START, _DURATION, _CORE = "name", "start time(us)", "duration(us)", "accelerator core"
_HEADER = frozenset({_NAME, _START, _DURATION, "type"})
_NUMBERS = {"device_id": "device", "stream id": "stream", "task id": "task", "model id": "model"}
_MICROSECONDS = r"^\s*(\d{1,19})(?:\.(\d{1,9}))?\s*$"
_COLLECTIVE = r"(?i)^hcom_"


def sniff(head: bytes) -> bool:
    """Return whether a file is a table of kernels, judging from its header."""
    return read_header(head) >= _HEADER


def read(path: Path) -> Trace:
    """Read a table of kernels.

    Raises:
        ReadError: It cannot be read, or has no kernels.
        LimitError: It is too large.
    """
    with decompressed_file(path, ".csv") as plain:
        frame = read_text_columns(plain, (_NAME, _START, _DURATION, _CORE, *_NUMBERS))
    stats: list[Stat] = []
    start, duration = (_parse_time(frame[name]) for name in (_START, _DURATION))
    lost = int(start.is_null().sum())
    stats.append(Stat("read.no_time", "data_loss", lost, "kernels without a valid start"))
    numbers = [
        pl.col(name).str.extract(r"^\s*(\d{1,15})").cast(pl.Int64).alias(ours)
        for name, ours in _NUMBERS.items()
    ]
    is_collective = pl.col(_NAME).str.contains(_COLLECTIVE)
    task_type = pl.when(is_collective).then(pl.lit("HCCL")).otherwise(_CORE)
    rows = frame.with_columns(*numbers, ts=start, dur=duration, type=task_type).drop_nulls("ts")
    if rows.is_empty():
        raise ReadError("has no kernels", where=path, remedy="record NPU activity (ProfilerActivity.NPU)")
    device = pl.col("device").fill_null(0)
    text = pl.col("type").fill_null("AI_CORE").str.replace_all(r'[\\"\x00-\x1f]', "")
    rows = rows.with_columns(
        ph=pl.lit("X"),
        pid=device + DEVICE_PID,
        tid=pl.col("stream").fill_null(0),
        args=pl.lit('{"Task Type": "') + text + pl.lit('"}'),
    ).with_row_index("position")
    events = sort_events(rows).with_row_index("id")
    threads = [
        {"pid": pid, "tid": None, "name": HARDWARE, "labels": f"NPU {pid - DEVICE_PID}"}
        for pid in events["pid"].unique().sort()
    ]
    tables = {
        "events": events.select("id", "ph", "name", "ts", "dur", "pid", "tid", "args", "position"),
        "threads": pl.DataFrame(
            threads, schema={"pid": pl.Int64, "tid": pl.Int64, "name": pl.String, "labels": pl.String}
        ),
    }
    meta: dict[str, Any] = {
        "formats": ["ascend"],
        "files": [str(path)],
        "clock": "epoch",
        "base_ns": 0,
        "rank": None,
    }
    return categorize(build_trace(tables, meta, stats))


def _parse_time(texts: pl.Series) -> pl.Series:
    """Convert decimal microseconds to ns exactly; null for other texts."""
    parts = texts.str.extract_groups(_MICROSECONDS).struct.unnest()
    integer, fraction = parts[parts.columns[0]], parts[parts.columns[1]]
    ns = fraction.fill_null("").str.pad_end(3, "0").str.head(3).cast(pl.Int64, strict=False)
    integer = integer.cast(pl.Int64, strict=False)
    return pl.select(pl.when(integer < 1 << 51).then(integer * 1000 + ns).alias("ns")).to_series()
