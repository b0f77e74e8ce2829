"""Converts the times of a communication replay to a table of calls, a summary, and a Job that can be analyzed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from etloom import linker
from etloom.collectives import compute_message_size, get_bus_factor
from etloom.core.categories import itemsize
from etloom.core.trace import Job, Trace
from etloom.replayer.plan import Call, Plan

if TYPE_CHECKING:
    from etloom.replayer.comms.runner import CallTimes

CALL_COLUMNS = {
    "rank": pl.Int64,
    "repeat": pl.Int64,
    "call": pl.Int64,
    "collective": pl.String,
    "group": pl.String,
    "communication": pl.Int64,  # the same number for the calls that match each other across ranks, in every repeat
    "instance": pl.Int64,  # the same, counted per repeat
    "bytes": pl.Int64,
    "bus_bytes": pl.Float64,  # the part of the bytes that a bus bandwidth counts
    "issued_ns": pl.Int64,  # since all ranks started, on the clock of rank 0
    "returned_ns": pl.Int64,
    "completed_ns": pl.Int64,
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
"""Headers for the columns that are summed over ranks and repeats."""
PASS_COLUMNS = {"rank": pl.Int64, "repeat": pl.Int64, "span_ns": pl.Int64, "exposed_ns": pl.Int64}


def pass_table(times: Mapping[int, CallTimes]) -> pl.DataFrame:
    """Return duration and exposed communication time (ns) of each repeat, one row per rank and repeat.

    Returns:
        PASS_COLUMNS: ``span_ns`` is the duration of the repeat, ``exposed_ns`` the part of it in which the host waited
        for communication.
    """
    rows = [
        (rank, repeat, span, blocked)
        for rank, rank_times in sorted(times.items())
        for repeat, (span, blocked) in enumerate(
            zip(rank_times.span.tolist(), rank_times.blocked.tolist(), strict=True)
        )
    ]
    return pl.DataFrame(rows, schema=PASS_COLUMNS, orient="row")


def call_table(plan: Plan, times: Mapping[int, CallTimes]) -> pl.DataFrame:
    """Return group, bytes and times (ns) of the calls (CALL_COLUMNS), one row per rank, repeat and call."""
    frames = [_rank_calls(plan.calls[rank], rank, rank_times) for rank, rank_times in sorted(times.items())]
    table = pl.concat(frames, how="vertical_relaxed")
    key = ("collective", "group", "key")
    return table.with_columns(
        latency_ns=pl.col("completed_ns") - pl.col("issued_ns"),
        communication=pl.struct(key).rank("dense").cast(pl.Int64) - 1,
        instance=pl.struct("repeat", *key).rank("dense").cast(pl.Int64) - 1,
    ).select(pl.col(name).cast(dtype) for name, dtype in CALL_COLUMNS.items())


def _rank_calls(calls: Sequence[Call], rank: int, times: CallTimes) -> pl.DataFrame:
    repeats, count = times.issued.shape
    columns: dict[str, Sequence[Any]] = {
        "call": [call.index for call in calls],
        "collective": ["message" if call.peer is not None else call.collective for call in calls],
        "group": [
            json.dumps(sorted((rank, call.peer)) if call.peer is not None else call.group) for call in calls
        ],
        "key": _instance_keys(calls, rank),
        "bytes": [_message_bytes(call) for call in calls],
        "bus_bytes": [_bus_bytes(call, rank) for call in calls],
        "recorded_ns": [call.recorded_ns for call in calls],
    }
    return pl.DataFrame({name: list(values) * repeats for name, values in columns.items()}).with_columns(
        pl.Series("repeat", np.repeat(np.arange(repeats), count)),
        pl.lit(rank, pl.Int64).alias("rank"),
        *(
            pl.Series(f"{name}_ns", getattr(times, name).ravel() - times.zero)
            for name in ("issued", "returned", "completed")
        ),
    )


def summarize_calls(table: pl.DataFrame, per: str = "group") -> pl.DataFrame:
    """Summarize latency, skew and bandwidth of calls over all ranks and repeats (SUMMARY_COLUMNS).

    Count and total are over all ranks and repeats: a call of 4 ranks counts 20 times in 5 repeats. Latency is until
    completion on each rank. Skew is between the first and the last rank to make a call. Bytes are defined as in the
    analysis `collectives`: the whole result of an all-gather, the whole input of a reduce-scatter, otherwise the
    contribution of a rank; the largest value over the ranks of a call. Bandwidth is bytes divided by the median time
    from the last rank's call to the last completion, with the factors of nccl-tests; for an uneven all-to-all, bytes
    are the maximum that a rank sends to or receives from others. GB is 1e9 B.

    Args:
        table: Calls (CALL_COLUMNS).
        per: "group": one row per collective, group and size, largest total first. "all": groups of the same size
            together, with a null group. "call": one row per communication in the order in which they were made, with
            its number on the lowest rank in front.

    Returns:
        SUMMARY_COLUMNS, preceded by ``call`` if per is "call".
    """
    size = pl.col("group").str.json_decode(pl.List(pl.Int64)).list.len().cast(pl.Int64)
    group = pl.lit(None, pl.String) if per == "all" else pl.col("group")
    table = table.with_columns(
        pl.col("bytes", "bus_bytes").max().over("instance"), group_size=size
    ).with_columns(group=group)
    key = ["collective", "group", "group_size", "bytes", *(["communication"] if per == "call" else [])]
    transfers = _median_transfers(table, key)
    latency = pl.col("latency_ns") / 1e3
    is_timed = pl.col("transfer") > 0
    rows = (
        table.group_by(key)
        .agg(
            pl.len().alias("count"),
            pl.col("call").sort_by("rank").first(),
            pl.col("issued_ns").min(),
            *(latency.quantile(q / 100, "linear").alias(f"p{q}_us") for q in (50, 95, 99)),
            latency.min().alias("min_us"),
            latency.max().alias("max_us"),
            (latency.sum() / 1e3).alias("total_ms"),
            (pl.col("recorded_ns") / 1e3).median().alias("recorded_p50_us"),
        )
        .join(transfers, on=key, nulls_equal=True)
        .with_columns(
            skew_p50_us=pl.col("skew") / 1e3,
            algo_gb_per_s=pl.when(is_timed, pl.col("bytes") > 0).then(pl.col("bytes") / pl.col("transfer")),
            bus_gb_per_s=pl.when(is_timed, pl.col("bytes") > 0).then(
                pl.col("bus_bytes") / pl.col("transfer")
            ),
            share_pct=100.0 * pl.col("total_ms") / pl.col("total_ms").sum(),
            replayed_over_recorded=pl.col("p50_us") / pl.col("recorded_p50_us"),
        )
    )
    if per == "call":
        return rows.sort("issued_ns", "communication").select(
            pl.col(name).cast(dtype) for name, dtype in {"call": pl.Int64, **SUMMARY_COLUMNS}.items()
        )
    rows = rows.sort("total_ms", "collective", "group", "bytes", descending=(True, False, False, False))
    return rows.select(pl.col(name).cast(dtype) for name, dtype in SUMMARY_COLUMNS.items())


def _median_transfers(table: pl.DataFrame, key: list[str]) -> pl.DataFrame:
    """Return the median arrival skew (ns), transfer time (ns) and bus bytes of communications, per ``key`` columns."""
    instances = table.group_by("instance", maintain_order=True).agg(
        pl.col(*key, "bus_bytes").first(),
        skew=pl.col("issued_ns").max() - pl.col("issued_ns").min(),
        transfer=pl.col("completed_ns").max() - pl.col("issued_ns").max(),
    )
    return instances.group_by(key).agg(pl.col("skew", "transfer", "bus_bytes").median())


def build_job(plan: Plan, table: pl.DataFrame, backend: str, *, repeat: int = -1) -> Job:
    """Return the measured calls of one repeat (default: the last) as a linked Job, like a recording.

    Each call becomes an operator, and the time until its completion an annotation.
    """
    selected = table["repeat"].max() if repeat < 0 else repeat
    rows = table.filter(pl.col("repeat") == selected)
    return Job(
        {
            rank: linker.link(
                _build_trace(calls, rows.filter(pl.col("rank") == rank), rank, plan.world_size, backend)
            )
            for rank, calls in enumerate(plan.calls)
        }
    )


def _message_bytes(call: Call) -> int | None:
    """Return the message size of a call in bytes, as the analysis `collectives` defines it."""
    size = itemsize(call.dtype) or 0
    sent, received = sum(call.inputs) * size, sum(call.outputs) * size
    collective = "message" if call.peer is not None else call.collective
    return compute_message_size(collective, sent or received, received or sent)


def _bus_bytes(call: Call, rank: int) -> float | None:
    """Return the bytes by which bus bandwidth is computed: usually message size times the collective's bus factor."""
    if call.collective == "all_to_all" and (elements := _uneven_elements(call, rank)) is not None:
        return float((itemsize(call.dtype) or 0) * elements)
    size = _message_bytes(call)
    factor = 1.0 if call.peer is not None else get_bus_factor(call.collective, len(call.group))
    return None if size is None or factor is None else size * factor


