"""Predicts kernel times on another device, as the ratio of the time on that device to the recorded time.

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

from pathlib import Path

import numpy as np
import polars as pl

from etloom.analyses.flops.call_shapes import parse_calls
from etloom.analyses.flops.counting import assign_kernels, count_calls
from etloom.analyses.flops.formulas import MATRIX
from etloom.analyses.flops.limits import add_limits, find_device_peaks
from etloom.analyses.flops.measured_tables import MeasuredRatios
from etloom.analyses.flops.peaks import Peaks, lookup_peaks
from etloom.core.errors import AnalysisError, EtloomError
from etloom.core.trace import Job, Trace
from etloom.graphs.graph import EdgeKind
from etloom.simulator.scenario import Basis, Scenario

MIN_KERNEL_NS = 2_000
"""The time of a kernel that does almost nothing."""

LARGE_KERNEL_EFFICIENCY = 0.75
"""Share of a device's limit that large kernels reach."""

SAME_PEAK_DEVIATION, OTHER_PEAK_DEVIATION = 0.11, 0.39
"""Relative standard deviation of times by roofline, between devices of equal and of different peaks."""

_MATRIX = [str(name) for name in MATRIX]
_COSTS = {
    **dict.fromkeys(("name", "dims", "family", "dtype"), pl.String),
    **dict.fromkeys(("tf32", "bus"), pl.Boolean),
    **dict.fromkeys(("flops", "bytes", "time_ns"), pl.Float64),
}
"""Columns of calls that ratios depend on."""


_GPU_VENDORS = {"NVIDIA", "AMD"}
"""Vendors whose devices run the same PyTorch kernels, so that a recording on one of them bounds the time on another."""


def change_device(scenario: Scenario, device: str, *, tables: Path | None = None) -> Scenario:
    """Return the scenario with the kernel times predicted for another device.

    Args:
        scenario: of a run recorded on a device with known peaks.
        device: name of a device of devices.json, such as h100.
        tables: folder of measured tables; default: those of the package aiconfigurator-core, if it is installed.

    Raises:
        UnknownName: the device is not known.
        AnalysisError: the recorded device has no known peaks.
        EtloomError: the run has no kernels, or the devices run other kernels.
    """
    new = lookup_peaks(device)
    if not (scenario.graph.kind == EdgeKind.KERNEL).any():
        raise EtloomError(f"--device {device}: the run has no kernels", remedy="record it on a GPU")
    recorded = scenario.recorded.compute_once(collect_kernel_costs, list_kernel_ranks(scenario))
    for old, _ in recorded:
        _require_comparable(old, new)
    ratios = pl.concat(
        compute_kernel_ratios(costs, old, new, tables).with_columns(costs["rank"]) for old, costs in recorded
    )
    changed, shares = scale_kernels(scenario, ratios)
    names = ", ".join(sorted(old.name for old, _ in recorded))
    note = f"kernels of {names} on {new.name}: {shares} (of their recorded time)"
    deviation = max(estimate_deviation(old, new) for old, _ in recorded)
    deviations = {**scenario.deviations, Basis.ROOFLINE: deviation}
    return changed.replace(deviations=deviations, notes=(*scenario.notes, note))


def _require_comparable(old: Peaks, new: Peaks) -> None:
    """Raise EtloomError if two devices run other kernels: compilers fuse and divide operators in other ways there."""
    comparable = _GPU_VENDORS if old.vendor in _GPU_VENDORS else {old.vendor}
    if new.vendor not in comparable:
        raise EtloomError(
            f"--device {new.name}: no measurement relates kernels of the {old.name} ({old.vendor}) to those of "
            f"{new.vendor}",
            remedy=f"record the job there, or name a device of {' or '.join(sorted(comparable))}",
        )


def scale_kernels(scenario: Scenario, ratios: pl.DataFrame) -> tuple[Scenario, str]:
    """Return the scenario with kernel times multiplied by ``ratios``, and a text: the share of kernel time by source.

    Args:
        scenario: of a run with kernels.
        ratios: rank (of the recording), id, ratio and basis of kernels.
    """
    edges = np.flatnonzero(scenario.graph.kind == EdgeKind.KERNEL)
    owners = pl.DataFrame(
        {
            "edge": edges,
            "rank": np.array(_list_templates(scenario))[scenario.graph.rank[scenario.graph.target[edges]]],
            "id": scenario.graph.owner[edges].astype(np.int64),
        }
    )
    changed = owners.join(ratios, on=("rank", "id"))
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
    """Return the peaks of the device of the first recorded rank. Raises AnalysisError if they are not known."""
    return find_device_peaks(next(iter(scenario.recorded.values())))


def changes_vendor(scenario: Scenario, device: str) -> bool:
    """Return whether another vendor makes a device than the device of the first recorded rank."""
    return find_recorded_device(scenario).vendor != lookup_peaks(device).vendor


def list_kernel_ranks(scenario: Scenario) -> tuple[int, ...]:
    """Return the recorded ranks whose kernels appear in a scenario, ascending."""
    ranks = scenario.graph.rank[scenario.graph.target[scenario.graph.kind == EdgeKind.KERNEL]]
    return tuple(sorted({scenario.template[rank] for rank in np.unique(ranks).tolist()}))


def _list_templates(scenario: Scenario) -> list[int]:
    """Return a list with the recorded rank that each rank of the scenario repeats, by rank; -1 for none."""
    return [scenario.template.get(rank, -1) for rank in range(max(scenario.template) + 1)]


