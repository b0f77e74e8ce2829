"""Step times predicted for other networks and numbers of ranks, next to measurements on a network of limited rate.

Usage:
    lab.py                    the table of the stored results (lab/results.csv)
    lab.py RECORDINGS         predict from these recordings, compare with lab/measured.csv, write lab/results.csv
    lab.py RECORDINGS record  record at 1 Gbit/s, measure every case, and predict as above (root, iproute2; about 15
                              minutes)

The jobs run under lab/net_lab.sh: one network namespace per rank, gloo, compute emulated by sleeping. LAB_PREFIX goes
before it (nice, chrt). The stored measurements were made on a busy machine (column load) at real-time priority, so that
other work hardly delayed them; the constants of the intervals were set after the first such table. Jumbo frames (MTU
9000) keep the packets per second of 8 ranks below what 2 cores can do.
"""

from __future__ import annotations

import csv
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from requirements import state

LAB = Path(__file__).parent / "lab"
RATES = {"200mbit": "200Mbit/s", "500mbit": "500Mbit/s", "2gbit": "2Gbit/s"}
PROGRAMS = [("train_emulated.py", 1.0), ("train_emulated.py", 2.0), ("train_sharded.py", 0.0)]
MAX_SPREAD = 0.1
"""Interquartile range over median of the steps above which a measurement is not steady and does not count."""


def name_recording(program: str, ranks: int, bucket_mb: float) -> str:
    return f"ddp_n{ranks}_b{bucket_mb:g}" if bucket_mb else f"sharded_n{ranks}"


def run_job(
    program: str, ranks: int, rate: str, bucket_mb: float, out: Path | None = None
) -> tuple[float, float]:
    """Run a job under the lab; return the median of its steps in ms, and their interquartile range over it."""
    command = [*shlex.split(os.environ.get("LAB_PREFIX", "")), "bash", str(LAB / "net_lab.sh")]
    command += [str(ranks), rate, str(LAB / program), *([str(out)] if out else [])]
    variables = {"BUCKET_MB": str(bucket_mb), "STEPS": "18", "RECORD": "4:14", "PYTHON": sys.executable}
    result = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=300)
    if "STEPS_MS" not in result.stdout:
        raise SystemExit(f"{shlex.join(command)}: {result.stdout[-500:]}{result.stderr[-500:]}")
    steps = [float(word) for word in result.stdout.split("STEPS_MS")[1].split("MEDIAN")[0].split()][4:]
    low, middle, high = statistics.quantiles(steps, n=4)
    return middle, (high - low) / middle


def record(folder: Path) -> None:
    """Record at 1 Gbit/s with 2 and 4 ranks, then measure every case; write lab/measured.csv."""
    for ranks in (2, 4):
        for program, bucket_mb in PROGRAMS:
            run_job(program, ranks, "1gbit", bucket_mb, folder / name_recording(program, ranks, bucket_mb))
    with (LAB / "measured.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["program", "bucket_mb", "ranks", "rate", "step_ms", "spread", "load"])
        for program, bucket_mb in PROGRAMS:
            for ranks in (2, 4, 8):
                for rate in RATES:
                    attempts = (run_job(program, ranks, rate, bucket_mb) for _ in range(4))
                    step, spread = next((each for each in attempts if each[1] < 0.05), (0.0, 1.0))
                    load = f"{os.getloadavg()[0]:.1f}"
                    rows.writerow([program, bucket_mb, ranks, rate, f"{step:.2f}", f"{spread:.4f}", load])


def predict_cases(folder: Path) -> Iterator[dict[str, str]]:
    """Predict each measured case from the recordings with 2 and with 4 ranks."""
    import etloom

    with (LAB / "measured.csv").open() as file:
        measured = list(csv.DictReader(file))
    for recorded in (2, 4):
        for case in measured:
            run = folder / name_recording(case["program"], recorded, float(case["bucket_mb"]))
            ranks = None if int(case["ranks"]) == recorded else int(case["ranks"])
            prediction = etloom.predict(
                str(run), network=RATES[case["rate"]], recorded_network="1Gbit/s", ranks=ranks
            )
            row = prediction.table.filter(scope="step time").row(0, named=True)
            names = ("predicted_ns", "lower_bound_ns", "upper_bound_ns")
            values = {f"{name[:-3]}_ms": f"{row[name] / 1e6:.2f}" for name in names}
            yield {"recorded_ranks": str(recorded), **case, **values}


def print_table(rows: list[dict[str, str]]) -> None:
    """Print the cases, and the errors of those that were measured steadily."""
    print("recording      ranks  rate      predicted  90 % interval     measured  error   spread  load")
    errors, inside = [], 0
    for row in rows:
        name = name_recording(row["program"], int(row["recorded_ranks"]), float(row["bucket_mb"]))
        predicted, lower, upper, step = (
            float(row[key]) for key in ("predicted_ms", "lower_bound_ms", "upper_bound_ms", "step_ms")
        )
        steady = float(row["spread"]) <= MAX_SPREAD
        error = predicted / step - 1
        print(
            f"{name:13}  {row['ranks']:>5}  {row['rate']:8}  {predicted:9.1f}  {lower:7.1f} - {upper:7.1f}  "
            f"{step:8.1f}  {100 * error:+5.1f} %  {row['spread']}  {row['load']}{'' if steady else '  not steady'}"
        )
        if steady:
            errors.append(abs(error))
            inside += lower <= step <= upper
    loads = [float(row["load"]) for row in rows]
    print(f"load of the machine when measured: {min(loads):.1f} to {max(loads):.1f}")
    middle, worst, share = (
        100 * value for value in (statistics.median(errors), max(errors), inside / len(errors))
    )
    cases = f"{len(errors)} of {len(rows)} steady cases"
    state(f"lab, median error of {cases}", "5 %", f"{middle:.1f} %", middle <= 5)
    state("lab, worst error", "12 %", f"{worst:.1f} %", worst <= 12)
    state("lab, truths in the 90 % intervals", "85 to 95 %", f"{share:.0f} %", 85 <= share <= 95)
    print(
        f"{len(errors)} steady cases of {len(rows)}: median error {100 * statistics.median(errors):.1f} %, worst "
        f"{100 * max(errors):.1f} %; {100 * inside / len(errors):.0f} % in the 90 % interval"
    )


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
