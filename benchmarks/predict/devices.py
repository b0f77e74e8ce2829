"""Predicts measured kernel times of one device from those of another: leave one machine out.

    python benchmarks/predict/devices.py [--tables FOLDER]

Rows of aiconfigurator-core's tables (pip install "etloom[devices]") that both devices have. The prediction sees only
the rows of the first device and the declared peaks of both (`src/etloom/analyses/flops/devices.json`), as for kernels
of known cost; of NCCL's collectives, the nominal rates of both nodes. The last columns predict half of the shapes of
the second device from the ratios measured on the other half, drawn with a fixed seed, as for calls with a table.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from functools import lru_cache
from pathlib import Path

import numpy as np
import polars as pl
from requirements import state

from etloom.analyses.flops.measured_tables import (
    FAMILIES,
    SYSTEMS,
    TIME_ERRORS_PCT,
    MeasuredRatios,
    find_tables,
    read_family,
)
from etloom.analyses.flops.peaks import Peaks, lookup_peaks
from etloom.simulator.devices.kernel_ratios import MIN_KERNEL_NS, estimate_deviation, scale_by_limits
from etloom.simulator.network import NetworkModel
from etloom.simulator.network.target import NOMINAL_DEVIATION
from etloom.simulator.network.topology import get_preset
from etloom.simulator.scenario import DEVIATIONS, Basis

PAIRS = (("H100 SXM", "H200 SXM"), ("H100 SXM", "B200"), ("H100 SXM", "A100 80GB SXM"))
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "fp8": "fp8", "fp8_block": "fp8"}
BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0}
SEED = 0
CALIBRATION: dict[tuple[str, float], list[tuple[np.ndarray, np.ndarray]]] = {}
"""(source, half width of the interval) -> errors (in logarithms) of the calibration half and of the reported half."""
PRESETS = {"H100 SXM": "dgx-h100", "H200 SXM": "dgx-h100", "B200": "dgx-b200", "A100 80GB SXM": "dgx-a100"}
read_once = lru_cache(maxsize=8)(read_family)


def print_times(folder: Path, samples: int = 1500) -> None:
    """Print the error of times predicted from the other shapes of the same device (`etloom analyze tasks`)."""
    for device in SYSTEMS:
        for family in TIME_ERRORS_PCT:
            measured = MeasuredRatios.load_times(family, lookup_peaks(device), folder)
            for kind, ratios in ({} if measured is None else measured.ratios).items():
                assert measured is not None
                rows = np.random.default_rng(SEED).permutation(len(ratios))[:samples]
                predicted = np.array([measured.cross_validate(kind, int(row)) for row in rows])
                errors = 100 * np.abs(predicted / ratios[rows] - 1)
                errors = errors[np.isfinite(errors)]
                low, high = np.quantile(errors, [0.5, 0.9])
                print(f"{device:16} {family:22} {kind:9} {len(ratios):7,} shapes: {low:5.1f} % {high:5.1f} %")


def limit_ns(flops: pl.Series, size: pl.Series, precision: pl.Series, peaks: Peaks) -> np.ndarray:
    """Return the larger of the times that arithmetic and memory traffic need."""
    rate = np.array([peaks.tflops(name) or np.nan for name in precision])
    return np.maximum(flops.to_numpy() / rate / 1e3, size.to_numpy() / (peaks.bandwidth_gbs or np.nan))


def describe(family: str, rows: pl.DataFrame) -> pl.DataFrame:
    """Return flops, size (bytes) and precision of the rows of a family."""
    column = {"gemm_perf": "gemm_dtype", "moe_perf": "moe_dtype"}.get(family, "attn_dtype")
    rows = rows.with_columns(precision=pl.col(column).replace_strict(PRECISIONS, default=None)).drop_nulls(
        "precision"
    )
    width = pl.col("precision").replace_strict(BYTES, return_dtype=pl.Float64)
    if family == "gemm_perf":
        m, n, k = (pl.col(name).cast(pl.Float64) for name in "mnk")
        flops, size = 2 * m * n * k, width * (m * k + k * n) + 2 * m * n
    elif family == "moe_perf":
        tokens, hidden, inner = (
            pl.col(name).cast(pl.Float64) for name in ("num_tokens", "hidden_size", "inter_size")
        )
        inner = inner / pl.col("moe_tp_size")
        calls = tokens * pl.col("topk") / pl.col("moe_ep_size")
        used = pl.min_horizontal(calls, pl.col("num_experts") / pl.col("moe_ep_size"))
        flops, size = 6 * calls * hidden * inner, width * 3 * used * hidden * inner + 4 * tokens * hidden
    else:
        batch, length, heads, head_dim = (
            pl.col(name).cast(pl.Float64) for name in ("batch_size", "isl", "num_heads", "head_dim")
        )
        shared = pl.col("num_key_value_heads").cast(pl.Float64)
        context = length + pl.col("step")
        pairs = length * context / 2 if family == "context_attention_perf" else length * context
        flops = 4 * batch * heads * head_dim * pairs
        size = width * batch * head_dim * (2 * length * heads + 2 * context * shared)
    return rows.with_columns(flops=flops, size=size)


def compare(family: str, old: str, new: str, folder: Path) -> dict[str, object] | None:
    """Return the errors of a family; None if the devices share no rows."""
    tables = [read_once(folder, SYSTEMS[name], family) for name in (old, new)]
    if not all(table.height for table in tables):
        return None
    key = [
        name for name in tables[0].columns if name in tables[1].columns and name not in ("latency", "op_name")
    ]
    both = describe(family, tables[0].join(tables[1].select(*key, measured="latency"), on=key))
    both = both.filter((pl.col("latency") > 0) & (pl.col("measured") > 0))
    limits = [
        limit_ns(both["flops"], both["size"], both["precision"], lookup_peaks(name)) for name in (old, new)
    ]
    known = np.isfinite(limits[0]) & np.isfinite(limits[1])
    both = both.filter(pl.Series(known))
    if not both.height:
        return None
    before, measured = both["latency"].to_numpy() * 1e6, both["measured"].to_numpy() * 1e6
    ratios = scale_by_limits(pl.Series(before), *(pl.Series(limit[known]) for limit in limits))
    predicted = np.maximum(before * ratios, np.minimum(before, MIN_KERNEL_NS))
    row = {"from": old, "to": new, "family": family.removesuffix("_perf"), "rows": both.height}
    width = 1.645 * estimate_deviation(lookup_peaks(old), lookup_peaks(new))
    row |= summarize("roofline", predicted, measured, width)
    return row | cross_validate(family, old, new, folder)


def summarize(name: str, predicted: np.ndarray, measured: np.ndarray, width: float) -> dict[str, float]:
    """Return the median error, its bias and the share of measurements inside the interval."""
    error = np.log(predicted / measured)
    halves = np.random.default_rng(SEED).permutation(error) if len(error) else error
    calibration, error = halves[: len(error) // 2], halves[len(error) // 2 :]
    CALIBRATION.setdefault((name, round(width, 4)), []).append((calibration, error))
    return {
        f"{name}_median_pct": round(100 * float(np.median(np.abs(np.expm1(error)))), 1),
        f"{name}_bias_pct": round(100 * float(np.expm1(np.median(error))), 1),
        f"{name}_inside_90_pct": round(100 * float((np.abs(error) <= width).mean()), 1),
    }


def print_coverage() -> None:
    """Print the share of the reported halves in the intervals, each family and pair of devices with equal weight."""
    print("\n90 % intervals; the widths come from one half of the rows, the shares from the other")
    print(f"{'source':10} {'width':>6}  {'calibrated':>10}  {'tables':>6}  inside")
    inside = []
    for (name, width), halves in sorted(CALIBRATION.items()):
        weights = np.concatenate([np.full(len(half), 1 / len(half)) for half, _ in halves])
        errors = np.abs(np.concatenate([half for half, _ in halves]))
        order = np.argsort(errors)
        share = np.cumsum(weights[order]) / weights.sum()
        calibrated = errors[order][np.searchsorted(share, 0.9)]
        shares = [float((np.abs(half) <= width).mean()) for _, half in halves]
        inside += shares
        print(f"{name:10} {width:6.3f}  {calibrated:10.3f}  {len(halves):6}  {100 * np.mean(shares):.1f} %")
    mean = 100 * float(np.mean(inside))
    state("devices, truths in the 90 % intervals", "85 to 95 %", f"{mean:.1f} %", 85 <= mean <= 95)


def cross_validate(family: str, old: str, new: str, folder: Path, most: int = 500) -> dict[str, object]:
    """Return the error of ratios predicted from the nearest shapes of the other half."""
    name = next(name for name, described in FAMILIES.items() if described.file == family)
    measured = MeasuredRatios.load(name, old, new, folder)
    if measured is None:
        return {}
    generator, predicted, truth = np.random.default_rng(SEED), [], []
    for kind, shapes in measured.shapes.items():
        order = generator.permutation(len(shapes))
        known, asked = order[: len(order) // 2], order[len(order) // 2 :][:most]
        half = MeasuredRatios({kind: shapes[known]}, {kind: measured.ratios[kind][known]})
        predicted.append(half.compute_ratios(np.exp2(shapes[asked]), [kind] * len(asked)))
        truth.append(measured.ratios[kind][asked])
    values, ratios = np.concatenate(predicted), np.concatenate(truth)
    near = np.isfinite(values)
    return summarize("table", values[near], ratios[near], 1.645 * DEVIATIONS[Basis.TABLE])


def compare_collectives(old: str, new: str, folder: Path) -> dict[str, object]:
    """Return the errors of NCCL's collectives in a node: by the nominal rates of both devices, and by the tables."""
    tables = [read_once(folder, SYSTEMS[name], "nccl_perf") for name in (old, new)]
    key = [name for name in tables[0].columns if name != "latency"]
    both = tables[0].join(tables[1].select(*key, measured="latency"), on=key)
    networks = [NetworkModel(get_preset(PRESETS[name])) for name in (old, new)]
    predicted = []
    for name, ranks, size, latency in both.select(
        "op_name", "num_gpus", "message_size", "latency"
    ).iter_rows():
        collective = {"alltoall": "all_to_all"}.get(name, name)
        times = []
        for network in networks:
            times.append(network.time_ns(collective, size, range(ranks)) or math.nan)
        predicted.append(latency * times[1] / times[0])
    row = {"from": old, "to": new, "family": "nccl", "rows": both.height}
    row |= summarize("roofline", np.array(predicted), both["measured"].to_numpy(), 1.645 * NOMINAL_DEVIATION)
    return row | cross_validate("nccl_perf", old, new, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tables", type=Path, help="folder systems/data of aiconfigurator-core")
    parser.add_argument("--times", action="store_true", help="only the error of times of left out shapes")
    options = parser.parse_args()
    folder = options.tables or find_tables()
    if folder is None:
        print('devices: no measured tables; pip install "etloom[devices]" (Python 3.11 or newer)')
        sys.exit()
    if options.times:
        print_times(folder)
        return
    begin = time.perf_counter()
    families = ("gemm_perf", "context_attention_perf", "generation_attention_perf", "moe_perf")
    rows = [row for pair in PAIRS for family in families if (row := compare(family, *pair, folder))]
    rows += [compare_collectives(*pair, folder) for pair in PAIRS]
    with pl.Config(
        tbl_rows=-1,
        tbl_cols=-1,
        tbl_width_chars=190,
        tbl_hide_dataframe_shape=True,
        tbl_formatting="ASCII_MARKDOWN",
        fmt_str_lengths=30,
    ):
        print(pl.DataFrame(rows, infer_schema_length=None))
    print_coverage()
    table = pl.DataFrame(rows, infer_schema_length=None)
    for column in ("roofline_median_pct", "table_median_pct"):
        worst = table.sort(column, descending=True, nulls_last=True).row(0, named=True)
        text = f"{table[column].median():.1f} %, worst {worst[column]} % ({worst['family']}, {worst['to']})"
        state(f"devices, median error by {column.partition('_')[0]}, median family", "printed", text)
    print(f"{time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    main()
