"""Compare what etloom says of the recordings of `measure.py` with the times that were measured without a recorder.

    python benchmarks/gpu/compare.py recorded

For each job: what removing its problem saves (measured: the step time of the other job), the first finding, the gain
that the right finding promises, and the time without what the job's what-if changes remove.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import polars as pl
from jobs import JOBS, Job

import etloom
from etloom.analyses.steps import measure_device_periods

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _measure import print_markdown


def compare(name: str, job: Job, folder: Path, step_ms: dict[str, float]) -> dict[str, str]:
    """Return the row of a job."""
    opened = etloom.open(folder / re.sub(r"\W+", "_", name))
    periods = measure_device_periods(etloom.analyze(opened, "steps"))
    recorded_ms = float(periods.median() or 0) / 1e6
    findings = etloom.analyze(opened, "findings").with_columns(pl.col("job_gain_pct").fill_null(0))
    right = findings.filter(pattern=job.pattern)["job_gain_pct"] if job.pattern else pl.Series()
    saved = 100 * (1 - step_ms[job.without] / step_ms[name]) if job.pattern or job.changes else 0.0
    first: dict[str, Any] = {"pattern": "-", "job_gain_pct": 0.0}
    if findings.height:
        first = findings.row(0, named=True)
    return {
        "job": name,
        "step": f"{step_ms[name]:.2f} ms",
        "recorded step": f"{recorded_ms:.2f} ms",
        "saved without the problem": f"{saved:.1f} %",
        "first finding": f"{first['pattern']} {first['job_gain_pct']:.1f} %",
        "right finding": f"{job.pattern} {right[0]:.1f} %"
        if len(right)
        else job.pattern and f"{job.pattern}: missing",
        "what-if": predict(opened, job),
    }


def predict(run: Any, job: Job) -> str:
    """Return the predicted change of the time by the job's changes."""
    if not job.changes:
        return ""
    try:
        change_pct = etloom.simulate(run, *job.changes).table["upper_bound_change_pct"][0]
    except etloom.EtloomError as error:
        return str(error)
    return f"{change_pct:.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recorded", type=Path, help="the folder of measure.py")
    options = parser.parse_args()
    facts = json.loads((options.recorded / "times.json").read_text())
    step_ms = {name: job["step_ms"] for name, job in facts["jobs"].items() if "step_ms" in job}
    print(f"{facts['device']}, torch {facts['torch']}\n")
    print_markdown([compare(name, JOBS[name], options.recorded, step_ms) for name in step_ms])


if __name__ == "__main__":
    main()
