"""N ranks predicted from N/2, compared with the generated job of N ranks, to the nanosecond.

    python benchmarks/predict/known_answers.py

The jobs are those of tests/support/simulated_jobs.py and mesh_jobs.py; all collectives are rings.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import tempfile

from requirements import state

from etloom.graphs import build_graph
from etloom.graphs.graph import PointRole
from etloom.simulator.recorded_run import describe_recording
from etloom.simulator.resizing import resize, synthesize_job
from support.mesh_jobs import (
    context_calls,
    context_groups,
    count_differences,
    expert_calls,
    expert_groups,
    open_job,
)
from support.simulated_jobs import FLOORS, World, event_times, job_of, programs, simulate

CASES = [(seed, recorded) for seed in range(4) for recorded in (2, 4, 8)]


def compare(seed: int, recorded: int) -> tuple[int, int]:
    """Return the number of times compared, and of those that differ."""
    # Whole times when they are multiplied by the factor of a ring.
    program = [
        replace(do, sizes=(do.sizes[0] // 16 * 16,)) if do.what == "collective" else do
        for do in programs(seed, 30)[0]
    ]
    small, truth = (
        simulate([program] * ranks, World(transfer=2 * (ranks - 1) / ranks))
        for ranks in (recorded, 2 * recorded)
    )
    job = job_of(small)
    grown = resize(describe_recording(job, build_graph(job, FLOORS)), 2 * recorded)
    predicted = event_times(grown.graph, grown.compute_times())
    total = differ = 0
    for rank in range(2 * recorded):
        for number, i in enumerate(small[rank % recorded].order()):
            event = truth[rank].events[i]
            if event["cat"] == "cuda_sync":
                continue
            for role, key in ((PointRole.START, "ts"), (PointRole.END, "end")):
                total += 1
                differ += predicted[rank, number, int(role)] != event[key]
    return total, differ


def compare_meshes() -> int:
    """Print and return the events that differ in jobs with twice the context or expert parallelism."""
    cases = []
    for name in ("all_gather", "all_to_all", "ring"):
        for cp in (2, 4):
            programs = [(context_calls(size, name), context_groups(size)) for size in (cp, 2 * cp)]
            cases.append((f"cp={cp}, {name}", {"cp": 2 * cp}, programs))
    for ep, dp in ((2, 4), (4, 8)):
        sizes = {"ep": 2 * ep, "dp": 2 * dp}
        programs = [(expert_calls(*size), expert_groups(*size)) for size in ((ep, dp), tuple(sizes.values()))]
        cases.append((f"ep={ep}, dp={dp}", sizes, programs))
    total = 0
    print("\nrecorded            predicted          events  differ")
    for name, sizes, programs in cases:
        with tempfile.TemporaryDirectory() as folder:
            recorded, truth = (
                open_job(Path(folder) / str(number), *program) for number, program in enumerate(programs)
            )
            predicted = synthesize_job(resize(describe_recording(recorded), None, sizes))
            differ = count_differences(predicted, truth)
        events = sum(trace.events.height for trace in truth.values())
        total += differ
        print(f"{name:18}  {sizes!s:17}  {events:6}  {differ:6}")
    return total


def main() -> None:
    print("seed  recorded  predicted    times  differ")
    totals = [0, 0]
    for seed, recorded in CASES:
        total, differ = compare(seed, recorded)
        totals = [totals[0] + total, totals[1] + differ]
        print(f"{seed:4}  {recorded:8}  {2 * recorded:9}  {total:7}  {differ:6}")
    text = f"{totals[0] - totals[1]:,} of {totals[0]:,} times"
    state("generated jobs, N ranks from N/2, equal to the ns", "all", text, not totals[1])
    differ = compare_meshes()
    state("generated jobs, cp and ep from half of it, events that differ", "0", f"{differ}", not differ)


if __name__ == "__main__":
    main()
