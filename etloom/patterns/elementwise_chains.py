"""Elementwise kernels one after another, each of which reads and writes what the one before wrote."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.patterns._finding import Finding, at, counted, places
from etloom.patterns._view import View, named

ELEMENTWISE = r"elementwise_kernel|elementwise_kernel_manual_unroll|CUDAFunctor|multi_tensor_apply"
FUSED = r"multi_tensor_apply|^triton_"
LENGTH = 3

SCOPE = "rank"


def find(view: View) -> Iterator[Finding]:
    kernels = view.work.filter(pl.col("cat").is_in(["kernel", "Kernel"]))
    is_one = named(kernels, ELEMENTWISE) & ~named(kernels, FUSED)
    runs = (
        kernels.with_columns(is_one=is_one)
        .with_columns(run=pl.struct("is_one", "step").rle_id().over("device", "stream"))
        .filter(pl.col("is_one"))
        .group_by("device", "stream", "run", maintain_order=True)
        .agg(
            pl.len().alias("length"),
            pl.col("dur").sum(),
            pl.col("launch", "step", "name").first(),
            pl.col("ts").first().alias("start"),
            pl.col("end").last(),
        )
        .filter(pl.col("length") >= LENGTH)
        # n passes over memory become one.
        .with_columns(cost_ns=(pl.col("dur") * (1 - 1 / pl.col("length"))).round().cast(pl.Int64))
    )
    yield from places(
        view,
        runs.select("step", "stream", "name", "start", "end", "cost_ns", event="launch"),
        lambda row: (
            f"{counted(row['count'], 'chain')} of {LENGTH}+ elementwise kernels{at(row, 'block')}, each kernel a pass "
            "over memory"
        ),
        confidence="low",
        advice="fuse them: torch.compile, a fused optimizer or norm, or foreach operators",
        by="block",
    )
