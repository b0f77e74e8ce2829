"""Find operators that are busy and slow: far below the roofline of the device, or of a type that the CPU emulates."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.analyses.findings.finding import DEVICE, HOST, Finding, describe_place, sum_places
from etloom.analyses.findings.rank_view import RankView
from etloom.analyses.flops.counting import assign_kernels, count_calls
from etloom.analyses.flops.formulas import MATRIX
from etloom.analyses.flops.limits import add_limits, find_device_peaks
from etloom.analyses.flops.peaks import Peaks
from etloom.core.errors import AnalysisError
from etloom.core.text import count_noun

SCOPE = "rank"
MAX_ROOFLINE = 0.15
"""Matrix operators of a reasonable size reach a larger share of the roofline."""
MIN_CALL_NS = 50_000
"""Fixed costs of shorter calls may explain their share of the roofline."""
MIN_BUSY = 0.5
"""If less of the time is busy, slow operators are not what costs it."""
MIN_SHARE = 0.05
"""Operators that take less than this share of the busy time are not reported."""
NARROW_TYPES = ("c10::BFloat16", "c10::Half")
MIN_HOST_FLOPS = 10_000_000
"""Smaller products on the host are bound by their fixed costs."""
HOST_GFLOPS = 32.0
"""GFLOP/s that a core of a current CPU reaches in fp32 matrix products, if the run has none to compare with."""
MIN_COMPARED = 4
"""Number of fp32 products from which their rate is that of the CPU."""
EMULATED = 0.25
"""Products in a type that the CPU has instructions for reach at least this share of the rate in fp32."""


def find(view: RankView) -> Iterator[Finding]:
    if view.window is None or view.busy.total < MIN_BUSY * (view.window[1] - view.window[0]):
        return
    try:
        calls = count_calls(view.trace)
        peaks = find_device_peaks(view.trace) if view.activity.basis == "device" else None
    except AnalysisError:  # without shapes, or of an unknown device
        return
    calls = calls.filter(pl.col("known") & pl.col("family").is_in(MATRIX))
    yield from _find_on_host(view, calls) if peaks is None else _find_on_device(view, calls, peaks)


def _find_on_device(view: RankView, calls: pl.DataFrame, peaks: Peaks) -> Iterator[Finding]:
    calls = add_limits(calls, peaks).filter(
        (pl.col("time_ns") >= MIN_CALL_NS) & (pl.col("ideal_ns") < MAX_ROOFLINE * pl.col("time_ns"))
    )
    if calls.is_empty() or float(calls["time_ns"].sum()) < MIN_SHARE * view.busy.total:
        return
    work = assign_kernels(view.trace).join(
        calls.select("row", "replay", "id", "time_ns", "ideal_ns"), on=["row", "replay"], suffix="_call"
    )
    lost = (pl.col("dur") * (1 - pl.col("ideal_ns") / pl.col("time_ns"))).sum().cast(pl.Int64)
    per_call = work.group_by("row", "replay", maintain_order=True)
    rows = per_call.agg(
        pl.col("step", "name").first(),
        pl.col("end").max(),
        start=pl.col("ts").min(),
        cost_ns=lost,
        event=pl.col("id_call").first(),
    )
    share = 100 * float(calls["ideal_ns"].sum()) / float(calls["time_ns"].sum())
    yield from sum_places(
        view,
        rows,
        lambda row: (
            f"{count_noun(row['count'], 'matrix operator')}{describe_place(row)} at {share:.1f} % of the device's "
            "roofline on average"
        ),
        confidence="low",
        advice="see `etloom analyze roofline`: other shapes (multiples of 8 to 128), layouts or libraries, another "
        "precision, or a fused kernel; the cost is the time above the roofline, of which a part remains",
        tracks=DEVICE,
        kind="device",
    )


def _find_on_host(view: RankView, calls: pl.DataFrame) -> Iterator[Finding]:
    calls = calls.filter((pl.col("flops") >= MIN_HOST_FLOPS) & (pl.col("time_ns") > 0))
    is_narrow = pl.col("dtype").is_in(NARROW_TYPES)
    plain = calls.filter(pl.col("dtype") == "float")
    usual = (plain["flops"] / plain["time_ns"]).median()
    reference = usual if isinstance(usual, float) and plain.height >= MIN_COMPARED else HOST_GFLOPS
    slow = calls.filter(is_narrow & (pl.col("flops") / pl.col("time_ns") < EMULATED * reference))
    if slow.is_empty() or float(slow["time_ns"].sum()) < MIN_SHARE * view.busy.total:
        return
    rate = float(slow["flops"].sum()) / float(slow["time_ns"].sum())
    events = view.trace.events.select("id", "ts", "dur", "step", "name")
    rows = slow.select("id", "flops").join(events, on="id").with_columns(end=pl.col("ts") + pl.col("dur"))
    saved = (pl.col("dur") - (pl.col("flops") / reference).cast(pl.Int64)).clip(0)
    rows = rows.select("step", pl.col("name").cast(pl.String), "end", start="ts", cost_ns=saved, event="id")
    basis = "fp32 products of this run" if plain.height >= MIN_COMPARED else "those of a core in fp32 usually"
    yield from sum_places(
        view,
        rows,
        lambda row: (
            f"{count_noun(row['count'], 'matrix product')} in a 16-bit type{describe_place(row)} at {rate:.1f} "
            f"GFLOP/s; {basis} reach {reference:.0f}: this CPU emulates the type"
        ),
        confidence="medium",
        advice="train in fp32 on this CPU (no autocast), or use one with instructions for the type (AVX512-BF16, AMX, "
        "AVX512-FP16)",
        tracks=HOST,
        kind="host",
    )
