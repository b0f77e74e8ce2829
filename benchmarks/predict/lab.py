"""Step times predicted for other networks and numbers of ranks, next to measurements on a network of limited rate.

Usage:
    lab.py                    the table of the stored results (lab/results.csv)
    lab.py RECORDINGS         predict from these recordings, compare with lab/measured.csv, write lab/results.csv
    lab.py RECORDINGS record  record at 500 Mbit/s, measure every case, and predict as above (root, iproute2; about 20
                              minutes)

The jobs run under lab/net_lab.sh: one network namespace per rank, gloo, compute emulated by sleeping. Each job is
recorded with 2, 3 and 4 ranks at one rate, and measured at three. The column load is that of the machine when a case
was measured; the jobs run at real-time priority, so that other work hardly delays them. Jumbo frames (MTU 9000) keep
the packets per second below what 2 cores can do.
"""

from __future__ import annotations

import csv
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from requirements import state

LAB = Path(__file__).parent / "lab"
RATES = {
    "200mbit": "200Mbit/s",
    "500mbit": "500Mbit/s",
    "1gbit": "1Gbit/s",
    "100mbit": "100Mbit/s",
    "300mbit": "300Mbit/s",
}
RECORDED_RATE = "500mbit"
RANKS = (2, 3, 4)
JOBS: dict[str, tuple[str, dict[str, str]]] = {
    "data parallel": ("train_emulated.py", {"BUCKET_MB": "2"}),
    "sharded": ("train_sharded.py", {}),
    "pipeline": ("train_pipeline.py", {"MESSAGE_KB": "1024", "LAYERS": "12", "FORWARD_MS": "5"}),
    "all-to-all": ("train_experts.py", {"TOKENS_KB": "512", "LAYERS": "6"}),
}
"""Job -> its program, and its sizes."""
RESIZED = ("data parallel", "sharded")
"""Jobs that are also predicted for other numbers of ranks."""
MAX_SPREAD = 0.1
"""Interquartile range over median of the steps above which a measurement is not steady and does not count."""


def name_recording(folder: Path, job: str, ranks: int) -> Path:
    return folder / f"{job.replace(' ', '_')}_{ranks}"


def run_job(job: str, ranks: int, rate: str, out: Path | None = None) -> tuple[float, float]:
    """Run a job under the lab; return the median of its steps in ms, and their interquartile range over it."""
    program, sizes = JOBS[job]
    command = [
        "bash",
        str(LAB / "net_lab.sh"),
        str(ranks),
        rate,
        str(LAB / program),
        *([str(out)] if out else []),
    ]
    variables = sizes | {"STEPS": "16", "RECORD": "6:14", "PYTHON": sys.executable, "PRIORITY": "20"}
    result = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=300)
    if "STEPS_MS" not in result.stdout:
        raise SystemExit(f"{shlex.join(command)}: {result.stdout[-500:]}{result.stderr[-500:]}")
    steps = [float(word) for word in result.stdout.split("STEPS_MS")[1].split("MEDIAN")[0].split()][4:]
    low, middle, high = statistics.quantiles(steps, n=4)
    return middle, (high - low) / middle


def record(folder: Path) -> None:
    """Record each job at one rate, then measure every case; write lab/measured.csv."""
    with (LAB / "measured.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["job", "ranks", "rate", "step_ms", "spread", "load"])
        for job in JOBS:
            for ranks in RANKS:
                run_job(job, ranks, RECORDED_RATE, name_recording(folder, job, ranks))
                for rate in RATES:
                    step, spread = run_job(job, ranks, rate)
                    if spread > MAX_SPREAD:
                        step, spread = min(
                            (step, spread), run_job(job, ranks, rate), key=lambda each: each[1]
                        )
                    load = f"{os.getloadavg()[0]:.1f}"
                    rows.writerow([job, ranks, rate, f"{step:.2f}", f"{spread:.4f}", load])
                    file.flush()


def predict_cases(folder: Path) -> Iterator[dict[str, str]]:
    """Predict each measured case from the recording of its job; `RESIZED` jobs also from those with other ranks."""
    import etloom

    with (LAB / "measured.csv").open() as file:
        measured = list(csv.DictReader(file))
    for case in measured:
        ranks = int(case["ranks"])
        for recorded in RANKS if case["job"] in RESIZED else (ranks,):
            prediction = etloom.predict(
                str(name_recording(folder, case["job"], recorded)),
                network=RATES[case["rate"]],
                recorded_network=RATES[RECORDED_RATE],
                ranks=None if ranks == recorded else ranks,
            )
            row = prediction.table.filter(scope="step time").row(0, named=True)
            names = ("predicted_ns", "lower_bound_ns", "upper_bound_ns")
            values = {f"{name[:-3]}_ms": f"{row[name] / 1e6:.2f}" for name in names}
            # The interval without the errors by class, from which held_out.py sets these.
            alone = replace(prediction, classes=()).table.filter(scope="step time").row(0, named=True)
            values |= {
                f"{end}_alone_ms": f"{alone[f'{end}_bound_ns'] / 1e6:.2f}" for end in ("lower", "upper")
            }
            yield {
                **case,
                "recorded_ranks": str(recorded),
                **values,
                "classes": ";".join(prediction.classes),
            }


def classify(row: dict[str, str]) -> str:
    """Return what the prediction of a case extrapolates."""
    if row["recorded_ranks"] != row["ranks"]:
        return "ranks"
    return {"pipeline": "messages", "all-to-all": "all-to-all"}.get(row["job"], "rate")


def print_table(rows: list[dict[str, str]]) -> None:
    """Print the cases, and the errors of those that were measured steadily, by what they extrapolate."""
    print(
        "job            recorded  ranks  rate      predicted  90 % interval     measured  error   spread  load"
    )
    errors: dict[str, list[tuple[float, bool]]] = {}
    for row in rows:
        predicted, lower, upper, step = (
            float(row[key]) for key in ("predicted_ms", "lower_bound_ms", "upper_bound_ms", "step_ms")
        )
        steady = float(row["spread"]) <= MAX_SPREAD
        error = predicted / step - 1
        print(
            f"{row['job']:13}  {row['recorded_ranks']:>8}  {row['ranks']:>5}  {row['rate']:8}  {predicted:9.1f}  "
            f"{lower:7.1f} - {upper:7.1f}  {step:8.1f}  {100 * error:+5.1f} %  {row['spread']}  {row['load']}"
            f"{'' if steady else '  not steady'}"
        )
        if steady:
            case = abs(error), lower <= step <= upper
            for name in (classify(row), "all"):
                errors.setdefault(name, []).append(case)
    loads = [float(row["load"]) for row in rows]
    print(f"load of the machine when measured: {min(loads):.1f} to {max(loads):.1f}")
    for kind, cases in errors.items():
        values, inside = [error for error, _ in cases], statistics.mean(is_inside for _, is_inside in cases)
        middle, worst, share = 100 * statistics.median(values), 100 * max(values), 100 * inside
        state(f"lab, {kind}: median error of {len(cases)} cases", "5 %", f"{middle:.1f} %", middle <= 5)
        state(f"lab, {kind}: worst error", "12 %", f"{worst:.1f} %", worst <= 12)
        state(f"lab, {kind}: in the 90 % intervals", "85 to 95 %", f"{share:.0f} %", 85 <= share <= 95)


def main(arguments: list[str]) -> None:
    results = LAB / "results.csv"
    if arguments[1:] == ["record"]:
        record(Path(arguments[0]))
    if arguments:
        rows = list(predict_cases(Path(arguments[0])))
        with results.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        with results.open() as file:
            rows = list(csv.DictReader(file))
    print_table(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
