"""Predicts the measured training steps of vTrain (GPT models on A100s) from their shapes.

    python benchmarks/predict/vtrain.py [MEASUREMENTS.csv] [--tables FOLDER] [--calibrate-on OTHER.csv]

Columns as in vTrain's measurements: GPUs, global batch, micro batch, hidden size, heads, layers, sequence length,
tensor, data and pipeline parallelism, time in ms. Two answers: "blind", with the constants of `StepConstants`, and
"calibrated", with constants fitted to a tenth of the measurements, drawn with a fixed seed. Errors are of the other
nine tenths. With --calibrate-on, the tenth comes from another file and all of MEASUREMENTS is reported. One draw may be
lucky: the last row is the mean over DRAWS seeds, the first of which is the one above.

The 90 % intervals come from the errors of the calibration measurements, each predicted without itself.
"""

from __future__ import annotations

import argparse
import gzip
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from requirements import DATA, state

from etloom.simulator.training_step import (
    FITTED,
    AllReduce,
    Array,
    StepConstants,
    TrainingShapes,
    calibrate,
    predict_steps,
)

SEED, SHARE, DRAWS = 0, 10, 8
GPUS_PER_NODE = 8


def read_measurements(path: Path) -> tuple[TrainingShapes, Array]:
    """Return the shapes and the seconds of a file of measurements."""
    table = pl.read_csv(path).cast(pl.Float64)
    if table.width != 11:
        sys.exit(f"{path}: expected 11 columns, got {table.width}")
    _, batch, micro, hidden, heads, layers, sequence, tensor, data, pipeline, ms = (
        column.to_numpy() for column in table
    )
    shapes = TrainingShapes(
        layers, hidden, heads, sequence, micro, np.maximum(batch / (micro * data), 1), tensor, data, pipeline
    )
    return shapes, ms / 1e3


def read_all_reduces(folder: Path, node_bytes_per_s: float) -> AllReduce:
    """Return the time of an all-reduce: measured in one node, by bandwidth and latency across nodes."""
    tables = {}
    for ranks in range(2, GPUS_PER_NODE + 1):
        text = gzip.decompress((folder / f"a100_all_reduce_{ranks}_gpus.csv.gz").read_bytes())
        # Columns: size, count, type, out-of-place time and bandwidth, in-place time and bandwidth.
        table = pl.read_csv(text)
        tables[ranks] = table.to_series(0).to_numpy(), table.to_series(5).to_numpy() / 1e9

    def all_reduce(size: Array, ranks: Array) -> Array:
        seconds = np.zeros(np.broadcast(size, ranks).shape)
        for count, (sizes, times) in tables.items():
            inside = np.minimum(size, sizes[-1])
            in_table = np.interp(inside, sizes, times) * np.maximum(size / sizes[-1], 1)
            seconds = np.where(ranks == count, in_table, seconds)
        # Across nodes each group of a node has its share of the node's network.
        across = 2 * (ranks - 1) / np.maximum(ranks, 1) * size / node_bytes_per_s * GPUS_PER_NODE / 2 + 50e-6
        return np.where(ranks > GPUS_PER_NODE, across, seconds)

    return all_reduce


def report(name: str, predicted: Array, measured: Array, deviation: float) -> dict[str, Any]:
    """Return a row of the table of errors; ``deviation``: half the width of the 90 % interval, in logarithms."""
    error = predicted / measured - 1
    inside = np.abs(np.log(measured / predicted)) <= deviation
    return {
        "model": name,
        "reported": len(measured),
        "mean_error_pct": round(100 * float(np.abs(error).mean()), 2),
        "median_error_pct": round(100 * float(np.median(np.abs(error))), 2),
        "worst_pct": round(100 * float(np.abs(error).max()), 1),
        "bias_pct": round(100 * float(error.mean()), 2),
        "interval_pct": round(100 * float(np.expm1(deviation)), 1),
        "inside_90_pct": round(100 * float(inside.mean()), 1),
    }


