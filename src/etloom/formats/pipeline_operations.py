"""Pipeline operation traces: one Parquet file with the operations of all ranks of a job, by stage and micro-batch.

A row is an operation of a rank in a step: forward-compute, forward-send, grads-reduce-scatter, ... The file is the one
that "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI 2025) publishes: rank, dp_rank,
stage, step, optype, start_ts and duration (seconds, from the beginning of the step), seq_id (position among the
operations of the type in the step), mb_id (micro-batch) and optionally mc (model chunk of the rank). -1 means absent.

Operations become events of category ``pipeline_operation``, with step, sequence number, micro-batch and chunk in
``args``; communications also become rows of ``comms``, with the ranks that take part, which follow from the stage and
the data-parallel rank. The file states no time between the steps: each follows the previous one directly.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import polars as pl

from etloom.core.categories import PIPELINE_OPERATION
from etloom.core.errors import LimitError, ReadError
from etloom.core.schema import Stat
from etloom.core.trace import Job, Trace
from etloom.core.urls import describe_path
from etloom.formats.io.parquet_input import PARQUET_ERRORS, list_columns, read_columns
from etloom.formats.tables.building import build_trace

_REQUIRED = {
    "rank": pl.Int64,
    "dp_rank": pl.Int64,
    "stage": pl.Int64,
    "step": pl.Int64,
    "optype": pl.String,
    "start_ts": pl.Float64,
    "duration": pl.Float64,
    "seq_id": pl.Int64,
    "mb_id": pl.Int64,
}
_OPTIONAL = {"mc": pl.Int64}
_MAGIC = b"PAR1"
_LONGEST_STEP_S = 1e7
_LONGEST_RUN_S = 9e9
"""Less than the largest int64 in ns."""
_MAX_RANKS = 1 << 16
_COLLECTIVES = {
    "params-all-gather": ("all_gather", "data parallel"),
    "grads-reduce-scatter": ("reduce_scatter", "data parallel"),
    "embedding-grads-all-reduce": ("all_reduce", "embedding"),
    "layernorm-grads-all-reduce": ("all_reduce", "tensor parallel"),
    "optimizer-clip-main-grad": ("all_reduce", "world"),
}
"""Operation -> collective, kind of its process group. The ranks of a tensor-parallel group are recorded as one."""
_MESSAGES = ("forward-send", "forward-recv", "backward-send", "backward-recv")
_TRACKS = {name: 1 + track for track, name in enumerate(_MESSAGES)}
_COLLECTIVE_TRACK = 1 + len(_MESSAGES)


def sniff(head: bytes) -> bool:
    """Return whether a file is a pipeline operation trace: Parquet whose footer names all required columns."""
    return head[:4] == _MAGIC and all(name.encode() in head for name in _REQUIRED)


def read(
    path: Path, *, limit: Annotated[int, "The largest accepted number of operations."] = 20_000_000
) -> Job:
    """Read the operations of all ranks as a Job with one Trace per rank.

    Raises:
        ReadError: If the file cannot be read or lacks a column.
        LimitError: If it has too many operations.
    """
    stats: list[Stat] = []
    rows = _read_rows(Path(path), limit, stats)
    complete = _drop_invalid_rows(rows)
    if complete.is_empty():
        raise ReadError("contains no operation with rank, step, type and time", where=path)
    if complete["rank"].n_unique() > _MAX_RANKS:
        raise LimitError(f"has operations of more than {_MAX_RANKS} ranks", where=path)
    stats += [
        Stat(
            "read.incomplete_rows",
            "data_loss",
            rows.height - complete.height,
            "an operation without rank, step, type or time",
        ),
        Stat(
            "read.steps_joined",
            "info",
            complete["step"].n_unique(),
            "steps follow each other directly: the file has times within each step only",
        ),
    ]
    return build_job(_place_steps(complete, path), path).with_stats([row for row in stats if row.count])


def build_job(operations: pl.DataFrame, path: Path) -> Job:
    """Build a Job, with one Trace per rank, from a table of pipeline operations.

    Args:
        operations: rank, dp_rank, stage, step, optype, seq_id, mb_id, optionally mc and bytes (sizes of messages), and
            ts and dur in ns.
        path: where they come from.
    """
    groups = _ProcessGroups(operations)
    traces = {
        rank: _build_rank(rank, rows, groups, path)
        for (rank,), rows in sorted(operations.group_by("rank"), key=lambda item: item[0])
    }
    return Job(traces, {"path": describe_path(path)})


def _read_rows(path: Path, limit: int, stats: list[Stat]) -> pl.DataFrame:
    """Read the required and optional columns as int64, float64 or text; values that cannot be cast become null."""
    try:
        columns = list_columns(path)
        if missing := [name for name in _REQUIRED if name not in columns]:
            raise ReadError(f"has no column {missing[0]!r}", where=path, remedy="export all columns")
        wanted = {**_REQUIRED, **{name: dtype for name, dtype in _OPTIONAL.items() if name in columns}}
        return read_columns(path, wanted, "read.wrong_type", stats, limit)
    except PARQUET_ERRORS as error:
        reason = str(error).partition("\n")[0]
        raise ReadError(f"is not a readable Parquet file: {reason}", where=path) from None


def _drop_invalid_rows(rows: pl.DataFrame) -> pl.DataFrame:
    """Drop rows without a valid rank, stage, step, type or time; set negative seq_id, mb_id and mc to null."""
    is_valid = (
        pl.all_horizontal(pl.col("rank", "dp_rank", "stage", "step").is_between(0, 1 << 31))
        & pl.col("optype").is_not_null()
        & pl.col("start_ts").is_between(-_LONGEST_STEP_S, _LONGEST_STEP_S)
        & pl.col("duration").is_between(0, _LONGEST_STEP_S)
    )
    optional = [name for name in ("seq_id", "mb_id", "mc") if name in rows.columns]
    valid = rows.filter(is_valid.fill_null(False))
    return valid.with_columns(pl.when(pl.col(name) >= 0).then(pl.col(name)).alias(name) for name in optional)


def _place_steps(rows: pl.DataFrame, path: Path) -> pl.DataFrame:
    """Add ts and dur (int64 ns), placing each step directly after the previous step. Raises LimitError."""
    spans = (
        rows.group_by("step")
        .agg(
            first=pl.col("start_ts").min(),
            length=(pl.col("start_ts") + pl.col("duration")).max() - pl.col("start_ts").min(),
        )
        .sort("step")
        .with_columns(offset=pl.col("length").cum_sum() - pl.col("length"))
    )
    if spans["length"].sum() > _LONGEST_RUN_S:
        raise LimitError(f"its steps take more than {_LONGEST_RUN_S:.0e} s in total", where=path)
    start = pl.col("start_ts") - pl.col("first") + pl.col("offset")
    return rows.join(spans, on="step").with_columns(
        ts=(start * 1e9).round().cast(pl.Int64), dur=(pl.col("duration") * 1e9).round().cast(pl.Int64)
    )


class _ProcessGroups:
    """Derives process groups and message peers from the pipeline stage and data-parallel rank of each rank."""

    def __init__(self, rows: pl.DataFrame) -> None:
        places = rows.select("rank", "stage", "dp_rank").unique("rank", keep="first").sort("rank")
        self._places = {rank: (stage, replica) for rank, stage, replica in places.iter_rows()}
        self._rank_at = {place: rank for rank, place in self._places.items()}
        self._last_stage = max(stage for stage, _ in self._places.values())

    def describe(self, rank: int, kind: str) -> tuple[str, list[int]]:
        """Return name and member ranks of the process group of a kind (such as data parallel) that contains a rank."""
        stage, replica = self._places[rank]
        if kind == "data parallel":
            return f"{kind}, stage {stage}", [r for r, place in self._places.items() if place[0] == stage]
        if kind == "embedding":
            ends = (0, self._last_stage)
            members = [r for r, place in self._places.items() if place[0] in ends and place[1] == replica]
            return f"{kind}, replica {replica}", members
        return (kind, list(self._places)) if kind == "world" else (f"{kind}, rank {rank}", [rank])

    def find_peer(self, rank: int, message: str) -> int | None:
        """Return a rank's peer for a message type (such as forward-send); None if the peer is not in the trace."""
        stage, replica = self._places[rank]
        goes_up = message in ("forward-send", "backward-recv")
        # The last stage sends forward only if stages have several chunks: to the next chunk, on the first stage.
        neighbor = (stage + (1 if goes_up else -1)) % (self._last_stage + 1)
        return self._rank_at.get((neighbor, replica))

    def place(self, rank: int) -> tuple[int, int]:
        """Return the stage and the data-parallel rank of a rank."""
        return self._places[rank]


