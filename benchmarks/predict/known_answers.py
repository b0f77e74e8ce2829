"""N ranks predicted from N/2, compared with the generated job of N ranks, to the nanosecond.

    python benchmarks/predict/known_answers.py

The jobs are those of tests/support/simulated_jobs.py; all collectives are rings.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from requirements import state

from etloom.graphs import build_graph
from etloom.graphs.graph import PointRole
from etloom.simulator.recording import describe_recording
from etloom.simulator.resizing import resize
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


def main() -> None:
    print("seed  recorded  predicted    times  differ")
    totals = [0, 0]
    for seed, recorded in CASES:
        total, differ = compare(seed, recorded)
        totals = [totals[0] + total, totals[1] + differ]
        print(f"{seed:4}  {recorded:8}  {2 * recorded:9}  {total:7}  {differ:6}")
    text = f"{totals[0] - totals[1]:,} of {totals[0]:,} times"
    state("generated jobs, N ranks from N/2, equal to the ns", "all", text, not totals[1])


if __name__ == "__main__":
    main()
