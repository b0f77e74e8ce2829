"""The answers of `etloom.hangs`: from Flight Recorder dumps, or from reports of NCCL's RAS."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from etloom.api.verdicts import HangReport

if TYPE_CHECKING:
    from etloom.analyses.hangs import JobCalls
    from etloom.core.communicators import RasReport


def judge_dumps(calls: JobCalls, reports: Sequence[RasReport], problems: tuple[str, ...]) -> HangReport:
    """Return the answer of dumps; the latest report of RAS adds the state of ranks without a dump."""
    from etloom.analyses.hangs import compare_calls, describe_processes, find_cause
    from etloom.analyses.hangs.ras_causes import describe_undumped

    table = compare_calls(calls)
    written = [int(facts.get("written_ns") or 0) for facts in calls.processes.values()]
    processes = describe_processes(calls.processes, max(written, default=0))
    return HangReport(
        find_cause(table, processes),
        table,
        tuple(sorted(calls.dumped)),
        problems,
        absent=calls.absent,
        remarks=tuple(describe_undumped(reports[-1], calls.dumped)) if reports else (),
    )


def judge_reports(reports: Sequence[RasReport], problems: tuple[str, ...]) -> HangReport:
    """Return the answer of the latest of some reports of NCCL's RAS, compared with the one before."""
    from etloom.analyses.hangs.ras_causes import describe_no_cause, find_ras_cause
    from etloom.analyses.hangs.ras_gaps import JobRanks, build_gap_table, describe_communicators, list_gaps

    *before, report = reports
    earlier = before[-1] if before else None
    names = JobRanks(report)
    return HangReport(
        find_ras_cause(report, earlier),
        build_gap_table(list_gaps(report.communicators), names),
        tuple(range(report.gpus or 0)) if names.is_known else (),
        problems,
        communicators=describe_communicators(report),
        no_cause=describe_no_cause(report, earlier),
    )
