"""Result of a regression check."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl


@dataclass(frozen=True)
class CheckResult:
    """The result of `etloom.check`.

    Attributes:
        table: one row per measure; columns of `etloom.comparison.gate.COLUMNS`.
        messages: for each row the lines to show, empty if the measure simply passed.
    """

    table: pl.DataFrame
    messages: tuple[tuple[str, ...], ...]

    @property
    def verdict(self) -> str:
        """Return "failed" if any measure failed, else "undecided" if any is, else "passed"."""
        verdicts = set(self.table["verdict"])
        return next((verdict for verdict in ("failed", "undecided") if verdict in verdicts), "passed")

    @property
    def has_passed(self) -> bool:
        """Return whether every judged measure passed."""
        return self.verdict == "passed"
