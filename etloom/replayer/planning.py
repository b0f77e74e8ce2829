"""From a recorded job to the plan of its communication."""

from __future__ import annotations

from collections.abc import Collection

from etloom.errors import EtloomError
from etloom.ranks import in_words
from etloom.replayer.among import began
from etloom.replayer.grouping import told_by_order
from etloom.replayer.mapping import chosen, mapped, scaled
from etloom.replayer.matching import matched
from etloom.replayer.plan import Plan, Skipped
from etloom.replayer.recorded import known_groups, meetings, rows_of, world_of
from etloom.trace import Job


def plan(
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
        raise EtloomError(f"rank {missing[0]} was not recorded", remedy=f"recorded: {in_words(job)}")
    size = world or len(played)
    if size > len(played):
        raise EtloomError(
            f"{size} processes, but {len(played)} recorded ranks to play",
            remedy=f"start {len(played)} processes, or play one trace on all of them (--use-one-trace)",
        )
    played = played[:size]
    place = {rank: at for at, rank in enumerate(played)}
    met = meetings(job)
    known = known_groups(job)
    if len(known) > 1:
        # Who met by time alone may be of two groups that were busy at once.
        met = {
            rank: {event: ((), start, end) for event, (_, start, end) in own.items()}
            for rank, own in met.items()
        }
    recorded = {rank: rows_of(trace, list(job), met.get(rank, {})) for rank, trace in job.items()}
    guessed = 0
    if len(known) > 1:
        guessed = sum(row.group is None and row.peer is None for rank in played for row in recorded[rank][0])
        told_by_order({rank: rows for rank, (rows, _) in recorded.items()}, known)
    calls, skipped = [], []
    for rank in played:
        rows, left = recorded[rank]
        skipped += [Skipped(place[rank], *one) for one in left]
        own, lost = mapped(
            rows, rank, place, world_of(job, job[rank]), began(job[rank]) if operators else None
        )
        skipped += [Skipped(place[rank], *one) for one in lost]
        wanted = [at for at, call in enumerate(own) if not only or call.collective in only]
        calls.append(chosen([scaled(call, scale) for call in own], set(wanted[:first])))
    kept, unmet = matched(calls)
    skipped += unmet
    calls = [chosen(own, places) for own, places in zip(calls, kept, strict=True)]
    if not any(calls):
        reasons = "; ".join(sorted({f"{one.name}: {one.reason}" for one in skipped})[:3])
        raise EtloomError(
            "the run holds no communication that can be replayed" + (f" ({reasons})" if reasons else ""),
            remedy="record an execution trace (etloom collect) of a job with several ranks"
            if len(job) > 1 or not skipped
            else "play the one trace on all processes (--use-one-trace)",
        )
    of = max(len(world_of(job, job[rank])) for rank in played)
    return Plan(tuple(calls), _summed(skipped), tuple(played), guessed, of)


def _summed(skipped: list[Skipped]) -> tuple[Skipped, ...]:
    sums: dict[tuple[int, str, str], int] = {}
    for one in skipped:
        key = (one.rank, one.name, one.reason)
        sums[key] = sums.get(key, 0) + 1
    return tuple(Skipped(*key, count) for key, count in sums.items())
