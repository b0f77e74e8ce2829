"""Find operators that are busy and slow: far below the roofline of the device, or of a type that the CPU emulates.

Three kinds:

- Matrix products, attention and convolutions of 50 µs or more below 15 % of the device's roofline, if they take
  5 % of the busy time.
- An operator that takes a third of the busy time with the same shapes at less than half of the roofline, with
  the reason from its shapes (few tiles, skinny or misaligned products; depthwise, grouped, pointwise,
  transposed, dilated or asymmetric convolutions, few channels or pixels, fp32 or tf32; long or short sequences,
  large heads, expanded heads of keys; experts with few tokens). Without known peaks the roofline is that of the
  slowest known device of the architecture that the kernels name (sm90, sm100, gfx90a, gfx950); else only
  operators with such a reason are compared, with the fastest known device.
- On a run without a GPU, products of 10 MFLOP or more in bf16 or fp16 at less than a quarter of the rate of
  fp32 products (of the run, else 32 GFLOP/s): the CPU emulates the type.

Cost: the time above the roofline, or above the rate of fp32.
Confidence: low; medium on the host.
"""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.analyses.findings.finding import DEVICE, HOST, Finding, describe_place, sum_places
from etloom.analyses.findings.rank_view import RankView
from etloom.analyses.flops.counting import assign_kernels, count_calls
from etloom.analyses.flops.formulas import MATRIX
from etloom.analyses.flops.limits import add_limits, certain_ns, find_device_peaks, list_used_devices
from etloom.analyses.flops.peaks import (
    Peaks,
    find_architecture_peaks,
    find_device_name,
    find_fastest_peaks,
)
from etloom.analyses.flops.shape_reasons import describe_setting, explain_call
from etloom.core.errors import AnalysisError
from etloom.core.text import count_noun
from etloom.core.trace import Trace

SCOPE = "rank"
MAX_ROOFLINE = 0.15
"""Matrix operators of a reasonable size reach a larger share of the roofline."""
MIN_CALL_NS = 50_000
"""Fixed costs of shorter calls may explain their share of the roofline."""
MIN_BUSY = 0.5
"""If less of the time is busy, slow operators are not what costs it."""
MIN_SHARE = 0.05
"""Operators that take less than this share of the busy time are not reported."""
DOMINANT_SHARE, DOMINANT_ROOFLINE, UNKNOWN_ROOFLINE = 1 / 3, 0.5, 0.3
"""An operator with the same shapes that takes this share of the busy time is reported below this share of the roofline,
whatever its size; on a device of unknown peaks only if its shapes show why, below the last share of the roofline of the
fastest known device."""
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
    except AnalysisError:  # without shapes
        return
    if view.activity.basis == "device":
        yield from _find_on_device(view, calls.filter("known"))
    else:
        yield from _find_on_host(view, calls.filter(pl.col("known") & pl.col("family").is_in(MATRIX)))


def _find_on_device(view: RankView, calls: pl.DataFrame) -> Iterator[Finding]:
    peaks, has_peaks, limit = _find_peaks(view.trace)
    calls = _select_slow(view, add_limits(calls, peaks), peaks, has_peaks)
    if calls.is_empty() or float(calls["time_ns"].sum()) < MIN_SHARE * view.busy.total:
        return
    work = assign_kernels(view.trace).join(
        calls.select("row", "replay", "id", "time_ns", "ideal_ns", "operator", "reason", "advice"),
        on=["row", "replay"],
        suffix="_call",
    )
    lost = (pl.col("dur") * (1 - pl.col("ideal_ns") / pl.col("time_ns"))).sum().cast(pl.Int64)
    rows = work.group_by("row", "replay", maintain_order=True).agg(
        pl.col("step", "name", "operator", "reason", "advice").first(),
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
            f"{count_noun(row['count'], 'call')} of slow operators{describe_place(row)} at {share:.1f} % of {limit}"
            + (f": {row['reason']}" if row["reason"] else " on average")
        ),
        confidence="low",
        advice=lambda row: (
            f"{row['advice'] or GENERAL_ADVICE}; see `etloom analyze roofline`. The cost is the time above "
            "the roofline, of which a part remains"
        ),
        tracks=DEVICE,
        kind="device",
    )


def _find_peaks(trace: Trace) -> tuple[Peaks, bool, str]:
    """Return the peaks, whether an operator far below them is slow for certain, and what the text calls the roofline.

    Without peaks of the device they are the smallest of the known devices that run its kernels, else the largest of all
    known devices.
    """
    try:
        return find_device_peaks(trace), True, "the device's roofline"
    except AnalysisError:
        name = find_device_name(trace, list_used_devices(trace)) or "this device, which has no name,"
        slowest = find_architecture_peaks(trace)
        peaks = slowest or find_fastest_peaks()
        text = f"the roofline of {peaks.name} (the peaks of {name} are unknown)"
        return peaks, slowest is not None, text


def _select_slow(view: RankView, calls: pl.DataFrame, peaks: Peaks, has_peaks: bool) -> pl.DataFrame:
    """Return the slow calls, with ``operator``, ``reason`` and ``advice`` of those whose shapes show a reason."""
    calls = calls.with_columns(ideal_ns=certain_ns()).filter(
        pl.col("time_ns") > 0, pl.col("ideal_ns").is_not_null(), pl.col("assumed").is_null()
    )
    reasons = _explain(view, calls, peaks if has_peaks else None)
    is_slow = pl.lit(False)
    if has_peaks:
        is_slow = (
            pl.col("family").is_in(MATRIX)
            & (pl.col("time_ns") >= MIN_CALL_NS)
            & (pl.col("ideal_ns") < MAX_ROOFLINE * pl.col("time_ns"))
        )
    calls = calls.join(reasons, on=_SAME, how="left", nulls_equal=True, maintain_order="left")
    return calls.filter(is_slow | pl.col("is_dominant").fill_null(False))


_SAME = ["name", "dims", "types"]
GENERAL_ADVICE = (
    "other shapes (multiples of 8 to 128), layouts or libraries, another precision, or a fused kernel"
)


def _explain(view: RankView, calls: pl.DataFrame, peaks: Peaks | None) -> pl.DataFrame:
    """Return the operators with equal shapes that take a third of the busy time, far below the roofline.

    Returns:
        name, dims, types, is_dominant, operator, and the reason and advice, if the shapes show one.
    """
    groups = calls.group_by(_SAME, maintain_order=True).agg(
        pl.col("family", "dtype", "precision", "id").first(), pl.col("time_ns", "ideal_ns").sum()
    )
    has_peaks = peaks is not None
    limit = DOMINANT_ROOFLINE if has_peaks else UNKNOWN_ROOFLINE
    groups = groups.filter(
        (pl.col("time_ns") >= DOMINANT_SHARE * view.busy.total)
        & (pl.col("ideal_ns") < limit * pl.col("time_ns"))
        & (pl.col("family") != "communication")
    )
    values = view.trace.arguments.select("concrete_inputs", id="event")
    setting = describe_setting(view.trace, peaks)
    explained = []
    for row in groups.join(values, on="id", how="left", maintain_order="left").iter_rows(named=True):
        reason = explain_call(row, setting, has_peaks)
        if reason is not None or has_peaks:
            text, advice = (None, None) if reason is None else (reason.text, reason.advice)
            explained.append((*(row[name] for name in _SAME), True, row["name"], text, advice))
    schema = {name: calls.schema[name] for name in _SAME} | {
        "is_dominant": pl.Boolean, "operator": pl.String, "reason": pl.String, "advice": pl.String,
    }  # fmt: skip
    return pl.DataFrame(explained, schema=schema, orient="row")


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
