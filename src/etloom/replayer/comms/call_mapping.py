"""Maps recorded calls to planned calls: renumbers ranks, shrinks sizes to smaller groups, and decides when to wait."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from etloom.core.errors import EtloomError
from etloom.replayer.comms.operator_waits import NodeStarts, place_waits
from etloom.replayer.plan import MESSAGES, ROOTED, Call
from etloom.replayer.recorded_calls import MAX_ELEMENTS, RecordedCall

_MAX_IN_FLIGHT = 256
"""Maximum number of calls in flight. If more calls have no recorded wait yet, the oldest one is waited for; a recorded
wait is searched in this many calls."""


class _NotReplayable(Exception):
    """Raised for a recorded call that cannot be replayed; the exception's message states the reason."""


def map_calls(
    recorded_calls: list[RecordedCall],
    rank: int,
    new_ranks: Mapping[int, int],
    world: tuple[int, ...],
    starts: NodeStarts | None = None,
) -> tuple[list[Call], list[tuple[str, str]]]:
    """Convert the recorded calls of one rank to calls of the plan.

    Args:
        recorded_calls: Calls of the rank, in their order.
        rank: The recorded rank.
        new_ranks: Recorded rank -> rank of the replay.
        world: The recorded ranks of the world.
        starts: Start times of the rank's operators, if they are replayed too.

    Returns:
        The calls, and (name, reason) of those that cannot be replayed.
    """
    calls: list[Call] = []
    skipped: list[tuple[str, str]] = []
    new_index: dict[int, int] = {}  # position among the recorded calls -> index of the call
    previous_start: int | None = None
    for position, recorded in enumerate(recorded_calls):
        try:
            call = _map_call(recorded, rank, new_ranks, world)
        except _NotReplayable as reason:
            skipped.append((recorded.name, str(reason)))
            continue
        gap: int | None = None
        duration: int | None = None
        if recorded.start is not None and previous_start is not None:
            gap = max(0, recorded.start - previous_start)
        if recorded.end is not None and recorded.start is not None and not call.shrunk:
            duration = recorded.end - recorded.start
        previous_start = recorded.start
        new_index[position] = len(calls)
        calls.append(replace(call, index=len(calls), gap_ns=gap, recorded_ns=duration))
    waits = _waits_before_calls(recorded_calls, new_index)
    calls = [replace(call, waits_for=indices) for call, indices in zip(calls, waits, strict=True)]
    if starts is not None:
        calls = place_waits(calls, [recorded_calls[position] for position in new_index], starts)
    return calls, skipped


def _map_call(
    recorded: RecordedCall, rank: int, new_ranks: Mapping[int, int], world: tuple[int, ...]
) -> Call:
    """Convert a recorded call to a planned `Call`; `map_calls` then sets index, gap, recorded duration and waits.

    The ranks of the call's group are sorted, since torch.distributed sorts the ranks of a group that it creates; sizes
    per rank are reordered likewise. A group that was created unsorted (sort_ranks=False) is replayed sorted.

    Raises:
        _NotReplayable: The call has no meaning among the replayed ranks, or something was not recorded.
    """
    if recorded.missing:
        raise _NotReplayable(recorded.missing)
    group = recorded.group or world
    if rank not in group:
        raise _NotReplayable(f"rank {rank} is not in its group")
    members = tuple(sorted(new_ranks[member] for member in group if member in new_ranks))
    call = Call(
        0,
        recorded.collective,
        members,
        recorded.dtype or "float",
        (),
        (),
        reduce_op=recorded.reduce_op or "sum",
        is_async=bool(recorded.is_async),
        coalesced=recorded.coalesced,
        seq=recorded.seq,
        name=recorded.name,
        node=recorded.node,
        shrunk=len(members) < len(group),
    )
    if recorded.collective in MESSAGES:
        return _map_message(call, recorded, rank, new_ranks)
    if len(members) < 2 <= len(group):
        raise _NotReplayable("no other rank of its group is replayed")
    call = replace(call, root=_map_root(recorded, group, members, new_ranks))
    if recorded.collective == "barrier":
        return call
    if not (recorded.inputs or recorded.outputs):
        raise _NotReplayable("its size was not recorded")
    return _map_sizes(call, recorded, group, new_ranks)


