"""Which part of a recorded job is played, on how many processes: a job and what was asked for in, a plan out."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import polars as pl

from etloom import formats
from etloom.core.errors import EtloomError, UnknownName
from etloom.core.trace import Job
from etloom.replayer.comms.plan_builder import build_plan
from etloom.replayer.plan import COLLECTIVES, MESSAGES, Call, Plan

TRACE_TYPES = ("et", "kineto", "basic")
_MAX_RANKS = 1 << 20
"""More ranks than that are a slip of the hand."""


def plan_replay(
    job: Job,
    world: int,
    *,
    trace_type: str | None = None,
    one_for_all: bool = False,
    ranks: Sequence[int] | None = None,
    shrink: bool = False,
    only: Collection[str] = (),
    first: int | None = None,
    scale: float = 1.0,
    balance: bool = False,
    operators: bool = False,
) -> Plan:
    """The plan for ``world`` processes; one process alone plans for all recorded ranks.

    trace_type: insist on one of `TYPES`. one_for_all: play the lowest recorded rank on all processes. ranks: these.
    shrink: play the first ranks where there are fewer processes. only, first, scale, operators: as for
    `planning.plan`. balance: give every rank of an all-to-all the same share. Raises EtloomError where that cannot be.
    """
    if unknown := sorted(set(only) - COLLECTIVES - MESSAGES):
        raise UnknownName("collective", unknown[0], sorted(COLLECTIVES | MESSAGES), option="only")
    if trace_type is not None:
        _require_trace_type(job, trace_type)
    other = False
    if one_for_all:
        job, other = _replicate_lowest_rank(job, world)
    played = len(ranks) if ranks else len(job)
    if world < played and not shrink and world > 1:
        raise EtloomError(
            f"{world} processes for {played} recorded ranks",
            remedy=f"start {played}, or add --shrink to play the first {world} of them",
        )
    alone = world == 1 and played > 1
    made = build_plan(
        job,
        world=None if alone else world,
        ranks=ranks,
        only=only,
        first=first,
        scale=scale,
        operators=operators,
    )
    made = _balance_all_to_alls(made) if balance else made
    return _drop_recorded_times(made) if other else made


def plan_early(make: Callable[[int], Plan], world: int, path: Path) -> Callable[[int], Plan]:
    """``make`` for `session.replay`, whose torch takes seconds to load: what is wrong with the input is raised before,
    as far as one process alone may end. Of several the first makes the plan when it can tell the others."""
    formats.detect_format(path)
    if world > 1:
        return make
    made = check_world_size(make(world), world)
    return lambda world: made


def check_world_size(made: Plan, world: int) -> Plan:
    """The plan, for as many ranks as there are processes. Raises EtloomError where it is for others."""
    if made.world != world:
        raise EtloomError(
            f"{made.world} ranks to play, but {world} process",
            remedy=f"start {made.world} (torchrun --nproc-per-node {made.world} -m etloom ..., mpirun -np "
            f"{made.world} etloom ..., srun -n {made.world} etloom ...), or only look at the plan (--dry-run)",
        )
    return made


def parse_ranks(text: str) -> list[int]:
    """0,8-15 as a list without repetitions. Raises EtloomError for what is none."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < first + _MAX_RANKS:
            raise EtloomError(f"{text!r} is no list of ranks", remedy="such as 0,8-15", option="ranks")
        found.update(range(first, last + 1))
    return sorted(found)


def _require_trace_type(job: Job, kind: str) -> None:
    if kind not in TRACE_TYPES:
        raise UnknownName("type of traces", kind, TRACE_TYPES, option="trace_type")
    if kind == "basic":
        there = any("param-basic" in trace.meta.get("formats", ()) for trace in job.values())
    else:
        there = any(trace.table("nodes" if kind == "et" else "events").height for trace in job.values())
    if not there:
        raise EtloomError(
            f"holds no trace of type {kind}", where=job.meta.get("path"), remedy="leave --trace-type out"
        )


def _replicate_lowest_rank(job: Job, world: int) -> tuple[Job, bool]:
    """The lowest rank's trace on all ranks of the world, which is then the group of all that were recorded; and whether
    these were more or fewer.

    Shares of an uneven all-to-all are of one rank and would contradict each other: they become equal.
    """
    first = job[min(job)]
    first = first.replace(
        comms=first.comms.with_columns(pl.lit(None).alias(name) for name in ("in_split", "out_split"))
    )
    recorded = first.meta.get("world_size")
    sizes = pl.concat([first.groups["size"], first.comms["group_size"]]).drop_nulls()
    most = max([recorded if isinstance(recorded, int) else 1, *sizes.unique()])
    if world == 1 and 1 < most <= 1024:
        world = most  # one process alone plans for all
    if most < world:
        fewer = pl.col("ranks").cast(pl.String).str.count_matches(",") + 1 < most
        ranks = pl.when(fewer).then("ranks")
        first = first.replace(groups=first.groups.with_columns(ranks), comms=first.comms.with_columns(ranks))
    played = {rank: first.replace(meta={"rank": rank, "world_size": world}) for rank in range(world)}
    return Job(played, job.meta), world != most


def _drop_recorded_times(made: Plan) -> Plan:
    """Without recorded times to compare with."""
    calls = (tuple(replace(call, recorded_ns=None) for call in own) for own in made.calls)
    return replace(made, calls=tuple(calls))


def _balance_all_to_alls(made: Plan) -> Plan:
    """All-to-alls with the mean of what their ranks put in, in equal shares."""
    totals: dict[tuple[tuple[int, ...], int], int] = {}
    for own in made.calls:
        for turn, call in _all_to_alls(own):
            totals[call.group, turn] = totals.get((call.group, turn), 0) + sum(call.inputs)
    calls = []
    for own in made.calls:
        now = {
            call.index: max(1, round(totals[call.group, turn] / len(call.group) ** 2)) * len(call.group)
            for turn, call in _all_to_alls(own)
        }
        calls.append(
            tuple(
                replace(
                    call,
                    inputs=(now[call.index],),
                    outputs=(now[call.index],),
                    in_split=(),
                    out_split=(),
                    recorded_ns=None,
                )
                if call.index in now
                else call
                for call in own
            )
        )
    return replace(made, calls=tuple(calls))


def _all_to_alls(own: Sequence[Call]) -> Iterator[tuple[int, Call]]:
    """(which one of its group it is, the call)."""
    turns: dict[tuple[int, ...], int] = {}
    for call in own:
        if call.collective == "all_to_all":
            turns[call.group] = turns.get(call.group, -1) + 1
            yield turns[call.group], call
