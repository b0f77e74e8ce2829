"""Extracts the communication calls that each rank recorded: collective, tensor sizes, group, root or peer, and times.

A c10d operator takes its input and output tensors as arguments, which its schema names (output_tensors, input_tensors,
tensors); PyTorch's record_param_comms records them as inputs and outputs.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from etloom.collectives import match_collectives
from etloom.core import categories
from etloom.core.trace import Job, Trace
from etloom.replayer.plan import COLLECTIVES, MESSAGES

Group = tuple[int, ...]
Sizes = tuple[tuple[int, ...], tuple[int, ...]]
_MAX_RANKS = 1 << 20
"""A larger recorded world size is taken for corrupt."""
MAX_ELEMENTS = 1 << 50
"""So is a larger number of elements of all tensors of a call; in bytes it stays far below 2**63."""
RAISED_REASON = "it raised an exception in the recording"


@dataclass
class RecordedCall:
    """A recorded communication call, from which a planned `Call` is derived; ranks are numbered as in the recording.

    Attributes:
        waits: Positions of the calls that were waited for after this call and before the next.
        waited_at: Node at which this call was waited for.
        missing: Why it cannot be replayed, if its group could not be inferred.
    """

    collective: str
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    dtype: str | None
    group: Group | None
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
    missing: str | None = None


@dataclass(frozen=True)
class Instance:
    """A collective instance from the view of one rank: the participating ranks, and start and end on that rank.

    Attributes:
        ranks: The ranks that took part, as far as they were recorded; empty if they are not known.
        start, end: Times of this rank's participation in ns.
    """

    ranks: Group
    start: int | None
    end: int | None


def matched_instances(job: Job) -> Mapping[int, Mapping[int, Instance]]:
    """Match collectives across ranks; return rank -> id of the event that issued the call -> collective instance."""
    if not any(trace.events.height for trace in job.values()):
        return {}
    participations = match_collectives(job).parts.filter(pl.col("issuer").is_not_null())
    members = (
        participations.drop_nulls("instance").group_by("instance").agg(pl.col("rank").sort().alias("members"))
    )
    joined = (
        participations.join(members, on="instance", how="left")
        .group_by("rank", "issuer")
        .agg(pl.col("members").drop_nulls().first(), pl.col("own_start").min(), pl.col("own_end").max())
    )
    instances: dict[int, dict[int, Instance]] = {}
    for rank, issuer, ranks, start, end in joined.iter_rows():
        instances.setdefault(rank, {})[issuer] = Instance(tuple(ranks or ()), start, end)
    return instances


def world_ranks(job: Job, trace: Trace) -> Group:
    """Return the ranks 0, 1, ... of the recorded world size; if it is missing or implausible, the ranks of the job."""
    size = trace.meta.get("world_size")
    return tuple(range(size)) if isinstance(size, int) and 0 < size <= _MAX_RANKS else tuple(job)


def recorded_groups(job: Job) -> set[Group]:
    """Return the recorded process groups and the group of all ranks, as tuples; empty if a rank has no trace."""
    worlds = {world_ranks(job, trace) for trace in job.values()}
    if worlds != {tuple(job)}:
        return set()
    tables = pl.concat([trace.groups.select(pl.col("ranks").cast(pl.String)) for trace in job.values()])
    return {ranks for text in tables["ranks"].unique() if (ranks := _parse_integers(text))} | worlds


def extract_calls(
    trace: Trace, job_ranks: Collection[int], instances: Mapping[int, Instance]
) -> tuple[list[RecordedCall], list[tuple[str, str]]]:
    """Extract the communication calls of one rank.

    Args:
        trace: The linked trace of the rank.
        job_ranks: The ranks that were recorded.
        instances: Event -> collective instance (`matched_instances`).

    Returns:
        The calls in their order, and (name, reason) of those that lack what a replay needs.
    """
    return _Extraction(trace, job_ranks, instances).run()


class _Extraction:
    """Converts a rank's rows of the table comms to recorded calls, and assigns each recorded wait to a call."""

    def __init__(self, trace: Trace, job_ranks: Collection[int], instances: Mapping[int, Instance]) -> None:
        self._rows = _host_calls(trace)
        self._sizes = tensor_sizes(trace, self._rows["node"].drop_nulls())
        self._instances = instances
        self._group_by_name = {
            row["pg_name"]: row["ranks"]
            for row in trace.groups.select(pl.col("pg_name", "ranks").cast(pl.String)).iter_rows(named=True)
        }
        self._job_size = len(job_ranks)
        self._is_complete = len(job_ranks) == trace.meta.get("world_size")
        self._calls: list[RecordedCall] = []
        self._skipped: list[tuple[str, str]] = []
        self._by_group_and_seq: dict[tuple[str | None, int], int] = {}
        self._last_by_seq: dict[int, int] = {}

    def run(self) -> tuple[list[RecordedCall], list[tuple[str, str]]]:
        for row in self._rows.iter_rows(named=True):
            if row["collective"] == "wait":
                self._add_wait(row)
                continue
            name = row["name"] or row["collective"] or "?"
            if reason := _row_problem(row):
                self._skipped.append((name, reason))
                continue
            call = self._extract(row, name)
            if reason := _size_problem(call):
                self._skipped.append((name, reason))
                continue
            if call.seq is not None:
                position = len(self._calls)
                self._by_group_and_seq[call.pg_name, call.seq] = position
                self._last_by_seq[call.seq] = position
            self._calls.append(call)
        return self._calls, self._skipped

    def _add_wait(self, row: Mapping[str, Any]) -> None:
        # In some versions of torch, waits do not name their group.
        position = self._by_group_and_seq.get((row["pg_name"], row["seq"]), self._last_by_seq.get(row["seq"]))
        if position is not None and self._calls:
            self._calls[-1].waits.append(position)
            waited_call = self._calls[position]
            waited_call.waited_at = waited_call.waited_at or row["node"]

    def _extract(self, row: Mapping[str, Any], name: str) -> RecordedCall:
        instance = self._instances.get(row["event"], Instance((), None, None))
        recorded_group = (
            _parse_integers(row["ranks"]) or _parse_integers(self._group_by_name.get(row["pg_name"])) or None
        )
        # The ranks that took part are the group, unless all recorded ranks did: then the group is the world, which may
        # have more ranks than were recorded.
        is_group = len(instance.ranks) < self._job_size or self._is_complete
        group = recorded_group or (instance.ranks if is_group else None) or None
        no_sizes: Sizes = ((), ())
        inputs, outputs = self._sizes.get(row["node"], no_sizes)
        return RecordedCall(
            row["collective"],
            name,
            inputs or _optional_size(row["in_nelems"]),
            outputs or _optional_size(row["out_nelems"]),
            row["dtype"],
            group,
            _parse_integers(row["in_split"]),
            _parse_integers(row["out_split"]),
            root=global_rank(row["root"], name, group),
            peer=global_rank(row["peer"], name, recorded_group),
            reduce_op=row["reduce_op"],
            is_async=row["is_async"],
            seq=row["seq"],
            pg_name=row["pg_name"],
            start=row["ts"] if instance.start is None else instance.start,
            end=instance.end,
            coalesced="coalesced" in name,
            node=row["node"],
        )


