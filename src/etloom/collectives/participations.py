"""Participations: one row per communication of a rank.

A participation is a collective's kernel on a device or, if the backend works on the host, its range there
(gloo:all_reduce), which belongs to the last communication operator that began before it. A thread of the backend opens
such a range, sometimes late: the participation starts with the operator.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.core import arrays, categories, nesting
from etloom.core.trace import Trace
from etloom.linker.group_axes import infer_group_axes
from etloom.timeline.activity import select_device_events

WAIT_PATTERN = r"(?i)::_?wait|^wait"
"""Calls of a communication library that start no communication."""

COLUMNS = {
    "rank": pl.Int32,
    "event": pl.UInt32,  # events.id of the kernel or range
    "issuer": pl.UInt32,  # events.id of the host operator that issued it
    "where": pl.String,  # device | host | library
    "collective": pl.String,  # all_reduce, ...; message where both ends of a send and receive are known
    "pg_name": pl.String,
    "pg_desc": pl.String,
    "axis": pl.String,  # axis of parallelism of the group, as groups.axis
    "ranks": pl.String,  # JSON, global ranks
    "group_size": pl.Int64,
    "seq": pl.Int64,
    "source": pl.Int64,
    "destination": pl.Int64,
    "root": pl.Int64,
    "dtype": pl.String,
    "bytes": pl.Int64,  # message size, see `compute_message_size`
    "moved": pl.Int64,  # bytes through the busier direction of this rank's link, if splits are recorded
    "uneven": pl.Boolean,  # an all-to-all whose input and output differ in size on this rank
    "synchronizes": pl.Boolean,  # nobody can end before the others begin; null if unknown, see `_synchronizes`
    "start": pl.Int64,
    "end": pl.Int64,  # null if only the start of a library's communication is recorded
}
SYNCHRONIZING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Collectives in which every rank needs data of all others."""

_FACT_COLUMNS: tuple[pl.Expr, ...] = (
    pl.col("event"),
    *(pl.col(name).cast(pl.String) for name in ("collective", "pg_name", "pg_desc", "ranks", "dtype")),
    *(pl.col(name).cast(pl.String) for name in ("in_split", "out_split")),
    pl.col("group_size", "seq", "root", "peer", "in_nelems", "out_nelems"),
)


def list_participations(trace: Trace, rank: int) -> pl.DataFrame:
    """List the communications of one rank (COLUMNS), in order of start. The trace must be linked."""
    sources = (_from_device(trace), *_from_host(trace), *_from_library(trace))
    events = pl.concat(sources, how="diagonal_relaxed") if len(sources) > 1 else sources[0]
    # The attributes of the event itself take precedence over those of the issuing operator.
    facts = trace.comms.drop_nulls("event").select(*_FACT_COLUMNS).unique("event", keep="first")
    described = (
        events.join(facts, on="event", how="left")
        .join(facts, left_on="issuer", right_on="event", how="left", suffix="_issuer")
        .with_columns(
            pl.coalesce(name, f"{name}_issuer").alias(name) for name in facts.columns if name != "event"
        )
    )
    if described["collective"].null_count():
        described = described.with_columns(by_call=_name_by_calls(trace.events, described["issuer"]))
        named = pl.coalesce("collective", "by_call", parse_collective_column("name"))
        described = described.with_columns(named.alias("collective"))
    groups = trace.groups.select(
        pl.col("pg_name").cast(pl.String), ranks_="ranks", size_="size", desc_="pg_desc"
    ).unique("pg_name", keep="first")
    described = described.join(groups, on="pg_name", how="left").with_columns(
        pl.coalesce("ranks", pl.col("ranks_").cast(pl.String)).alias("ranks"),
        pl.coalesce("pg_desc", pl.col("desc_").cast(pl.String)).alias("pg_desc"),
        pl.coalesce("group_size", "size_").alias("group_size"),
    )
    described = described.join(infer_group_axes(trace), on="pg_name", how="left", nulls_equal=True)
    rows = [_complete_row(row, rank) for row in described.iter_rows(named=True)]
    table = pl.DataFrame(rows, schema=COLUMNS, infer_schema_length=None)
    return table.sort("start", "event", maintain_order=True)


def _name_by_calls(events: pl.DataFrame, issuers: pl.Series) -> pl.Series:
    """Return the collective that the innermost communication call around each issuer denotes; null if there is none.

    Libraries build collectives from kernels of other names: oneCCL's all-reduce ends with a reduce.
    """
    is_call = categories.match_names(events, categories.COMMUNICATION_CALL)
    is_call &= ~categories.match_names(events, WAIT_PATTERN)
    if not is_call.any():
        return pl.Series("by_call", [None], dtype=pl.String).new_from_index(0, len(issuers))
    names = categories.parse_collectives(events["name"]).cast(pl.String)
    parent = arrays.rows_of_ids(events, events["parent"])
    call = nesting.find_nearest_ancestor(
        parent, is_call & arrays.is_present(names), arrays.rows_of_ids(events, issuers)
    )
    return arrays.take_rows(names, call).alias("by_call")


