"""Make rows of the table of hangs: for unfinished calls, and for calls that differ between ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from etloom.core.text import format_ranks

Calls = dict[int, dict[str, Any]]
"""Calls of one sequence number, by rank."""


def is_unfinished(row: dict[str, Any]) -> bool:
    """Return whether the backend reports a call as unfinished."""
    return row["state"] not in ("completed", None)


def make_unfinished(calls: Calls) -> dict[str, Any]:
    """Return the row of a call that some ranks have not completed."""
    states: dict[str, list[int]] = {}
    for rank, row in calls.items():
        if is_unfinished(row):
            states.setdefault(row["state"], []).append(rank)
    waiting = [rank for ranks in states.values() for rank in ranks]
    detail = "; ".join(f"{format_ranks(ranks)}: {state}" for state, ranks in states.items())
    return make_finding("not finished", waiting, calls, calls[waiting[0]]["collective"], detail)


def find_differences(calls: Calls, finding: str, get_value: Any) -> Iterator[dict[str, Any]]:
    """Yield a row for the ranks on which an attribute of a call differs from the most common value, if any.

    If two values are equally common, the finding names all ranks: neither side is known to be wrong.
    """
    by_value: dict[Any, list[int]] = {}
    for rank, row in calls.items():
        by_value.setdefault(get_value(row), []).append(rank)
    if len(by_value) < 2:
        return
    counts = Counter({value: len(ranks) for value, ranks in by_value.items()}).most_common(2)
    has_majority = counts[0][1] > counts[1][1]
    deviating = sorted(
        rank
        for value, ranks in by_value.items()
        if not has_majority or value != counts[0][0]
        for rank in ranks
    )
    detail = "; ".join(
        f"{_format_value(value)} on {format_ranks(ranks)}" for value, ranks in by_value.items()
    )
    yield make_finding(finding, deviating, calls, calls[deviating[0]]["collective"], detail)


def make_finding(
    finding: str, ranks: list[int], calls: Calls, collective: str | None, detail: str
) -> dict[str, Any]:
    """Return a row of the table of hangs (`COLUMNS`) without group and seq."""
    others = sorted(set(calls) - set(ranks))
    callers = [rank for rank in ranks if rank in calls] or others
    return {
        "finding": finding,
        "collective": collective,
        "ranks": sorted(ranks),
        "others": others,
        "detail": detail,
        "called_ns": min(row["created_ns"] for row in calls.values()),
        "called_at": calls[callers[0]]["called_at"],
    }


def _format_value(value: Any) -> str:
    return f"{value[0]} in, {value[1]} out" if isinstance(value, tuple) else str(value)