def _build_rank(rank: int, operations: pl.DataFrame, groups: _ProcessGroups, path: Path) -> Trace:
    ordered = operations.with_columns(
        tid=pl.col("optype").replace_strict(
            {**_TRACKS, **dict.fromkeys(_COLLECTIVES, _COLLECTIVE_TRACK)}, default=0
        ),
    ).sort("ts", "tid", "optype", "seq_id")
    chunk = pl.col("mc") if "mc" in ordered.columns else pl.lit(None, pl.Int64)
    fields = pl.struct(step="step", sequence="seq_id", micro_batch="mb_id", chunk=chunk)
    events = ordered.select(
        id=pl.int_range(pl.len(), dtype=pl.UInt32),
        ph=pl.lit("X"),
        cat=pl.lit(PIPELINE_OPERATION),
        name="optype",
        ts="ts",
        dur="dur",
        pid=pl.lit(rank),
        tid="tid",
        args=fields.struct.json_encode(),
        position=pl.int_range(pl.len(), dtype=pl.UInt32),
    )
    stage, replica = groups.place(rank)
    meta: dict[str, Any] = {
        "formats": ["pipeline_operations"],
        "files": [str(path)],
        "clock": "relative",
        "rank": rank,
        "stage": stage,
        "data_parallel_rank": replica,
    }
    comms = _build_comms(rank, ordered, groups)
    tables = {"events": events, "comms": comms, "groups": _build_groups(comms), "threads": _name_tracks(rank)}
    return build_trace(tables, meta, [])


