"""From a recorded job to the calls that each rank will make: the plan of a communication replay.

A call is a collective or one end of a message, with the sizes of its tensors. Before it, the plan says which earlier
calls to wait for: those that had completed in the recording when this one was made. What was recorded obeyed that
order, so a replay that keeps it cannot deadlock, and keeps as much in flight as the recording did. Where no times are
known, the recorded waits say so, else every call is waited for at once.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import polars as pl

from etloom import kinds
from etloom.collectives import together
from etloom.errors import EtloomError
from etloom.replayer.sizes import tensor_sizes
from etloom.trace import Job, Trace

ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
COLLECTIVES = ROOTED | {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"}
MESSAGES = frozenset({"send", "recv"})
_MOST_RANKS = 1 << 20
"""A file that names a larger world is not believed."""


@dataclass(frozen=True)
class Call:
    """One call of one rank. Ranks are those of the replay. Sizes are elements of each tensor.

    inputs, outputs: of an all-gather one input and as many outputs as ranks, or one of all their elements; of a
    coalesced call several pairs. after: earlier calls (index) to wait for before this one. gap_ns: recorded between the
    last host event of communication and this call. recorded_ns: from the call to its completion. node: of the
    recording, where it has an execution trace.
    """

    index: int
    collective: str
    group: tuple[int, ...]
    dtype: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    in_split: tuple[int, ...] = ()
    out_split: tuple[int, ...] = ()
    root: int | None = None
    peer: int | None = None
    reduce_op: str = "sum"
    is_async: bool = False
    coalesced: bool = False
    after: tuple[int, ...] = ()
    gap_ns: int | None = None
    recorded_ns: int | None = None
    seq: int | None = None
    name: str = ""
    node: int | None = None

    @property
    def bytes(self) -> int:
        """Bytes of what this rank puts in, or gets where it puts in nothing."""
        size = kinds.itemsize(self.dtype) or 0
        return size * (sum(self.inputs) or sum(self.outputs))


@dataclass(frozen=True)
class Skipped:
    """A recorded call that cannot be replayed, and why."""

    rank: int
    name: str
    reason: str
    count: int = 1


@dataclass(frozen=True)
class Plan:
    """The calls of every rank of the replay, and what is left out. recorded: which recorded rank each rank plays."""

    calls: tuple[tuple[Call, ...], ...]
    skipped: tuple[Skipped, ...] = ()
    recorded: tuple[int, ...] = ()

    @property
    def world(self) -> int:
        return len(self.calls)

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """The groups of collectives, in the order in which every rank makes them. Messages go through the world's."""
        return sorted({call.group for own in self.calls for call in own if call.peer is None})


@dataclass
class _Row:
    """A recorded call on its way to become a `Call`; ranks as recorded."""

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


def plan(
    job: Job,
    *,
    world: int | None = None,
    ranks: Collection[int] | None = None,
    only: Collection[str] = (),
    first: int | None = None,
    scale: float = 1.0,
) -> Plan:
    """The plan of a job's communication.

    world: how many ranks the replay has; fewer than recorded: the first ones of ``ranks`` (default: of all) are
    played, groups keep the members that are, and sizes follow the groups. only: these collectives. first: this many
    calls of each rank. scale: times the sizes, at least one element.

    Raises EtloomError where nothing was communicated, or the world is larger than what was recorded.
    """
    played = sorted(ranks) if ranks else list(job)
    if missing := [rank for rank in played if rank not in job]:
        raise EtloomError(
            f"rank {missing[0]} was not recorded", remedy=f"recorded: {', '.join(map(str, job))}"
        )
    size = world or len(played)
    if size > len(played):
        raise EtloomError(
            f"{size} processes, but {len(played)} recorded ranks to play",
            remedy=f"start {len(played)} processes, or play one trace on all of them (--use-one-trace)",
        )
    played = played[:size]
    place = {rank: at for at, rank in enumerate(played)}
    groups = _groups(job)
    calls, skipped = [], []
    for rank in played:
        trace = job[rank]
        rows, left = _rows(trace, list(job), groups.get(rank, {}))
        skipped += [Skipped(place[rank], *one) for one in left]
        own, lost = _mapped(rows, rank, place, _world_of(job, trace))
        skipped += [Skipped(place[rank], *one) for one in lost]
        chosen = [call for call in own if not only or call.collective in only]
        calls.append(_numbered([_scaled(call, scale) for call in chosen[:first]]))
    if not any(calls):
        reasons = "; ".join(sorted({f"{one.name}: {one.reason}" for one in skipped})[:3])
        raise EtloomError(
            "the run holds no communication that can be replayed" + (f" ({reasons})" if reasons else ""),
            remedy="record an execution trace (etloom collect) of a job with several ranks",
        )
    return Plan(tuple(calls), _summed(skipped), tuple(played))


