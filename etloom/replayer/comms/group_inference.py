"""Which group a call is in, where the recording does not say, as gloo's execution traces do not.

Ranks make their calls in an order that came to its end, and the groups that there were are known. So the calls are
played through: the next call of a rank is one of a known group if it is next on all ranks of that group, and they agree
on what it is. A group waits while a larger one may come to that call, as long as others can go on. What fits none stays
without a group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from etloom.replayer.plan import MESSAGES
from etloom.replayer.recorded_calls import RecordedCall, global_rank

Group = tuple[int, ...]


def infer_groups(rows: Mapping[int, list[RecordedCall]], known: Collection[Group]) -> None:
    """Give the calls without a group theirs, or the reason why they have none. rows: of every rank of the world, in
    order. known: the groups that were made."""
    told = {row.group for own in rows.values() for row in own if row.group}
    groups = [group for group in {*known, *told} if rows.keys() >= set(group)]
    left = _PendingCalls(rows, sorted(groups, key=lambda group: (-len(group), group)))
    while group := left.next():
        for rank in group:
            row = left.take(rank)
            if row.group is None:
                row.group, row.root = group, global_rank(row.root, row.name, group)
    for row in left.rows():
        if row.group is None:
            row.unknown = "its group was not recorded, and what other ranks call does not tell it"


class _PendingCalls:
    """The collective calls of each rank that are not played yet. groups: largest first."""

    def __init__(self, rows: Mapping[int, list[RecordedCall]], groups: list[Group]) -> None:
        self._groups = groups
        self._queues = {
            rank: [row for row in own if row.collective not in MESSAGES] for rank, own in rows.items()
        }
        self._kinds = {rank: Counter(map(_call_signature, own)) for rank, own in self._queues.items()}
        self._at = dict.fromkeys(rows, 0)
        self._cannot: set[Group] = set()  # until one of their ranks is at another call

    def next(self) -> Group | None:
        """A group whose next call can be played; None at the end, or where none can."""
        first = None
        for group in self._groups:
            if group in self._cannot:
                continue
            if not self._meets(group):
                self._cannot.add(group)
            elif not self._may_be_larger(group):
                return group
            else:
                first = first or group
        return first

    def take(self, rank: int) -> RecordedCall:
        row = self._queues[rank][self._at[rank]]
        self._at[rank] += 1
        self._kinds[rank][_call_signature(row)] -= 1
        self._cannot = {group for group in self._cannot if rank not in group}
        return row

    def rows(self) -> Iterator[RecordedCall]:
        for rank, own in self._queues.items():
            yield from own[self._at[rank] :]

    def _head(self, rank: int) -> RecordedCall | None:
        return self._queues[rank][self._at[rank]] if self._at[rank] < len(self._queues[rank]) else None

    def _meets(self, group: Group) -> bool:
        """Whether the next calls of all ranks of a group can be one call of that group."""
        heads = [self._head(rank) for rank in group]
        kinds = {_call_signature(row) for row in heads if row is not None}
        return len(kinds) == 1 and all(
            row is not None and _may_be_group(row.group, group) and _sizes_fit_group(row, len(group))
            for row in heads
        )

    def _may_be_larger(self, group: Group) -> bool:
        """Whether all ranks of a larger group that these are in are at such a call, or come to one."""
        row = self._head(group[0])
        if row is None or row.group:
            return False
        kind = _call_signature(row)
        return any(
            set(group) < set(other)
            and _sizes_fit_group(row, len(other))
            and all(self._kinds[rank][kind] for rank in other)
            for other in self._groups
        )


def _may_be_group(told: Group | None, group: Group) -> bool:
    """Whether a call may be of a group: of one set of ranks, ranks may name them in different orders."""
    return told in (None, group) or (told is not None and sorted(told) == sorted(group))


def _call_signature(row: RecordedCall) -> tuple[object, ...]:
    """What all ranks of a call agree on: also on its root, which is a place in the group where that is not known."""
    return row.collective, row.dtype, _common_elements(row), None if row.group else row.root


def _common_elements(row: RecordedCall) -> int | None:
    """The elements that all ranks of a call have alike."""
    if row.collective in ("barrier", "all_to_all"):
        return None
    sizes = row.outputs if row.collective in ("reduce_scatter", "scatter") else row.inputs
    return sum(sizes or row.outputs or row.inputs)


def _sizes_fit_group(row: RecordedCall, size: int) -> bool:
    """Whether the sizes of a call are those of a group of so many ranks."""
    ins, outs = row.inputs, row.outputs
    for split in (row.in_split, row.out_split):
        if split and len(split) != size:
            return False
    if row.coalesced or not (ins and outs):
        return True
    match row.collective:
        case "all_gather":
            return sum(outs) == size * sum(ins)
        case "reduce_scatter":
            return sum(ins) == size * sum(outs)
        case "gather":
            return len(outs) == size or sum(outs) in (0, sum(ins))
        case "scatter":
            return len(ins) == size or sum(ins) in (0, sum(outs))
        case "all_to_all" if len(ins) > 1 or len(outs) > 1:
            return len(ins) == len(outs) == size
    return True