def _build_comms(rank: int, operations: pl.DataFrame, groups: _ProcessGroups) -> pl.DataFrame:
    names = [*_MESSAGES, *_COLLECTIVES]
    facts: list[tuple[Any, ...]] = []
    for name in names:
        if name in _COLLECTIVES:
            collective, kind = _COLLECTIVES[name]
            group, members = groups.describe(rank, kind)
            facts.append((name, collective, group, json.dumps(members), len(members), None, False))
        else:
            group = f"pipeline {name.partition('-')[0]}"
            peer = groups.find_peer(rank, name)
            facts.append((name, name.partition("-")[2], group, None, None, peer, True))
    described = pl.DataFrame(
        facts,
        schema={
            "optype": pl.String,
            "collective": pl.String,
            "pg_name": pl.String,
            "ranks": pl.String,
            "group_size": pl.Int64,
            "peer": pl.Int64,
            "is_p2p": pl.Boolean,
        },
        orient="row",
    )
    size = pl.col("bytes") if "bytes" in operations.columns else pl.lit(None, pl.Int64)
    rows = operations.select("optype", "seq_id", event=pl.int_range(pl.len(), dtype=pl.UInt32), bytes=size)
    return rows.join(described, on="optype", maintain_order="left").select(
        pl.exclude("optype", "seq_id"), id=pl.int_range(pl.len(), dtype=pl.UInt32), seq="seq_id"
    )


def _build_groups(comms: pl.DataFrame) -> pl.DataFrame:
    return (
        comms.filter(pl.col("ranks").is_not_null())
        .select("pg_name", "ranks", size="group_size")
        .unique("pg_name", keep="first", maintain_order=True)
    )


def _name_tracks(rank: int) -> pl.DataFrame:
    names = {0: "computation", **{track: name for name, track in _TRACKS.items()}}
    names[_COLLECTIVE_TRACK] = "collectives"
    return pl.DataFrame({"pid": [rank] * len(names), "tid": list(names), "name": list(names.values())})