def table(made: Plan) -> pl.DataFrame:
    """The plan as a table: a row a call, then one a sort of skipped call with its reason."""
    rows = [
        {
            "rank": rank,
            "call": call.index,
            "collective": call.collective,
            "group": json.dumps(call.group),
            "dtype": call.dtype,
            "in_nelems": sum(call.inputs),
            "out_nelems": sum(call.outputs),
            "bytes": call.bytes,
            "root": call.root,
            "peer": call.peer,
            "reduce_op": call.reduce_op
            if call.collective in ("all_reduce", "reduce", "reduce_scatter")
            else None,
            "waits_for": len(call.after),
            "gap_ns": call.gap_ns,
            "recorded_ns": call.recorded_ns,
            "name": call.name,
            "reason": None,
        }
        for rank, own in enumerate(made.calls)
        for call in own
    ]
    rows += [
        {"rank": one.rank, "name": one.name, "reason": f"{one.reason} ({one.count}x)"} for one in made.skipped
    ]
    return pl.DataFrame(rows, schema=TABLE, orient="row", infer_schema_length=None)


TABLE = {
    **dict.fromkeys(("rank", "call"), pl.Int64),
    **dict.fromkeys(("collective", "group", "dtype"), pl.String),
    **dict.fromkeys(("in_nelems", "out_nelems", "bytes", "root", "peer"), pl.Int64),
    "reduce_op": pl.String,
    **dict.fromkeys(("waits_for", "gap_ns", "recorded_ns"), pl.Int64),
    "name": pl.String,
    "reason": pl.String,
}


def _groups(job: Job) -> Mapping[int, Mapping[int, tuple[tuple[int, ...], int, int]]]:
    """rank -> event -> (ranks that met, start, end), of what ranks did together; gloo records no group."""
    if not any(trace.events.height for trace in job.values()):
        return {}
    met = together(job).parts.filter(pl.col("issuer").is_not_null())
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


def _world_of(job: Job, trace: Trace) -> tuple[int, ...]:
    size = trace.meta.get("world_size")
    return tuple(range(size)) if isinstance(size, int) and 0 < size <= _MOST_RANKS else tuple(job)


def _rows(
    trace: Trace, recorded: Collection[int], met: Mapping[int, tuple[tuple[int, ...], int, int]]
) -> tuple[list[_Row], list[tuple[str, str]]]:
    """The recorded calls of a rank in their order, and (name, reason) of those without what a replay needs."""
    comms = _calls(trace)
    sizes = tensor_sizes(trace, comms["node"].drop_nulls())
    named = {
        row["pg_name"]: row["ranks"]
        for row in trace.groups.select(pl.col("pg_name", "ranks").cast(pl.String)).iter_rows(named=True)
    }
    rows: list[_Row] = []
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
            continue
        if collective not in COLLECTIVES | MESSAGES:
            skipped.append((name, f"{collective or 'it'} is no collective that can be replayed"))
            continue
        ranks, start, end = met.get(one["event"], ((), None, None))
        # Who was seen to meet is the group, where all that were recorded did not: then it is the world.
        seen = ranks if len(ranks) < len(recorded) else None
        group = _numbers(one["ranks"]) or _numbers(named.get(one["pg_name"])) or seen
        inputs, outputs = sizes.get(one["node"], ((), ()))
        row = _Row(
            collective,
            name,
            inputs or _one(one["in_nelems"]),
            outputs or _one(one["out_nelems"]),
            one["dtype"],
            group,
            _numbers(one["in_split"]),
            _numbers(one["out_split"]),
            _root(one["root"], name, group),
            one["peer"],
            one["reduce_op"],
            one["is_async"],
            one["seq"],
            one["pg_name"],
            start if start is not None else one["ts"],
            end,
            "coalesced" in name,
            one["node"],
        )
        if reason := _unplayable(row):
            skipped.append((name, reason))
            continue
        if one["seq"] is not None:
            by_seq[(one["pg_name"], one["seq"])] = last[one["seq"]] = len(rows)
        rows.append(row)
    return rows, skipped


