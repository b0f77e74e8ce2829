"""Summarizes dumps of the Flight Recorder: which ranks stopped, and the calls that others wait in."""

from __future__ import annotations

from collections.abc import Iterable

import polars as pl

from etloom.analyses import hangs
from etloom.core.text import count_noun, format_ranks
from etloom.core.trace import Job
from etloom.reports.time_shares import SummaryLine


def is_hang_dump(job: Job) -> bool:
    """Return whether every trace is a dump of the Flight Recorder, which has no operators and no times of GPU work."""
    return all("flight_recorder" in trace.meta.get("formats", ()) for trace in job.values())


def summarize_hang(job: Job) -> tuple[SummaryLine, pl.DataFrame]:
    """Return the summary line on a hang, and the table of `etloom analyze hangs` with lists of ranks as text."""
    table = hangs.analyze(job)
    ranks_as_text = [
        pl.Series(name, [_list_ranks(ranks) for ranks in table[name].to_list()], pl.String)
        for name in ("ranks", "others")
    ]
    return _describe(table), table.with_columns(ranks_as_text)


def _describe(table: pl.DataFrame) -> SummaryLine:
    if table.is_empty():
        return SummaryLine("Hang", "none", hangs.EMPTY_MESSAGE)
    cause = hangs.find_cause(table)
    if cause is not None:
        return SummaryLine("Hang", f"{format_ranks(cause.ranks)}: {cause.kind}", cause.sentence, "bad")
    first = table.row(0, named=True)
    call = f"{first['collective'] or 'a call'} of group {first['group']} ({_list_ranks(first['ranks'])})"
    return SummaryLine(
        "Hang", count_noun(table.height, "finding"), f"first: {first['finding']}, {call}", "bad"
    )


def _list_ranks(ranks: Iterable[int] | None) -> str | None:
    """Format ranks as text, such as "ranks 0-7, 9"; None if there are no ranks."""
    numbers = list(ranks or ())
    return format_ranks(numbers) if numbers else None
