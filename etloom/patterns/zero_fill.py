"""Memory is filled with zeros over and over."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom import kinds
from etloom.patterns._finding import Finding, at, places, times
from etloom.patterns._view import View, named

FILLS = r"^aten::(?:zero_|fill_|_foreach_zero_)$"
KERNELS = r"FillFunctor|(?i)^memset|FillBuffer"

SCOPE = "rank"


def find(view: View) -> Iterator[Finding]:
    if view.activity.basis == "device":
        fills = view.work.filter(named(view.work, KERNELS)).select(
            "step", "stream", "name", cost_ns="dur", event="launch"
        )
    else:
        inner = view.host(FILLS, kinds.OPERATORS)
        fills = inner.filter(~pl.col("parent").is_in(inner["id"].implode()).fill_null(False)).select(
            "step", "name", cost_ns="dur", event="id"
        )
    yield from places(
        view,
        fills,
        lambda row: f"memory is filled {times(row['count'])}{at(row)}",
        confidence="medium",
        advice="zero_grad(set_to_none=True); torch.empty for what is written next; keep buffers instead of making "
        "zeros in each step",
    )