def parse_collective_column(name: str) -> pl.Expr:
    """Return an expression for the collective that the name in a column denotes."""
    return pl.col(name).map_batches(
        lambda names: categories.parse_collectives(names).cast(pl.String), pl.String
    )


def compute_message_size(collective: str | None, into: int | None, out: int | None) -> int | None:
    """Compute the size of a collective in bytes, as nccl-tests defines it, from the input and output bytes of one rank.

    The whole result of an all-gather, the whole input of a reduce-scatter, else what one rank sends or receives.
    """
    sizes = [size for size in (into, out) if size is not None]
    if not sizes or collective == "barrier":  # a barrier passes a tensor, but no data
        return None
    if collective in ("all_gather", "gather"):
        return max(sizes)
    if collective in ("recv", "scatter", "broadcast"):
        return max(sizes)
    return sizes[0] if into else max(sizes)


def get_bus_factor(collective: str | None, size: int | None) -> float | None:
    """Return the ratio of bus bandwidth to algorithm bandwidth of a collective on ``size`` ranks (as nccl-tests)."""
    if not size:
        return None
    if collective == "all_reduce":
        return 2 * (size - 1) / size
    if collective in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return (size - 1) / size
    return None if collective in (None, "barrier", "wait") else 1.0


def _from_device(trace: Trace) -> pl.DataFrame:
    work = select_device_events(trace, "kind", "id", "name", "ts", "dur")
    events = work.filter(pl.col("kind") == "communication")
    is_communication = pl.col("device_event").is_in(events["id"].implode())
    issuer = trace.launches[["device_event", "operator"]].filter(is_communication)
    issuer = issuer.unique("device_event", keep="first")
    return events.join(issuer, left_on="id", right_on="device_event", how="left").select(
        event="id",
        issuer="operator",
        where=pl.lit("device"),
        name="name",
        start="ts",
        end=pl.col("ts") + pl.col("dur"),
    )


def _from_library(trace: Trace) -> list[pl.DataFrame]:
    """Return the communications with a start time that NCCL's profiler recorded, or calls of MPI; at most one table."""
    is_call = categories.mask_events(trace.events, (categories.NCCL_COLLECTIVE,))
    described = trace.events["id"].is_in(trace.comms["event"].drop_nulls().implode()).to_numpy()
    is_call = is_call | (described & categories.match_names(trace.events, categories.MPI_CALL))
    if not is_call.any():
        return []
    calls = (
        trace.events.filter(pl.Series(is_call))
        .drop_nulls("ts")
        .select(
            event="id",
            issuer=pl.lit(None, dtype=pl.UInt32),
            where=pl.lit("library"),
            name=pl.when(pl.col("cat") == categories.NCCL_COLLECTIVE)
            .then(pl.concat_str(pl.lit("nccl:"), pl.col("name").cast(pl.String)))
            .otherwise(pl.col("name").cast(pl.String)),
            start="ts",
            end=pl.col("ts") + pl.col("dur"),
        )
    )
    return [calls]


def _from_host(trace: Trace) -> list[pl.DataFrame]:
    """Return the communications of host backends (such as gloo), from their ranges outside the call stacks.

    A table, or none if there are none.
    """
    events = trace.events
    host = categories.mask_events(events, categories.HOST_CATEGORIES)
    ranged = host & ~arrays.is_present(events["depth"]) & arrays.is_present(events["dur"])
    ranged &= categories.match_names(events, categories.BACKEND_RANGE)
    if not ranged.any():
        return []
    calls = categories.mask_events(events, categories.OPERATOR_CATEGORIES) & arrays.is_present(
        events["depth"]
    )
    described = trace.comms.filter(pl.col("collective") != "wait")["event"].drop_nulls()
    if len(described):
        # Not the enclosing wrappers, which begin in between.
        calls &= events["id"].is_in(described.implode()).to_numpy()
    else:
        calls &= categories.match_names(events, categories.COMMUNICATION_CALL)
        calls &= ~categories.match_names(events, WAIT_PATTERN)
    watched = categories.match_names(events, "monitored_barrier")
    ids, starts = events["id"].to_numpy().astype(np.int64), events["ts"].to_numpy()
    pids = arrays.to_array(events["pid"], 0)
    issuers = np.full(len(ids), -1, np.int64)
    for pid in np.unique(pids[ranged]):
        call_rows, range_rows = np.flatnonzero(calls & (pids == pid)), np.flatnonzero(ranged & (pids == pid))
        if len(call_rows):
            at = np.searchsorted(starts[call_rows], starts[range_rows], side="right") - 1
            by_record = _find_calls_by_record(events, call_rows, range_rows)
            call = np.where(by_record >= 0, by_record, np.where(at >= 0, call_rows[at], -1))
            issuers[range_rows] = np.where(call >= 0, ids[call], -1)
    ranged &= ~watched[np.searchsorted(ids, np.maximum(issuers, 0))] | (issuers < 0)
    called = np.where(issuers >= 0, starts[np.searchsorted(ids, np.maximum(issuers, 0))], starts)
    rows = events.select("id", "name", "ts", "dur").with_columns(
        issuer=pl.Series(issuers), called=pl.Series(called)
    )
    ranges = rows.filter(pl.Series(ranged)).select(
        event="id",
        issuer=pl.when(pl.col("issuer") >= 0).then("issuer").cast(pl.UInt32),
        where=pl.lit("host"),
        name="name",
        start="called",
        end=pl.col("ts") + pl.col("dur"),
    )
    return [ranges]


