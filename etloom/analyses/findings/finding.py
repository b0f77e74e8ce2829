"""One place where time is lost, and how rows of a table become such places."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from etloom.analyses.findings.rank_view import View
from etloom.core.arrays import map_text
from etloom.core.intervals import Intervals

_PLACE = ("step", "stream", "name", "operator", "module", "frame", "event")
MOST = 5
"""A pattern names so many places; the others are smaller."""
FEW = 3


@dataclass(frozen=True)
class Finding:
    """title: what happens, in one sentence. cost_ns: what the run would gain at most if it did not. confidence: high
    (measured) | medium (measured, but part of it would stay) | low (estimated). advice: what to do."""

    title: str
    cost_ns: int
    confidence: str
    advice: str
    count: int = 1
    step: int | None = None
    stream: int | None = None
    name: str | None = None
    operator: str | None = None
    module: str | None = None
    frame: str | None = None
    event: int | None = None
    """The host event to look at: id."""
    in_steps_ns: int = 0
    """Of the cost, what lies in the time of marked steps."""
    place: str | None = None
    """What makes it the same finding on another rank."""


def group_by_place(
    view: View,
    rows: pl.DataFrame,
    title: Callable[[dict[str, Any]], str],
    *,
    confidence: str,
    advice: str | Callable[[dict[str, Any]], str],
    by: str = "operator",
    kind: str | None = None,
    most: int = MOST,
    least: int = 1,
) -> Iterator[Finding]:
    """A Finding for each value of ``by`` among rows, costliest first. Its place is that of its costliest row.

    rows: event (the host event to blame, or null), cost_ns, start and end of the time that it is of, and of step,
    stream and name what is known. by: operator, name, or block, which is the class of the module and else the operator.
    kind: which of the findings of a pattern it is, where one place may have several.
    least: of places with fewer rows there is nothing to say. title, and advice where it depends on the place: of the
    costliest row with cost_ns and count of all, and ``longest``, the costs of the FEW costliest.
    """
    rows = rows.filter(pl.col("cost_ns") > 0)
    known = rows.hstack(view.where(rows["event"]))
    if by == "block":
        # Layers of one class are one place.
        layer = map_text(known["module"], lambda name: name.str.replace(r"_\d+$", "")).alias("class")
        known = known.with_columns(layer).with_columns(block=pl.coalesce("class", "operator"))
    sums = (
        known.with_row_index("row")
        .group_by(by)
        .agg(
            pl.col("cost_ns").sum(),
            pl.len().alias("count"),
            pl.col("cost_ns").max().alias("most"),
            pl.col("row").get(pl.col("cost_ns").arg_max()),
            longest=pl.col("cost_ns").top_k(FEW).sort(descending=True),
        )
        .filter(pl.col("count") >= least)
        .sort("cost_ns", "most", "row", descending=(True, True, False))
    )
    for place_sums in sums.head(most).iter_rows(named=True):
        row = known.row(place_sums["row"], named=True) | place_sums
        row["cost_ns"], in_steps_ns = compute_cost(view, known.filter(pl.col(by).eq_missing(row[by])))
        place: dict[str, Any] = {name: row.get(name) for name in _PLACE}
        place |= {"in_steps_ns": in_steps_ns, "place": f"{kind} {row[by]}" if kind else row[by]}
        todo = advice if isinstance(advice, str) else advice(row)
        yield Finding(title(row), row["cost_ns"], confidence, todo, row["count"], **place)


def compute_cost(view: View, rows: pl.DataFrame) -> tuple[int, int]:
    """What rows cost at most together, and what of it lies in the time of marked steps, in ns.

    rows: cost_ns, start and end of the time that it is of, over which it is spread evenly. What several streams or
    threads lose at once could be gained once.
    """
    start, end, each = (rows[name].to_numpy() for name in ("start", "end", "cost_ns"))
    taken = Intervals.of(start, end)
    inside = view.stepped.covered(start, end) / np.maximum(end - start, 1) * each
    in_steps = min(round(float(inside.sum())), (taken & view.stepped).total)
    return min(round(float(each.sum())), taken.total), in_steps


def times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """1 gap, 1,390 gaps."""
    return f"1 {noun}" if count == 1 else f"{count:,} {plural or f'{noun}s'}"


def describe_place(row: dict[str, Any], name: str = "operator") -> str:
    """ " in OPERATOR" (or in BLOCK), or nothing where it is not known."""
    return f" in {row[name]}" if row.get(name) else ""
