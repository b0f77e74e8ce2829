"""Formats findings as paragraphs of text, because a table would be as wide as the longest advice."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from etloom.cli.error_handling import make_printable

if TYPE_CHECKING:
    import polars as pl

MAX_WIDTH = 100
_LOCATION = ("step", "stream", "operator", "module", "frame", "name", "event")


def is_findings_table(frame: pl.DataFrame) -> bool:
    """Return whether a table has all columns of the findings analysis, possibly with further columns."""
    if not {"pattern", "advice"} <= set(frame.columns):
        return False  # most tables: no need to import the analysis
    from etloom.analyses.findings import COLUMNS

    return set(COLUMNS) <= set(frame.columns)


def format_findings(frame: pl.DataFrame, to_terminal: bool) -> str:
    """Format each finding as a paragraph: gain, problem, advice, cost, place; advice is not repeated within a pattern.

    The last paragraph states the bases of the percentages.
    No line is longer than the terminal or `MAX_WIDTH`.
    """
    from etloom.reports.finding_text import PERCENT_BASES

    width = min(MAX_WIDTH, shutil.get_terminal_size().columns) if to_terminal else MAX_WIDTH
    is_single = frame["rank"].n_unique() == 1 and frame["ranks"].max() == 1
    bold = ("\x1b[1m", "\x1b[0m") if to_terminal and sys.stdout.isatty() else ("", "")
    paragraphs = []
    advised: dict[str, str] = {}
    for row in frame.iter_rows(named=True):
        again = advised.get(row["pattern"]) == row["advice"]
        advised[row["pattern"]] = row["advice"]
        if again:
            row["advice"] = f"as {row['pattern']} above"
        head, *rest = _lines(row, 1 if is_single else None)
        wrapped = [
            textwrap.fill(
                line,
                max(width, 40),
                initial_indent="  ",
                subsequent_indent="  ",
                break_on_hyphens=False,
            )
            for line in map(make_printable, rest)
        ]
        paragraphs.append("\n".join([f"{bold[0]}{make_printable(head)}{bold[1]}", *wrapped]))
    bases = textwrap.fill(PERCENT_BASES, max(width, 40))
    return "\n\n".join([*paragraphs, bases]) + "\n" if paragraphs else ""


def _lines(row: Mapping[str, Any], rank_count: int | None) -> Iterator[str]:
    from etloom.core.text import count_noun
    from etloom.reports.finding_text import format_cost, format_gain, format_parts, label_location
    from etloom.reports.kernel_labels import shorten_labels

    gain, share = format_gain(row)
    yield f"{gain}, {share}: {row['pattern']} ({row['confidence']} confidence)"
    yield row["title"]
    yield f"-> {row['advice']}"
    name = None if row["name"] == f"rank {row['rank']}" else shorten_labels([row["name"]])[0]
    location = {**row, "name": name}
    at = (label_location(location, field) for field in _LOCATION if location[field] is not None)
    yield "; ".join([format_cost(row, rank_count), count_noun(row["count"], "time"), *at])
    if parts := format_parts(row):
        yield parts
