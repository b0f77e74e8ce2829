"""Find repeated fills of memory with zeros.

Repeated zero-filling of memory at one place in the program. Also on runs without a GPU.

Cost: the kernels, or the operators.
Confidence: medium.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import polars as pl

from etloom.analyses.findings.finding import DEVICE, HOST, Finding, describe_place, format_times, sum_places
from etloom.analyses.findings.rank_view import RankView
from etloom.core import arrays, categories, nesting

ZEROS = r"^aten::(?:zero_|_foreach_zero_)$"
FILLS = r"^aten::fill_$"
IS_ZERO = r'^\["", ?"?(?:0|0\.|0\.0|False)"?[,\]]'
"""Arguments of fill_, as recorded."""
BACKWARDS = r"_backward$|Backward\d*$"
"""Operators that compute the gradient of indexing or slicing."""
KERNELS = r"FillFunctor|(?i)^memset|FillBuffer"
MIN_FILLS = 2

SCOPE = "rank"


def find(view: RankView) -> Iterator[Finding]:
    if view.activity.basis == "device":
        fills = view.activities.filter(view.match_activities(view.activities, KERNELS))
        if fills.height < MIN_FILLS:
            return
        # A fill may write ones, and a memset may come from a library: check the operator, if any were recorded.
        rows = view.find_rows(fills["launch"])
        is_zero_fill = np.where(rows >= 0, _find_zero_fills(view)[1][rows], -1) >= 0
        no_operators = not categories.mask_events(view.trace.events, categories.OPERATOR_CATEGORIES).any()
        fills = fills.filter(pl.Series(is_zero_fill | no_operators)).select(
            "step", "stream", "name", "end", start="ts", cost_ns="dur", event="launch"
        )
    else:
        outermost = view.trace.events["id"].filter(pl.Series(_find_zero_fills(view)[0]))
        inner = view.find_host_events("", categories.OPERATOR_CATEGORIES).filter(
            pl.col("id").is_in(outermost.implode())
        )
        fills = inner.select("step", "name", "end", start="ts", cost_ns="dur", event="id")
    yield from sum_places(
        view,
        fills,
        lambda row: f"memory is filled with zeros {format_times(row['count'])}{describe_place(row)}",
        confidence="medium",
        advice=lambda row: _advise(row["operator"] or ""),
        tracks=DEVICE if view.activity.basis == "device" else HOST,
        min_rows=MIN_FILLS,
    )


def _advise(operator: str) -> str:
    """Return the advice on how to avoid the zeros that an operator writes."""
    if re.search(BACKWARDS, operator):
        return (
            f"{operator} writes its gradient into zeros of the whole input: index once instead of in a loop (unbind, "
            "split, gather); sparse=True for embeddings whose optimizer supports it"
        )
    if re.search(ZEROS, operator):
        return "if these are gradients, zero_grad(set_to_none=True); else overwrite the buffer instead of clearing it"
    return "torch.empty for memory that is overwritten next; reuse buffers instead of allocating zeros in each step"


def _find_zero_fills(view: RankView) -> tuple[np.ndarray, np.ndarray]:
    """Find the operators that fill memory with zeros.

    Returns:
        A mask of the outermost such operators, and for each event the row of the innermost such operator that is or
        encloses it, -1 for none.
    """
    events, arguments = view.trace.events, view.trace.arguments
    zero = arguments.filter(pl.Series(arrays.match_text(arguments["concrete_inputs"], IS_ZERO)))
    fills_zero = events["id"].is_in(zero["event"].implode()).to_numpy()
    zeroes = view.match_events(ZEROS)
    zeroes |= view.match_events(FILLS) & fills_zero
    zeroes &= categories.mask_events(events, categories.OPERATOR_CATEGORIES)
    parent = view.parents
    nearest = nesting.find_nearest_ancestor(parent, zeroes)
    inner = np.flatnonzero(zeroes & (parent >= 0))
    zeroes[inner[nearest[parent[inner]] >= 0]] = False
    return zeroes, nearest
