"""Calls of all ranks of a job in one table, from the dumps themselves or from an opened run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from etloom.core.calls import CALL_COLUMNS, Call, DumpedCalls, find_call_site, get_state, name_group
from etloom.core.errors import AnalysisError
from etloom.core.text import format_ranges
from etloom.core.trace import Job, Trace


@dataclass(frozen=True)
class JobCalls:
    """The collectives and point-to-point messages that the ranks of a job called, from their Flight Recorder dumps.

    Attributes:
        table: columns of `etloom.core.calls.CALL_COLUMNS` and rank; a row per numbered call.
        members: group -> its ranks, where known.
        dumped: ranks with a dump.
        processes: rank -> facts about its process, in dumps of `etloom collect --watch`.
        unnumbered: number of calls without a sequence number, by which the calls of ranks are compared.
    """

    table: pl.DataFrame
    members: dict[str, tuple[int, ...]]
    dumped: frozenset[int]
    processes: dict[int, dict[str, Any]] = field(default_factory=dict)
    unnumbered: int = 0

    @property
    def absent(self) -> tuple[int, ...]:
        """The ranks without a dump that are members of a recorded group."""
        return tuple(sorted({rank for ranks in self.members.values() for rank in ranks} - self.dumped))

    def require_dumps(self) -> JobCalls:
        """Return this object; raise AnalysisError if no rank has a Flight Recorder dump."""
        if not self.dumped:
            raise AnalysisError(
                "the run contains no Flight Recorder dump",
                remedy="set TORCH_FR_BUFFER_SIZE=20000 (in older torch: TORCH_NCCL_TRACE_BUFFER_SIZE) and "
                "TORCH_NCCL_DUMP_ON_TIMEOUT=1, and open the folder with the dumps",
            )
        return self

    def require_numbers(self) -> JobCalls:
        """Return this object; raise AnalysisError if no call has a sequence number by which to compare ranks."""
        if self.unnumbered and self.table.is_empty():
            raise AnalysisError(
                f"none of the {self.unnumbered:,} recorded calls has a sequence number (collective_seq_id, p2p_seq_id)",
                remedy="record the dumps with torch 2.4 or newer",
            )
        return self


def combine_calls(dumps: Mapping[int, DumpedCalls]) -> JobCalls:
    """Combine the calls of all ranks; groups with the same name but different members are different groups."""
    members: dict[str, tuple[int, ...]] = {}
    rows: list[Call] = []
    for rank, dump in dumps.items():
        renamed = {}
        for group, ranks in dump.members.items():
            if members.setdefault(group, ranks) is not ranks and members[group] != ranks:
                renamed[group] = f"{group} ({format_ranges(ranks)})"
                members[renamed[group]] = ranks
        rows += [(renamed.get(group, group), *values, rank) for group, *values in dump.rows]
    table = pl.DataFrame(rows, schema={**CALL_COLUMNS, "rank": pl.Int64}, orient="row")
    processes = {rank: dump.process for rank, dump in dumps.items() if dump.process}
    numbered = table.filter(pl.col("seq").is_not_null())
    return JobCalls(numbered, members, frozenset(dumps), processes, table.height - numbered.height)


def calls_of_job(job: Job) -> JobCalls:
    """Return the calls of those ranks of a job that were read from Flight Recorder dumps."""
    return combine_calls(
        {
            rank: _read_trace(trace)
            for rank, trace in job.items()
            if "flight_recorder" in trace.meta.get("formats", ())
        }
    )


def _read_trace(trace: Trace) -> DumpedCalls:
    text = ("collective", "pg_name", "pg_desc", "ranks", "dtype")
    comms = trace.comms.select(
        *(pl.col(name).cast(pl.String) for name in text),
        "seq",
        "in_nelems",
        "out_nelems",
        "event",
        "peer",
        "is_p2p",
    )
    events = trace.events.select(
        "id", "ts", args=pl.col("args").cast(pl.String), name=pl.col("name").cast(pl.String)
    )
    members: dict[str, tuple[int, ...]] = {}
    rows = []
    for row in comms.join(events, left_on="event", right_on="id", how="left").iter_rows(named=True):
        args = json.loads(row["args"]) if row["args"] else {}
        group = name_group(row["pg_name"], row["pg_desc"])
        if row["ranks"] and group not in members:
            members[group] = tuple(json.loads(row["ranks"]))
        rows.append(
            {
                **row,
                "group": group,
                "is_p2p": bool(row["is_p2p"]),
                "state": get_state(row["name"] or "", args.get("state"), args.get("retired")),
                "created_ns": args.get("created_ns", row["ts"]),
                "called_at": find_call_site(args.get("frames") or []),
            }
        )
    return DumpedCalls([tuple(map(row.get, CALL_COLUMNS)) for row in rows], members)
