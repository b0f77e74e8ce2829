"""Result classes of `etloom.check` (regression check) and `etloom.hangs` (cause of a hang)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from etloom.core.errors import UnknownName
from etloom.core.text import format_bytes, format_ranks

if TYPE_CHECKING:
    from etloom.analyses.hangs import HangCause
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
    changes = [line for line in (difference.verdict, difference.explanation) if line]
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