def _unplayable(row: _Row) -> str | None:
    """Why a call cannot be played whatever the world is."""
    if row.collective != "barrier" and kinds.itemsize(row.dtype) is None:
        return f"its type {row.dtype!r} is not known" if row.dtype else "its type was not recorded"
    if min((0, *row.inputs, *row.outputs, *row.in_split, *row.out_split)) < 0:
        return "a negative size was recorded"
    if row.group and (len(set(row.group)) < len(row.group) or min(row.group) < 0):
        return "its group names a rank twice, or none"
    return None


def _root(recorded: int | None, name: str, group: tuple[int, ...] | None) -> int | None:
    """The rank that is the root: operators of c10d take its place in the group, all others record the rank."""
    if recorded is None or not name.startswith("c10d::") or not group:
        return recorded
    return group[recorded] if 0 <= recorded < len(group) else None


def _one(elements: int | None) -> tuple[int, ...]:
    return () if elements is None else (elements,)


def _calls(trace: Trace) -> pl.DataFrame:
    """comms of the host in the order of their calls: those of nodes or, without an execution trace, of events."""
    comms = trace.comms.with_columns(pl.col(pl.Categorical).cast(pl.String))
    nodes = trace.nodes.select("id", name=pl.col("name").cast(pl.String))
    events = trace.events.select("id", "ts", "cat", event_name=pl.col("name").cast(pl.String))
    joined = comms.join(nodes, left_on="node", right_on="id", how="left").join(
        events, left_on="event", right_on="id", how="left"
    )
    host = joined.filter(pl.col("cat").is_null() | ~pl.col("cat").cast(pl.String).is_in(list(kinds.DEVICE)))
    if host["node"].count():
        calls = host.filter(pl.col("node").is_not_null()).unique("node", keep="first").sort("node")
    else:
        calls = host.filter(pl.col("event").is_not_null()).unique("event", keep="first").sort("ts", "event")
    return calls.with_columns(name=pl.coalesce("name", "event_name"))


def _numbers(text: str | None) -> tuple[int, ...]:
    try:
        values = json.loads(text) if text else []
    except ValueError:
        return ()
    return tuple(values) if isinstance(values, list) and all(type(value) is int for value in values) else ()


def _mapped(
    rows: list[_Row], rank: int, place: Mapping[int, int], world: tuple[int, ...]
) -> tuple[list[Call], list[tuple[str, str]]]:
    """The rows as calls of the replay, and (name, reason) of what has no meaning there."""
    calls: list[Call] = []
    lost: list[tuple[str, str]] = []
    became: dict[int, int] = {}
    before: int | None = None
    for at, row in enumerate(rows):
        made = _call(row, rank, place, world)
        if isinstance(made, str):
            lost.append((row.name, made))
            continue
        gap = max(0, row.start - before) if row.start is not None and before is not None else None
        before = row.start
        took = row.end - row.start if row.end is not None and row.start is not None else None
        became[at] = len(calls)
        calls.append(replace(made, index=len(calls), gap_ns=gap, recorded_ns=took))
    return [replace(call, after=after) for call, after in zip(calls, _waits(rows, became), strict=True)], lost


def _call(row: _Row, rank: int, place: Mapping[int, int], world: tuple[int, ...]) -> Call | str:
    """The call, or why there is none."""
    recorded = row.group or world
    if rank not in recorded:
        return f"rank {rank} is not in its group"
    members = tuple(place[one] for one in recorded if one in place)
    made = Call(
        0,
        row.collective,
        members,
        row.dtype or "float",
        (),
        (),
        reduce_op=row.reduce_op or "sum",
        is_async=bool(row.is_async),
        coalesced=row.coalesced,
        seq=row.seq,
        name=row.name,
        node=row.node,
    )
    if row.collective in MESSAGES:
        if row.peer is None:
            return "its peer was not recorded"
        if row.peer not in place:
            return f"its peer, rank {row.peer}, is not played"
        if row.peer == rank:
            return "it is to itself"
        sizes = row.inputs or row.outputs
        made = replace(made, group=tuple(sorted((place[rank], place[row.peer]))), peer=place[row.peer])
        return replace(made, inputs=sizes) if row.collective == "send" else replace(made, outputs=sizes)
    if len(members) < 2 <= len(recorded):
        return "no other rank of its group is played"
    root = None
    if row.collective in ROOTED:
        # Where it was not recorded, the first.
        root = place.get(recorded[0] if row.root is None else row.root)
        if root not in members:
            return "its root is not played"
    if row.collective != "barrier" and not (row.inputs or row.outputs):
        return "its size was not recorded"
    size = len(recorded)
    row = replace(
        row, in_split=_elements(row.in_split, row, size), out_split=_elements(row.out_split, row, size)
    )
    kept = [at for at, one in enumerate(recorded) if one in place]
    ins, outs = _shrunk(row, size, kept)
    in_split, out_split = (
        tuple(split[at] for at in kept) if len(split) == size else ()
        for split in (row.in_split, row.out_split)
    )
    return replace(made, inputs=ins, outputs=outs, root=root, in_split=in_split, out_split=out_split)


