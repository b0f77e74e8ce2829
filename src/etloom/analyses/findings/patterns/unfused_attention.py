"""Find attention as separate operators: a product, a softmax and another product, each of which moves all scores.

A batched product, a softmax and another product in a row, or the same backward; with a GPU.

Cost: the host except one call, and the kernels, of the products half.
Confidence: medium.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl

from etloom.analyses.findings.finding import Finding, format_times
from etloom.analyses.findings.host_calls import select_outermost
from etloom.analyses.findings.rank_view import RankView
from etloom.analyses.findings.removed_work import REGION_SCHEMA, keep_disjoint, list_launched, sum_removed
from etloom.core import arrays, categories, nesting

SCOPE = "rank"
KEPT_SHARE = 0.5
"""Share of the products' time that a fused kernel needs: it computes the same, but keeps the scores on the chip."""
_PRODUCT = r"^aten::(?:matmul|bmm|baddbmm|mm|addmm|_?convolution(?:_backward)?)$"
_BATCHED = r"^aten::(?:matmul|bmm|baddbmm)$"
"""Products of scores; without a product inside, a matmul counts as one."""
_SOFTMAX = r"^aten::_?(?:safe_)?softmax(?:_backward_data)?$"
_WRAPPERS = r"^aten::(?:matmul|einsum)$|^autograd::engine::evaluate_function|Backward\d*$"
"""Operators around a product that do nothing else."""
_ADVICE = (
    "use torch.nn.functional.scaled_dot_product_attention (or FlashAttention), with a layout, mask and type that its "
    "fused kernels take; the cost assumes that the fused kernel takes half the time of the products"
)


def find(view: RankView) -> Iterator[Finding]:
    if view.activity.basis != "device":
        return
    regions = view.compute_once(find_attention)
    if regions.is_empty():
        return
    products = view.find_host_events(_BATCHED, categories.OPERATOR_CATEGORIES).sort("ts")
    kept = list_launched(view, select_outermost(products).select("end", start="ts", event="id"))["event"]
    share = pl.when(pl.col("event").is_in(kept.implode())).then(1 - KEPT_SHARE).otherwise(1.0)
    launched = list_launched(view, regions)
    launched = launched.with_columns(cost_ns=(pl.col("cost_ns") * share).round().cast(pl.Int64))
    title = f"attention runs as separate products and softmax, {format_times(regions.height)}"
    yield from sum_removed(view, regions, title, launched, confidence="medium", advice=_ADVICE)


def find_attention(view: RankView) -> pl.DataFrame:
    """Return the times from the first product to the last one around each softmax, with the host's cost."""
    marks = _list_marks(view)
    products = marks["kind"].to_numpy()
    thread = nesting.track_codes(marks, ("pid", "tid"))
    rows = []
    for at in np.flatnonzero(products == "softmax").tolist():
        reach = 2 if "backward" in marks["name"][at] else 1
        places = [*range(at - reach, at), *range(at + 1, at + reach + 1)]
        if places[0] < 0 or places[-1] >= marks.height:
            continue
        if (products[places] == "batched").all() and (thread[places] == thread[at]).all():
            rows.append((places[0], places[-1]))
    if not rows:
        return pl.DataFrame(schema=REGION_SCHEMA)
    first, last = (marks[list(column)] for column in zip(*rows, strict=True))
    events = view.trace.events
    start = events["ts"].to_numpy()[_find_wrappers(view, first["id"])]
    end_rows = _find_wrappers(view, last["id"])
    end = events["ts"].to_numpy()[end_rows] + arrays.to_array(events["dur"], 0)[end_rows]
    calls = select_outermost(view.find_host_events("", categories.OPERATOR_CATEGORIES))["ts"].to_numpy()
    count = np.maximum(np.searchsorted(calls, end) - np.searchsorted(calls, start), 2)
    regions = first.select("step", "name", event="id").with_columns(
        start=pl.Series(start),
        end=pl.Series(end),
        cost_ns=pl.Series(np.round((end - start) * (1 - 1 / count))),
    )
    return keep_disjoint(regions).select(pl.col(name).cast(dtype) for name, dtype in REGION_SCHEMA.items())


def _list_marks(view: RankView) -> pl.DataFrame:
    """Return the innermost products and outermost softmaxes by thread and start; kind: batched, product, softmax."""
    products = view.find_host_events(_PRODUCT, categories.OPERATOR_CATEGORIES).sort("pid", "tid", "ts")
    encloses = (pl.col("ts").shift(-1).over("pid", "tid") < pl.col("end")).fill_null(False)
    products = products.filter(~encloses).with_columns(
        kind=pl.when(pl.col("name").str.contains(_BATCHED))
        .then(pl.lit("batched"))
        .otherwise(pl.lit("product"))
    )
    softmax = select_outermost(view.find_host_events(_SOFTMAX, categories.OPERATOR_CATEGORIES))
    return pl.concat([products, softmax.with_columns(kind=pl.lit("softmax"))]).sort("pid", "tid", "ts")


def _find_wrappers(view: RankView, ids: pl.Series) -> np.ndarray:
    """Return the row of the outermost operator around each event that does nothing else."""
    rows = view.find_rows(ids)
    is_wrapper = np.append(view.match_events(_WRAPPERS), False)  # the last entry is for no parent
    while (inside := is_wrapper[view.parents[rows]]).any():
        rows = np.where(inside, view.parents[rows], rows)
    return rows
