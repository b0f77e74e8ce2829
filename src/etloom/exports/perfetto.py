"""Write a Perfetto trace (.pftrace), for https://ui.perfetto.dev and Perfetto's trace processor.

The file has the tracks, slices, counters and arguments of the Chrome export (`etloom.exports.chrome`) in about a third
of its size; a file of one rank reads back to the same events, a file of several ranks as a job. Launches are flows from
the call to its GPU activity. If collectives show that the clocks of hosts differ, all ranks are moved to one clock.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Annotated, Any

import polars as pl

from etloom import _native
from etloom.analyses.answers import answer
from etloom.collectives import correct_clocks, match_collectives
from etloom.core.trace import Job, Trace
from etloom.exports.chrome import (
    RankFormatter,
    base_time,
    describe_rank,
    format_ranks,
    prepare_ranks,
    relative_base,
)
from etloom.formats.io.atomic_file import open_atomic
from etloom.formats.io.json_text import join_lines
from etloom.formats.kineto import tracks
from etloom.formats.kineto.event_json import format_objects
from etloom.formats.perfetto import RANKS_MEMBER

SUFFIX = (".pftrace", ".perfetto-trace")
_TIMED = ("events", "memory", "counters", "flows")
_FINDING_COLUMNS = ("advice", "confidence", "cost_ns", "job_gain_ns", "operator", "module", "frame")


def write(
    trace: Trace | Job,
    path: str | PathLike[str],
    *,
    overlay: Annotated[str | None, "Critical-path draws the critical path as a track."] = None,
    findings: Annotated[
        bool, "Draw where the causes of lost time (etloom findings) cost most, as a track."
    ] = False,
) -> None:
    """Write a Trace or a Job to one Perfetto trace.

    Raises:
        EtloomError: The trace has no timed events.
    """
    traces = _correct_ranks(prepare_ranks(trace, path, overlay))
    base = base_time(traces.values())
    writer = _native.PerfettoWriter()
    with open_atomic(Path(path)) as file:
        file.write(writer.start(base))
        is_numbered = len(traces) > 1 or overlay is not None or findings
        ranks = format_ranks(traces, base, with_flow_ids=True, is_numbered=is_numbered)
        formatters = dict(zip(traces, ranks, strict=True))
        for key, value in _describe_ranks(formatters, is_numbered).items():
            file.write(writer.member(key, json.dumps(value)))
        for formatter in formatters.values():
            for lines in formatter.format_all():
                file.write(writer.add(join_lines(lines)) if lines.len() else b"")
        for rows in _list_overlays(traces, overlay, findings=findings):
            for rank, part in rows.group_by("rank", maintain_order=True):
                lines = _format_overlay(part, relative_base(traces[rank[0]], base))
                file.write(writer.add(join_lines(lines)))


def _correct_ranks(traces: dict[int, Trace]) -> dict[int, Trace]:
    """Return the ranks with their times on the clock of the reference rank, where clocks of hosts differ."""
    if len(traces) < 2 or any(trace.meta.get("clock") != "epoch" for trace in traces.values()):
        return traces
    clocks = match_collectives(Job(traces)).clocks
    corrected = set(clocks.filter(pl.col("verdict") == "corrected")["rank"])

    def correct(rank: int, table: pl.DataFrame) -> pl.DataFrame:
        times = table.select(pl.lit(rank, pl.Int64).alias("rank"), start="ts", end="ts")
        return table.with_columns(correct_clocks(times, clocks)["start"].alias("ts"))

    return {
        rank: trace.replace(None, **{name: correct(rank, trace.table(name)) for name in _TIMED})
        if rank in corrected
        else trace
        for rank, trace in traces.items()
    }


def _describe_ranks(formatters: dict[int, RankFormatter], is_numbered: bool) -> dict[str, Any]:
    """Return the members of the file: those of the original file of one rank, or the recorded processes of each rank,
    which tell several ranks, and tracks that no recorder wrote, apart."""
    if not is_numbered:
        return describe_rank(next(iter(formatters.values())).trace)
    ranks = {}
    for rank, formatter in formatters.items():
        trace = formatter.trace
        names = {
            pid: name
            for pid, tid, name in trace.threads.select("pid", "tid", "name").iter_rows()
            if tid is None
        }
        pids = formatter.track_table.select("pid", "pid_text").unique(maintain_order=True).iter_rows()
        ranks[str(rank)] = {
            "processes": {
                text: json.loads(tracks.format_track_id(pid, names.get(pid))) for pid, text in pids
            },
            "clock": trace.meta.get("clock"),
            "header": describe_rank(trace),
        }
    return {RANKS_MEMBER: ranks}


def _list_overlays(
    traces: dict[int, Trace], overlay: str | None, *, findings: bool
) -> Iterator[pl.DataFrame]:
    """Yield the slices of tracks that no recorder wrote: rank, track, name, cat, ts, dur (ns), args."""
    job = Job(traces)
    if overlay is not None:
        # Imported here, because only an overlay needs the dependency graph.
        from etloom.exports.chrome.graph_overlays import find_critical_pieces

        pieces = find_critical_pieces(traces)
        for rank, trace in traces.items():
            events = trace.events.select(pl.col("cat", "name").cast(pl.String), event="id")
            rows = pieces.filter(pl.col("rank") == rank).join(
                events, on="event", how="left", maintain_order="left"
            )
            yield rows.select(
                "rank",
                "name",
                "cat",
                track=pl.lit("critical path"),
                ts="start",
                dur=pl.col("end") - pl.col("start"),
                args=pl.lit(""),
            )
    if findings:
        rows = answer(job, "findings").table.drop_nulls(["start_ns", "end_ns"])
        args = [
            "".join(
                f",{json.dumps(key)}:{json.dumps(value)}" for key, value in row.items() if value is not None
            )
            for row in rows.select(_FINDING_COLUMNS).iter_rows(named=True)
        ]
        yield rows.select(
            "rank", name="title", cat="pattern", track=pl.lit("findings"), ts="start_ns",
            dur=pl.col("end_ns") - pl.col("start_ns"), args=pl.Series(args, dtype=pl.String),
        )  # fmt: skip


def _format_overlay(rows: pl.DataFrame, base: int) -> pl.Series:
    """Format slices of one rank as JSON objects on tracks of their own."""
    rows = rows.sort("ts", "dur", descending=[False, True]).with_columns(pid=pl.lit(0), tid=pl.lit(0))
    sub_track = tracks.assign_sub_tracks(rows)
    place = pl.concat_str(
        pl.lit('"rank '),
        "rank",
        pl.when(sub_track > 0)
        .then(pl.concat_str(pl.lit(" ("), sub_track + 1, pl.lit(")")))
        .otherwise(pl.lit("")),
        pl.lit('"'),
    )
    texts = rows.with_columns(
        ph=pl.lit("X"), pid_text=pl.concat_str(pl.lit('"'), "track", pl.lit('"')), tid_text=place
    )
    return format_objects(texts.drop("rank", "track", "pid", "tid"), base)