def _uneven_elements(call: Call, rank: int) -> int | None:
    """Return the elements that a rank of an uneven all-to-all exchanges with other ranks; None if shares are even."""
    ranks, index = len(call.group), call.group.index(rank)
    # The share of each rank: splits of one tensor, or one tensor each.
    sent_shares, received_shares = (
        split or (sizes if len(sizes) == ranks > 1 else ())
        for split, sizes in ((call.in_split, call.inputs), (call.out_split, call.outputs))
    )
    shares = sent_shares or received_shares
    if not shares:
        return None
    # A rank sends to itself what it receives from itself.
    return max(sum(sent_shares or call.inputs), sum(received_shares or call.outputs)) - shares[index]


def _occurrence_numbers(calls: Sequence[Call], rank: int) -> list[int]:
    """Number calls from 0 among calls with equal collective and group, or with equal source and destination."""
    counts: dict[Any, int] = {}
    numbers = []
    for call in calls:
        key = _message_ends(call, rank) if call.peer is not None else (call.collective, call.group)
        counts[key] = counts.get(key, -1) + 1
        numbers.append(counts[key])
    return numbers


def _message_ends(call: Call, rank: int) -> tuple[int | None, int | None]:
    """Return (source rank, destination rank) of a send or receive that ``rank`` calls."""
    return (rank, call.peer) if call.collective == "send" else (call.peer, rank)


