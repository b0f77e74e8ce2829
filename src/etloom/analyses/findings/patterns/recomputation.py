"""Find forward operators that run again in the backward pass (activation checkpointing).

Operators of the forward pass that run again in the backward pass (activation checkpointing, see `etloom
analyze recompute`). Also on runs without a GPU.

Cost: their kernels, or the operators.
Confidence: medium.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl

from etloom.analyses.findings.finding import DEVICE, HOST, Finding, describe_place, sum_places
from etloom.analyses.findings.rank_view import RankView
from etloom.analyses.recompute import find_recomputed
from etloom.core import arrays, categories, nesting
from etloom.core.text import count_noun

SCOPE = "rank"


def find(view: RankView) -> Iterator[Finding]:
    events = view.trace.events
    operator = categories.mask_events(events, categories.OPERATOR_CATEGORIES)
    operator = operator & arrays.is_present(events["depth"])
    backward = operator & (arrays.to_array(events["fwd_tid"], 0) > 0)
    if not backward.any():
        return
    repeated, _, _ = find_recomputed(view.trace, view.parents, operator, backward)
    if not repeated.size:
        return
    yield from sum_places(
        view,
        _list_work(view, repeated),
        lambda row: (
            f"{count_noun(len(repeated), 'operator')} of the forward pass run again in the backward pass"
            f"{describe_place(row)}: activation checkpointing"
        ),
        confidence="medium",
        advice="this is the price of memory: if some is free, checkpoint fewer layers, or only operators that are "
        "cheap to repeat (selective checkpointing, torch.utils.checkpoint's context_fn)",
        tracks=DEVICE if view.activity.basis == "device" else HOST,
    )


def _list_work(view: RankView, repeated: np.ndarray) -> pl.DataFrame:
    """Return the kernels of recomputed operators (without a GPU: the operators themselves) as rows for `sum_places`."""
    events = view.trace.events
    if view.activity.basis != "device":
        rows = events[repeated].filter(pl.col("dur").is_not_null())
        return rows.select(
            "step", "name", start="ts", end=pl.col("ts") + pl.col("dur"), cost_ns="dur", event="id"
        )
    is_repeated = np.zeros(events.height, np.bool_)
    is_repeated[repeated] = True
    launches = view.find_rows(view.activities["launch"])
    inside = nesting.find_nearest_ancestor(view.parents, is_repeated, launches) >= 0
    kernels = view.activities.filter(pl.Series(inside & (launches >= 0)))
    return kernels.select("step", "stream", "name", "end", start="ts", cost_ns="dur", event="launch")
