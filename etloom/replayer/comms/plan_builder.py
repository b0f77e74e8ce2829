"""Builds the plan of a job's communication from what each rank recorded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from etloom.core.errors import EtloomError
from etloom.core.text import format_ranks
from etloom.core.trace import Job
from etloom.replayer.comms.call_mapping import map_calls, scale_call, select_calls
from etloom.replayer.comms.call_matching import match_calls
from etloom.replayer.comms.group_inference import infer_groups
from etloom.replayer.comms.operator_waits import node_starts
from etloom.replayer.plan import Call, Plan, Skipped
from etloom.replayer.recorded_calls import (
    Instance,
    RecordedCall,
    extract_calls,
    matched_instances,
    recorded_groups,
    world_ranks,
)

_Extracted = tuple[list[RecordedCall], list[tuple[str, str]]]


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
    """Build the plan of a job's communication.

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
    """Extract the calls of every rank; return them and the number of replayed calls whose group was inferred."""
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
    """Merge equal entries, adding up their counts."""
    counts: dict[tuple[int, str, str], int] = {}
    for entry in skipped:
        key = (entry.rank, entry.name, entry.reason)
        counts[key] = counts.get(key, 0) + 1
    return tuple(Skipped(*key, count) for key, count in counts.items())
