"""Memory is filled with zeros over and over."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl

from etloom.analyses.findings.finding import Finding, describe_place, group_by_place, times
from etloom.analyses.findings.rank_view import View
from etloom.core import arrays, categories

ZEROS = r"^aten::(?:zero_|_foreach_zero_)$"
FILLS = r"^aten::fill_$"
IS_ZERO = r'^\["", ?"?(?:0|0\.|0\.0|False)"?[,\]]'
"""Arguments of fill_, as recorded."""
KERNELS = r"FillFunctor|(?i)^memset|FillBuffer"
OFTEN = 2

SCOPE = "rank"


def find(view: View) -> Iterator[Finding]:
    if view.activity.basis == "device":
        fills = view.work.filter(view.named(view.work, KERNELS))
        # A fill may be of ones, and a memset the doing of a library: the operator tells, where any was recorded.
        rows = view.rows_of(fills["launch"])
        told = np.where(rows >= 0, _zeroing(view)[1][rows], -1) >= 0
        without = not arrays.is_in(view.trace.events["cat"], categories.OPERATOR_CATEGORIES).any()
        fills = fills.filter(pl.Series(told | without)).select(
            "step", "stream", "name", "end", start="ts", cost_ns="dur", event="launch"
        )
    else:
        outermost = view.trace.events["id"].filter(pl.Series(_zeroing(view)[0]))
        inner = view.host("", categories.OPERATOR_CATEGORIES).filter(pl.col("id").is_in(outermost.implode()))
        fills = inner.select("step", "name", "end", start="ts", cost_ns="dur", event="id")
    yield from group_by_place(
        view,
        fills,
        lambda row: f"memory is filled with zeros {times(row['count'])}{describe_place(row)}",
        confidence="medium",
        advice="zero_grad(set_to_none=True); torch.empty for what is written next; keep buffers instead of making "
        "zeros in each step",
        least=OFTEN,
    )


def _zeroing(view: View) -> tuple[np.ndarray, np.ndarray]:
    """Which events are the outermost operators that fill with zeros, and the row of the innermost such among each event
    and those around it, -1 for none."""
    events, arguments = view.trace.events, view.trace.arguments
    zero = arguments.filter(
        pl.Series(arrays.match_text(arguments["concrete_inputs"], lambda text: text.str.contains(IS_ZERO)))
    )
    told = events["id"].is_in(zero["event"].implode()).to_numpy()
    zeroes = view.asked(lambda name: name.str.contains(ZEROS))
    zeroes |= view.asked(lambda name: name.str.contains(FILLS)) & told
    zeroes &= arrays.is_in(events["cat"], categories.OPERATOR_CATEGORIES)
    parent = view.parents
    nearest = arrays.find_nearest_ancestor(parent, zeroes)
    inner = np.flatnonzero(zeroes & (parent >= 0))
    zeroes[inner[nearest[parent[inner]] >= 0]] = False
    return zeroes, nearest