def bound_errors(errors: Array) -> float:
    """Return the width of a 90 % interval: of n errors, the ceil(0.9 (n + 1))-th smallest.

    It bounds the next error in at least nine of ten cases.
    """
    place = min(int(np.ceil(0.9 * (len(errors) + 1))), len(errors)) - 1
    return float(np.sort(np.abs(errors))[place])


Measurements = tuple[TrainingShapes, Array]


def evaluate(
    run: Measurements, source: Measurements | None, all_reduce: AllReduce, seed: int
) -> tuple[list[dict[str, Any]], StepConstants]:
    """Return the rows of the blind and of the calibrated prediction, and the fitted constants."""
    shapes, measured = run
    source_shapes, source_measured = source or run
    drawn = np.random.default_rng(seed).permutation(len(source_measured))[: len(source_measured) // SHARE]
    rest = np.arange(len(measured)) if source else np.setdiff1d(np.arange(len(measured)), drawn)
    constants, errors = calibrate(
        source_shapes.take(drawn), source_measured[drawn], StepConstants(), all_reduce
    )
    blind_errors = np.log(
        predict_steps(source_shapes.take(drawn), StepConstants(), all_reduce) / source_measured[drawn]
    )
    blind, fitted = (
        predict_steps(shapes, values, all_reduce)[rest] for values in (StepConstants(), constants)
    )
    rows = [
        report("blind", blind, measured[rest], bound_errors(blind_errors)),
        report("calibrated", fitted, measured[rest], bound_errors(errors)),
    ]
    return rows, constants


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "measurements", nargs="?", type=Path, default=DATA / "vtrain/measured_single_node.csv"
    )
    parser.add_argument(
        "--tables", type=Path, default=DATA / "vtrain", help="folder of all-reduce measurements"
    )
    parser.add_argument("--calibrate-on", type=Path, help="file whose tenth calibrates the constants")
    parser.add_argument(
        "--node-gb-per-s", type=float, default=100.0, help="network of a node, default 4 x 200 Gbit/s"
    )
    arguments = parser.parse_args()
    for path in (arguments.measurements, arguments.tables):
        if not path.exists():
            sys.exit(f"{path}: not found; set ETLOOM_DATA or pass the path")
    begin = time.perf_counter()
    all_reduce = read_all_reduces(arguments.tables, 1e9 * arguments.node_gb_per_s)
    run = read_measurements(arguments.measurements)
    source = read_measurements(arguments.calibrate_on) if arguments.calibrate_on else None
    results = [evaluate(run, source, all_reduce, SEED + draw) for draw in range(DRAWS)]
    rows, constants = results[0]
    names = [name for name in rows[1] if name not in ("model", "reported")]
    mean = {name: round(float(np.mean([draw[1][name] for draw, _ in results])), 2) for name in names}
    rows.append({"model": f"calibrated, {DRAWS} draws", "reported": rows[1]["reported"]} | mean)
    blind, _, mean_row = rows
    for label, row, limit in (("blind", blind, 15), ("calibrated on a tenth, mean of draws", mean_row, 7)):
        error, share = row["mean_error_pct"], row["inside_90_pct"]
        state(f"vTrain, mean error, {label}", f"{limit} %", f"{error} %", error <= limit)
        state(f"vTrain, truths in the 90 % intervals, {label}", "85 to 95 %", f"{share} %", 85 <= share <= 95)
    measured, drawn = run[1], (source or run)[1].size // SHARE
    print(f"vTrain: {len(measured)} measurements, calibrated on {drawn} (seed {SEED}), the rest reported")
    with pl.Config(
        tbl_cols=-1, tbl_width_chars=150, tbl_hide_dataframe_shape=True, tbl_hide_column_data_types=True
    ):
        print(pl.DataFrame(rows))
    fitted = {
        name: f"{getattr(constants, name):.4g} ({getattr(StepConstants(), name):.4g})" for name in FITTED
    }
    print("constants fitted (blind):", ", ".join(f"{name} {value}" for name, value in fitted.items()))
    print(f"{time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    main()
