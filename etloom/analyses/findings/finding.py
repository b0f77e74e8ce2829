"""A finding (one place where time is lost), and how rows of a table are grouped into findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from etloom.analyses.findings.rank_view import RankView
from etloom.core.arrays import map_text
from etloom.core.intervals import Intervals

_PLACE = ("step", "stream", "name", "operator", "module", "frame", "event")
MAX_PLACES = 5
"""Maximum number of places that a pattern reports; the others are smaller."""
LONGEST_COUNT = 3


@dataclass(frozen=True)
class Finding:
    """A place where time is lost.

    Attributes:
        title: The problem, in one sentence.
        cost_ns: Upper bound of the time that the run would save without it.
        confidence: high (measured), medium (measured, but part of it is unavoidable) or low (estimated).
        advice: The remedy.
        event: Id of the host event to look at.
        in_steps_ns: The part of the cost inside annotated steps.
        place: Identifies the same finding on another rank.
    """

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
    in_steps_ns: int = 0
    place: str | None = None


def group_by_place(
    view: RankView,
    rows: pl.DataFrame,
    title: Callable[[dict[str, Any]], str],
    *,
    confidence: str,
    advice: str | Callable[[dict[str, Any]], str],
    by: str = "operator",
    kind: str | None = None,
    max_places: int = MAX_PLACES,
    min_rows: int = 1,
) -> Iterator[Finding]:
    """Yield one Finding per value of ``by`` among the rows, most expensive first.

    A finding is located at its most expensive row.

    Args:
        view: The rank.
        rows: event (the responsible host event, or null), cost_ns, start and end of the time it covers, and, if known,
            step, stream and name.
        title: Returns the title, given the most expensive row with cost_ns and count of the group, and ``longest``, the
            LONGEST_COUNT highest costs.
        confidence: high, medium or low.
        advice: The advice, or a function like ``title``.
        by: operator, name, or block, which is the class of the module, else the operator.
        kind: Distinguishes findings of one pattern that may share a place.
        max_places: Maximum number of places.
        min_rows: Minimum number of rows of a place.
    """
    rows = rows.filter(pl.col("cost_ns") > 0)
    located = rows.hstack(view.locate(rows["event"]))
    if by == "block":
        # Layers of one class count as one place.
        layer = map_text(located["module"], lambda name: name.str.replace(r"_\d+$", "")).alias("class")
        located = located.with_columns(layer).with_columns(block=pl.coalesce("class", "operator"))
    sums = (
        located.with_row_index("row")
        .group_by(by)
        .agg(
            pl.col("cost_ns").sum(),
            pl.len().alias("count"),
            pl.col("cost_ns").max().alias("largest"),
            pl.col("row").get(pl.col("cost_ns").arg_max()),
            longest=pl.col("cost_ns").top_k(LONGEST_COUNT).sort(descending=True),
        )
        .filter(pl.col("count") >= min_rows)
        .sort("cost_ns", "largest", "row", descending=(True, True, False))
    )
    for place_sums in sums.head(max_places).iter_rows(named=True):
        row = located.row(place_sums["row"], named=True) | place_sums
        row["cost_ns"], in_steps_ns = compute_cost(view, located.filter(pl.col(by).eq_missing(row[by])))
        place: dict[str, Any] = {name: row.get(name) for name in _PLACE}
        place |= {"in_steps_ns": in_steps_ns, "place": f"{kind} {row[by]}" if kind else row[by]}
        advice_text = advice if isinstance(advice, str) else advice(row)
        yield Finding(title(row), row["cost_ns"], confidence, advice_text, row["count"], **place)


def compute_cost(view: RankView, rows: pl.DataFrame) -> tuple[int, int]:
    """Return the combined cost of rows, and the part of it inside annotated steps, in ns.

    Concurrent losses of several streams or threads are counted once.

    Args:
        view: The rank.
        rows: cost_ns, and the start and end of the time over which it is spread evenly.
    """
    start, end, each = (rows[name].to_numpy() for name in ("start", "end", "cost_ns"))
    lost = Intervals.of(start, end)
    inside = view.step_intervals.covered(start, end) / np.maximum(end - start, 1) * each
    in_steps = min(round(float(inside.sum())), (lost & view.step_intervals).total)
    return min(round(float(each.sum())), lost.total), in_steps


def format_times(count: int) -> str:
    """Return once, 2 times, 1,390 times."""
    return "once" if count == 1 else f"{count:,} times"


def describe_place(row: dict[str, Any], name: str = "operator") -> str:
    """Return " in OPERATOR" (or " in BLOCK"), or an empty string if it is unknown."""
    return f" in {row[name]}" if row.get(name) else ""