def _row_problem(row: Mapping[str, Any]) -> str | None:
    if raised_exception(row["attrs"]):
        return RAISED_REASON
    if row["collective"] not in COLLECTIVES | MESSAGES:
        return f"{row['collective'] or 'it'} is not a collective that can be replayed"
    return None


def _size_problem(call: RecordedCall) -> str | None:
    """Return the reason if a recorded call's data type, sizes or group prevent a replay; None if all are valid."""
    if call.collective != "barrier" and categories.itemsize(call.dtype) is None:
        return f"unknown data type {call.dtype!r}" if call.dtype else "its data type was not recorded"
    sizes = (call.inputs, call.outputs, call.in_split, call.out_split)
    if any(size < 0 for elements in sizes for size in elements):
        return "a negative size of a tensor was recorded"
    if max(map(sum, sizes)) > MAX_ELEMENTS:
        return "a size of more than 2**50 elements was recorded"
    if call.group and (len(set(call.group)) < len(call.group) or min(call.group) < 0):
        return "its group has a duplicate or negative rank"
    return None


def global_rank(recorded: int | None, name: str, group: Group | None) -> int | None:
    """Return the global rank of a root or peer; c10d operators record an index in the group, others the rank itself."""
    if recorded is None or not name.startswith("c10d::") or not group:
        return recorded
    return group[recorded] if 0 <= recorded < len(group) else None


