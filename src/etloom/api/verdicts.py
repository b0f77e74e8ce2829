"""Results of `etloom.check` (regression check) and `etloom.hangs` (cause of a hang)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from etloom.core.errors import UnknownName
from etloom.core.text import format_bytes, format_ranks

if TYPE_CHECKING:
    from etloom.analyses.hangs import HangCause, JobCalls
    from etloom.core.calls import RankStacks
    from etloom.core.communicators import RasReport
    from etloom.core.trace import Job


@dataclass(frozen=True)
class CheckResult:
    """The result of `etloom.check`: the verdict (passed, failed or undecided), and a table with one row per measure.

    Attributes:
        table: one row per measure; columns of `etloom.comparison.gate.COLUMNS`.
        messages: for each row the lines to show, empty if the measure simply passed.
    """

    table: pl.DataFrame
    messages: tuple[tuple[str, ...], ...]

    @property
    def verdict(self) -> str:
        """Return "failed" if any measure failed, else "undecided" if any measure is undecided, else "passed"."""
        verdicts = set(self.table["verdict"])
        return next((verdict for verdict in ("failed", "undecided") if verdict in verdicts), "passed")

    @property
    def has_passed(self) -> bool:
        """Return whether the verdict is "passed": no measure failed and none is undecided."""
        return self.verdict == "passed"


def check_metric_names(names: Iterable[str]) -> None:
    """Raise UnknownName if a name is not a metric of `etloom.check`."""
    from etloom.comparison.gate import METRICS

    for name in names:
        if name not in METRICS:
            raise UnknownName("metric", name, METRICS, option="metric")


def format_comment(result: CheckResult, run: Job, baseline: Job) -> str:
    """Format the result as Markdown: the verdict, a table of the measures, what changed, and the largest findings.

    Args:
        result: of the check.
        run: the first judged run, of which the findings are.
        baseline: the first run to compare with.
    """
    from etloom.api.questions import diff
    from etloom.exports.markdown import escape, format_findings

    rows = [
        "| measure | before | after | change | 95 % interval | limit | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result.table.to_dicts():
        before, after = (
            format_bytes(round(row[side])) if row["unit"] == "B" else f"{row[side] / 1e6:,.4g} ms"
            for side in ("before", "after")
        )
        percent = [
            "unknown" if row[f"{name}_pct"] is None else f"{row[f'{name}_pct']:+.1f} %"
            for name in ("change", "low", "high", "limit")
        ]
        cells = (
            row["measure"],
            before,
            after,
            percent[0],
            f"{percent[1]} to {percent[2]}",
            percent[3],
            row["verdict"],
        )
        rows.append(f"| {' | '.join(cells)} |")
    difference = diff(baseline, run)
    sentences = (difference.verdict, difference.explanation, difference.source_changes)
    changes = [line for line in sentences if line]
    messages = [line for lines in result.messages for line in lines]
    return (
        f"### etloom: {result.verdict}\n\n"
        + "\n".join(rows)
        + "\n\n"
        + "".join(f"{escape(line)}\n\n" for line in messages)
        + f"**What changed**: {escape('; '.join(changes))}\n\n"
        + f"**Where the run loses time**, largest first:\n\n{format_findings(run)}"
    )


@dataclass(frozen=True)
class HangReport:
    """The result of `etloom.hangs`: the cause of a hang, the divergences between ranks, and unreadable dumps.

    Without dumps, the result is of a report of NCCL's RAS; its ranks are those of the job if a communicator has all
    GPUs.

    Attributes:
        cause: its kind, ranks, sentence and evidence; None if no rank waits for another.
        table: one row per divergence between ranks; columns as of ``etloom analyze hangs``.
        ranks: the ranks with a dump.
        problems: damaged and unreadable dumps, a line each.
        absent: the members of recorded groups that have no dump.
        remarks: what NCCL's RAS states about ranks without a dump, a line each.
        communicators: of a report of NCCL's RAS: one row per communicator, property and value; else None.
        no_cause: the verdict of a RAS report in which no rank differs; empty for dumps.
    """

    cause: HangCause | None
    table: pl.DataFrame
    ranks: tuple[int, ...]
    problems: tuple[str, ...] = ()
    absent: tuple[int, ...] = ()
    remarks: tuple[str, ...] = ()
    communicators: pl.DataFrame | None = None
    no_cause: str = ""

    @property
    def sentence(self) -> str:
        """Return one sentence: the cause of the hang, or that no rank waits for another."""
        is_dump = self.communicators is None
        if is_dump and self.cause is not None and self.cause.kind == "crashed" and len(self.ranks) == 1:
            return f"{format_ranks(self.ranks)} waits for {format_ranks(self.cause.ranks)}, of which no dump was read"
        if self.cause is not None:
            return self.cause.sentence
        if self.no_cause:
            return self.no_cause
        text = f"no hang in the dumps of {format_ranks(self.ranks)}: no rank waits for another"
        if not self.absent:
            return text
        return f"{text}; {format_ranks(self.absent)} have no dump, so that a wait for them is not visible"


# The answers of `etloom.hangs`: from Flight Recorder dumps, reports of NCCL's RAS, or stacks of the debug server.


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
