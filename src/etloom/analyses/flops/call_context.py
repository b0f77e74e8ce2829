"""Numbers for the cost of a call that other events contain: the iteration around it, and the operators inside it.

pairs    ``pairs`` and ``keys`` of the engine's iteration that encloses the call, or the launch of the device graph that
         replays it (`etloom.core.iterations.Iteration`).
experts  ``chosen``: experts a token, from the operators inside that select them; ``is_packed``: the kernels' names
         have 4-bit weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.analyses.flops.formulas import find_entry
from etloom.core import nesting
from etloom.core.arrays import rows_of_ids, take_rows
from etloom.core.iterations import find_iterations
from etloom.core.trace import Trace

_NUMBER_AT = {"TopK": 1, "aten::topk": 1}
"""Operators that select experts -> position of the argument that states how many."""
_BY_COLUMNS = ("SortTokens", "_moe_C::topk_softmax", "sgl_kernel::topk_softmax")
"""Operators whose first tensor has a column for each selected expert."""


def find_context(trace: Trace, calls: pl.DataFrame, parent: NDArray[np.int64]) -> pl.Series:
    """Return a JSON object per call (row, replay, name, costed, packed) with the numbers that its formula needs.

    It is null if the formula needs none, or none was recorded.
    """
    names = calls["name"].unique().drop_nulls().cast(pl.String)
    needs = {name: entry.needs for name in names if (entry := find_entry(name)) and entry.needs}
    context: list[str | None] = [None] * calls.height
    if needs:
        needed = calls.with_row_index("call").filter(
            "costed", pl.col("name").cast(pl.String).is_in(list(needs))
        )
        needed = needed.with_columns(need=pl.col("name").cast(pl.String).replace_strict(needs))
        pairs, experts = (needed.filter(pl.col("need") == need) for need in ("pairs", "experts"))
        for call, values in (*_find_pairs(trace, pairs), *_find_chosen(trace, experts, parent)):
            context[call] = json.dumps(values)
    return pl.Series("context", context, dtype=pl.String)


def _find_pairs(trace: Trace, calls: pl.DataFrame) -> Iterator[tuple[int, dict[str, Any]]]:
    if calls.is_empty():
        return
    events = trace.events
    rows, iterations = find_iterations(events)
    spans = take_rows(events, rows).select("ts", end=pl.col("ts") + pl.col("dur"))
    order = np.argsort(spans["ts"].to_numpy(), kind="stable")
    starts, ends = spans["ts"].to_numpy()[order], spans["end"].to_numpy()[order]
    # The call of a captured operator happens when its graph is replayed.
    replays = rows_of_ids(events, calls["replay"])
    times = events["ts"].to_numpy()[np.where(replays >= 0, replays, calls["row"].to_numpy())]
    places = np.searchsorted(starts, times, side="right") - 1
    for call, time, place in zip(calls["call"], times.tolist(), places.tolist(), strict=True):
        if place < 0 or time >= ends[place]:
            continue
        iteration = iterations[order[place]]
        if iteration.pairs is not None and iteration.keys is not None:
            yield call, {"pairs": iteration.pairs, "keys": iteration.keys}


def _find_chosen(
    trace: Trace, calls: pl.DataFrame, parent: NDArray[np.int64]
) -> Iterator[tuple[int, dict[str, Any]]]:
    if calls.is_empty():
        return
    events = trace.events
    is_call = np.zeros(events.height, np.bool_)
    is_call[calls["row"].to_numpy()] = True
    inside = events.select("id", pl.col("name").cast(pl.String)).with_row_index("inner")
    inside = inside.filter(pl.col("name").is_in([*_NUMBER_AT, *_BY_COLUMNS])).join(
        trace.arguments.select("dims", "concrete_inputs", id="event"), on="id"
    )
    owners = nesting.find_nearest_ancestor(parent, is_call, inside["inner"].to_numpy())
    chosen: dict[int, set[int]] = {}
    texts = inside.select("name", pl.col("dims", "concrete_inputs").cast(pl.String).fill_null("[]"))
    for owner, arguments in zip(owners.tolist(), texts.iter_rows(), strict=True):
        number = _read_chosen(*arguments)
        if owner >= 0 and number is not None:
            chosen.setdefault(owner, set()).add(number)
    for call, row, is_packed in calls.select("call", "row", "packed").iter_rows():
        numbers = chosen.get(row, set())
        if len(numbers) == 1:
            yield call, {"chosen": min(numbers), "is_packed": int(is_packed)}


def _read_chosen(name: str, dims: str, values: str) -> int | None:
    """Return how many experts a token an operator selects; None if it does not state it."""
    try:
        columns = json.loads(dims)[0][1]
        number = columns if name in _BY_COLUMNS else int(json.loads(values)[_NUMBER_AT[name]])
        return number if 0 < number <= columns else None
    except (ValueError, TypeError, LookupError):
        return None