def _instance_keys(calls: Sequence[Call], rank: int) -> list[str]:
    """Return a text per call which, with collective and group, identifies the same communication on all ranks."""
    return [
        f"{_message_ends(call, rank)} {number}" if call.peer is not None else str(number)
        for call, number in zip(calls, _occurrence_numbers(calls, rank), strict=True)
    ]


def _build_trace(
    calls: Sequence[Call], table: pl.DataFrame, rank: int, world_size: int, backend: str
) -> Trace:
    ids = 2 * np.arange(len(calls))
    operators = pl.DataFrame(
        {
            "id": ids,
            "cat": ["cpu_op"] * len(calls),
            "name": [f"c10d::{call.collective}" for call in calls],
            "ts": table["issued_ns"],
            "dur": table["returned_ns"] - table["issued_ns"],
        }
    )
    annotations = pl.DataFrame(
        {
            "id": ids + 1,
            "cat": ["user_annotation"] * len(calls),
            "name": [f"{backend}:{call.collective}" for call in calls],
            "ts": table["issued_ns"],
            "dur": table["latency_ns"],
        }
    )
    events = pl.concat((operators, annotations)).with_columns(ph=pl.lit("X"), pid=pl.lit(rank), tid=pl.lit(1))
    ordered = events.sort("ts", "dur", descending=(False, True)).with_row_index("new")
    new_id = dict(zip(ordered["id"].to_list(), ordered["new"].to_list(), strict=True))
    comms = pl.DataFrame(
        {
            "id": list(range(len(calls))),
            "event": [new_id[event] for event in ids.tolist()],
            "collective": [call.collective for call in calls],
            # Groups of the same name are distinguished by their ranks.
            "pg_name": ["world" if len(call.group) == world_size else "group" for call in calls],
            "ranks": [json.dumps(call.group) for call in calls],
            "group_size": [len(call.group) for call in calls],
            "seq": _occurrence_numbers(calls, rank),
            "dtype": [call.dtype for call in calls],
            "in_nelems": [sum(call.inputs) for call in calls],
            "out_nelems": [sum(call.outputs) for call in calls],
            "root": [call.root for call in calls],
            "peer": [call.peer for call in calls],
        },
        schema_overrides={"root": pl.Int64, "peer": pl.Int64},
    )
    events = ordered.drop("id").rename({"new": "id"}).with_columns(position=pl.col("id"))
    meta = {"rank": rank, "world_size": world_size, "clock": "relative", "formats": ["replay"], "files": []}
    return Trace({"events": events, "comms": comms}, meta)
