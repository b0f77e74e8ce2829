"""Formats tables and lines as text of bounded length for AI agents, whose cost depends on the number of tokens."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from etloom.cli.error_handling import make_printable

if TYPE_CHECKING:
    import polars as pl

    from etloom.core.errors import EtloomError

MAX_TOKENS = 2000
_RESERVED_TOKENS = 60
"""Tokens reserved for the line that reports how much was cut."""
_MAX_CELL = 160
_WHOLE_TEXTS = ("title", "advice")
"""Columns of sentences, which are not cut as names are."""
_TOKEN = re.compile(r"[A-Za-z]{1,4}|\d{1,2}|\s+|.", re.ASCII)


def estimate_tokens(text: str) -> int:
    """Estimate a text's number of tokens from above: a token per 4 letters, 2 digits, run of blanks, or other sign."""
    return sum(1 if token.isascii() else len(token.encode()) for token in _TOKEN.findall(text))


class Answer(str):
    """The text of an answer; `content` has what it states as JSON values."""

    content: dict[str, Any]
    is_error: bool


def answer_error(error: EtloomError) -> Answer:
    """Return an error as an answer of one line."""
    return _make_answer(bound_lines([f"error: {error}"]), {"error": str(error)}, is_error=True)


def bound_answer(parts: Mapping[str, Any]) -> Answer:
    """Return named parts as text and as JSON values, both cut after `MAX_TOKENS` tokens of text.

    Args:
        parts: values by name. A table becomes a header and a line per row, a list of texts a line each, and other
            values their JSON; a text is written without its name.
    """
    budget = _Budget()
    content: dict[str, Any] = {}
    for name, value in parts.items():
        if _is_table(value):
            content[name] = budget.add_table(name, value)
        elif isinstance(value, list):
            content[name] = [item for item in value if budget.add(_to_text(item))]
        elif budget.add(value if isinstance(value, str) else f"{name}: {_to_text(value)}"):
            content[name] = value
    if budget.cut:
        content["lines_cut"] = budget.cut
    return _make_answer(budget.join("narrow the question"), content, is_error=False)


def bound_lines(lines: Iterable[str], hint: str = "narrow the question") -> str:
    """Join lines up to `MAX_TOKENS` tokens; the last line reports how many lines were cut.

    Args:
        lines: the lines, without control characters or with: they are escaped.
        hint: how to see the rest.
    """
    budget = _Budget()
    for line in lines:
        budget.add(line)
    return budget.join(hint)


class _Budget:
    """Lines up to a number of tokens; after the first line that does not fit, all are cut and counted."""

    def __init__(self) -> None:
        self.kept: list[str] = []
        self.cut = 0
        self._tokens = 0

    def add(self, line: str) -> bool:
        """Add a line if it fits; return whether it does."""
        printable = make_printable(line)
        needed = estimate_tokens(printable) + 1
        if self.cut or self._tokens + needed > MAX_TOKENS - _RESERVED_TOKENS:
            self.cut += 1
            return False
        self.kept.append(printable)
        self._tokens += needed
        return True

    def add_table(self, name: str, table: pl.DataFrame) -> dict[str, Any]:
        """Add a line per row, below one with the columns that have values; return the columns and rows that fit."""
        shown = [column for column in table.columns if table[column].null_count() < table.height]
        if not shown:
            self.add(f"{name}: none")
            return {"columns": [], "rows": []}
        self.add(f"{name}:")
        self.add(" | ".join(shown))
        rows = [
            list(map(_to_json, shown, row))
            for row in table.select(shown).iter_rows()
            if self.add(" | ".join(map(_format_cell, shown, row)))
        ]
        return {"columns": shown, "rows": rows}

    def join(self, hint: str) -> str:
        """Return the lines, and one that reports how many were cut, if any."""
        return "\n".join([*self.kept, *([f"({self.cut:,} more lines cut; {hint})"] if self.cut else [])])


def _make_answer(text: str, content: dict[str, Any], *, is_error: bool) -> Answer:
    answer = Answer(text)
    answer.content, answer.is_error = content, is_error
    return answer


def _is_table(value: Any) -> bool:
    return hasattr(value, "iter_rows")


def _to_json(column: str, value: Any) -> Any:
    """Return a value of a table as JSON has it: null for infinities and NaN, text for what JSON lacks."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, (list, dict)):
        return json.loads(json.dumps(value, default=str))
    return str(value) if column in _WHOLE_TEXTS else _shorten(str(value))


def _to_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _format_cell(column: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e6 else f"{value:.0f}"
    text = _to_text(value)
    return text if column in _WHOLE_TEXTS else _shorten(text)


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_CELL else f"{text[:_MAX_CELL]}..."
