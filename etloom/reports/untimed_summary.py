"""What a run of execution traces alone comes to: operators and messages, and no times."""

from __future__ import annotations

import polars as pl

from etloom.core.trace import Job
from etloom.reports.formatting import SIZE_UNITS, choose_unit, count_noun, format_duration, format_number
from etloom.reports.summary_line import SummaryLine


def is_untimed(job: Job) -> bool:
    """Whether nodes were read and no events."""
    return any(trace.rows("nodes") for trace in job.values()) and not any(
        trace.rows("events") for trace in job.values()
    )


def count_recorded_operators(job: Job) -> pl.DataFrame:
    """rank, name, count of the nodes, the most frequent first; total_ns: how long they take as Chakra's nodes state it,
    null of others."""
    stated = pl.col("attrs").cast(pl.String).str.extract(r'"duration_micros": ?(\d+)').cast(pl.Int64)
    counts = [
        trace.nodes.group_by(pl.col("name").cast(pl.String))
        .agg(
            pl.len().cast(pl.Int64).alias("count"),
            pl.when(stated.count() > 0).then(1000 * stated.sum()).alias("total_ns"),
        )
        .select(pl.lit(rank, pl.Int64).alias("rank"), "name", "count", "total_ns")
        for rank, trace in job.items()
    ]
    return pl.concat(counts).sort("count", "name", "rank", descending=(True, False, False))


def summarize_untimed_run(job: Job) -> tuple[SummaryLine, ...]:
    """Operators, communication, and why nothing is said of time."""
    found = count_recorded_operators(job)
    stated = int(found["total_ns"].sum())
    by_name = (
        found.group_by("name").agg(pl.col("count").sum()).sort("count", "name", descending=(True, False))
    )
    often, times = by_name.row(0)
    return (
        SummaryLine(
            "Operators",
            f"{by_name['count'].sum():,}",
            f"of {count_noun(by_name.height, 'name')}; {often} most often, {count_noun(times, 'time')}",
        ),
        _summarize_communication(job),
        _summarize_recorded_times(stated),
    )


def _summarize_recorded_times(stated: int) -> SummaryLine:
    if not stated:
        why = "an execution trace holds operators and tensors: put the profiler's trace of the same steps beside it"
        return SummaryLine("Times", "not recorded", why)
    return SummaryLine(
        "Times", format_duration(stated), "summed over nodes, which say how long they take, not when"
    )


def _summarize_communication(job: Job) -> SummaryLine:
    comms = pl.concat(
        trace.comms.select(pl.col("collective").cast(pl.String), "bytes") for trace in job.values()
    )
    sent = comms.filter(pl.col("collective").is_not_null() & ~pl.col("collective").is_in(["wait", "init"]))
    if sent.is_empty():
        return SummaryLine("Communication", "none", "no communication in these traces")
    size = int(sent["bytes"].sum())
    unit, factor = choose_unit(size, SIZE_UNITS)
    parts = sent.group_by("collective").len().sort("len", "collective", descending=(True, False))
    said = ", ".join(f"{name} {calls:,}" for name, calls in parts.head(3).iter_rows())
    text = f"calls: {said}{', ...' if parts.height > 3 else ''}; {format_number(size / factor)} {unit} in all"
    return SummaryLine("Communication", f"{sent.height:,}", text)