def _find_calls_by_record(
    events: pl.DataFrame, call_rows: NDArray[np.int64], range_rows: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return for each backend range the row of the call that submitted it, by record-function id; -1 if unknown.

    A range gets its record-function id, the next one, when the call submits it; it may begin on a worker after later
    calls. A call that splits its work makes several, so the last call with a lower id counts if it began before.
    """
    records = arrays.to_array(events["rf_id"], -1).astype(np.int64)
    starts = events["ts"].to_numpy()
    calls = call_rows[records[call_rows] >= 0]
    calls = calls[np.argsort(records[calls], kind="stable")]
    at = np.searchsorted(records[calls], records[range_rows], side="left") - 1
    if not len(calls):
        return np.full(len(range_rows), -1, np.int64)
    call = calls[np.maximum(at, 0)]
    is_known = (at >= 0) & (records[range_rows] >= 0) & (starts[call] <= starts[range_rows])
    return np.where(is_known, call, -1)


def _complete_row(row: dict[str, Any], rank: int) -> dict[str, Any]:
    """Complete a participation of a rank (COLUMNS): sizes in bytes, and source and destination of a send or receive."""
    collective, size = row["collective"], categories.itemsize(row["dtype"])
    into = None if size is None or row["in_nelems"] is None else row["in_nelems"] * size
    out = None if size is None or row["out_nelems"] is None else row["out_nelems"] * size
    sent, received = _parse_numbers(row["in_split"]), _parse_numbers(row["out_split"])
    members = _parse_numbers(row["ranks"])
    completed = {name: row.get(name) for name in COLUMNS}
    completed |= {
        "rank": rank,
        "collective": collective,
        "bytes": compute_message_size(collective, into, out),
    }
    completed["group_size"] = row["group_size"] or (len(members) or len(sent) or None)
    if collective in ("send", "recv") and row["peer"] is not None:
        ends = (rank, row["peer"]) if collective == "send" else (row["peer"], rank)
        completed |= {"collective": "message", "source": ends[0], "destination": ends[1]}
    me = members.index(rank) if rank in members else rank
    completed["uneven"] = collective == "all_to_all" and None not in (into, out) and into != out
    if size and me < min(len(sent), len(received)):
        completed["moved"] = size * max(sum(sent) - sent[me], sum(received) - received[me])
    completed["synchronizes"] = _synchronizes(completed, me, sent, received)
    return completed


def _synchronizes(
    row: dict[str, Any], me: int, sent: tuple[int, ...], received: tuple[int, ...]
) -> bool | None:
    """Return whether a collective cannot end on any rank before all have begun; for a message, whether it
    carries data.

    Where no data is exchanged, backends return at once: a collective of empty tensors, and two ranks of an all-to-all
    between which a split is zero. Of an uneven all-to-all whose splits are unknown, this is unknown: None.
    """
    if row["bytes"] == 0 or row["collective"] not in (*SYNCHRONIZING, "message"):
        return False
    if row["collective"] != "all_to_all":
        return True
    others = [length for splits in (sent, received) for at, length in enumerate(splits) if at != me]
    if others:
        return 0 not in others
    return None if row["uneven"] else True


@lru_cache(maxsize=1024)
def _parse_numbers(text: str | None) -> tuple[int, ...]:
    """Parse a JSON list of integers; empty for any other text."""
    try:
        values = json.loads(text) if text else []
    except ValueError:
        return ()
    return tuple(values) if isinstance(values, list) and all(type(value) is int for value in values) else ()
