"""From a recorded job to the plan of its communication."""

from __future__ import annotations

from collections.abc import Collection

from etloom.core.errors import EtloomError
from etloom.core.text import format_ranks
from etloom.core.trace import Job
from etloom.replayer.comms.call_mapping import map_calls, scale_call, select_calls
from etloom.replayer.comms.call_matching import match_calls
from etloom.replayer.comms.group_inference import infer_groups
from etloom.replayer.comms.operator_waits import node_starts
from etloom.replayer.plan import Plan, Skipped
from etloom.replayer.recorded_calls import extract_calls, matched_instances, recorded_groups, world_ranks


def build_plan(
    job: Job,
    *,
    world: int | None = None,
    ranks: Collection[int] | None = None,
    only: Collection[str] = (),
    first: int | None = None,
    scale: float = 1.0,
    operators: bool = False,
) -> Plan:
    """The plan of a job's communication.

    world: how many ranks the replay has; fewer than recorded: the first ones of ``ranks`` (default: of all) are
    played, groups keep the members that are, and sizes follow the groups. only: these collectives. first: this many
    calls of each rank, less those that another rank then lacks. scale: times the sizes, at least one element.
    operators: they are played too, and calls tell before which of them they are waited for.

    Raises EtloomError where nothing was communicated, ranks contradict each other, or the world is larger than what was
    recorded.
    """
    played = sorted(ranks) if ranks else list(job)
    if missing := [rank for rank in played if rank not in job]:
        raise EtloomError(f"rank {missing[0]} was not recorded", remedy=f"recorded: {format_ranks(job)}")
    size = world or len(played)
    if size > len(played):
        raise EtloomError(
            f"{size} processes, but {len(played)} recorded ranks to play",
            remedy=f"start {len(played)} processes, or play one trace on all of them (--use-one-trace)",
        )
    played = played[:size]
    place = {rank: at for at, rank in enumerate(played)}
    met = matched_instances(job)
    known = recorded_groups(job)
    if len(known) > 1:
        # Who met by time alone may be of two groups that were busy at once.
        met = {
            rank: {event: ((), start, end) for event, (_, start, end) in own.items()}
            for rank, own in met.items()
        }
    recorded = {rank: extract_calls(trace, list(job), met.get(rank, {})) for rank, trace in job.items()}
    guessed = 0
    if len(known) > 1:
        guessed = sum(row.group is None and row.peer is None for rank in played for row in recorded[rank][0])
        infer_groups({rank: rows for rank, (rows, _) in recorded.items()}, known)
    calls, skipped = [], []
    for rank in played:
        rows, left = recorded[rank]
        skipped += [Skipped(place[rank], *one) for one in left]
        own, lost = map_calls(
            rows, rank, place, world_ranks(job, job[rank]), node_starts(job[rank]) if operators else None
        )
        skipped += [Skipped(place[rank], *one) for one in lost]
        wanted = [at for at, call in enumerate(own) if not only or call.collective in only]
        calls.append(select_calls([scale_call(call, scale) for call in own], set(wanted[:first])))
    kept, unmet = match_calls(calls)
    skipped += unmet
    calls = [select_calls(own, places) for own, places in zip(calls, kept, strict=True)]
    if not any(calls):
        reasons = "; ".join(sorted({f"{one.name}: {one.reason}" for one in skipped})[:3])
        raise EtloomError(
            "the run holds no communication that can be replayed" + (f" ({reasons})" if reasons else ""),
            remedy="record an execution trace (etloom collect) of a job with several ranks"
            if len(job) > 1 or not skipped
            else "play the one trace on all processes (--use-one-trace)",
        )
    of = max(len(world_ranks(job, job[rank])) for rank in played)
    return Plan(tuple(calls), _count_skipped(skipped), tuple(played), guessed, of)


def _count_skipped(skipped: list[Skipped]) -> tuple[Skipped, ...]:
    sums: dict[tuple[int, str, str], int] = {}
    for one in skipped:
        key = (one.rank, one.name, one.reason)
        sums[key] = sums.get(key, 0) + 1
    return tuple(Skipped(*key, count) for key, count in sums.items())
