"""Findings as paragraphs: a table would be as wide as the longest advice."""

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
_PLACE = ("step", "stream", "operator", "module", "frame", "name", "event")


def is_findings_table(frame: pl.DataFrame) -> bool:
    """Return whether the rows are findings, possibly with more columns."""
    from etloom.analyses.findings import COLUMNS

    return set(COLUMNS) <= set(frame.columns)


def format_findings(frame: pl.DataFrame, to_terminal: bool) -> str:
    """Format each finding as a paragraph: cost, problem, advice, place; advice is not repeated within a pattern.

    No line is longer than the terminal or `MAX_WIDTH`.
    """
    width = min(MAX_WIDTH, shutil.get_terminal_size().columns) if to_terminal else MAX_WIDTH
    several = frame["ranks"].max() != 1 or frame["rank"].n_unique() > 1
    bold = ("\x1b[1m", "\x1b[0m") if to_terminal and sys.stdout.isatty() else ("", "")
    paragraphs = []
    advised: dict[str, str] = {}
    for row in frame.iter_rows(named=True):
        again = advised.get(row["pattern"]) == row["advice"]
        advised[row["pattern"]] = row["advice"]
        if again:
            row["advice"] = f"as {row['pattern']} above"
        head, *rest = _lines(row, several)
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
    return "\n\n".join(paragraphs) + "\n" if paragraphs else ""


def _lines(row: Mapping[str, Any], several: bool) -> Iterator[str]:
    from etloom.reports.formatting import count_noun, format_duration
    from etloom.reports.kernel_labels import shorten_labels

    share = f", {row['pct']:.1f} % of the run" if row["pct"] is not None else ""
    if row["step_pct"] is not None:
        share += f", {row['step_pct']:.1f} % of its steps"
    yield f"{format_duration(row['cost_ns'])}{share}: {row['pattern']} ({row['confidence']} confidence)"
    yield row["title"]
    yield f"-> {row['advice']}"
    ranks = f"rank {row['rank']}" + (f" and {row['ranks'] - 1:,} more" if row["ranks"] > 1 else "")
    place = [ranks] if several else []
    place.append(count_noun(row["count"], "time"))
    values = {
        **row,
        "name": None if row["name"] == f"rank {row['rank']}" else shorten_labels([row["name"]])[0],
    }
    yield "; ".join([*place, *(f"{name} {values[name]}" for name in _PLACE if values[name] is not None)])