def collect_kernel_costs(job: Job, ranks: tuple[int, ...]) -> list[tuple[Peaks, pl.DataFrame]]:
    """Return for each recorded device model its peaks, and the kernels of its ranks with costs (`list_kernel_costs`).

    Raises:
        AnalysisError: the device of a rank has no known peaks.
    """
    devices: dict[str, tuple[Peaks, list[pl.DataFrame]]] = {}
    for rank in ranks:
        try:
            peaks = find_device_peaks(job[rank])
        except AnalysisError as error:
            remedy = "--device needs a recording that names a device of docs/flops.md"
            raise AnalysisError(error.what, where=error.where, remedy=remedy) from None
        costs = job[rank].compute_once(list_kernel_costs)
        devices.setdefault(peaks.name, (peaks, []))[1].append(costs.with_columns(rank=pl.lit(rank, pl.Int64)))
    return [(peaks, pl.concat(costs)) for peaks, costs in devices.values()]


def list_kernel_costs(trace: Trace) -> pl.DataFrame:
    """Return the computation kernels of a rank, each with the cost (FLOPs, bytes) of the operator call that launched
    it.

    Returns:
        id, kernel_family, and of the call, null if no cost is known: name, dims, family, dtype, tf32, bus, flops, bytes
        and time_ns, see `count_calls`.

    Raises:
        AnalysisError: the trace has no GPU activity.
    """
    kernels = assign_kernels(trace).filter((pl.col("kind") != "communication") & ~pl.col("bus"))
    kernels = kernels.select(
        pl.col("id").cast(pl.Int64), "row", "replay", pl.col("kernel_family").cast(pl.String)
    )
    try:
        calls = count_calls(trace).filter(pl.col("row") >= 0)
    except AnalysisError:
        return kernels.select(
            "id", "kernel_family", **{name: pl.lit(None, dtype) for name, dtype in _COSTS.items()}
        )
    costs = calls.select("row", "replay", *(pl.col(name).cast(dtype) for name, dtype in _COSTS.items()))
    return kernels.join(costs, on=("row", "replay"), how="left", maintain_order="left").drop("row", "replay")


def compute_kernel_ratios(
    costs: pl.DataFrame, old: Peaks, new: Peaks, tables: Path | None = None
) -> pl.DataFrame:
    """Return for each kernel (id) the time on the device ``new`` divided by that on ``old``, and its source (`Basis`).

    Args:
        costs: as `list_kernel_costs` returns them.
        old: the recorded device.
        new: the other one.
        tables: folder of measured tables; default: those of an installed aiconfigurator-core.
    """
    before, after = add_limits(costs, old)["ideal_ns"], add_limits(costs, new)["ideal_ns"]
    is_matrix = costs["family"].is_in(_MATRIX).fill_null(False).to_numpy()
    return costs.select(
        "id",
        table=pl.Series(_look_up_calls(costs, old, new, tables)).fill_nan(None),
        limit=pl.Series(scale_by_limits(costs["time_ns"], before, after, is_matrix)).fill_nan(None),
        guess=_guess_ratios(pl.col("kernel_family"), old, new),
    ).select(
        "id",
        ratio=pl.coalesce("table", "limit", "guess").cast(pl.Float64),
        basis=pl.when(pl.col("table").is_not_null())
        .then(pl.lit(int(Basis.TABLE)))
        .when(pl.col("limit").is_not_null())
        .then(pl.lit(int(Basis.ROOFLINE)))
        .otherwise(pl.lit(int(Basis.GUESSED)))
        .cast(pl.UInt8),
    )


def _look_up_calls(calls: pl.DataFrame, old: Peaks, new: Peaks, tables: Path | None) -> np.ndarray:
    """Return for each call the measured ratio of its time on both devices (new / old); nan if not measured."""
    distinct = calls.select("name", "dims", "dtype").unique(maintain_order=True)
    ratios = np.full(distinct.height, np.nan)
    for family in ("gemm", "context_attention", "generation_attention"):
        measured = MeasuredRatios.load(family, old.name, new.name, tables)
        if measured is not None:
            values = measured.compute_ratios(*parse_calls(distinct, family))
            ratios = np.where(np.isnan(values), ratios, values)
    if np.isnan(ratios).all():
        return np.full(calls.height, np.nan)
    by_call = distinct.with_columns(ratio=pl.Series(ratios))
    keys = ("name", "dims", "dtype")
    return calls.join(by_call, on=keys, how="left", maintain_order="left", nulls_equal=True)[
        "ratio"
    ].to_numpy()


def scale_by_limits(
    time: pl.Series, old_limit: pl.Series, new_limit: pl.Series, keeps_efficiency: np.ndarray | bool = True
) -> np.ndarray:
    """Return the time on another device divided by the recorded time, by roofline limits; nan where a limit is unknown.

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
    """Return the relative standard deviation of kernel times predicted by roofline for the device ``new``."""
    return SAME_PEAK_DEVIATION if old.matrix_tflops == new.matrix_tflops else OTHER_PEAK_DEVIATION


def _guess_ratios(family: pl.Expr, old: Peaks, new: Peaks) -> pl.Expr:
    """Return guessed kernel time ratios (new / old): by peak for matrix products, else by bandwidth; 1 if unknown."""
    peaks = old.tflops("bf16") or old.tflops("fp16"), new.tflops("bf16") or new.tflops("fp16")
    compute = peaks[0] / peaks[1] if peaks[0] and peaks[1] else 1.0
    memory = old.bandwidth_gbs / new.bandwidth_gbs if old.bandwidth_gbs and new.bandwidth_gbs else 1.0
    return pl.when(family.is_in(_MATRIX)).then(compute).otherwise(memory)
