"""From recorded calls to calls of the replay: its ranks, the sizes that fewer ranks share, and what to wait for."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from etloom.core.errors import EtloomError
from etloom.replayer.comms.operator_waits import NodeStarts, place_waits
from etloom.replayer.plan import MESSAGES, ROOTED, Call
from etloom.replayer.recorded_calls import MAX_ELEMENTS, RecordedCall

_MAX_IN_FLIGHT = 256
"""Calls in flight at once; of more, which nothing says was waited for, the oldest is. Nor does a recorded wait lie
further before the next call."""


def map_calls(
    rows: list[RecordedCall],
    rank: int,
    place: Mapping[int, int],
    world: tuple[int, ...],
    times: NodeStarts | None = None,
) -> tuple[list[Call], list[tuple[str, str]]]:
    """The rows as calls of the replay, and (name, reason) of what has no meaning there. times: of the rank's
    operators, where they are played too."""
    calls: list[Call] = []
    lost: list[tuple[str, str]] = []
    became: dict[int, int] = {}
    before: int | None = None
    for at, row in enumerate(rows):
        made = _map_call(row, rank, place, world)
        if isinstance(made, str):
            lost.append((row.name, made))
            continue
        gap = max(0, row.start - before) if row.start is not None and before is not None else None
        before = row.start
        took = row.end - row.start if row.end is not None and row.start is not None else None
        became[at] = len(calls)
        calls.append(replace(made, index=len(calls), gap_ns=gap, recorded_ns=None if made.fewer else took))
    calls = [
        replace(call, after=after)
        for call, after in zip(calls, _waits_before_calls(rows, became), strict=True)
    ]
    return calls if times is None else place_waits(calls, [rows[at] for at in became], times), lost


def _map_call(row: RecordedCall, rank: int, place: Mapping[int, int], world: tuple[int, ...]) -> Call | str:
    """The call, or why there is none.

    torch.distributed sorts the ranks of a group that it makes, and so are those of the call, with what is shared
    between them; a group that was made unsorted (sort_ranks=False) is played sorted.
    """
    if row.unknown:
        return row.unknown
    recorded = row.group or world
    if rank not in recorded:
        return f"rank {rank} is not in its group"
    members = tuple(sorted(place[one] for one in recorded if one in place))
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
        fewer=len(members) < len(recorded),
    )
    if row.collective in MESSAGES:
        if row.peer is None:
            return "its peer was not recorded"
        if row.peer not in place:
            return f"its peer, rank {row.peer}, is not played"
        if row.peer == rank:
            return "it is to itself"
        sizes = row.inputs or row.outputs
        made = replace(
            made, group=tuple(sorted((place[rank], place[row.peer]))), peer=place[row.peer], fewer=False
        )
        return replace(made, inputs=sizes) if row.collective == "send" else replace(made, outputs=sizes)
    if len(members) < 2 <= len(recorded):
        return "no other rank of its group is played"
    root = None
    if row.collective in ROOTED:
        # Where it was not recorded, the first.
        root = place.get(recorded[0] if row.root is None else row.root)
        if root not in members:
            return "its root is not played"
    if row.collective == "barrier":
        return made
    if not (row.inputs or row.outputs):
        return "its size was not recorded"
    size = len(recorded)
    row = replace(
        row,
        in_split=_split_elements(row.in_split, row, size),
        out_split=_split_elements(row.out_split, row, size),
    )
    kept = sorted((at for at, one in enumerate(recorded) if one in place), key=lambda at: place[recorded[at]])
    ins, outs = _shrink_sizes(row, size, kept)
    in_split, out_split = (
        tuple(split[at] for at in kept) if len(split) == size else ()
        for split in (row.in_split, row.out_split)
    )
    if max(sum(in_split), sum(out_split)) > MAX_ELEMENTS:
        return "its splits have beyond 2**50 elements"
    return replace(made, inputs=ins, outputs=outs, root=root, in_split=in_split, out_split=out_split)


def _split_elements(split: tuple[int, ...], row: RecordedCall, size: int) -> tuple[int, ...]:
    """A split in elements: recorded are rows of the tensors, which are as wide on all ranks."""
    if len(split) != size:
        return ()
    for sizes, rows in ((row.inputs, sum(row.in_split)), (row.outputs, sum(row.out_split))):
        if len(sizes) == 1 and rows and sizes[0] % rows == 0:
            return tuple(one * (sizes[0] // rows) for one in split)
    return split


def _shrink_sizes(row: RecordedCall, size: int, kept: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
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
        if len(ins) == len(outs) == 1 and not row.in_split and not row.out_split:
            outs = ins  # in equal shares
    return ins, outs


def _waits_before_calls(rows: list[RecordedCall], became: Mapping[int, int]) -> Iterator[tuple[int, ...]]:
    """Of each call, the earlier ones to wait for before it is made."""
    pending: list[int] = []
    for at in became:
        row, waited = rows[at], _recorded_waits(rows, at)
        done = {one for one in pending if one in waited or not _may_be_in_flight(rows[one], row)}
        if len(pending) - len(done) >= _MAX_IN_FLIGHT:
            # The oldest; not a message, whose other end may be called only after this one.
            done.update(
                [one for one in pending if one not in done and rows[one].collective not in MESSAGES][:1]
            )
        yield tuple(became[one] for one in pending if one in done)
        pending = [one for one in pending if one not in done] + [at]


def _recorded_waits(rows: list[RecordedCall], at: int) -> set[int]:
    """What waits recorded before a call have waited for."""
    return {waited for row in rows[max(0, at - _MAX_IN_FLIGHT) : at] for waited in row.waits}


def _may_be_in_flight(row: RecordedCall, other: RecordedCall) -> bool:
    """Whether a call may still be in flight when another is made."""
    if row.end is not None and other.start is not None:
        return row.end > other.start
    if row.collective in MESSAGES:
        return other.collective in MESSAGES
    # Recorders of NCCL say which call was waited for; others say at least whether it was asynchronous.
    return row.seq is not None or bool(row.is_async)


def scale_call(call: Call, scale: float) -> Call:
    """The call with its sizes times the scale. Raises EtloomError where they become larger than any memory."""
    if scale == 1.0:
        return call
    if max(map(sum, (call.inputs, call.outputs, call.in_split, call.out_split))) * scale > MAX_ELEMENTS:
        raise EtloomError(
            f"{call.collective} (call {call.index}) of more than 2**50 elements at scale {scale:g}",
            remedy="a smaller --scale",
        )
    size = len(call.group)
    call = replace(call, recorded_ns=None)

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


def select_calls(calls: Sequence[Call], places: Collection[int]) -> tuple[Call, ...]:
    """The calls at these places: numbered anew, without waits for what is gone, and after the gaps of what is gone."""
    now: dict[int, int] = {}
    found: list[Call] = []
    gap: int | None = None
    for at, call in enumerate(calls):
        if call.gap_ns is not None:
            gap = (gap or 0) + call.gap_ns
        if at in places:
            after = tuple(now[one] for one in call.after if one in now)
            now[call.index] = len(found)
            found.append(replace(call, index=len(found), after=after, gap_ns=gap if found else None))
            gap = None
    return tuple(found)
