"""Shares of measured steps inside 90 % intervals whose class errors were set without them: python held_out.py

Each class of `etloom.simulator.interval_classes` with enough measurements is set again without a group of them (a
model, a publication, a job), and compared with that group; so the interval has not seen the measurements of a share.
The deviation of a class is the smallest with which nine of ten of the other measurements are inside.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl
import published
import vtrain
from requirements import DATA, state

from etloom.simulator.durations import Z_90
from etloom.simulator.interval_classes import ERRORS, MIN_MEASUREMENTS
from etloom.simulator.network.model import NetworkModel
from etloom.simulator.planning import choose_constants, list_classes
from etloom.simulator.training_step import StepConstants, predict_steps

LAB_RESULTS = Path(__file__).parent / "lab" / "results.csv"


class Case(NamedTuple):
    """A measured step.

    ``ratio``: measured over predicted time. ``lower``, ``upper``: the interval without errors by class, relative to the
    predicted time. ``classes``: what the prediction extrapolates. ``groups``: labels by which it may be left out.
    """

    ratio: float
    lower: float
    upper: float
    classes: frozenset[str]
    groups: dict[str, str]

    def is_inside(self, deviation: float) -> bool:
        """Return whether the measured time is in the interval with this deviation of its classes."""
        below = math.hypot(1 - self.lower, -math.expm1(-Z_90 * deviation))
        above = math.hypot(self.upper - 1, math.expm1(Z_90 * deviation))
        return 1 - below <= self.ratio <= 1 + above


def read_lab_cases() -> list[Case]:
    """Return the predictions from recordings of `lab.py`."""
    with LAB_RESULTS.open() as file:
        rows = list(csv.DictReader(file))
    cases = []
    for row in rows:
        predicted, step, lower, upper = (
            float(row[key]) for key in ("predicted_ms", "step_ms", "lower_alone_ms", "upper_alone_ms")
        )
        groups = {"job and ranks": f"{row['job']}, {row['ranks']}", "job": row["job"]}
        classes = frozenset(row["classes"].split(";"))
        cases.append(Case(step / predicted, lower / predicted, upper / predicted, classes, groups))
    return cases


def list_published_cases() -> list[Case]:
    """Return the published steps of `published.py`."""
    cases = []
    for row in published.list_publications():
        job, cluster = row.job, row.cluster
        constants, network = choose_constants(job, cluster), NetworkModel(cluster.topology)
        predicted = float(predict_steps(job.model, row.layout, constants, network).total)
        tokens = job.batch * job.model.sequence
        step = row.step_s or tokens / (row.tokens_per_s or 0) / cluster.gpus
        holds = list_classes(job, cluster, row.layout)
        classes = frozenset(name for name, applies in holds.items() if applies)
        groups = {
            "publication": row.source,
            "model": f"{float(job.model.count_parameters()) / 1e9:.0f}B",
            "device": cluster.peaks.name,
        }
        cases.append(Case(step / predicted, 1.0, 1.0, classes, groups))
    return cases


def read_vtrain_cases() -> list[Case]:
    """Return vTrain's steps, predicted with the constants stated beforehand."""
    run = vtrain.read_measurements(DATA / "vtrain/measured_single_node.csv")
    predicted = run.predict(StepConstants(), vtrain.read_network(DATA / "vtrain", 1e11))
    sizes = zip(run.model.layers, run.model.hidden, strict=True)
    gpus = run.layout.tensor * run.layout.data * run.layout.pipeline
    labels = [
        {"model": f"{int(layers)} layers of {int(hidden)}", "GPUs": f"{int(count)}"}
        for (layers, hidden), count in zip(sizes, gpus, strict=True)
    ]
    classes = frozenset(["unfused kernels"])
    ratios = (run.seconds / predicted).tolist()
    return [Case(ratio, 1.0, 1.0, classes, groups) for ratio, groups in zip(ratios, labels, strict=True)]


def set_deviation(cases: Sequence[Case], name: str) -> float:
    """Return the smallest deviation of a class with which nine of ten measurements are inside.

    As many of n as bound a further one in nine of ten cases: ceil(0.9 (n + 1)).
    """
    needed = min(math.ceil(0.9 * (len(cases) + 1)), len(cases))

    def count_inside(deviation: float) -> int:
        return sum(
            case.is_inside(
                math.hypot(deviation, *(ERRORS[other].deviation for other in case.classes - {name}))
            )
            for case in cases
        )

    for thousandth in range(1000):
        if count_inside(thousandth / 1000) >= needed:
            return thousandth / 1000
    return 1.0


def leave_out(cases: Sequence[Case], name: str, label: str) -> dict[str, object]:
    """Return a row: the deviation of a class from all cases, and the share of cases inside without their group."""
    deviations, inside = [], []
    for group in sorted({case.groups[label] for case in cases}):
        others = [case for case in cases if case.groups[label] != group]
        deviations.append(set_deviation(others, name))
        for case in cases:
            if case.groups[label] == group:
                rest = (ERRORS[other].deviation for other in case.classes - {name})
                inside.append(case.is_inside(math.hypot(deviations[-1], *rest)))
    return {
        "class": name,
        "cases": len(cases),
        "in use": ERRORS[name].deviation,
        "of all": set_deviation(cases, name),
        "left out": label,
        "groups": len(deviations),
        "without": f"{min(deviations):.3f} to {max(deviations):.3f}",
        "inside_pct": round(100 * float(np.mean(inside))),
    }


def main() -> None:
    sources: dict[str, tuple[Callable[[], list[Case]], tuple[str, ...], tuple[str, ...]]] = {
        "lab": (
            read_lab_cases,
            ("another rate, collectives", "another rate, messages", "another rate, all-to-all"),
            ("job and ranks", "job"),
        ),
        "lab, ranks": (read_lab_cases, ("another number of ranks",), ("job and ranks", "job")),
        "vTrain": (read_vtrain_cases, ("unfused kernels",), ("model", "GPUs")),
        "published": (
            list_published_cases,
            ("fused kernels", "torch kernels"),
            ("publication", "model", "device"),
        ),
    }
    rows = []
    for source, (read, names, labels) in sources.items():
        cases = read()
        if source == "lab":
            cases = [case for case in cases if "another number of ranks" not in case.classes]
        for name in names:
            members = [case for case in cases if name in case.classes]
            if name == "torch kernels":  # its steps with context parallelism would set its deviation
                members = [case for case in members if "context parallelism" not in case.classes]
            for label in labels:
                if len(members) < MIN_MEASUREMENTS or len({case.groups[label] for case in members}) < 2:
                    continue
                row = leave_out(members, name, label)
                rows.append({"source": source, **row})
                share = int(str(row["inside_pct"]))
                text = f"held out, {name}, by {label}: {len(members)} in the 90 % intervals"
                state(text, "85 to 95 %", f"{share} %", 85 <= share <= 95)
    for name, error in ERRORS.items():
        if error.measurements < MIN_MEASUREMENTS:
            state(f"held out, {name}", "85 to 95 %", f"not calibrated, {error.measurements} measurements")
    print(
        "in use: deviation of the class; of all: the smallest that holds for all cases; without: a group left out"
    )
    print("torch kernels: without the two steps with context parallelism, a class that is not calibrated")
    with pl.Config(
        tbl_cols=-1, tbl_rows=-1, tbl_width_chars=180, tbl_hide_column_data_types=True, fmt_str_lengths=40,
        tbl_formatting="ASCII_MARKDOWN", tbl_hide_dataframe_shape=True,
    ):  # fmt: skip
        print(pl.DataFrame(rows))


if __name__ == "__main__":
    main()
