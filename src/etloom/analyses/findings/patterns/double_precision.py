"""Find work in double precision (float64), which moves twice the bytes and computes at a fraction of the rate.

Kernels, or on a run without a GPU operators, with tensors in float64, by the types of the operator's tensors,
else by the kernel's name. Also on runs without a GPU.

Cost: half of them; of products the ratio of the device's peaks, if known.
Confidence: medium.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import polars as pl

from etloom.analyses.findings.finding import DEVICE, HOST, Finding, sum_places
from etloom.analyses.findings.host_calls import select_outermost
from etloom.analyses.findings.rank_view import RankView
from etloom.analyses.flops.limits import find_device_peaks
from etloom.core import arrays, categories
from etloom.core.errors import AnalysisError
from etloom.core.text import count_noun

SCOPE = "rank"
BYTES_SHARE = 0.5
"""Share of the time that work bound by memory saves in float32: half of the bytes."""
_KERNEL = (
    r"^[^(]*<[^(]*\bdouble\b|\{lambda\(double(?:, double)*\)"
    r"|(?i:(?:^|[^a-z])d(?:884|168\d+)|(?:^|[^e])dgemm|[_f]f64|fp64|float64)|^Cijk_A\w+_B\w+_D_?B_"
)
"""Matches kernels on float64, where the types of the operator were not recorded."""
_SCALARS = r"multi_tensor_apply"
"""Matches kernels whose type has a double for a number."""
_PRODUCT = r"(?i)gemm|conv|^Cijk_|xmma|cutlass|matmul"
_TYPES = r'"double"'
_ADVICE = (
    "create tensors as float32 (torch.tensor of Python floats and numpy arrays of float64 are the usual sources; "
    ".float(), dtype=torch.float32)"
)


def find(view: RankView) -> Iterator[Finding]:
    wide = _find_operators(view)
    if view.activity.basis == "device":
        yield from _find_on_device(view, wide)
        return
    calls = view.find_host_events("", categories.OPERATOR_CATEGORIES)
    calls = select_outermost(calls.filter(pl.col("id").is_in(wide.implode())))
    rows = calls.select("step", "name", "end", start="ts", event="id", cost_ns=pl.col("dur") // 2)
    yield from _sum_rows(view, rows, HOST, "the cost assumes half the time")


def _find_operators(view: RankView) -> pl.Series:
    """Return the ids of the operators with a tensor argument in float64; a number is a tensor without dimensions."""
    table = view.trace.arguments.select("event", "types", "dims")
    table = table.filter(pl.Series(arrays.match_text(table["types"], _TYPES)))
    kinds = table.select("types", "dims").unique().with_columns(pl.all().cast(pl.String))
    is_wide = [_has_wide_tensor(types, dims) for types, dims in kinds.iter_rows()]
    return table.with_columns(pl.col("types", "dims").cast(pl.String)).join(
        kinds.filter(pl.Series(is_wide, dtype=pl.Boolean)), on=["types", "dims"], how="semi"
    )["event"]


def _has_wide_tensor(types: str, dims: str | None) -> bool:
    shapes = json.loads(dims) if dims is not None else []
    return any(type == "double" and shape for type, shape in zip(json.loads(types), shapes, strict=False))


def _find_on_device(view: RankView, wide: pl.Series) -> Iterator[Finding]:
    typed = view.trace.arguments.filter(pl.col("types").is_not_null())["event"]
    operators = view.trace.launches.select(
        id="device_event",
        is_wide=pl.col("operator").is_in(wide.implode()),
        is_typed=pl.col("operator").is_in(typed.implode()),
    ).unique("id", keep="first")
    work = view.activities
    operators = work.select("id").join(operators, on="id", how="left", maintain_order="left")
    by_name = view.match_activities(work, _KERNEL) & ~view.match_activities(work, _SCALARS)
    is_typed = operators["is_typed"].fill_null(False)
    is_wide = operators["is_wide"].fill_null(False) | (by_name & ~is_typed)
    work = work.filter(is_wide & (work["kind"] == "computation").fill_null(False))
    if work.is_empty():
        return
    share = _estimate_share(view)
    is_product = view.match_activities(work, _PRODUCT)
    assumed = pl.when(is_product).then(BYTES_SHARE if share is None else share).otherwise(BYTES_SHARE)
    saved = (pl.col("dur") * assumed).round().cast(pl.Int64)
    rows = work.select("step", "stream", "name", "end", start="ts", event="launch", cost_ns=saved)
    basis = "the cost assumes half the time, as for half the bytes"
    if is_product.any():
        basis += (
            "; how much faster products are is unknown, as the peaks of this device are"
            if share is None
            else f", and for products that of the device's peaks ({100 * share:.0f} % less)"
        )
    yield from _sum_rows(view, rows, DEVICE, basis)


def _estimate_share(view: RankView) -> float | None:
    """Return the share of their time that products save in float32, by the device's peaks; None if they are unknown."""
    try:
        peaks = find_device_peaks(view.trace)
    except AnalysisError:
        return None
    wide, narrow = peaks.tflops("fp64"), peaks.tflops("fp32")
    return max(BYTES_SHARE, 1 - wide / narrow) if wide and narrow else None


def _sum_rows(view: RankView, rows: pl.DataFrame, tracks: str, basis: str) -> Iterator[Finding]:
    yield from sum_places(
        view,
        rows,
        lambda row: (
            f"{count_noun(row['count'], 'operator')} in float64"
            + (f", mostly {row['operator']}" if row.get("operator") else "")
        ),
        confidence="medium",
        advice=f"{_ADVICE}; {basis}",
        tracks=tracks,
    )
