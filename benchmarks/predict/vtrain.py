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
import math
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from requirements import DATA, state

from etloom.simulator.network.model import NetworkModel
from etloom.simulator.network.topology import Level, Topology, get_preset
from etloom.simulator.training_shapes import Array, Layout, ModelShape, take_rows
from etloom.simulator.training_step import FITTED, StepConstants, calibrate, predict_steps

SEED, SHARE, DRAWS = 0, 10, 8
GPUS_PER_NODE = 8


class Measurements(NamedTuple):
    """Measured steps (s) of models and layouts, and their global batch."""

    model: ModelShape
    layout: Layout
    seconds: Array
    batch: Array

    def take(self, rows: np.ndarray) -> Measurements:
        """Return the measurements at the positions ``rows``."""
        shapes = take_rows(self.model, rows), take_rows(self.layout, rows)
        return Measurements(*shapes, self.seconds[rows], self.batch[rows])

    def predict(self, constants: StepConstants, network: NetworkModel) -> Array:
        """Return the predicted seconds."""
        return predict_steps(self.model, self.layout, constants, network).total


def read_measurements(path: Path) -> Measurements:
    """Return the models, layouts and seconds of a file of measurements."""
    table = pl.read_csv(path).cast(pl.Float64)
    if table.width != 11:
        sys.exit(f"{path}: expected 11 columns, got {table.width}")
    _, batch, micro, hidden, heads, layers, sequence, tensor, data, pipeline, ms = (
        column.to_numpy() for column in table
    )
    micro_batches = np.maximum(batch / (micro * data), 1)
    layout = Layout(micro, micro_batches, tensor, data, pipeline)
    return Measurements(ModelShape(layers, hidden, heads, sequence), layout, ms / 1e3, batch)


def read_network(folder: Path, node_bytes_per_s: float) -> NetworkModel:
    """Return nodes of A100s with measured all-reduces inside; each GPU has its share of the rate of its node."""
    tables = {}
    for ranks in range(2, GPUS_PER_NODE + 1):
        text = gzip.decompress((folder / f"a100_all_reduce_{ranks}_gpus.csv.gz").read_bytes())
        # Columns: size, count, type, out-of-place time and bandwidth, in-place time and bandwidth.
        table = pl.read_csv(text)
        tables[ranks] = table.to_series(0).to_numpy(), table.to_series(5).to_numpy() / 1e9

    network = Level("network", 1 << 16, "switch", node_bytes_per_s / GPUS_PER_NODE, 5e3)
    topology = Topology("A100 nodes", (get_preset("dgx-a100").levels[0], network))
    return NetworkModel(topology, measured=tables)


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


def evaluate(
    run: Measurements, source: Measurements | None, network: NetworkModel, seed: int
) -> tuple[list[dict[str, Any]], StepConstants]:
    """Return the rows of the blind and of the calibrated prediction, and the fitted constants."""
    measured, blind_constants = run.seconds, StepConstants()
    sample = source or run
    drawn = np.random.default_rng(seed).permutation(len(sample.seconds))[: len(sample.seconds) // SHARE]
    rest = np.arange(len(measured)) if source else np.setdiff1d(np.arange(len(measured)), drawn)
    sample = sample.take(drawn)
    constants, errors = calibrate(sample.model, sample.layout, sample.seconds, blind_constants, network)
    blind_errors = np.log(sample.predict(blind_constants, network) / sample.seconds)
    blind, fitted = (run.predict(values, network)[rest] for values in (blind_constants, constants))
    rows = [
        report("blind", blind, measured[rest], bound_errors(blind_errors)),
        report("calibrated", fitted, measured[rest], bound_errors(errors)),
    ]
    return rows, constants


def rank_layouts(run: Measurements, predicted: Array, *, same_batch: bool) -> pl.DataFrame:
    """Return Kendall's tau between predicted and measured step times, for each model and number of GPUs.

    Args:
        same_batch: compare only layouts of the same global batch; else batches differ within a group.
    """
    layout, model = run.layout, run.model
    keys = {
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "sequence": model.sequence,
        "gpus": layout.tensor * layout.data * layout.pipeline,
    }
    table = pl.DataFrame(keys | ({"batch": run.batch} if same_batch else {})).cast(pl.Int64)
    rows = []
    for key, members in table.with_row_index("row").group_by(table.columns, maintain_order=True):
        places = members["row"].to_numpy()
        first, second = np.triu_indices(len(places), 1)
        orders = [
            np.sign(seconds[places][first] - seconds[places][second]) for seconds in (predicted, run.seconds)
        ]
        tau = float(np.mean(orders[0] * orders[1])) if len(first) else math.nan
        rows.append((*key, len(places), tau))
    return pl.DataFrame(rows, [*table.columns, "layouts", "tau"], orient="row").sort(table.columns)


def report_ranking(run: Measurements, network: NetworkModel) -> None:
    """Print how far the predicted order of layouts agrees with the measured order, with the blind constants."""
    predicted = run.predict(StepConstants(), network)
    for same_batch, label in ((False, "model and GPUs"), (True, "model, GPUs and batch")):
        table = rank_layouts(run, predicted, same_batch=same_batch).filter(pl.col("layouts") >= 5)
        tau = table["tau"]
        mean = round(float((tau * table["layouts"]).sum() / table["layouts"].sum()), 3)
        good = round(100 * float((tau >= 0.8).mean()))
        state(f"vTrain, Kendall's tau of layouts of one {label}", "0.8", f"{mean}", mean >= 0.8)
        print(
            f"{label}: {table.height} groups of at least 5 layouts, tau mean {mean}, median {tau.median():.3f}, "
            f"lowest {tau.min():.3f}, at least 0.8 in {good} % of the groups"
        )
        if not same_batch:
            print(table)


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
    network = read_network(arguments.tables, 1e9 * arguments.node_gb_per_s)
    run = read_measurements(arguments.measurements)
    source = read_measurements(arguments.calibrate_on) if arguments.calibrate_on else None
    results = [evaluate(run, source, network, SEED + draw) for draw in range(DRAWS)]
    rows, constants = results[0]
    names = [name for name in rows[1] if name not in ("model", "reported")]
    mean = {name: round(float(np.mean([draw[1][name] for draw, _ in results])), 2) for name in names}
    rows.append({"model": f"calibrated, {DRAWS} draws", "reported": rows[1]["reported"]} | mean)
    blind, _, mean_row = rows
    for label, row, limit in (("blind", blind, 15), ("calibrated on a tenth, mean of draws", mean_row, 7)):
        error, share = row["mean_error_pct"], row["inside_90_pct"]
        state(f"vTrain, mean error, {label}", f"{limit} %", f"{error} %", error <= limit)
        state(f"vTrain, truths in the 90 % intervals, {label}", "85 to 95 %", f"{share} %", 85 <= share <= 95)
    measured, drawn = run.seconds, (source or run).seconds.size // SHARE
    print(f"vTrain: {len(measured)} measurements, calibrated on {drawn} (seed {SEED}), the rest reported")
    with pl.Config(
        tbl_cols=-1,
        tbl_rows=-1,
        tbl_width_chars=150,
        tbl_hide_dataframe_shape=True,
        tbl_formatting="ASCII_MARKDOWN",
        tbl_hide_column_data_types=True,
    ):
        print(pl.DataFrame(rows))
        report_ranking(run, network)
    fitted = {
        name: f"{getattr(constants, name):.4g} ({getattr(StepConstants(), name):.4g})" for name in FITTED
    }
    print("constants fitted (blind):", ", ".join(f"{name} {value}" for name, value in fitted.items()))
    print(f"{time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    main()
