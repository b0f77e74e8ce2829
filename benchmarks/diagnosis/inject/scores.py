"""Accuracy, confusion, false alarms and cost error of many cases, as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

Row = dict[str, Any]
LEAST_STRENGTH = 5.0
FIRST, THIRD = 1, 3


def count_right(rows: Sequence[Row], places: int) -> float:
    """Return the share in percent of the cases in which one of the first findings is right."""
    return 100 * sum(row["place"] is not None and row["place"] < places for row in rows) / max(1, len(rows))


def compute_cost_error(rows: Iterable[Row]) -> float | None:
    errors = [row["cost_error_pct"] for row in rows if row["cost_error_pct"] is not None]
    return median(errors) if errors else None


def write_scores(rows: Sequence[Row]) -> str:
    """Return the tables: totals, by strength, by kind, and the first findings of each kind."""
    clean = [row for row in rows if row["kind"] == "clean"]
    injected = [row for row in rows if row["kind"] != "clean"]
    strong = [row for row in injected if row["strength"] >= LEAST_STRENGTH]
    strengths = sorted({row["strength"] for row in injected})
    parts = [_write_total(strong, clean)]
    lines = [
        [f"{strength:g} %", *_score([row for row in injected if row["strength"] == strength])]
        for strength in strengths
    ]
    parts.append(_write_table(["strength", "cases", "top 1", "top 3", "cost error"], lines))
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in injected):
        of_kind = [row for row in injected if row["kind"] == kind]
        by_strength = [
            f"{count_right([row for row in of_kind if row['strength'] == strength], FIRST):.0f}"
            for strength in strengths
        ]
        lines.append(
            [kind, *_score([row for row in of_kind if row["strength"] >= LEAST_STRENGTH]), *by_strength]
        )
    heads = [f"top 1 at {strength:g} %" for strength in strengths]
    parts.append(_write_table(["kind", "cases", "top 1", "top 3", "cost error", *heads], lines))
    parts.append(_write_confusion(strong))
    return "\n\n".join(parts) + "\n"


def _score(rows: Sequence[Row]) -> list[str]:
    error = compute_cost_error(rows)
    return [
        str(len(rows)),
        f"{count_right(rows, FIRST):.0f} %",
        f"{count_right(rows, THIRD):.0f} %",
        "-" if error is None else f"{error:.0f} %",
    ]


def _write_total(strong: Sequence[Row], clean: Sequence[Row]) -> str:
    cases, first, third, error = _score(strong)
    alarmed = [row for row in clean if row["alarms"]]
    names = f" ({', '.join(sorted({name for row in alarmed for name in row['alarms']}))})" if alarmed else ""
    return (
        f"{cases} cases of {len({row['kind'] for row in strong})} kinds at {LEAST_STRENGTH:g} % of a step or more: "
        f"top 1 {first}, top 3 {third}, median cost error {error}. "
        f"False alarms: {len(alarmed)} of {len(clean)} clean runs{names}."
    )


def _write_confusion(rows: Sequence[Row]) -> str:
    """Return the confusion matrix: kinds by the first finding."""
    counts = Counter((row["kind"], row["findings"][0][0] if row["findings"] else "none") for row in rows)
    patterns = sorted({pattern for _, pattern in counts})
    kinds = dict.fromkeys(kind for kind, _ in counts)
    lines = [[kind, *(str(counts[kind, pattern] or "") for pattern in patterns)] for kind in kinds]
    return _write_table(["first finding", *patterns], lines)


def _write_table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
