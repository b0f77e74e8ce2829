"""The time of each kernel on another device, relative to the recorded one.

By family and shape, from the best source there is:

- table: measured matrix products and attention of these shapes on both devices (`measured_tables`);
- roofline: the limit of the call (FLOPs by peak, bytes by bandwidth, the larger one) on both devices. Only the part of
  the time changes that the limit explains, at the efficiency of large kernels; the rest is latency. On a slower device,
  matrix products and attention keep their recorded efficiency instead;
- guessed: kernels without known FLOPs and bytes follow the peak (matrix products, attention) or the bandwidth.

Collectives within a node of eight take the ratio of collectives measured on both (`collective_ratios`); without tables
they keep their time, as do copies between host and device and the work of the host. So a faster device does not shorten
the time in which the GPU waits for the host. No kernel takes less than `MIN_KERNEL_NS`, unless it did.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl

from etloom.analyses.flops.counting import assign_kernels, count_calls
from etloom.analyses.flops.formulas import MATRIX
from etloom.analyses.flops.limits import add_limits, find_device_peaks
from etloom.analyses.flops.peaks import Peaks, lookup_peaks
from etloom.core.errors import AnalysisError, EtloomError
from etloom.core.trace import Trace
from etloom.graphs.graph import EdgeKind
from etloom.simulator.devices.call_shapes import parse_calls
from etloom.simulator.devices.measured_tables import MeasuredRatios
from etloom.simulator.scenario import Basis, Scenario

MIN_KERNEL_NS = 2_000
"""The time of a kernel that does almost nothing."""

LARGE_KERNEL_EFFICIENCY = 0.75
"""Share of a device's limit that large kernels reach."""

SAME_PEAK_DEVIATION, OTHER_PEAK_DEVIATION = 0.11, 0.39
"""Relative standard deviation of times by roofline, between devices of equal and of different peaks."""


def change_device(scenario: Scenario, device: str, *, tables: Path | None = None) -> Scenario:
    """Return the scenario with the kernels on another device.

    Args:
        scenario: of a run recorded on a device with known peaks.
        device: name of a device of devices.json, such as h100.
        tables: folder of measured tables; default: those of the package aiconfigurator-core, if it is installed.

    Raises:
        UnknownName: the device is not known.
        AnalysisError: the recorded device has no known peaks.
        EtloomError: the run has no kernels.
    """
    new = lookup_peaks(device)
    names, deviation = set(), 0.0

    def compute_ratios(trace: Trace) -> pl.DataFrame:
        nonlocal deviation
        try:
            old = find_device_peaks(trace)
        except AnalysisError as error:
            remedy = "--device needs a recording that names a device of docs/flops.md"
            raise AnalysisError(error.what, where=error.where, remedy=remedy) from None
        names.add(old.name)
        deviation = max(deviation, estimate_deviation(old, new))
        return compute_kernel_ratios(trace, old, new, tables)

    if not (scenario.graph.kind == EdgeKind.KERNEL).any():
        raise EtloomError(f"--device {device}: the run has no kernels", remedy="record it on a GPU")
    changed, shares = scale_kernels(scenario, compute_ratios)
    note = f"kernels of {', '.join(sorted(names))} on {new.name}: {shares} (of their recorded time)"
    deviations = {**scenario.deviations, Basis.ROOFLINE: deviation}
    return changed.replace(deviations=deviations, notes=(*scenario.notes, note))


def scale_kernels(
    scenario: Scenario, compute_ratios: Callable[[Trace], pl.DataFrame]
) -> tuple[Scenario, str]:
    """Return the scenario with the kernels scaled by ratios, and the share of their time by basis as text.

    Args:
        scenario: of a run with kernels.
        compute_ratios: returns id, ratio and basis of kernels of the trace of a recorded rank.
    """
    edges = np.flatnonzero(scenario.graph.kind == EdgeKind.KERNEL)
    owners = pl.DataFrame(
        {
            "edge": edges,
            "rank": np.array(_list_templates(scenario))[scenario.graph.rank[scenario.graph.target[edges]]],
            "id": scenario.graph.owner[edges].astype(np.int64),
        }
    )
    ratios = [
        compute_ratios(scenario.recorded[rank]).with_columns(rank=pl.lit(rank, pl.Int64))
        for rank in owners["rank"].unique().sort().to_list()
    ]
    changed = owners.join(pl.concat(ratios), on=("rank", "id"))
    index = changed["edge"].to_numpy()
    before = scenario.lag[index]
    after = np.maximum(np.rint(before * changed["ratio"].to_numpy()), np.minimum(before, MIN_KERNEL_NS))
    lag, basis = scenario.lag.copy(), scenario.basis.copy()
    lag[index] = after.astype(np.int64)
    basis[index] = np.maximum(changed["basis"].to_numpy(), basis[index])
    shares = (
        changed.with_columns(before=pl.Series(before))
        .group_by("basis")
        .agg(pl.col("before").sum())
        .sort("basis")
    )
    total = max(int(before.sum()), 1)
    parts = [f"{100 * ns / total:.0f} % {Basis(kind).source}" for kind, ns in shares.iter_rows()]
    return scenario.replace(lag=lag, basis=basis), ", ".join(parts)


