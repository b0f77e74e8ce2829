"""Builds the plan of a communication replay from a recorded job: which ranks, calls and sizes are replayed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl

from etloom import formats
from etloom.core import categories
from etloom.core.errors import EtloomError, InvalidValue, UnknownName
from etloom.core.text import format_ranks
from etloom.core.trace import Job
from etloom.replayer.comms.call_mapping import map_calls, scale_call, select_calls
from etloom.replayer.comms.operator_waits import node_starts
from etloom.replayer.plan import COLLECTIVES, MESSAGES, REDUCING, Call, Plan, Skipped
from etloom.replayer.recorded_calls import (
    Group,
    Instance,
    RecordedCall,
    extract_calls,
    global_rank,
    matched_instances,
    recorded_groups,
    world_ranks,
)

_Extracted = tuple[list[RecordedCall], list[tuple[str, str]]]

TRACE_TYPES = ("et", "kineto", "basic")
_MAX_RANKS = 1 << 20
"""A list of more ranks is assumed to be a typing error."""
_MAX_PLANNED_RANKS = 1024
"""Maximum number of copies of one trace in the plan of a single process."""


@dataclass(frozen=True)
class PlanOptions:
    """Options that select the ranks and calls of a job to replay, and change their sizes.

    Attributes:
        trace_type: Require this type of trace (TRACE_TYPES).
        one_for_all: Replay the lowest recorded rank on all processes.
        ranks: Recorded ranks to replay (default: all).
        shrink: With fewer processes than ranks, replay the first ranks.
        only: Collectives to keep (default: all).
        first: Number of calls to keep per rank.
        scale: Factor for the sizes.
        balance: Give every rank of an all-to-all the same share.
        operators: Operators are replayed too.
    """

    trace_type: str | None = None
    one_for_all: bool = False
    ranks: Sequence[int] | None = None
    shrink: bool = False
    only: Collection[str] = ()
    first: int | None = None
    scale: float = 1.0
    balance: bool = False
    operators: bool = False


def plan_replay(job: Job, world_size: int, options: PlanOptions = PlanOptions()) -> Plan:
    """Plan the communication replay of a job on ``world_size`` processes; with 1 process, plan for all recorded ranks.

    Raises:
        EtloomError: The options do not fit the job or the number of processes.
    """
    if unknown := sorted(set(options.only) - COLLECTIVES - MESSAGES):
        raise UnknownName("collective", unknown[0], sorted(COLLECTIVES | MESSAGES), option="only")
    if options.trace_type is not None:
        _require_trace_type(job, options.trace_type)
    resized = False
    if options.one_for_all:
        job, resized = _replicate_lowest_rank(job, world_size)
    rank_count = len(options.ranks) if options.ranks else len(job)
    if world_size < rank_count and not options.shrink and world_size > 1:
        raise EtloomError(
            f"{world_size} processes for {rank_count} recorded ranks",
            remedy=f"start {rank_count} processes, or add --shrink to replay only the first {world_size} ranks",
        )
    plan = build_plan(
        job,
        world_size=None if world_size == 1 and rank_count > 1 else world_size,
        ranks=options.ranks,
        only=options.only,
        first=options.first,
        scale=options.scale,
        operators=options.operators,
    )
    if options.balance:
        plan = _balance_all_to_alls(plan)
    return _drop_recorded_times(plan) if resized else plan


def build_plan(
    job: Job,
    *,
    world_size: int | None = None,
    ranks: Collection[int] | None = None,
    only: Collection[str] = (),
    first: int | None = None,
    scale: float = 1.0,
    operators: bool = False,
) -> Plan:
    """Build the plan that replays the communication of a job.

    Args:
        job: The linked job.
        world_size: Number of ranks of the replay (default: all of ``ranks``). If smaller, the first ranks are replayed,
            groups keep the members that are replayed, and sizes shrink with the groups.
        ranks: Recorded ranks to replay (default: all).
        only: Collectives to keep (default: all).
        first: Number of calls to keep per rank, before calls without a counterpart are dropped.
        scale: Factor for the sizes, which stay at least one element.
        operators: Operators are replayed too: calls also name the operator before which they are waited for.

    Raises:
        EtloomError: The job has no communication, ranks contradict each other, or ``world_size`` is larger than the
            number of recorded ranks.
    """
    replayed = _select_ranks(job, ranks, world_size)
    new_ranks = {rank: index for index, rank in enumerate(replayed)}
    extracted, inferred_groups = _extract_all(job, matched_instances(job), replayed)
    calls_by_rank: list[tuple[Call, ...]] = []
    skipped: list[Skipped] = []
    for rank in replayed:
        recorded_calls, not_extracted = extracted[rank]
        starts = node_starts(job[rank]) if operators else None
        calls, not_mapped = map_calls(recorded_calls, rank, new_ranks, world_ranks(job, job[rank]), starts)
        skipped += [Skipped(new_ranks[rank], *reason) for reason in (*not_extracted, *not_mapped)]
        positions = [index for index, call in enumerate(calls) if not only or call.collective in only]
        scaled = [scale_call(call, scale) for call in calls]
        calls_by_rank.append(select_calls(scaled, set(positions[:first])))
    matched_positions, unmatched = match_calls(calls_by_rank)
    skipped += unmatched
    matched = [
        select_calls(calls, positions)
        for calls, positions in zip(calls_by_rank, matched_positions, strict=True)
    ]
    if not any(matched):
        raise _no_communication_error(job, skipped)
    recorded_world_size = max(len(world_ranks(job, job[rank])) for rank in replayed)
    return Plan(
        tuple(matched), _count_skipped(skipped), tuple(replayed), inferred_groups, recorded_world_size
    )


def _select_ranks(job: Job, ranks: Collection[int] | None, world_size: int | None) -> list[int]:
    """Return the recorded ranks to replay, ascending."""
    candidates = sorted(ranks) if ranks else list(job)
    if missing := [rank for rank in candidates if rank not in job]:
        raise EtloomError(f"rank {missing[0]} was not recorded", remedy=f"recorded: {format_ranks(job)}")
    size = world_size or len(candidates)
    if size > len(candidates):
        raise EtloomError(
            f"{size} processes, but only {len(candidates)} recorded ranks to replay",
            remedy=f"start {len(candidates)} processes, or replay one trace on all of them (--use-one-trace)",
        )
    return candidates[:size]


def _extract_all(
    job: Job, instances: Mapping[int, Mapping[int, Instance]], replayed: Sequence[int]
) -> tuple[Mapping[int, _Extracted], int]:
    """Extract the calls of every rank and infer unrecorded groups; return the calls, and how many lacked a group."""
    groups = recorded_groups(job)
    if len(groups) > 1:
        # A match by time alone may mix two groups that communicated at the same time.
        instances = {
            rank: {event: Instance((), instance.start, instance.end) for event, instance in by_event.items()}
            for rank, by_event in instances.items()
        }
    extracted = {
        rank: extract_calls(trace, list(job), instances.get(rank, {})) for rank, trace in job.items()
    }
    if len(groups) <= 1:
        return extracted, 0
    unknown = sum(
        call.group is None and call.peer is None for rank in replayed for call in extracted[rank][0]
    )
    infer_groups({rank: calls for rank, (calls, _) in extracted.items()}, groups)
    return extracted, unknown


def _no_communication_error(job: Job, skipped: Sequence[Skipped]) -> EtloomError:
    reasons = "; ".join(sorted({f"{entry.name}: {entry.reason}" for entry in skipped})[:3])
    return EtloomError(
        "the run has no communication that can be replayed" + (f" ({reasons})" if reasons else ""),
        remedy="record an execution trace (etloom collect) of a job with several ranks"
        if len(job) > 1 or not skipped
        else "replay the one trace on all processes (--use-one-trace)",
    )


def _count_skipped(skipped: Sequence[Skipped]) -> tuple[Skipped, ...]:
    """Merge skipped calls with equal rank, name and reason into a single entry that states how many there are."""
    counts: dict[tuple[int, str, str], int] = {}
    for entry in skipped:
        key = (entry.rank, entry.name, entry.reason)
        counts[key] = counts.get(key, 0) + 1
    return tuple(Skipped(*key, count) for key, count in counts.items())


def plan_early(make_plan: Callable[[int], Plan], world_size: int, path: Path | None) -> Callable[[int], Plan]:
    """Make the plan before torch is imported, which takes seconds, so that a wrong input is reported at once.

    A single process plans here. Of several processes none may end alone, so the first one plans once it can report an
    error to the others; here only the format of ``path`` is checked.

    Returns:
        A function for `run_session` that takes the number of processes.
    """
    if path is not None:
        formats.detect_format(path)
    if world_size > 1:
        return make_plan
    plan = check_world_size(make_plan(world_size), world_size)
    return lambda _: plan


def check_world_size(plan: Plan, world_size: int) -> Plan:
    """Return the plan if it is a plan for ``world_size`` processes; raise EtloomError otherwise."""
    ranks = plan.world_size
    if ranks != world_size:
        raise EtloomError(
            f"{ranks} ranks to replay, but {world_size} process",
            remedy=f"start {ranks} (torchrun --nproc-per-node {ranks} -m etloom ..., mpirun -np {ranks} etloom ..., "
            f"srun -n {ranks} etloom ...), or print the plan only (--dry-run)",
        )
    return plan


def parse_ranks(text: str) -> list[int]:
    """Parse a list of ranks such as 0,8-15; return them ascending, without duplicates.

    Raises:
        EtloomError: The text is not a list of ranks.
    """
    ranks: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < first + _MAX_RANKS:
            raise InvalidValue(
                f"{text!r} is not a list of ranks", remedy="expected e.g. 0,8-15", option="ranks"
            )
        ranks.update(range(first, last + 1))
    return sorted(ranks)


def _require_trace_type(job: Job, trace_type: str) -> None:
    if trace_type not in TRACE_TYPES:
        raise UnknownName("trace type", trace_type, TRACE_TYPES, option="trace_type")
    if trace_type == "basic":
        exists = any("param-basic" in trace.meta.get("formats", ()) for trace in job.values())
    else:
        table = "nodes" if trace_type == "et" else "events"
        exists = any(trace.table(table).height for trace in job.values())
    if not exists:
        raise EtloomError(
            f"no trace of type {trace_type!r}", where=job.meta.get("path"), remedy="omit --trace-type"
        )


def _replicate_lowest_rank(job: Job, world_size: int) -> tuple[Job, bool]:
    """Copy the trace of the lowest recorded rank to all ranks; collectives of all recorded ranks span all new ranks.

    Splits of an uneven all-to-all belong to one rank and would contradict each other: they become equal.

    Returns:
        The job, and whether its world has another size than the recorded one.
    """
    first = job[min(job)]
    first = first.replace(
        comms=first.comms.with_columns(pl.lit(None).alias(name) for name in ("in_split", "out_split"))
    )
    recorded = first.meta.get("world_size")
    sizes = pl.concat([first.groups["size"], first.comms["group_size"]]).drop_nulls()
    recorded_size = max([recorded if isinstance(recorded, int) else 1, *sizes.unique()])
    if world_size == 1 and 1 < recorded_size <= _MAX_PLANNED_RANKS:
        world_size = recorded_size
    if recorded_size < world_size:
        is_subgroup = pl.col("ranks").cast(pl.String).str.count_matches(",") + 1 < recorded_size
        ranks = pl.when(is_subgroup).then("ranks")
        first = first.replace(groups=first.groups.with_columns(ranks), comms=first.comms.with_columns(ranks))
    copies = {
        rank: first.replace(meta={"rank": rank, "world_size": world_size}) for rank in range(world_size)
    }
    return Job(copies, job.meta), world_size != recorded_size


def _drop_recorded_times(plan: Plan) -> Plan:
    calls = (tuple(replace(call, recorded_ns=None) for call in calls) for calls in plan.calls)
    return replace(plan, calls=tuple(calls))


def _balance_all_to_alls(plan: Plan) -> Plan:
    """Replace the sizes of each all-to-all by the mean over its ranks, divided into equal shares per peer."""
    totals: dict[tuple[tuple[int, ...], int], int] = {}
    for calls in plan.calls:
        for occurrence, call in _all_to_alls(calls):
            key = (call.group, occurrence)
            totals[key] = totals.get(key, 0) + sum(call.inputs)
    balanced = []
    for calls in plan.calls:
        sizes = {
            call.index: max(1, round(totals[call.group, occurrence] / len(call.group) ** 2)) * len(call.group)
            for occurrence, call in _all_to_alls(calls)
        }
        balanced.append(
            tuple(
                _with_equal_shares(call, sizes[call.index]) if call.index in sizes else call for call in calls
            )
        )
    return replace(plan, calls=tuple(balanced))


def _with_equal_shares(call: Call, size: int) -> Call:
    return replace(call, inputs=(size,), outputs=(size,), in_split=(), out_split=(), recorded_ns=None)


def _all_to_alls(calls: Sequence[Call]) -> Iterator[tuple[int, Call]]:
    """Yield (number, call) for each all-to-all of a rank; calls are numbered from 0 within each process group."""
    occurrences: dict[tuple[int, ...], int] = {}
    for call in calls:
        if call.collective == "all_to_all":
            occurrences[call.group] = occurrences.get(call.group, -1) + 1
            yield occurrences[call.group], call


# Infers the process groups of calls whose group was not recorded, as in execution traces of gloo.
#
# All recorded calls completed in their order, and the groups that existed are known. So the calls are simulated: the
# next call of a rank belongs to a known group if it is next on all ranks of that group and they agree on its
# attributes. A group is deferred while a larger group may come to the same call, as long as others can proceed. A
# call that fits no group stays without one.


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


# Matches planned calls across ranks; drops calls that another rank lacks, and rejects calls that do not agree.
#
# Calls match by position: the first call of each rank in a group, the second, and so on; likewise the messages that one
# rank sends to another, and those received there. Recordings that end at different calls on different ranks, and the
# first N calls of each rank, leave unmatched calls at the end; replayed, these would wait forever.

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
