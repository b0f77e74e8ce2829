"""What a recording says of each call of a rank: sizes, group, root, times. Ranks are those that were recorded."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import polars as pl

from etloom.collectives import match_collectives
from etloom.core import categories
from etloom.core.trace import Job, Trace
from etloom.replayer.plan import COLLECTIVES, MESSAGES
from etloom.replayer.tensor_sizes import tensor_sizes

_MAX_RANKS = 1 << 20
"""A file that names a larger world is not believed."""
MAX_ELEMENTS = 1 << 50
"""Nor is a size beyond this, of all tensors of a call together; in bytes it is far from the end of 64 bits."""
RAISED_REASON = "it raised in the recording"


@dataclass
class RecordedCall:
    """A recorded call on its way to become a `Call`; ranks as recorded. waits: rows that were waited for after
    it; waited_at: the node where it was. unknown: what is missing to replay it."""

    collective: str
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    dtype: str | None
    group: tuple[int, ...] | None
    in_split: tuple[int, ...] = ()
    out_split: tuple[int, ...] = ()
    root: int | None = None
    peer: int | None = None
    reduce_op: str | None = None
    is_async: bool | None = None
    seq: int | None = None
    pg_name: str | None = None
    start: int | None = None
    end: int | None = None
    coalesced: bool = False
    node: int | None = None
    waits: list[int] = field(default_factory=list)
    waited_at: int | None = None
    unknown: str | None = None


def matched_instances(job: Job) -> Mapping[int, Mapping[int, tuple[tuple[int, ...], int, int]]]:
    """rank -> event -> (ranks that met, start, end), of what ranks did together; gloo records no group."""
    if not any(trace.events.height for trace in job.values()):
        return {}
    met = match_collectives(job).parts.filter(pl.col("issuer").is_not_null())
    members = met.drop_nulls("meeting").group_by("meeting").agg(pl.col("rank").sort().alias("members"))
    joined = (
        met.join(members, on="meeting", how="left")
        .group_by("rank", "issuer")
        .agg(pl.col("members").drop_nulls().first(), pl.col("own_start").min(), pl.col("own_end").max())
    )
    found: dict[int, dict[int, tuple[tuple[int, ...], int, int]]] = {}
    for rank, issuer, ranks, start, end in joined.iter_rows():
        found.setdefault(rank, {})[issuer] = (tuple(ranks or ()), start, end)
    return found


def world_ranks(job: Job, trace: Trace) -> tuple[int, ...]:
    size = trace.meta.get("world_size")
    return tuple(range(size)) if isinstance(size, int) and 0 < size <= _MAX_RANKS else tuple(job)


def recorded_groups(job: Job) -> set[tuple[int, ...]]:
    """The groups that were made, where the job has all ranks of its world; the world is one. Empty where not."""
    worlds = {world_ranks(job, trace) for trace in job.values()}
    if worlds != {tuple(job)}:
        return set()
    named = pl.concat([trace.groups.select(pl.col("ranks").cast(pl.String)) for trace in job.values()])
    return {ranks for text in named["ranks"].unique() if (ranks := _parse_integers(text))} | worlds


def extract_calls(
    trace: Trace, recorded: Collection[int], met: Mapping[int, tuple[tuple[int, ...], int, int]]
) -> tuple[list[RecordedCall], list[tuple[str, str]]]:
    """The recorded calls of a rank in their order, and (name, reason) of those without what a replay needs."""
    comms = _host_calls(trace)
    sizes = tensor_sizes(trace, comms["node"].drop_nulls())
    named = {
        row["pg_name"]: row["ranks"]
        for row in trace.groups.select(pl.col("pg_name", "ranks").cast(pl.String)).iter_rows(named=True)
    }
    rows: list[RecordedCall] = []
    skipped: list[tuple[str, str]] = []
    by_seq: dict[tuple[str | None, int], int] = {}
    last: dict[int, int] = {}
    for one in comms.iter_rows(named=True):
        collective, name = one["collective"], one["name"] or one["collective"] or "?"
        if collective == "wait":
            # Of some versions of torch, waits do not name their group.
            waited = by_seq.get((one["pg_name"], one["seq"]), last.get(one["seq"]))
            if waited is not None and rows:
                rows[-1].waits.append(waited)
                rows[waited].waited_at = rows[waited].waited_at or one["node"]
            continue
        if raised_exception(one["attrs"]):
            skipped.append((name, RAISED_REASON))
            continue
        if collective not in COLLECTIVES | MESSAGES:
            skipped.append((name, f"{collective or 'it'} is no collective that can be replayed"))
            continue
        ranks, start, end = met.get(one["event"], ((), None, None))
        # Who was seen to meet is the group, where all that were recorded did not: then it is the world.
        seen = ranks if len(ranks) < len(recorded) or len(recorded) == trace.meta.get("world_size") else None
        told = _parse_integers(one["ranks"]) or _parse_integers(named.get(one["pg_name"])) or None
        group = told or seen or None
        inputs, outputs = sizes.get(one["node"], ((), ()))
        row = RecordedCall(
            collective,
            name,
            inputs or _optional_size(one["in_nelems"]),
            outputs or _optional_size(one["out_nelems"]),
            one["dtype"],
            group,
            _parse_integers(one["in_split"]),
            _parse_integers(one["out_split"]),
            global_rank(one["root"], name, group),
            global_rank(one["peer"], name, told),
            one["reduce_op"],
            one["is_async"],
            one["seq"],
            one["pg_name"],
            start if start is not None else one["ts"],
            end,
            "coalesced" in name,
            one["node"],
        )
        if reason := _unreplayable_reason(row):
            skipped.append((name, reason))
            continue
        if one["seq"] is not None:
            by_seq[(one["pg_name"], one["seq"])] = last[one["seq"]] = len(rows)
        rows.append(row)
    return rows, skipped


def _unreplayable_reason(row: RecordedCall) -> str | None:
    """Why a call cannot be played whatever the world is."""
    if row.collective != "barrier" and categories.itemsize(row.dtype) is None:
        return f"its type {row.dtype!r} is not known" if row.dtype else "its type was not recorded"
    if min((0, *row.inputs, *row.outputs, *row.in_split, *row.out_split)) < 0:
        return "a negative size was recorded"
    if max(map(sum, (row.inputs, row.outputs, row.in_split, row.out_split))) > MAX_ELEMENTS:
        return "a size beyond 2**50 elements was recorded"
    if row.group and (len(set(row.group)) < len(row.group) or min(row.group) < 0):
        return "its group names a rank twice, or none"
    return None


def global_rank(recorded: int | None, name: str, group: tuple[int, ...] | None) -> int | None:
    """The rank of a root or peer: operators of c10d take its place in the group, all others record the rank."""
    if recorded is None or not name.startswith("c10d::") or not group:
        return recorded
    return group[recorded] if 0 <= recorded < len(group) else None


def raised_exception(attrs: str | None) -> bool:
    """Whether an operator ended by an exception in the recording; our own observer tells."""
    return '"raised": true' in (attrs or "")


def _optional_size(elements: int | None) -> tuple[int, ...]:
    return () if elements is None else (elements,)


def _host_calls(trace: Trace) -> pl.DataFrame:
    """comms of the host in the order of their calls: those of nodes or, without an execution trace, of events."""
    comms = trace.comms.with_columns(pl.col(pl.Categorical).cast(pl.String))
    nodes = trace.nodes.select("id", "attrs", name=pl.col("name").cast(pl.String))
    events = trace.events.select("id", "ts", "cat", event_name=pl.col("name").cast(pl.String))
    joined = comms.join(nodes, left_on="node", right_on="id", how="left").join(
        events, left_on="event", right_on="id", how="left"
    )
    host = joined.filter(
        pl.col("cat").is_null() | ~pl.col("cat").cast(pl.String).is_in(list(categories.DEVICE_CATEGORIES))
    )
    if host["node"].count():
        calls = host.filter(pl.col("node").is_not_null()).unique("node", keep="first").sort("node")
    else:
        calls = host.filter(pl.col("event").is_not_null()).unique("event", keep="first").sort("ts", "event")
    return calls.with_columns(name=pl.coalesce("name", "event_name"))


def _parse_integers(text: str | None) -> tuple[int, ...]:
    try:
        values = json.loads(text) if text else []
    except (ValueError, RecursionError):
        return ()
    return tuple(values) if isinstance(values, list) and all(type(value) is int for value in values) else ()