def _map_message(call: Call, recorded: RecordedCall, rank: int, new_ranks: Mapping[int, int]) -> Call:
    if recorded.peer is None:
        raise _NotReplayable("its peer was not recorded")
    if recorded.peer not in new_ranks:
        raise _NotReplayable(f"its peer, rank {recorded.peer}, is not replayed")
    if recorded.peer == rank:
        raise _NotReplayable("its peer is the rank itself")
    peer = new_ranks[recorded.peer]
    sizes = recorded.inputs or recorded.outputs
    call = replace(call, group=tuple(sorted((new_ranks[rank], peer))), peer=peer, shrunk=False)
    return replace(call, inputs=sizes) if recorded.collective == "send" else replace(call, outputs=sizes)


def _map_root(
    recorded: RecordedCall, group: Sequence[int], members: Collection[int], new_ranks: Mapping[int, int]
) -> int | None:
    """Return the root of a collective as a rank of the replay (default: first of the group); None if it has no root."""
    if recorded.collective not in ROOTED:
        return None
    root = new_ranks.get(group[0] if recorded.root is None else recorded.root)
    if root not in members:
        raise _NotReplayable("its root is not replayed")
    return root


def _map_sizes(
    call: Call, recorded: RecordedCall, group: Sequence[int], new_ranks: Mapping[int, int]
) -> Call:
    size = len(group)
    recorded = replace(
        recorded,
        in_split=_split_elements(recorded.in_split, recorded, size),
        out_split=_split_elements(recorded.out_split, recorded, size),
    )
    members = sorted(
        (index for index, member in enumerate(group) if member in new_ranks),
        key=lambda index: new_ranks[group[index]],
    )
    inputs, outputs = _shrink_sizes(recorded, size, members)
    in_split, out_split = (
        tuple(split[index] for index in members) if len(split) == size else ()
        for split in (recorded.in_split, recorded.out_split)
    )
    if max(sum(in_split), sum(out_split)) > MAX_ELEMENTS:
        raise _NotReplayable("its splits have more than 2**50 elements")
    return replace(call, inputs=inputs, outputs=outputs, in_split=in_split, out_split=out_split)


