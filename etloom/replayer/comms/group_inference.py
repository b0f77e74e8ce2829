"""Infers the process groups of calls whose group was not recorded, as in execution traces of gloo.

All recorded calls completed in their order, and the groups that existed are known. So the calls are simulated: the next
call of a rank belongs to a known group if it is next on all ranks of that group and they agree on its attributes. A
group is deferred while a larger group may come to the same call, as long as others can proceed. A call that fits no
group stays without one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from etloom.replayer.plan import MESSAGES
from etloom.replayer.recorded_calls import Group, RecordedCall, global_rank


def infer_groups(calls_by_rank: Mapping[int, list[RecordedCall]], groups: Collection[Group]) -> None:
    """Infer and set the unrecorded groups of calls; where that fails, set the reason (`RecordedCall.missing`).

    Args:
        calls_by_rank: The calls of every rank of the world, in their order. They are modified.
        groups: The groups that were created.
    """
    recorded = {call.group for calls in calls_by_rank.values() for call in calls if call.group}
    candidates = [group for group in {*groups, *recorded} if calls_by_rank.keys() >= set(group)]
    pending = _PendingCalls(calls_by_rank, sorted(candidates, key=lambda group: (-len(group), group)))
    while group := pending.next_group():
        for rank in group:
            call = pending.pop(rank)
            if call.group is None:
                call.group, call.root = group, global_rank(call.root, call.name, group)
    for call in pending.remaining():
        if call.group is None:
            call.missing = "its group was not recorded and cannot be inferred from the calls of other ranks"


class _PendingCalls:
    """Queues of each rank's collective calls not yet assigned to a group; ``groups``: candidates, largest first."""

    def __init__(self, calls_by_rank: Mapping[int, list[RecordedCall]], groups: list[Group]) -> None:
        self._groups = groups
        self._queues = {
            rank: [call for call in calls if call.collective not in MESSAGES]
            for rank, calls in calls_by_rank.items()
        }
        self._signature_counts = {
            rank: Counter(map(_call_signature, calls)) for rank, calls in self._queues.items()
        }
        self._positions = dict.fromkeys(calls_by_rank, 0)
        self._blocked: set[Group] = set()  # until one of their ranks comes to another call

    def next_group(self) -> Group | None:
        """Return a group whose ranks' next calls can be a single collective of that group; None if there is none."""
        fallback = None
        for group in self._groups:
            if group in self._blocked:
                continue
            if not self._can_call(group):
                self._blocked.add(group)
            elif not self._may_be_larger(group):
                return group
            else:
                fallback = fallback or group
        return fallback

    def pop(self, rank: int) -> RecordedCall:
        call = self._queues[rank][self._positions[rank]]
        self._positions[rank] += 1
        self._signature_counts[rank][_call_signature(call)] -= 1
        self._blocked = {group for group in self._blocked if rank not in group}
        return call

    def remaining(self) -> Iterator[RecordedCall]:
        for rank, calls in self._queues.items():
            yield from calls[self._positions[rank] :]

    def _head(self, rank: int) -> RecordedCall | None:
        position = self._positions[rank]
        return self._queues[rank][position] if position < len(self._queues[rank]) else None

    def _can_call(self, group: Group) -> bool:
        """Return whether the next calls of a group's ranks agree, so that they can be a collective of that group."""
        heads = [self._head(rank) for rank in group]
        signatures = {_call_signature(call) for call in heads if call is not None}
        return len(signatures) == 1 and all(
            call is not None and _may_be_group(call.group, group) and _sizes_fit_group(call, len(group))
            for call in heads
        )

    def _may_be_larger(self, group: Group) -> bool:
        """Return whether the next call may belong to a larger group, whose ranks all have an equal pending call."""
        call = self._head(group[0])
        if call is None or call.group:
            return False
        signature = _call_signature(call)
        return any(
            set(group) < set(other)
            and _sizes_fit_group(call, len(other))
            and all(self._signature_counts[rank][signature] for rank in other)
            for other in self._groups
        )


def _may_be_group(recorded: Group | None, group: Group) -> bool:
    """Return whether a recorded group is unknown or consists of the same ranks as ``group``, in any order."""
    return recorded in (None, group) or (recorded is not None and sorted(recorded) == sorted(group))


def _call_signature(call: RecordedCall) -> tuple[object, ...]:
    """Return the attributes that are equal on all ranks of a call: collective, dtype, elements and, if needed, root."""
    return call.collective, call.dtype, _common_elements(call), None if call.group else call.root


def _common_elements(call: RecordedCall) -> int | None:
    """Return the element count of a call that is equal on all ranks (of inputs or outputs); None if there is none."""
    if call.collective in ("barrier", "all_to_all"):
        return None
    sizes = call.outputs if call.collective in ("reduce_scatter", "scatter") else call.inputs
    return sum(sizes or call.outputs or call.inputs)


def _sizes_fit_group(call: RecordedCall, size: int) -> bool:
    """Return whether the sizes of a call are possible in a group of ``size`` ranks."""
    inputs, outputs = call.inputs, call.outputs
    for split in (call.in_split, call.out_split):
        if split and len(split) != size:
            return False
    if call.coalesced or not (inputs and outputs):
        return True
    match call.collective:
        case "all_gather":
            return sum(outputs) == size * sum(inputs)
        case "reduce_scatter":
            return sum(inputs) == size * sum(outputs)
        case "gather":
            return len(outputs) == size or sum(outputs) in (0, sum(inputs))
        case "scatter":
            return len(inputs) == size or sum(inputs) in (0, sum(outputs))
        case "all_to_all" if len(inputs) > 1 or len(outputs) > 1:
            return len(inputs) == len(outputs) == size
    return True