def raised_exception(attrs: str | None) -> bool:
    """Return whether an operator raised an exception in the recording; only etloom's observer records it."""
    return '"raised": true' in (attrs or "")


def _optional_size(elements: int | None) -> tuple[int, ...]:
    return () if elements is None else (elements,)


def _host_calls(trace: Trace) -> pl.DataFrame:
    """Return the host-side rows of the table comms, sorted by execution-trace node or, without nodes, by start time."""
    comms = trace.comms.with_columns(pl.col(pl.Categorical).cast(pl.String))
    nodes = trace.nodes.select("id", "attrs", name=pl.col("name").cast(pl.String))
    events = trace.events.select("id", "ts", "cat", event_name=pl.col("name").cast(pl.String))
    joined = comms.join(nodes, left_on="node", right_on="id", how="left").join(
        events, left_on="event", right_on="id", how="left"
    )
    on_device = pl.col("cat").cast(pl.String).is_in(list(categories.DEVICE_CATEGORIES))
    host = joined.filter(pl.col("cat").is_null() | ~on_device)
    if host["node"].count():
        calls = host.filter(pl.col("node").is_not_null()).unique("node", keep="first").sort("node")
    else:
        calls = host.filter(pl.col("event").is_not_null()).unique("event", keep="first").sort("ts", "event")
    return calls.with_columns(name=pl.coalesce("name", "event_name"))


def _parse_integers(text: str | None) -> tuple[int, ...]:
    """Parse a JSON list of integers; return an empty tuple for any other text."""
    try:
        values = json.loads(text) if text else []
    except (ValueError, RecursionError):
        return ()
    return tuple(values) if isinstance(values, list) and all(type(value) is int for value in values) else ()


def tensor_sizes(trace: Trace, nodes: pl.Series) -> dict[int, Sizes]:
    """Return node -> (input sizes, output sizes): the number of elements of each tensor, in argument order."""
    tensors = trace.tensors.join(nodes.to_frame("node").unique(), on="node", how="semi").sort(
        "node", "io", "index", "item"
    )
    descriptions = trace.nodes.join(nodes.to_frame("id").unique(), on="id", how="semi").select(
        "id", pl.col("name", "op_schema").cast(pl.String)
    )
    name_and_schema = {node: (name or "", schema or "") for node, name, schema in descriptions.iter_rows()}
    sizes: dict[int, Sizes] = {}
    grouped = tensors.group_by("node", maintain_order=True).agg("io", "index", "numel")
    for node, directions, arguments, elements in grouped.iter_rows():
        rows = [row for row in zip(directions, arguments, elements, strict=True) if row[2] is not None]
        name, schema = name_and_schema[node]
        sizes[node] = _sizes_by_schema(rows, name, schema) if schema else _sizes_as_recorded(rows)
    return sizes


def _sizes_as_recorded(rows: list[tuple[int, int, int]]) -> Sizes:
    inputs, outputs = (tuple(size for direction, _, size in rows if direction == side) for side in (0, 1))
    return inputs, outputs


def _sizes_by_schema(rows: list[tuple[int, int, int]], name: str, schema: str) -> Sizes:
    arguments = categories.parse_argument_names(schema)
    inputs: list[int] = []
    outputs: list[int] = []
    for direction, index, size in rows:
        if direction != 0:
            continue
        argument = arguments[index] if index < len(arguments) else ""
        is_sent, is_received = categories.get_tensor_directions(name, argument)
        inputs += [size] if is_sent else []
        outputs += [size] if is_received else []
    return tuple(inputs), tuple(outputs)
