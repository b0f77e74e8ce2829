"""Find time in long runtime or driver calls, which create the context, load kernels or wait for a lock.

Calls of the runtime or driver of 1 ms or more, while the GPU idles, that neither wait for the device nor
allocate, such as loading kernels; without annotated steps also those before the first launch, which create
the context, and without recorded GPU activity all. Also on runs without a GPU.

Cost: the gaps; the calls.
Confidence: medium; low without GPU activity.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl

from etloom.analyses.findings.finding import BOTH, HOST, Finding, describe_place, format_times, sum_places
from etloom.analyses.findings.rank_view import RankView
from etloom.core.arrays import take_rows

SCOPE = "rank"


def find(view: RankView) -> Iterator[Finding]:
    yield from _find_outside_gaps(view)
    gaps = view.select_gaps("call").drop("name", "event")
    if gaps.is_empty():
        return
    # The call to look at is the last one that began before the gap's end.
    calls = view.long_calls.sort("ts")
    last = np.searchsorted(calls["ts"].to_numpy(), gaps["end"].to_numpy()) - 1
    gaps = gaps.with_columns(take_rows(calls["name"], last), event=take_rows(calls["id"], last))
    yield from sum_places(
        view,
        gaps,
        lambda row: (
            f"the device is idle while the host is in a call of the runtime for 1 ms or more, "
            f"{format_times(row['count'])}{describe_place(row, 'name', ': ')}"
        ),
        confidence="medium",
        advice="first uses of kernels load their code: warm up with all shapes before the trace, or set "
        "CUDA_MODULE_LOADING=EAGER; else other threads or processes hold a lock of the driver",
        tracks=BOTH,
        by="name",
    )


def _find_outside_gaps(view: RankView) -> Iterator[Finding]:
    """Yield the finding on long calls before the first launch, when the device is not used yet and has no gaps.

    Without recorded GPU activity, all long calls count: no gap is known.
    """
    has_device = view.activity.basis == "device"
    if has_device and (view.window is None or view.steps.height):
        return
    calls = view.long_calls
    if calls.is_empty():
        return
    until = view.window[0] if has_device and view.window else calls["end"].max()
    calls = calls.filter(pl.col("ts") < until)
    end = pl.min_horizontal("end", until)
    when = " before the first launch" if has_device else " for 1 ms or more each"
    reason = ": the process creates its context and loads libraries" if has_device else ""
    yield from sum_places(
        view,
        calls.select("name", event="id", start="ts", end=end, cost_ns=end - pl.col("ts")),
        lambda row: (
            f"the host is in calls of the runtime{when}, {row['cost_ns'] / 1e6:,.1f} ms in all, "
            f"{'mostly ' if row['places'] > 1 else ''}{row['name']}{reason}"
        ),
        confidence="medium",
        advice="this happens once per process: record after warm-up, and leave it out of comparisons"
        if has_device
        else "first calls create the context and load kernels; later ones wait for the device, a lock or memory, which "
        "only recorded GPU activity tells apart",
        tracks=HOST,
        by="name",
        kind="outside gaps",
    )
