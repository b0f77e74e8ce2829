"""Classifies operator calls by family (gemm, attention), sizes and precision, named as in the measured tables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import polars as pl

from etloom.analyses.flops.measured_tables import (
    FAMILIES,
    SYSTEMS,
    TIME_ERRORS_PCT,
    Array,
    MeasuredRatios,
    count_limits,
)
from etloom.analyses.flops.peaks import Peaks, lookup_peaks

_PRECISIONS = {"half": "fp16", "float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp8"}
_PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::linear": 0, "aten::_scaled_mm": 0}
"""Operator -> position of the first matrix."""
_ATTENTION = {
    "aten::_scaled_dot_product_flash_attention": True,
    "aten::_scaled_dot_product_efficient_attention": True,
    "aten::_scaled_dot_product_cudnn_attention": True,
    "aten::_scaled_dot_product_fused_attention_overrideable": True,
    "aten::_flash_attention_forward": False,
    "flash_attn::_flash_attn_forward": False,
}
"""Operator -> whether heads come before the sequence in its tensors. Packed sequences are left out: rank 3."""
_PACKED = frozenset({"aten::_flash_attention_forward", "flash_attn::_flash_attn_varlen_forward"})
"""Operators whose sequences may be packed."""


def parse_calls(calls: pl.DataFrame, family: str) -> tuple[Array, list[str | None]]:
    """Return the sizes of calls of one family (nan rows for calls of other families), and the precision of every call.

    Args:
        calls: as `etloom.analyses.flops.counting.count_calls` returns them.
        family: gemm, context_attention or generation_attention.
    """
    shapes = np.full((calls.height, len(FAMILIES[family].sizes)), np.nan)
    for row, (name, dims) in enumerate(calls.select(pl.col("name", "dims").cast(pl.String)).iter_rows()):
        parsed = _parse_call(name, dims)
        if parsed is not None and parsed[0] == family:
            shapes[row] = parsed[1]
    precisions = [
        _PRECISIONS.get((dtype or "").replace("c10::", "").lower())
        for dtype in calls["dtype"].cast(pl.String)
    ]
    return shapes, precisions


@lru_cache(maxsize=4096)
def _parse_call(name: str | None, dims: str | None) -> tuple[str, tuple[float, ...]] | None:
    """Return the family (gemm or an attention) and the sizes of an operator call; None for other operators."""
    try:
        tensors = json.loads(dims) if dims else []
        if name in _PRODUCTS:
            sizes = ("gemm", _parse_product(name, tensors[_PRODUCTS[name] :]))
        elif name in _ATTENTION:
            sizes = _parse_attention(tensors, _ATTENTION[name])
        else:
            return None
        return sizes if min(sizes[1]) > 0 else None
    except (ValueError, TypeError, IndexError):
        return None


def estimate_times(
    calls: pl.DataFrame, peaks: Peaks, recorded: Mapping[str, MeasuredRatios] | None = None
) -> tuple[Array, Array]:
    """Return the time (ns) of calls of the nearest measured shapes on a device, and the bound of nine in ten errors, %.

    Both are nan where none was measured.

    Args:
        calls: as `etloom.analyses.flops.counting.count_calls` returns them.
        peaks: the device.
        recorded: family -> times to take instead of the tables.
    """
    times, errors = np.full(calls.height, np.nan), np.full(calls.height, np.nan)
    # A file of peaks may state others for this device, but measured times do not depend on them.
    stated = lookup_peaks(peaks.name) if peaks.name in SYSTEMS else peaks
    for family, error in TIME_ERRORS_PCT.items():
        shapes, kinds = parse_calls(calls, family)
        measured = MeasuredRatios.load_times(family, peaks) if recorded is None else recorded.get(family)
        ratios = np.full(calls.height, np.nan) if measured is None else measured.compute_ratios(shapes, kinds)
        for row in np.flatnonzero(np.isfinite(ratios)):
            times[row] = ratios[row] * count_limits(family, shapes[[row]], str(kinds[row]), stated)[0]
            errors[row] = error
    return times, errors


def parse_product(name: str | None, dims: str | None) -> tuple[float, ...]:
    """Return m, n and k of a matrix product; () for other calls."""
    parsed = _parse_call(name, dims)
    return parsed[1] if parsed is not None and parsed[0] == "gemm" else ()


def parse_tokens(name: str | None, dims: str | None) -> tuple[int, int] | None:
    """Return (batch size, query tokens per sequence) of an attention call; None for other calls.

    Packed sequences (tokens, heads, size of a head) count as one.
    """
    parsed = _parse_call(name, dims)
    if parsed is not None and parsed[0] == "context_attention":
        return int(parsed[1][0]), int(parsed[1][1])
    if name is None or name not in _PACKED or not dims:
        return None
    try:
        tokens, heads, size = json.loads(dims)[0]
    except (ValueError, TypeError, IndexError):
        return None
    return (1, int(tokens)) if min(tokens, heads, size) > 0 else None


def list_matrices(name: str | None, dims: str | None) -> tuple[float, ...]:
    """Return the number of elements of each of the three matrices of a matrix product; () for other calls."""
    product = parse_product(name, dims)
    if not product:
        return ()
    m, n, k = product
    return m * k, k * n, m * n


def _parse_product(name: str | None, tensors: list[Any]) -> tuple[float, ...]:
    """Return m, n and k of the product of an (m, k) and a (k, n) matrix, from the shapes of its tensors."""
    left, right = tensors[:2]
    columns = right[0] if name == "aten::linear" else right[-1]
    return float(np.prod(left[:-1])), float(columns), float(left[-1])


def _parse_attention(tensors: list[Any], heads_first: bool) -> tuple[str, tuple[float, ...]]:
    """Return family and sizes of an attention call: generation with a single query token per sequence, else context."""
    query, key = tensors[:2]
    batch, heads, queries, head_dim = query if heads_first else (query[0], query[2], query[1], query[3])
    shared, context = (key[1], key[2]) if heads_first else (key[2], key[1])
    sizes = (float(context), float(heads), float(shared), float(head_dim))
    if queries == 1:
        return "generation_attention", (float(batch), *sizes)
    return "context_attention", (float(batch), float(queries), *sizes)
