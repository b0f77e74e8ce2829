"""What one rank calls, the others must call too: what has no counterpart is left out, what contradicts it is an error.

The k-th call of a rank in a group meets the k-th calls of the group's other ranks, and the k-th message from one rank
to another the k-th that is received there. Recordings that end at other calls on other ranks, and the first N calls of
each, leave calls over at the end; replayed, they would wait for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from etloom.core import categories
from etloom.core.errors import EtloomError
from etloom.replayer.plan import REDUCING, Call, Skipped

Channel = tuple[str, tuple[int, ...]]
"""Where calls meet: those of a group, or the messages from one rank to another."""


def match_calls(calls: Sequence[Sequence[Call]]) -> tuple[list[set[int]], list[Skipped]]:
    """Of each rank, the places of its calls that all of their ranks make, and what is left out.

    Raises EtloomError where calls that meet are not of one collective, root, operation, or of tensors as large.
    """
    own = [list(_calls_by_channel(rank, calls[rank])) for rank in range(len(calls))]
    made: dict[Channel, dict[int, list[Call]]] = {}
    for rank, found in enumerate(own):
        for meeting, call in found:
            made.setdefault(meeting, {}).setdefault(rank, []).append(call)
    least = {meeting: _fewest_calls(meeting, by_rank) for meeting, by_rank in made.items()}
    for meeting, by_rank in made.items():
        _check_agreement(meeting, by_rank, least[meeting][0])
    kept: list[set[int]] = []
    left: list[Skipped] = []
    for rank, found in enumerate(own):
        turns: dict[Channel, int] = {}
        kept.append(set())
        for at, (meeting, call) in enumerate(found):
            turns[meeting] = turns.get(meeting, 0) + 1
            count, fewest = least[meeting]
            if turns[meeting] <= count:
                kept[rank].add(at)
            else:
                left.append(Skipped(rank, call.name, f"rank {fewest} has no call that meets it"))
    return kept, left


def _calls_by_channel(rank: int, own: Sequence[Call]) -> Iterator[tuple[Channel, Call]]:
    for call in own:
        if call.peer is None:
            yield ("group", call.group), call
        else:
            yield ("message", (rank, call.peer) if call.collective == "send" else (call.peer, rank)), call


def _fewest_calls(meeting: Channel, by_rank: dict[int, list[Call]]) -> tuple[int, int]:
    """(how many calls all have, the rank that has no more)."""
    return min((len(by_rank.get(rank, ())), rank) for rank in meeting[1])


def _check_agreement(meeting: Channel, by_rank: dict[int, list[Call]], count: int) -> None:
    first, *others = meeting[1]
    for turn in range(count):
        call = by_rank[first][turn]
        for other in others:
            its = by_rank[other][turn]
            if _common_attributes(meeting, call) != _common_attributes(meeting, its):
                raise _contradiction_error(first, call, other, its)
        if call.collective == "all_to_all":
            own = [by_rank[rank][turn] for rank in meeting[1]]
            wrong = np.argwhere(_all_to_all_bytes(own, True) != _all_to_all_bytes(own, False).T)
            if len(wrong):
                sends, gets = wrong[0].tolist()
                raise _contradiction_error(meeting[1][sends], own[sends], meeting[1][gets], own[gets])


def _common_attributes(meeting: Channel, call: Call) -> tuple[object, ...]:
    """What all ranks of a call must agree on."""
    if meeting[0] == "message":
        return (_call_bytes(call),)
    if call.collective == "barrier":
        return (call.collective,)
    sizes = _common_sizes(call)
    # Only these are made of several tensors one by one; all others are of all elements at once.
    single = not (call.coalesced or call.collective == "all_reduce")
    return (
        call.collective,
        call.root,
        call.reduce_op if call.collective in REDUCING else None,
        categories.itemsize(call.dtype),
        # An all-to-all sends each its own: see `_shares`.
        None if call.collective == "all_to_all" else (sum(sizes),) if single else sizes,
    )


def _contradiction_error(rank: int, call: Call, other: int, its: Call) -> EtloomError:
    return EtloomError(
        f"{_describe_call(rank, call)} meets {_describe_call(other, its)}: no replay of both can end",
        remedy="record all ranks over the same steps, or leave them out (--only, --first)",
    )


def _common_sizes(call: Call) -> tuple[int, ...]:
    """Elements of the tensors that are as large on every rank."""
    sizes = call.outputs if call.collective in ("reduce_scatter", "scatter", "recv") else call.inputs
    return sizes or call.outputs or call.inputs


def _call_bytes(call: Call) -> int:
    return (categories.itemsize(call.dtype) or 0) * sum(_common_sizes(call))


def _all_to_all_bytes(own: Sequence[Call], into: bool) -> np.ndarray:
    """[rank, rank] Bytes that each rank of an all-to-all sends to each other (into), or gets from it."""
    found = np.zeros((len(own), len(own)), dtype=np.int64)
    for at, call in enumerate(own):
        split, sizes = (call.in_split, call.inputs) if into else (call.out_split, call.outputs or call.inputs)
        shares = split or (sizes if len(sizes) == len(own) > 1 else (sum(sizes) // len(own),) * len(own))
        found[at] = np.array(shares) * (categories.itemsize(call.dtype) or 0)
    return found


def _describe_call(rank: int, call: Call) -> str:
    root = "" if call.root is None else f" from rank {call.root}"
    sizes = _common_sizes(call)
    of = f"{len(sizes)} tensors of {call.dtype}" if len(sizes) > 1 else call.dtype
    operation = f", {call.reduce_op}" if call.collective in REDUCING else ""
    return f"call {call.index} of rank {rank} ({call.collective}, {_call_bytes(call):,} B, {of}{operation}{root})"
