"""What a replay measured: a table of calls, sums of them, and the replay as a Job like any recording."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from etloom import linker
from etloom.collectives import compute_message_size, get_bus_factor
from etloom.core.categories import itemsize
from etloom.core.trace import Job, Trace
from etloom.replayer.plan import Call, Plan

CALL_COLUMNS = {
    "rank": pl.Int64,
    "repeat": pl.Int64,
    "call": pl.Int64,
    "collective": pl.String,
    "group": pl.String,
    "communication": pl.Int64,  # what is one communication of several ranks, in every repeat
    "meeting": pl.Int64,  # and in one repeat
    "bytes": pl.Int64,
    "bus_bytes": pl.Float64,  # what of them a bus bandwidth counts
    "made_ns": pl.Int64,  # since all set out, on the clock of rank 0
    "returned_ns": pl.Int64,
    "done_ns": pl.Int64,
    "latency_ns": pl.Int64,  # from the call to its completion
    "recorded_ns": pl.Int64,
}
SUMMARY_COLUMNS = {
    "collective": pl.String,
    "group": pl.String,
    "group_size": pl.Int64,
    "bytes": pl.Int64,
    "count": pl.Int64,
    "p50_us": pl.Float64,
    "p95_us": pl.Float64,
    "p99_us": pl.Float64,
    "min_us": pl.Float64,
    "max_us": pl.Float64,
    "skew_p50_us": pl.Float64,
    "algo_gb_per_s": pl.Float64,
    "bus_gb_per_s": pl.Float64,
    "total_ms": pl.Float64,
    "share_pct": pl.Float64,
    "recorded_p50_us": pl.Float64,
    "replayed_over_recorded": pl.Float64,
}
TOTAL_HEADERS = {"count": "count_over_all", "total_ms": "total_over_all_ms"}
"""Sums that grow with ranks and repeats -> what their headers say of that."""
PASS_COLUMNS = {"rank": pl.Int64, "repeat": pl.Int64, "span_ns": pl.Int64, "exposed_ns": pl.Int64}


def pass_table(times: Mapping[int, Any]) -> pl.DataFrame:
    """A row a rank and repeat (PASSES). span: of the whole repeat. exposed: of it, what the host waited for
    communication. times: rank -> `comms.Times`."""
    rows = [
        (rank, repeat, span, blocked)
        for rank, measured in sorted(times.items())
        for repeat, (span, blocked) in enumerate(
            zip(measured.span.tolist(), measured.blocked.tolist(), strict=True)
        )
    ]
    return pl.DataFrame(rows, schema=PASS_COLUMNS, orient="row")


def call_table(plan: Plan, times: Mapping[int, Any]) -> pl.DataFrame:
    """A row a call, rank and repeat (CALLS). times: rank -> `comms.Times`."""
    frames = []
    for rank, measured in sorted(times.items()):
        own = plan.calls[rank]
        repeats, count = measured.made.shape
        met = _instance_keys(own, rank)
        static: dict[str, Sequence[Any]] = {
            "call": [call.index for call in own],
            "collective": ["message" if call.peer is not None else call.collective for call in own],
            "group": [
                json.dumps(sorted((rank, call.peer)) if call.peer is not None else call.group) for call in own
            ],
            "met": met,
            "bytes": [_message_bytes(call) for call in own],
            "bus_bytes": [_bus_bytes(call, rank) for call in own],
            "recorded_ns": [call.recorded_ns for call in own],
        }
        frames.append(
            pl.DataFrame({name: list(values) * repeats for name, values in static.items()}).with_columns(
                pl.Series("repeat", np.repeat(np.arange(repeats), count)),
                pl.lit(rank, pl.Int64).alias("rank"),
                *(
                    pl.Series(f"{name}_ns", getattr(measured, name).ravel() - measured.zero)
                    for name in ("made", "returned", "done")
                ),
            )
        )
    table = pl.concat(frames, how="vertical_relaxed")
    key = ("collective", "group", "met")
    return table.with_columns(
        latency_ns=pl.col("done_ns") - pl.col("made_ns"),
        communication=pl.struct(key).rank("dense").cast(pl.Int64) - 1,
        meeting=pl.struct("repeat", *key).rank("dense").cast(pl.Int64) - 1,
    ).select(pl.col(name).cast(dtype) for name, dtype in CALL_COLUMNS.items())


def summarize_calls(table: pl.DataFrame, per: str = "group") -> pl.DataFrame:
    """Sums over all ranks and repeats (SUMS), a row for each of what ``per`` names.

    group: a row a collective, group and size, largest total first; all: groups of one size together, their group null;
    call: a row a communication, in the order in which they were made, with its number on the lowest rank in front.

    count and total are over all ranks and repeats, so a call of 4 ranks counts 20 times in 5 repeats. Latency is of
    completion on every rank. skew: between the first and the last rank to make a call. bytes: as in the analysis
    `collectives`, the whole result of an all-gather, the whole input of a reduce-scatter, else what a rank puts in, of
    the ranks of a call the most. Bandwidths: bytes over the median time from the last call to the last completion;
    factors of nccl-tests, of an uneven all-to-all the most that a rank sends to others or gets from them; GB = 1e9 B.
    """
    size = pl.col("group").str.json_decode(pl.List(pl.Int64)).list.len().cast(pl.Int64)
    shown = pl.lit(None, pl.String) if per == "all" else pl.col("group")
    table = table.with_columns(
        pl.col("bytes", "bus_bytes").max().over("meeting"), group_size=size
    ).with_columns(group=shown)
    key = ["collective", "group", "group_size", "bytes", *(["communication"] if per == "call" else [])]
    met = table.group_by("meeting", maintain_order=True).agg(
        pl.col(*key, "bus_bytes").first(),
        skew=pl.col("made_ns").max() - pl.col("made_ns").min(),
        transfer=pl.col("done_ns").max() - pl.col("made_ns").max(),
    )
    moved = met.group_by(key).agg(pl.col("skew", "transfer", "bus_bytes").median())
    latency = pl.col("latency_ns") / 1e3
    timed = pl.col("transfer") > 0
    rows = (
        table.group_by(key)
        .agg(
            pl.len().alias("count"),
            pl.col("call").sort_by("rank").first(),
            pl.col("made_ns").min(),
            *(latency.quantile(q / 100, "linear").alias(f"p{q}_us") for q in (50, 95, 99)),
            latency.min().alias("min_us"),
            latency.max().alias("max_us"),
            (latency.sum() / 1e3).alias("total_ms"),
            (pl.col("recorded_ns") / 1e3).median().alias("recorded_p50_us"),
        )
        .join(moved, on=key, nulls_equal=True)
        .with_columns(
            skew_p50_us=pl.col("skew") / 1e3,
            algo_gb_per_s=pl.when(timed, pl.col("bytes") > 0).then(pl.col("bytes") / pl.col("transfer")),
            bus_gb_per_s=pl.when(timed, pl.col("bytes") > 0).then(pl.col("bus_bytes") / pl.col("transfer")),
            share_pct=100 * pl.col("total_ms") / pl.col("total_ms").sum(),
            replayed_over_recorded=pl.col("p50_us") / pl.col("recorded_p50_us"),
        )
    )
    if per == "call":
        return rows.sort("made_ns", "communication").select(
            pl.col(name).cast(dtype) for name, dtype in {"call": pl.Int64, **SUMMARY_COLUMNS}.items()
        )
    rows = rows.sort("total_ms", "collective", "group", "bytes", descending=(True, False, False, False))
    return rows.select(pl.col(name).cast(dtype) for name, dtype in SUMMARY_COLUMNS.items())


def build_job(plan: Plan, table: pl.DataFrame, backend: str, *, repeat: int = -1) -> Job:
    """One repeat (default: the last) as a linked Job: calls as operators, their way to completion as ranges."""
    last = table["repeat"].max() if repeat < 0 else repeat
    chosen = table.filter(pl.col("repeat") == last)
    return Job(
        {
            rank: linker.link(
                _build_trace(own, chosen.filter(pl.col("rank") == rank), rank, plan.world, backend)
            )
            for rank, own in enumerate(plan.calls)
        }
    )


def _message_bytes(call: Call) -> int | None:
    """The bytes of a call as the analyses of a recording count them, as this rank sees them."""
    item = itemsize(call.dtype) or 0
    ins, outs = sum(call.inputs) * item, sum(call.outputs) * item
    return compute_message_size(
        "message" if call.peer is not None else call.collective, ins or outs, outs or ins
    )


def _bus_bytes(call: Call, rank: int) -> float | None:
    """The bytes of a call that its bus bandwidth counts, as this rank sees them."""
    if call.collective == "all_to_all":
        ranks, own = len(call.group), call.group.index(rank)
        # Of each rank, as splits of one tensor or as a tensor each; of even shares neither says anything.
        each = [
            split or (sizes if len(sizes) == ranks > 1 else ())
            for split, sizes in ((call.in_split, call.inputs), (call.out_split, call.outputs))
        ]
        if told := each[0] or each[1]:
            # What a rank sends to itself is what it gets from itself.
            sent, got = (
                sum(one or sizes) for one, sizes in zip(each, (call.inputs, call.outputs), strict=True)
            )
            return float((itemsize(call.dtype) or 0) * (max(sent, got) - told[own]))
    size = _message_bytes(call)
    share = 1.0 if call.peer is not None else get_bus_factor(call.collective, len(call.group))
    return None if size is None or share is None else size * share


def _occurrence_numbers(own: Sequence[Call], rank: int) -> list[int]:
    """Which one a call is of its sort in its group, or of the messages from one rank to another."""
    seen: dict[Any, int] = {}
    found = []
    for call in own:
        key = _message_ends(call, rank) if call.peer is not None else (call.collective, call.group)
        seen[key] = seen.get(key, -1) + 1
        found.append(seen[key])
    return found


def _message_ends(call: Call, rank: int) -> tuple[int | None, int | None]:
    """Source and destination of a message."""
    return (rank, call.peer) if call.collective == "send" else (call.peer, rank)


def _instance_keys(own: Sequence[Call], rank: int) -> list[str]:
    """What a call has in common with its counterparts on other ranks."""
    return [
        f"{_message_ends(call, rank)} {turn}" if call.peer is not None else str(turn)
        for call, turn in zip(own, _occurrence_numbers(own, rank), strict=True)
    ]


def _build_trace(own: Sequence[Call], table: pl.DataFrame, rank: int, world: int, backend: str) -> Trace:
    named = [f"c10d::{call.collective}" for call in own]
    ids = 2 * np.arange(len(own))
    calls = pl.DataFrame(
        {
            "id": ids,
            "cat": ["cpu_op"] * len(own),
            "name": named,
            "ts": table["made_ns"],
            "dur": table["returned_ns"] - table["made_ns"],
        }
    )
    ranges = pl.DataFrame(
        {
            "id": ids + 1,
            "cat": ["user_annotation"] * len(own),
            "name": [f"{backend}:{call.collective}" for call in own],
            "ts": table["made_ns"],
            "dur": table["latency_ns"],
        }
    )
    events = pl.concat((calls, ranges)).with_columns(ph=pl.lit("X"), pid=pl.lit(rank), tid=pl.lit(1))
    order = events.sort("ts", "dur", descending=(False, True)).with_row_index("new")
    now = dict(zip(order["id"].to_list(), order["new"].to_list(), strict=True))
    comms = pl.DataFrame(
        {
            "id": list(range(len(own))),
            "event": [now[at] for at in ids.tolist()],
            "collective": [call.collective for call in own],
            # Its ranks tell a group from others.
            "pg_name": ["world" if len(call.group) == world else "group" for call in own],
            "ranks": [json.dumps(call.group) for call in own],
            "group_size": [len(call.group) for call in own],
            "seq": _occurrence_numbers(own, rank),
            "dtype": [call.dtype for call in own],
            "in_nelems": [sum(call.inputs) for call in own],
            "out_nelems": [sum(call.outputs) for call in own],
            "root": [call.root for call in own],
            "peer": [call.peer for call in own],
        },
        schema_overrides={"root": pl.Int64, "peer": pl.Int64},
    )
    events = order.drop("id").rename({"new": "id"}).with_columns(position=pl.col("id"))
    meta = {"rank": rank, "world_size": world, "clock": "relative", "formats": ["replay"], "files": []}
    return Trace({"events": events, "comms": comms}, meta)
