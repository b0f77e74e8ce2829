"""The answers of `etloom.hangs`: from Flight Recorder dumps, reports of NCCL's RAS, or stacks of the debug server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import polars as pl

from etloom.api.verdicts import HangReport

if TYPE_CHECKING:
    from etloom.analyses.hangs import JobCalls
    from etloom.core.calls import RankStacks
    from etloom.core.communicators import RasReport


def judge_dumps(
    calls: JobCalls, reports: Sequence[RasReport], stacks: Sequence[RankStacks], problems: tuple[str, ...]
) -> HangReport:
    """Return the answer of dumps; the latest report of RAS adds the state of ranks without a dump, and stacks the lines
    in which ranks are."""
    from etloom.analyses.hangs import compare_calls, describe_processes, find_cause
    from etloom.analyses.hangs.ras_causes import describe_undumped
    from etloom.analyses.hangs.stack_causes import describe_stacks

    table = compare_calls(calls)
    written = [int(facts.get("written_ns") or 0) for facts in calls.processes.values()]
    processes = describe_stacks(stacks[-1]) if stacks else {}
    processes |= describe_processes(calls.processes, max(written, default=0))
    return HangReport(
        find_cause(table, processes),
        table,
        tuple(sorted(calls.dumped)),
        problems,
        absent=calls.absent,
        remarks=tuple(describe_undumped(reports[-1], calls.dumped)) if reports else (),
    )


def judge_stacks(stacks: Sequence[RankStacks], problems: tuple[str, ...]) -> HangReport:
    """Return the answer of the latest stacks of the debug server, compared with those before."""
    from etloom.analyses.hangs.divergences import COLUMNS
    from etloom.analyses.hangs.stack_causes import describe_no_cause, find_stack_cause

    latest, earlier = stacks[-1], stacks[0] if len(stacks) > 1 else None
    return HangReport(
        find_stack_cause(latest, earlier),
        pl.DataFrame(schema=COLUMNS),
        tuple(sorted({*latest.frames, *latest.errors})),
        problems,
        no_cause=describe_no_cause(latest, earlier),
    )


def judge_reports(
    reports: Sequence[RasReport], stacks: Sequence[RankStacks], problems: tuple[str, ...]
) -> HangReport:
    """Return the answer of the latest of some reports of NCCL's RAS, compared with the one before; stacks add the lines
    in which the ranks of the cause are."""
    from etloom.analyses.hangs.ras_causes import describe_no_cause, find_ras_cause
    from etloom.analyses.hangs.ras_gaps import JobRanks, build_gap_table, describe_communicators, list_gaps
    from etloom.analyses.hangs.stack_causes import describe_stacks

    *before, report = reports
    earlier = before[-1] if before else None
    names = JobRanks(report)
    cause = find_ras_cause(report, earlier)
    states = describe_stacks(stacks[-1]) if stacks else {}
    lines = {rank: state.frame or state.detail for rank, state in states.items()}
    return HangReport(
        cause,
        build_gap_table(list_gaps(report.communicators), names),
        tuple(range(report.gpus or 0)) if names.is_known else (),
        problems,
        remarks=tuple(
            f"rank {rank}: {lines[rank]}" for rank in (cause.ranks if cause else ()) if rank in lines
        ),
        communicators=describe_communicators(report),
        no_cause=describe_no_cause(report, earlier),
    )
