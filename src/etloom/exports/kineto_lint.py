"""Check Kineto traces for problems that make analyses of them wrong.

The rules are those of PyTorch's own validator (torch.profiler._trace_validator of torch 2.13), which loads a whole file
as Python objects, and the losses that the reader reports; `etloom.exports.chakra_lint.lint_codes` has their meanings.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import polars as pl

from etloom import formats
from etloom.core.errors import ReadError
from etloom.core.trace import Job, Trace
from etloom.exports.chakra_lint.lint_codes import FindingCollector, LintResult

_FORMAT = "kineto"
_RECORD_CALLS = tuple(
    f"cudaEventRecord{flags}{suffix}" for flags in ("", "WithFlags") for suffix in ("", "_ptsz")
)
_WAIT, _EVENT_SYNC, _STREAM_SYNC = "Stream Wait Event", "Event Sync", "Stream Sync"
_BACKWARD = "autograd::engine::evaluate_function:"
_FACTS = {
    "collective": "name",
    "dtype": "type",
    "in_nelems": "input size",
    "out_nelems": "output size",
    "group_size": "group size",
}
"""Columns of comms that a record of a collective fills."""


def find_files(paths: Iterable[Path]) -> list[Path]:
    """Return the Kineto traces among the files ``paths``, and in folders among them.

    Raises:
        ReadError: a folder also contains Chakra traces, or ``paths`` also has files that are not of Kineto.
    """
    named = list(paths)
    files = [file for path in named for file in (sorted(path.iterdir()) if path.is_dir() else [path])]
    format_by_file = {file: formats.detect_format(file) if file.is_file() else None for file in files}
    matching = [file for file, name in format_by_file.items() if name == _FORMAT]
    others = [
        file
        for file, name in format_by_file.items()
        if name == "chakra" or (name != _FORMAT and file in named)
    ]
    if matching and others:
        raise ReadError(
            f"is not a trace of Kineto, but {matching[0]} is",
            where=others[0],
            remedy="check one format at a time",
        )
    return matching


def lint_files(files: list[Path]) -> LintResult:
    """Return the findings of Kineto traces.

    A trace that states no rank has its place among the files; if that number, or the stated one, belongs to a trace
    before it, it has the next free one.
    """
    findings = FindingCollector()
    path_by_rank: dict[int, Path] = {}
    for number, file in enumerate(files):
        content = formats.read(file, _FORMAT)
        for trace in content.values() if isinstance(content, Job) else [content]:
            rank = number if trace.rank is None else trace.rank
            while rank in path_by_rank:
                rank += 1
            path_by_rank[rank] = file
            for name, severity, count, example in trace.stats.iter_rows():
                if severity != "info":
                    findings.add(rank, "reading-problem", None, f"{name}: {example}", count)
            _check_trace(findings, rank, trace)
    return LintResult(path_by_rank, findings.sorted_findings())


def _check_trace(findings: FindingCollector, rank: int, trace: Trace) -> None:
    columns = ("id", "ts", "dur", "device", "stream", "correlation", "external_id", "seq_id")
    events = trace.events.filter(pl.col("ph").cast(pl.String) == "X").select(
        *columns, pl.col("cat").cast(pl.String), pl.col("name").cast(pl.String).fill_null("(no name)")
    )
    waits = trace.syncs.select("record_correlation", id="event", kind=pl.col("kind").cast(pl.String))
    waits = waits.join(events, on="id", maintain_order="left")
    comms = trace.comms.select("event", *_FACTS)
    for code, rows in (
        ("kernel-before-launch", _find_early_kernels(events)),
        ("wait-without-record", _find_waits_without_record(waits)),
        ("kernel-beyond-sync", _find_running_kernels(waits, events)),
        ("record-after-wait", _find_late_records(waits, events)),
        ("incomplete-collective", _find_incomplete_collectives(events, comms)),
        ("shared-sequence-number", _find_shared_numbers(events)),
    ):
        for row in rows.select("id", "example", "^count$").iter_rows():
            findings.add(rank, code, *row)


def _find_early_kernels(events: pl.DataFrame) -> pl.DataFrame:
    """Return the first kernel of each External id if it starts before the first cudaLaunchKernel of the same id."""
    numbered = events.drop_nulls("external_id").sort("ts", maintain_order=True)
    kernels = numbered.filter(pl.col("cat") == "kernel").unique(
        "external_id", keep="first", maintain_order=True
    )
    calls = numbered.filter(pl.col("cat") == "cuda_runtime", pl.col("name") == "cudaLaunchKernel")
    calls = calls.select("external_id", call_ts="ts").unique("external_id", keep="first")
    early = kernels.join(calls, on="external_id", maintain_order="left").filter(
        pl.col("ts") < pl.col("call_ts")
    )
    microseconds = (pl.col("call_ts") - pl.col("ts")) / 1000
    return early.with_columns(example=pl.format("{} starts {} us before its launch", "name", microseconds))


def _find_waits_without_record(waits: pl.DataFrame) -> pl.DataFrame:
    unknown = pl.col("record_correlation").is_null() | (pl.col("record_correlation") < 0)
    rows = waits.filter(pl.col("kind").is_in([_WAIT, _EVENT_SYNC]), unknown)
    return rows.with_columns(example=pl.format("{} on stream {}", "kind", pl.col("stream").fill_null(-1)))


def _find_running_kernels(waits: pl.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
    """Return each synchronization of a stream that starts while kernels of it run: how many, and the last to end."""
    syncs = waits.filter(pl.col("kind") == _STREAM_SYNC, pl.col("cat") == "cuda_sync")
    kernels = events.filter(pl.col("cat") == "kernel").select(
        "device", "stream", start="ts", end=pl.col("ts") + pl.col("dur").fill_null(0).clip(0), kernel="name"
    )
    by_stream = kernels.drop_nulls().sort("start").partition_by("device", "stream", as_dict=True)
    parts = [syncs.select("id", "ts", "stream", count="id", end="ts", kernel="name").clear()]
    for key, members in syncs.drop_nulls(["device", "stream", "ts"]).group_by(
        "device", "stream", maintain_order=True
    ):
        if (running := by_stream.get(key)) is None:
            continue
        times, ends = members["ts"].to_numpy(), running["end"].to_numpy()
        begun = np.searchsorted(running["start"].to_numpy(), times)
        counts = begun - np.searchsorted(np.sort(ends), times, side="right")
        is_last = ends == np.maximum.accumulate(ends)
        lasts = np.maximum.accumulate(np.where(is_last, np.arange(ends.size), 0))[begun[counts > 0] - 1]
        rows = members.filter(pl.Series(counts > 0)).select("id", "ts", "stream")
        parts.append(
            rows.with_columns(pl.Series("count", counts[counts > 0]), *running[lasts].select("end", "kernel"))
        )
    microseconds = (pl.col("end") - pl.col("ts")) / 1000
    return pl.concat(parts, how="vertical_relaxed").with_columns(
        example=pl.format("{} runs {} us longer, on stream {}", "kernel", microseconds, "stream")
    )


def _find_late_records(waits: pl.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
    is_call = pl.col("cat").is_in(["cuda_runtime", "cuda_driver"]) & pl.col("name").is_in(_RECORD_CALLS)
    calls = events.filter(is_call)
    keys = pl.concat([calls.select("ts", key=key) for key in ("external_id", "correlation")]).drop_nulls(
        "key"
    )
    records = keys.group_by("key").agg(record_ts=pl.col("ts").min())
    rows = waits.filter(pl.col("kind") == _WAIT, pl.col("record_correlation") >= 0)
    rows = rows.join(records, left_on="record_correlation", right_on="key", how="left", maintain_order="left")
    late = (pl.col("record_ts") - pl.col("ts")) / 1000
    return rows.filter(pl.col("record_ts").is_null() | (late > 0)).with_columns(
        example=pl.coalesce(
            pl.format("the call with correlation {} is {} us later", "record_correlation", late),
            pl.format("no call has correlation {}", "record_correlation"),
        )
    )


def _find_incomplete_collectives(events: pl.DataFrame, comms: pl.DataFrame) -> pl.DataFrame:
    rows = events.filter(pl.col("name") == "record_param_comms").join(
        comms, left_on="id", right_on="event", how="left", maintain_order="left"
    )
    missing = pl.concat_str(
        (pl.when(pl.col(column).is_null()).then(pl.lit(word)) for column, word in _FACTS.items()),
        separator=", ",
        ignore_nulls=True,
    )
    return (
        rows.with_columns(example=missing)
        .filter(pl.col("example") != "")
        .with_columns(example=pl.format("no {}", "example"))
    )


def _find_shared_numbers(events: pl.DataFrame) -> pl.DataFrame:
    """Return the first event of each sequence number (0 is none) that backward operators of several names have."""
    rows = events.filter(pl.col("name").str.contains(_BACKWARD, literal=True), pl.col("seq_id") != 0)
    groups = rows.group_by("seq_id", maintain_order=True).agg(
        pl.col("id").first(),
        names=pl.col("name").str.split(_BACKWARD).list.last().str.strip_chars().unique().sort(),
    )
    shared = groups.filter(pl.col("names").list.len() > 1)
    return shared.with_columns(
        example=pl.format("{} has {}", "seq_id", pl.col("names").list.head(4).list.join(", "))
    )