def find_recorded_device(scenario: Scenario) -> Peaks:
    """Return the device of the first recorded rank. Raises AnalysisError if its peaks are not known."""
    return find_device_peaks(next(iter(scenario.recorded.values())))


def _list_templates(scenario: Scenario) -> list[int]:
    """Return the recorded rank that each rank repeats, indexed by rank."""
    return [scenario.template.get(rank, -1) for rank in range(max(scenario.template) + 1)]


def compute_kernel_ratios(trace: Trace, old: Peaks, new: Peaks, tables: Path | None = None) -> pl.DataFrame:
    """Return the ratio of the times on another device and on the recorded one for each computing kernel (id),
    and its `Basis`.

    tables: folder of measured tables; default: those of an installed aiconfigurator-core.

    Raises:
        AnalysisError: the trace has no GPU activity.
    """
    kernels = assign_kernels(trace).filter((pl.col("kind") != "communication") & ~pl.col("bus"))
    kernels = kernels.select(
        pl.col("id").cast(pl.Int64),
        pl.col("row", "replay"),
        pl.col("kernel_family").cast(pl.String).alias("family"),
    ).with_columns(guess=_guess_ratios(pl.col("family"), old, new))
    try:
        calls = count_calls(trace).filter(pl.col("row") >= 0)
    except AnalysisError:
        return _select_ratios(kernels.with_columns(table=None, limit=None))
    before, after = add_limits(calls, old)["ideal_ns"], add_limits(calls, new)["ideal_ns"]
    measured = _look_up_calls(calls, old, new, tables)
    is_matrix = calls["family"].is_in([str(name) for name in MATRIX]).to_numpy()
    costs = calls.select("row", "replay").with_columns(
        limit=pl.Series(scale_by_limits(calls["time_ns"], before, after, is_matrix)).fill_nan(None),
        table=pl.Series(measured).fill_nan(None),
    )
    return _select_ratios(kernels.join(costs, on=("row", "replay"), how="left", maintain_order="left"))


def _look_up_calls(calls: pl.DataFrame, old: Peaks, new: Peaks, tables: Path | None) -> np.ndarray:
    """Return the measured ratio of each call, nan without one."""
    ratios = np.full(calls.height, np.nan)
    for family in ("gemm", "context_attention", "generation_attention"):
        measured = MeasuredRatios.load(family, old.name, new.name, tables)
        if measured is not None:
            values = measured.compute_ratios(*parse_calls(calls, family))
            ratios = np.where(np.isnan(values), ratios, values)
    return ratios


def scale_by_limits(
    time: pl.Series, old_limit: pl.Series, new_limit: pl.Series, keeps_efficiency: np.ndarray | bool = True
) -> np.ndarray:
    """Return the ratio of the time on another device to the recorded one, nan where a limit is unknown.

    Args:
        time: recorded, ns.
        old_limit: the least time on the recorded device, ns.
        new_limit: the least time on the other device, ns.
        keeps_efficiency: on a slower device, the recorded efficiency stays (per call or for all).
    """
    recorded, old, new = (column.cast(pl.Float64).to_numpy() for column in (time, old_limit, new_limit))
    with np.errstate(divide="ignore", invalid="ignore"):
        explained = np.minimum(old / (LARGE_KERNEL_EFFICIENCY * recorded), 1.0)
        ratio = new / old
        keeps = (ratio >= 1) & keeps_efficiency
        ratio = np.where(keeps, ratio, 1 - explained + explained * ratio)
        return np.asarray(np.where(old > 0, ratio, np.nan))


def estimate_deviation(old: Peaks, new: Peaks) -> float:
    """Return the relative standard deviation of times by roofline from one device to another."""
    return SAME_PEAK_DEVIATION if old.matrix_tflops == new.matrix_tflops else OTHER_PEAK_DEVIATION


def _guess_ratios(family: pl.Expr, old: Peaks, new: Peaks) -> pl.Expr:
    """Return the ratio of peaks for families of matrix products, of bandwidths for others; 1 if unknown."""
    peaks = old.tflops("bf16") or old.tflops("fp16"), new.tflops("bf16") or new.tflops("fp16")
    compute = peaks[0] / peaks[1] if peaks[0] and peaks[1] else 1.0
    memory = old.bandwidth_gbs / new.bandwidth_gbs if old.bandwidth_gbs and new.bandwidth_gbs else 1.0
    return pl.when(family.is_in([str(name) for name in MATRIX])).then(compute).otherwise(memory)


def _select_ratios(kernels: pl.DataFrame) -> pl.DataFrame:
    """Return the ratio from the best source, and this source."""
    kernels = kernels.with_columns(pl.col("table", "limit").cast(pl.Float64))
    return kernels.select(
        "id",
        ratio=pl.coalesce("table", "limit", "guess"),
        basis=pl.when(pl.col("table").is_not_null())
        .then(pl.lit(int(Basis.TABLE)))
        .when(pl.col("limit").is_not_null())
        .then(pl.lit(int(Basis.ROOFLINE)))
        .otherwise(pl.lit(int(Basis.GUESSED)))
        .cast(pl.UInt8),
    )
