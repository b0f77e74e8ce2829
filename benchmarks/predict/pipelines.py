"""Pipelines laid out again: generated jobs of other sizes, the closed form of the bubble, and recorded schedules.

    python benchmarks/predict/pipelines.py

The generated jobs are those of tests/support/pipelines.py: a trace of one size is recorded, another is predicted,
and every start and end is compared with the job of that size. The recorded schedules (the two production traces of
"Understanding Stragglers in Large Model Training Using What-if Analysis", OSDI 2025, and 4 ranks over gloo)
are laid out again with their own sizes, which shows what the recurrence leaves out.

lab/pipelines.csv has a few measured step times of lab/train_pipeline.py (LAYERS=24 FORWARD_MS=8; recorded with `etloom
collect --out RUN --steps 4:9`, MICRO_BATCHES=6, one process a stage), on two cores at the load that it states.
"""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import etloom
from etloom.simulator.pipelines import RelaidPipeline, relay
from etloom.simulator.pipelines.schedules import Schedule
from support.pipelines import PipelineJob, gpipe, one_f_one_b

RECORDINGS = ("straggler_what_if/trace-AR.parquet", "straggler_what_if/trace-ST.parquet", "cpu/pp_4")


def interleave(stages: int, micro_batches: int, chunks: int) -> PipelineJob:
    """Return a job with interleaved 1F1B."""
    schedule = Schedule("1f1b", stages, micro_batches, chunks)
    orders = tuple(tuple(map(tuple, schedule.list_operations(stage))) for stage in range(stages))
    return PipelineJob(orders, chunks)


GENERATED = (
    (one_f_one_b(4, 4), {"mb": 32}, one_f_one_b(4, 32)),
    (one_f_one_b(4, 8), {"mb": 2}, one_f_one_b(4, 2)),
    (one_f_one_b(4, 4), {"pp": 8, "mb": 16}, one_f_one_b(8, 16)),
    (one_f_one_b(8, 8), {"pp": 2}, one_f_one_b(2, 8)),
    (gpipe(4, 4), {"mb": 16}, gpipe(4, 16)),
    (gpipe(4, 4), {"pp": 16}, gpipe(16, 4)),
    (interleave(4, 8, 2), {"mb": 32}, interleave(4, 32, 2)),
    (one_f_one_b(4, 8), {"vp": 4}, interleave(4, 8, 4)),
)


def print_measured() -> None:
    """Print the stored measurements next to their predictions."""
    with (Path(__file__).parent / "lab" / "pipelines.csv").open() as file:
        rows = list(csv.DictReader(file))
    print("\nmeasured: emulated pipelines over gloo")
    for row in rows:
        error = float(row["predicted_ms"]) / float(row["measured_ms"]) - 1
        print(
            f"{row['recorded']} -> {row['sizes']:6}  predicted {row['predicted_ms']} ms, measured "
            f"{row['measured_ms']} ms, {100 * error:+.1f} %, load {row['load']}"
        )


def main() -> None:
    print(
        "generated: recorded -> predicted                                      operations  differ  largest (ns)"
    )
    for job, sizes, truth in GENERATED:
        relaid = relay(job.job(on_device=True), sizes)
        spans = {(*key[:2], tuple(key[2])): span for key, span in relaid.timeline.spans.items()}
        expected = truth.times()
        errors = [
            max(abs(spans[key].start - start), abs(spans[key].end - end))
            for key, (start, end) in expected.items()
        ]
        name = f"{relaid.recorded.schedule.describe()} -> {relaid.schedule.describe()}".replace(
            "micro-batches", "mb"
        )
        print(f"{name:100}  {len(expected):10}  {sum(map(bool, errors)):6}  {max(errors):12g}")
    print_measured()
    data = os.environ.get("ETLOOM_DATA")
    if data is None:
        print("recorded: set ETLOOM_DATA")
        return
    print("\nrecorded: step time laid out again with its own sizes")
    for name in RECORDINGS:
        relaid = etloom.predict(Path(data) / name, parallel={"mb": 4})
        if isinstance(relaid, RelaidPipeline):
            schedule = relaid.recorded.schedule.describe()
            print(f"{name:36}  {schedule:38}  {100 * relaid.reproduction_error:+.3f} %")


if __name__ == "__main__":
    main()