def _split_elements(split: tuple[int, ...], recorded: RecordedCall, size: int) -> tuple[int, ...]:
    """Convert the split sizes of an all-to-all from tensor rows (as recorded) to elements; () if any are missing."""
    if len(split) != size:
        return ()
    for sizes, row_count in (
        (recorded.inputs, sum(recorded.in_split)),
        (recorded.outputs, sum(recorded.out_split)),
    ):
        if len(sizes) == 1 and row_count and sizes[0] % row_count == 0:
            return tuple(rows * (sizes[0] // row_count) for rows in split)
    return split


def _shrink_sizes(
    recorded: RecordedCall, size: int, members: list[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return a call's sizes for a group reduced to ``members`` (indices): tensors that are split among ranks shrink."""
    inputs, outputs = recorded.inputs, recorded.outputs

    def shrink(sizes: tuple[int, ...], split: tuple[int, ...]) -> tuple[int, ...]:
        total = sum(split)
        if len(split) == size and len(sizes) == 1 and total:
            return (sizes[0] * sum(split[index] for index in members) // total,)
        if len(sizes) == size and size > 1 and not recorded.coalesced:
            return tuple(sizes[index] for index in members)
        return tuple(elements * len(members) // size for elements in sizes)

    if recorded.collective in ("all_gather", "gather"):
        outputs = shrink(outputs, ())
    elif recorded.collective in ("reduce_scatter", "scatter"):
        inputs = shrink(inputs, ())
    elif recorded.collective == "all_to_all":
        inputs, outputs = shrink(inputs, recorded.in_split), shrink(outputs, recorded.out_split)
        if len(inputs) == len(outputs) == 1 and not recorded.in_split and not recorded.out_split:
            outputs = inputs  # equal shares
    return inputs, outputs


def _waits_before_calls(
    recorded_calls: list[RecordedCall], new_index: Mapping[int, int]
) -> Iterator[tuple[int, ...]]:
    """Yield, for each mapped call, the indices of the earlier calls to wait for before it is issued."""
    pending: list[int] = []
    for position in new_index:
        call, waits = recorded_calls[position], _recorded_waits(recorded_calls, position)
        completed = {
            earlier
            for earlier in pending
            if earlier in waits or not _may_be_in_flight(recorded_calls[earlier], call)
        }
        if len(pending) - len(completed) >= _MAX_IN_FLIGHT:
            # The oldest; not a message, since its other end may be called only after this call.
            in_flight = [earlier for earlier in pending if earlier not in completed]
            completed.update(
                [earlier for earlier in in_flight if recorded_calls[earlier].collective not in MESSAGES][:1]
            )
        yield tuple(new_index[earlier] for earlier in pending if earlier in completed)
        pending = [earlier for earlier in pending if earlier not in completed] + [position]


def _recorded_waits(recorded_calls: list[RecordedCall], position: int) -> set[int]:
    """Return the positions of calls whose wait was recorded during the 256 calls before ``position``."""
    return {
        waited
        for call in recorded_calls[max(0, position - _MAX_IN_FLIGHT) : position]
        for waited in call.waits
    }


def _may_be_in_flight(call: RecordedCall, later: RecordedCall) -> bool:
    """Return whether a call may be incomplete when a later call is issued, judged by recorded times or asynchrony."""
    if call.end is not None and later.start is not None:
        return call.end > later.start
    if call.collective in MESSAGES:
        return later.collective in MESSAGES
    # Recorders of NCCL record which call was waited for; others at least whether it was asynchronous.
    return call.seq is not None or bool(call.is_async)


def scale_call(call: Call, scale: float) -> Call:
    """Multiply the tensor sizes of a planned call by ``scale``, and remove its recorded duration.

    Raises:
        EtloomError: The sizes become larger than any memory.
    """
    if scale == 1.0:
        return call
    if max(map(sum, (call.inputs, call.outputs, call.in_split, call.out_split))) * scale > MAX_ELEMENTS:
        raise EtloomError(
            f"{call.collective} (call {call.index}) has more than 2**50 elements at scale {scale:g}",
            remedy="use a smaller --scale",
        )
    size = len(call.group)
    call = replace(call, recorded_ns=None)

    def scale_split(sizes: tuple[int, ...]) -> tuple[int, ...]:
        # The number that one rank sends and another receives is rounded alike on both.
        return tuple(max(1, round(elements * scale)) if elements else 0 for elements in sizes)

    if call.in_split or call.out_split:
        in_split, out_split = scale_split(call.in_split), scale_split(call.out_split)
        inputs = (sum(in_split),) if in_split else (size * max(1, round(call.inputs[0] // size * scale)),)
        outputs = (sum(out_split),) if out_split else (size * max(1, round(call.outputs[0] // size * scale)),)
        return replace(call, inputs=inputs, outputs=outputs, in_split=in_split, out_split=out_split)

    def scale_sizes(sizes: tuple[int, ...]) -> tuple[int, ...]:
        # A size that is divided among ranks stays divisible.
        return tuple(
            max(1, round(elements * scale / size)) * size if elements >= size else elements
            for elements in sizes
        )

    return replace(
        call, inputs=scale_sizes(call.inputs), outputs=scale_sizes(call.outputs), in_split=(), out_split=()
    )


def select_calls(calls: Sequence[Call], positions: Collection[int]) -> tuple[Call, ...]:
    """Return the calls at ``positions``, renumbered; drop waits for omitted calls, and add up the gaps around these."""
    new_index: dict[int, int] = {}
    selected: list[Call] = []
    gap: int | None = None
    for position, call in enumerate(calls):
        if call.gap_ns is not None:
            gap = (gap or 0) + call.gap_ns
        if position in positions:
            waits_for = tuple(new_index[earlier] for earlier in call.waits_for if earlier in new_index)
            new_index[call.index] = len(selected)
            selected.append(
                replace(call, index=len(selected), waits_for=waits_for, gap_ns=gap if selected else None)
            )
            gap = None
    return tuple(selected)