def _elements(split: tuple[int, ...], row: _Row, size: int) -> tuple[int, ...]:
    """A split in elements: recorded are rows of the tensors, which are as wide on all ranks."""
    if len(split) != size:
        return ()
    for sizes, rows in ((row.inputs, sum(row.in_split)), (row.outputs, sum(row.out_split))):
        if len(sizes) == 1 and rows and sizes[0] % rows == 0:
            return tuple(one * (sizes[0] // rows) for one in split)
    return split


def _shrunk(row: _Row, size: int, kept: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes in a group of which only ``kept`` (places) remain: what is shared between ranks shrinks with them."""
    ins, outs = row.inputs, row.outputs

    def fewer(sizes: tuple[int, ...], split: tuple[int, ...]) -> tuple[int, ...]:
        whole = sum(split)
        if len(split) == size and len(sizes) == 1 and whole:
            return (sizes[0] * sum(split[at] for at in kept) // whole,)
        if len(sizes) == size and size > 1 and not row.coalesced:
            return tuple(sizes[at] for at in kept)
        return tuple(one * len(kept) // size for one in sizes)

    if row.collective in ("all_gather", "gather"):
        outs = fewer(outs, ())
    elif row.collective in ("reduce_scatter", "scatter"):
        ins = fewer(ins, ())
    elif row.collective == "all_to_all":
        ins, outs = fewer(ins, row.in_split), fewer(outs, row.out_split)
    return ins, outs


def _waits(rows: list[_Row], became: Mapping[int, int]) -> Iterator[tuple[int, ...]]:
    """Of each call, the earlier ones to wait for before it is made."""
    pending: list[int] = []
    for at in became:
        row, waited = rows[at], _waited(rows, at)
        done = [one for one in pending if one in waited or not _flies(rows[one], row)]
        pending = [one for one in pending if one not in done] + [at]
        yield tuple(became[one] for one in done)


def _waited(rows: list[_Row], at: int) -> set[int]:
    """What waits recorded before a call have waited for."""
    return {waited for row in rows[max(0, at - 256) : at] for waited in row.waits}


def _flies(row: _Row, other: _Row) -> bool:
    """Whether a call may still be in flight when another is made."""
    if row.end is not None and other.start is not None:
        return row.end > other.start
    if row.collective in MESSAGES:
        return other.collective in MESSAGES
    # Recorders of NCCL say which call was waited for; others say at least whether it was asynchronous.
    return row.seq is not None or bool(row.is_async)


def _scaled(call: Call, scale: float) -> Call:
    if scale == 1.0:
        return call
    size = len(call.group)

    def split(sizes: tuple[int, ...]) -> tuple[int, ...]:
        # What one rank sends and another receives is one number: it comes out the same on both.
        return tuple(max(1, round(one * scale)) if one else 0 for one in sizes)

    if call.in_split or call.out_split:
        sent, got = split(call.in_split), split(call.out_split)
        ins = (sum(sent),) if sent else (size * max(1, round(call.inputs[0] // size * scale)),)
        outs = (sum(got),) if got else (size * max(1, round(call.outputs[0] // size * scale)),)
        return replace(call, inputs=ins, outputs=outs, in_split=sent, out_split=got)

    def scaled(sizes: tuple[int, ...]) -> tuple[int, ...]:
        # What is divided among ranks stays divisible.
        return tuple(max(1, round(one * scale / size)) * size if one >= size else one for one in sizes)

    return replace(call, inputs=scaled(call.inputs), outputs=scaled(call.outputs), in_split=(), out_split=())


def _numbered(calls: list[Call]) -> tuple[Call, ...]:
    """The calls with their index in what is left, and without waits for what is gone."""
    now = {call.index: at for at, call in enumerate(calls)}
    return tuple(
        replace(call, index=at, after=tuple(now[one] for one in call.after if one in now))
        for at, call in enumerate(calls)
    )


def _summed(skipped: list[Skipped]) -> tuple[Skipped, ...]:
    sums: dict[tuple[int, str, str], int] = {}
    for one in skipped:
        key = (one.rank, one.name, one.reason)
        sums[key] = sums.get(key, 0) + 1
    return tuple(Skipped(*key, count) for key, count in sums.items())
