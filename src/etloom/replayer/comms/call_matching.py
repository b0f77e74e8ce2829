"""Matches planned calls across ranks; drops calls that another rank lacks, and rejects calls that do not agree.

Calls match by position: the first call of each rank in a group, the second, and so on; likewise the messages that one
rank sends to another, and those received there. Recordings that end at different calls on different ranks, and the
first N calls of each rank, leave unmatched calls at the end; replayed, these would wait forever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from etloom.core import categories
from etloom.core.errors import EtloomError
from etloom.replayer.plan import REDUCING, Call, Skipped

Channel = tuple[str, tuple[int, ...]]
"""The calls that match each other in order: ("group", ranks), or ("message", (source, destination))."""


def match_calls(calls_by_rank: Sequence[Sequence[Call]]) -> tuple[list[set[int]], list[Skipped]]:
    """Match the planned calls of all ranks by their order in each group, and check that matching calls agree.

    Returns:
        For each rank the positions of its calls that all ranks of the call make, and the calls that are dropped.

    Raises:
        EtloomError: Matching calls differ in collective, root, reduce operation, or sizes.
    """
    channel_calls = [list(_calls_by_channel(rank, calls)) for rank, calls in enumerate(calls_by_rank)]
    by_channel: dict[Channel, dict[int, list[Call]]] = {}
    for rank, pairs in enumerate(channel_calls):
        for channel, call in pairs:
            by_channel.setdefault(channel, {}).setdefault(rank, []).append(call)
    fewest = {channel: _fewest_calls(channel, by_rank) for channel, by_rank in by_channel.items()}
    for channel, by_rank in by_channel.items():
        _check_agreement(channel, by_rank, fewest[channel][0])
    matched: list[set[int]] = []
    skipped: list[Skipped] = []
    for rank, pairs in enumerate(channel_calls):
        occurrences: dict[Channel, int] = {}
        matched.append(set())
        for position, (channel, call) in enumerate(pairs):
            occurrences[channel] = occurrences.get(channel, 0) + 1
            count, fewest_rank = fewest[channel]
            if occurrences[channel] <= count:
                matched[rank].add(position)
            else:
                skipped.append(Skipped(rank, call.name, f"rank {fewest_rank} has no matching call"))
    return matched, skipped


def _calls_by_channel(rank: int, calls: Sequence[Call]) -> Iterator[tuple[Channel, Call]]:
    for call in calls:
        if call.peer is None:
            yield ("group", call.group), call
        else:
            yield ("message", (rank, call.peer) if call.collective == "send" else (call.peer, rank)), call


def _fewest_calls(channel: Channel, by_rank: dict[int, list[Call]]) -> tuple[int, int]:
    """Return (calls, rank) of the rank with the fewest calls in a group or between a sender and a receiver."""
    return min((len(by_rank.get(rank, ())), rank) for rank in channel[1])


def _check_agreement(channel: Channel, by_rank: dict[int, list[Call]], count: int) -> None:
    ranks = channel[1]
    first, *others = ranks
    for occurrence in range(count):
        call = by_rank[first][occurrence]
        for other in others:
            other_call = by_rank[other][occurrence]
            if _common_attributes(channel, call) != _common_attributes(channel, other_call):
                raise _contradiction_error(first, call, other, other_call)
        if call.collective == "all_to_all":
            calls = [by_rank[rank][occurrence] for rank in ranks]
            differing = np.argwhere(
                _all_to_all_bytes(calls, sent=True) != _all_to_all_bytes(calls, sent=False).T
            )
            if len(differing):
                sender, receiver = differing[0].tolist()
                raise _contradiction_error(ranks[sender], calls[sender], ranks[receiver], calls[receiver])


def _common_attributes(channel: Channel, call: Call) -> tuple[object, ...]:
    """Return the attributes that must be equal on all ranks of a call, such as collective, root and tensor sizes."""
    if channel[0] == "message":
        return (_call_bytes(call),)
    if call.collective == "barrier":
        return (call.collective,)
    sizes = _common_sizes(call)
    # Only these treat several tensors one by one; all others treat them as one sequence of elements.
    is_single = not (call.coalesced or call.collective == "all_reduce")
    return (
        call.collective,
        call.root,
        call.reduce_op if call.collective in REDUCING else None,
        categories.itemsize(call.dtype),
        # The shares of an all-to-all differ: `_all_to_all_bytes` compares them.
        None if call.collective == "all_to_all" else (sum(sizes),) if is_single else sizes,
    )


def _contradiction_error(rank: int, call: Call, other: int, other_call: Call) -> EtloomError:
    return EtloomError(
        f"{_describe_call(rank, call)} does not match {_describe_call(other, other_call)}: a replay of both would hang",
        remedy="record all ranks over the same steps, or exclude these calls (--only, --first)",
    )


def _common_sizes(call: Call) -> tuple[int, ...]:
    """Return the element counts of a call's inputs or outputs, whichever must have equal sizes on every rank."""
    sizes = call.outputs if call.collective in ("reduce_scatter", "scatter", "recv") else call.inputs
    return sizes or call.outputs or call.inputs


def _call_bytes(call: Call) -> int:
    return (categories.itemsize(call.dtype) or 0) * sum(_common_sizes(call))


def _all_to_all_bytes(calls: Sequence[Call], sent: bool) -> np.ndarray:
    """Return a matrix [rank, peer] of the bytes that each rank of an all-to-all sends to (or receives from) a peer."""
    size = len(calls)
    shares = np.zeros((size, size), dtype=np.int64)
    for index, call in enumerate(calls):
        split, sizes = (call.in_split, call.inputs) if sent else (call.out_split, call.outputs or call.inputs)
        elements = split or (sizes if len(sizes) == size > 1 else (sum(sizes) // size,) * size)
        shares[index] = np.array(elements) * (categories.itemsize(call.dtype) or 0)
    return shares


def _describe_call(rank: int, call: Call) -> str:
    root = "" if call.root is None else f", root {call.root}"
    sizes = _common_sizes(call)
    tensors = f"{len(sizes)} tensors of {call.dtype}" if len(sizes) > 1 else call.dtype
    operation = f", {call.reduce_op}" if call.collective in REDUCING else ""
    return f"call {call.index} of rank {rank} ({call.collective}, {_call_bytes(call):,} B, {tensors}{operation}{root})"
