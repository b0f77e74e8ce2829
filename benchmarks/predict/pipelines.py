"""Pipelines laid out again: generated jobs of other sizes, the closed form of the bubble, and recorded schedules.

    pipelines.py                    generated and recorded schedules, and the stored measurements (lab/pipelines.csv)
    pipelines.py RECORDINGS record  record emulated pipelines, measure other sizes, predict, write lab/pipelines.csv
                                    (about 8 minutes on a calm machine)

The generated jobs are those of tests/support/pipelines.py: a trace of one size is recorded, another is predicted,
and every start and end is compared with the job of that size. The recorded schedules (the two production traces of
"Understanding Stragglers in Large Model Training Using What-if Analysis", OSDI 2025, and 4 ranks over gloo)
are laid out again with their own sizes, which shows what the recurrence leaves out.

The measurements are of lab/train_pipeline.py over gloo, one process a stage; lab/pipelines.csv states the load of the
machine. Rows without bounds were measured before bounds were kept.
"""

from __future__ import annotations

import csv
import os
import shlex
import socket
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from requirements import DATA, state

import etloom
from etloom.simulator.pipelines import RelaidPipeline, relay
from etloom.simulator.pipelines.schedules import Schedule
from support.pipelines import PipelineJob, gpipe, one_f_one_b

LAB = Path(__file__).parent / "lab"
LAYERS = 24
CASES = {
    (3, 6): ({"mb": 12}, {"mb": 24}, {"pp": 2}, {"pp": 4}, {"pp": 6}, {"pp": 6, "mb": 12}),
    (4, 8): ({"mb": 16}, {"mb": 32}, {"pp": 2}, {"pp": 3}, {"pp": 6}, {"pp": 6, "mb": 12}),
}
"""Stages and micro-batches that are recorded -> the sizes that are predicted and measured."""
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


def run_job(stages: int, micro_batches: int, out: Path | None = None) -> float:
    """Run an emulated pipeline, recorded if there is ``out``; return the median of its steps in ms."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {"MICRO_BATCHES": micro_batches, "WORLD_SIZE": stages, "MASTER_ADDR": "127.0.0.1"}
    variables |= {"MASTER_PORT": port, "LAYERS": LAYERS, "FORWARD_MS": 8, "STEPS": 12, "OMP_NUM_THREADS": 1}
    command = [sys.executable, str(LAB / "train_pipeline.py")]
    if out is not None:
        collect = [sys.executable, "-m", "etloom", "collect", "--out", str(out), "--steps", "4:9", "--"]
        command = collect + command
    processes = []
    for rank in range(stages):
        environment = os.environ | {name: str(value) for name, value in variables.items()}
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    output = "".join(process.communicate(timeout=600)[0] for process in processes)
    if "STEPS_MS" not in output:
        sys.exit(f"{shlex.join(command)}: {output[-500:]}")
    steps = output.split("STEPS_MS")[1].split("MEDIAN")[0].split()
    return statistics.median(map(float, steps[4:]))


def record(folder: Path) -> None:
    """Record the pipelines of `CASES`, measure and predict the other sizes, and write lab/pipelines.csv."""
    rows, measured = [], {}
    for (stages, micro_batches), targets in CASES.items():
        run = folder / f"pipeline_{stages}_{micro_batches}"
        run_job(stages, micro_batches, run)
        for sizes in targets:
            new = sizes.get("pp", stages), sizes.get("mb", micro_batches)
            if new not in measured:
                measured[new] = run_job(*new), os.getloadavg()[0]
            prediction = etloom.predict(run, parallel=sizes)
            row = prediction.table.filter(scope="step time").row(0, named=True)
            names = ("predicted_ns", "lower_bound_ns", "upper_bound_ns")
            times = {f"{name.split('_')[0]}_ms": f"{row[name] / 1e6:.0f}" for name in names}
            step, load = measured[new]
            labels = {"recorded": f"{stages} stages, {micro_batches} micro-batches"}
            labels["sizes"] = ",".join(f"{axis}={size}" for axis, size in sizes.items())
            rows.append({**labels, **times, "measured_ms": f"{step:.0f}", "load": f"{load:.1f}"})
    with (LAB / "pipelines.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def print_measured() -> None:
    """Print the stored measurements next to their predictions."""
    with (LAB / "pipelines.csv").open() as file:
        rows = list(csv.DictReader(file))
    print("\nmeasured: emulated pipelines over gloo")
    errors, inside = [], []
    for row in rows:
        predicted, measured = float(row["predicted_ms"]), float(row["measured_ms"])
        errors.append(predicted / measured - 1)
        bounds = row.get("lower_ms"), row.get("upper_ms")
        if all(bounds):
            inside.append(float(bounds[0]) <= measured <= float(bounds[1]))
        print(
            f"{row['recorded']} -> {row['sizes']:10}  predicted {predicted:.0f} ms "
            f"({' to '.join(bound or '?' for bound in bounds)}), measured {measured:.0f} ms, "
            f"{100 * errors[-1]:+.1f} %, load {row['load']}"
        )
    worst = 100 * max(map(abs, errors))
    state(f"pipelines, worst error of {len(rows)} measured", "12 %", f"{worst:.1f} %", worst <= 12)
    share = f"{100 * statistics.mean(inside):.0f} %" if inside else "not measured"
    holds = 0.85 <= statistics.mean(inside) <= 0.95 if inside else None
    state("pipelines, truths in the 90 % intervals", "85 to 95 %", share, holds)


def main(arguments: list[str]) -> None:
    if arguments[1:] == ["record"]:
        record(Path(arguments[0]))
    largest = 0
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
        largest = max(largest, *errors)
        name = f"{relaid.recorded.schedule.describe()} -> {relaid.schedule.describe()}".replace(
            "micro-batches", "mb"
        )
        print(f"{name:100}  {len(expected):10}  {sum(map(bool, errors)):6}  {max(errors):12g}")
    text = f"{largest:g} ns in {len(GENERATED)} jobs"
    state("pipelines, generated jobs laid out again, largest error", "0 ns", text, largest == 0)
    print_measured()
    if not DATA.exists():
        print(f"recorded: no folder {DATA}; set ETLOOM_DATA")
        return
    print("\nrecorded: step time laid out again with its own sizes")
    for name in RECORDINGS:
        relaid = etloom.predict(DATA / name, parallel={"mb": 4})
        if isinstance(relaid, RelaidPipeline):
            schedule = relaid.recorded.schedule.describe()
            print(f"{name:36}  {schedule:38}  {100 * relaid.reproduction_error:+.3f} %")


if __name__ == "__main__":
    main(sys.argv[1:])
