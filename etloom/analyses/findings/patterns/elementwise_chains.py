"""Elementwise kernels one after another, each of which reads and writes what the one before wrote."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl

from etloom.analyses.findings.finding import Finding, counted, describe_place, group_by_place
from etloom.analyses.findings.rank_view import View
from etloom.core import arrays

ELEMENTWISE = r"elementwise_kernel|elementwise_kernel_manual_unroll|CUDAFunctor|multi_tensor_apply"
FUSED = r"multi_tensor_apply|^triton_"
LENGTH = 3

SCOPE = "rank"


def find(view: View) -> Iterator[Finding]:
    yield from group_by_place(
        view,
        _runs(view),
        lambda row: (
            f"{counted(row['count'], 'chain')} of {LENGTH}+ elementwise kernels{describe_place(row, 'block')}, each kernel a pass "
            "over memory"
        ),
        confidence="low",
        advice="fuse them: torch.compile, a fused optimizer or norm, or foreach operators",
        by="block",
    )


def _runs(view: View) -> pl.DataFrame:
    """The chains as `places` takes them: elementwise kernels of one step, one after another on their stream."""
    kernels = view.kernels
    is_one = (view.named(kernels, ELEMENTWISE) & ~view.named(kernels, FUSED)).to_numpy()
    lane = arrays.track_codes(kernels, ("device", "stream"))
    rows = arrays.sort_by_track(lane)
    step = arrays.to_array(kernels["step"], np.iinfo(np.int64).min)
    cut = np.ones(len(rows) + 1, np.bool_)
    if rows.size:
        cut[1:-1] = np.any([one[rows[1:]] != one[rows[:-1]] for one in (is_one, lane, step)], axis=0)
    cuts = np.flatnonzero(cut)
    chains = np.flatnonzero(np.diff(cuts) >= LENGTH)
    chains = chains[is_one[rows[cuts[chains]]]]
    chains = chains[np.argsort(rows[cuts[chains]])]
    start, end = cuts[chains], cuts[chains + 1]
    until = np.concatenate(([0], np.cumsum(kernels["dur"].to_numpy()[rows])))
    # n passes over memory become one.
    saved = (until[end] - until[start]) * (1 - 1 / (end - start))
    first: pl.DataFrame = kernels[rows[start]]
    return first.select(
        *("step", "stream", "name"),
        kernels["end"][rows[end - 1]],
        start="ts",
        cost_ns=pl.Series(saved).round().cast(pl.Int64),
        event="launch",
    )
