"""Formats tables and lines as text of bounded length for AI agents, whose cost depends on the number of tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from etloom.cli.error_handling import make_printable

if TYPE_CHECKING:
    import polars as pl

MAX_TOKENS = 2000
_RESERVED_TOKENS = 60
"""Tokens reserved for the line that reports how much was cut."""
_MAX_CELL = 160
_TOKEN = re.compile(r"[A-Za-z]{1,4}|\d{1,2}|\s+|.", re.ASCII)


def estimate_tokens(text: str) -> int:
    """Estimate a text's number of tokens from above: a token per 4 letters, 2 digits, run of blanks, or other sign."""
    return sum(1 if token.isascii() else len(token.encode()) for token in _TOKEN.findall(text))


def bound_lines(lines: Iterable[str], hint: str = "narrow the question") -> str:
    """Join lines up to `MAX_TOKENS` tokens; the last line reports how many lines were cut.

    Args:
        lines: the lines, without control characters or with: they are escaped.
        hint: how to see the rest.
    """
    kept: list[str] = []
    tokens, cut = 0, 0
    for line in lines:
        printable = make_printable(line)
        needed = estimate_tokens(printable) + 1
        if cut or tokens + needed > MAX_TOKENS - _RESERVED_TOKENS:
            cut += 1
        else:
            kept.append(printable)
            tokens += needed
    return "\n".join([*kept, *([f"({cut:,} more lines cut; {hint})"] if cut else [])])


def list_rows(frame: pl.DataFrame, note: str = "") -> list[str]:
    """Return a table as lines: a header, then a line per row, cells separated by " | ".

    Columns without values are left out. Numbers are unrounded but floats, which have four significant digits.

    Args:
        frame: the table.
        note: units of the columns whose names do not state one.
    """
    shown = [name for name in frame.columns if frame[name].null_count() < frame.height]
    header = " | ".join(shown)
    rows = (" | ".join(map(_format_cell, row)) for row in frame.select(shown).iter_rows())
    return [*([note] if note else []), header, *rows] if shown else ["(no rows)"]


def _format_cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e6 else f"{value:.0f}"
    text = str(value)
    return text if len(text) <= _MAX_CELL else f"{text[:_MAX_CELL]}..."
