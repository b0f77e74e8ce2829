"""Model and hardware FLOP utilization (MFU, HFU): achieved FLOPs as share of the device's peak.

One row per step, and one (null step) for the whole trace, from the first to the last GPU activity. mfu_pct: 100
model_flops / (dur peak); hfu_pct: the same with all executed flops. model_flops excludes recomputation: forward
operators that activation checkpointing repeats during backward, and the attention scores that fused attention
recomputes. Only matrix products, attention, convolutions and mixtures of experts are counted, and no flops that are
assumed. precision: all precisions used, the one with most flops first ("fp32, tf32"); peak: their peak weighted by
flops, so that a step at full speed is 100 percent. The flops of a step are those launched in it; its dur is that of the
annotation. covered_pct: the share of the device time of matrix operations (recognized by kernel name if the operator is
unknown) whose flops are known; below 100, both utilizations are underestimated.

Units: FLOP, ns, TFLOP/s (10^12), percent. Several devices of one rank are counted together. Needs shapes, and a device
with known peaks. Definitions: MFU, Chowdhery et al. 2022 (PaLM); HFU, Korthikanti et al. 2022.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import polars as pl

from etloom.analyses.flops.counting import count_calls
from etloom.analyses.flops.formulas import MATRIX
from etloom.analyses.flops.limits import add_limits, find_device_peaks, list_used_devices
from etloom.analyses.flops.peaks import check_device
from etloom.analyses.helpers import Step, conform_columns, step_windows
from etloom.core.trace import Trace
from etloom.timeline.activity import compute_activity

SCOPE = "rank"
COLUMNS = {
    "step": pl.Int64,
    "dur_ns": pl.Int64,
    "device": pl.String,
    "precision": pl.String,
    "peak_tflops_per_s": pl.Float64,
    "model_flops": pl.Int64,
    "flops": pl.Int64,
    "tflops_per_s": pl.Float64,
    "mfu_pct": pl.Float64,
    "hfu_pct": pl.Float64,
    "covered_pct": pl.Float64,
}


def analyze(
    trace: Trace,
    *,
    step: Step = None,
    device: Annotated[str | None, "The device (H100), if the trace does not name it."] = None,
    device_peaks: Annotated[str | None, "A file of device peaks, as shown in docs/flops.md."] = None,
    peak_tflops: Annotated[float | None, "Use this peak, for any precision."] = None,
) -> pl.DataFrame:
    check_device(device, device_peaks)
    calls = count_calls(trace).filter(pl.col("family").is_in(MATRIX))
    # Assumed FLOPs were not observed, so they do not count as utilization.
    stated = (
        pl.when(pl.col("assumed").is_null()).then(name).alias(name) for name in ("flops", "model_flops")
    )
    calls = calls.with_columns(stated)
    peaks = find_device_peaks(
        trace, device=device, device_peaks=device_peaks, peak_tflops=peak_tflops, memory=False
    )
    devices = max(1, len(list_used_devices(trace)))
    calls = add_limits(calls, peaks)
    rows = []
    for number, start, end in step_windows(trace, compute_activity(trace).busy, step).iter_rows():
        window_calls = calls if number is None else calls.filter(pl.col("step") == number)
        rows.append((number, end - start, *_summarize(window_calls, end - start, devices)))
    names = ("step", "dur_ns", *list(COLUMNS)[3:])
    table = pl.DataFrame(rows, schema={name: COLUMNS[name] for name in names}, orient="row")
    return conform_columns(table.with_columns(device=pl.lit(peaks.name)), COLUMNS)


def _summarize(calls: pl.DataFrame, dur: int, devices: int) -> tuple[Any, ...]:
    """Return the values of the columns from precision on, for the operator calls in a time interval."""
    total = int(calls["time_ns"].sum())
    with_flops = calls.filter(pl.col("compute_ns").is_not_null())
    covered = 100 * int(with_flops["time_ns"].sum()) / total if total else None
    flops, model = int(with_flops["flops"].sum()), int(with_flops["model_flops"].sum())
    if not flops or not dur:
        return (*[None] * 7, covered)
    # With several precisions, each call is compared with the peak of its own.
    needed, needed_model = (
        float(with_flops.select((pl.col(name) / pl.col("peak") / 1e3).sum()).item()) / devices
        for name in ("flops", "model_flops")
    )
    used = with_flops.group_by("precision").agg(pl.col("flops").sum()).filter(pl.col("flops") > 0)
    precisions = ", ".join(used.sort("flops", "precision", descending=[True, False])["precision"])
    peak = flops / needed / 1e3
    return (
        precisions,
        peak,
        model,
        flops,
        flops / dur / 1e3,
        100 * needed_model / dur,
        100 * needed / dur,
        covered,
    )


def remarks(table: pl.DataFrame) -> Iterator[str]:
    """Yield notes for the terminal on mixed precisions and on operations with unknown flops."""
    mixed = [precisions for precisions in table["precision"] if precisions and ", " in precisions]
    if mixed:
        yield (
            f"the peak of {mixed[0]} is the mean weighted by flops: each call is compared with the peak of its own "
            "precision"
        )
    min_covered = table["covered_pct"].min()
    if isinstance(min_covered, float) and min_covered < 100:
        yield (
            f"the flops of up to {100 - min_covered:.1f} % of the time of matrix operations are unknown: both "
            "utilizations are underestimated; see `etloom analyze flops`"
        )
