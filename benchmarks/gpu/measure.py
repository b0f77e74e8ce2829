"""Time and record the jobs of `jobs.py` on this machine's GPU.

    python benchmarks/gpu/measure.py --out recorded         # all of them, some minutes
    python benchmarks/gpu/compare.py recorded               # anywhere: predictions next to these times

A job is timed without any recorder first; then three of its steps are recorded.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jobs import JOBS, Job, make

import etloom

WARM_UP, TIMED, ROUNDS, STEPS_BEFORE, RECORDED = 6, 12, 3, 8, 3


def time_steps(step: Callable[[], None]) -> float:
    """Return the median over rounds of the mean step time in ms."""
    for _ in range(WARM_UP):
        step()
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(TIMED):
            step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / TIMED * 1e3)
    return statistics.median(times)


def record(step: Callable[[], None], job: Job, out: Path, observer: str) -> list[str]:
    """Record RECORDED steps; return the recorder's messages."""
    steps = f"{STEPS_BEFORE}:{STEPS_BEFORE + RECORDED}"
    with etloom.record(out, steps=steps, overwrite=True, stack=job.stack, observer=observer) as recording:
        for _ in range(STEPS_BEFORE + RECORDED + 1):
            step()
            recording.step()
    return list(recording.warnings)


def measure(name: str, job: Job, out: Path, observer: str) -> dict[str, Any]:
    """Return the facts of a job and of its recording."""
    torch.cuda.reset_peak_memory_stats()
    step = make(job)
    untraced_ms = time_steps(step)
    peak_bytes = torch.cuda.max_memory_allocated()
    messages = record(step, job, out / re.sub(r"\W+", "_", name), observer)
    return {
        "step_ms": untraced_ms,
        "peak_bytes": peak_bytes,
        "messages": messages,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("jobs", nargs="*", help="default: all")
    parser.add_argument("--out", type=Path, required=True, help="folder for the recordings and times.json")
    parser.add_argument("--observer", choices=("native", "stock"), default="native")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "jobs": {}}
    for name in options.jobs or JOBS:
        try:
            facts["jobs"][name] = measure(name, JOBS[name], options.out, options.observer)
        except (RuntimeError, etloom.EtloomError) as error:
            facts["jobs"][name] = {"error": f"{type(error).__name__}: {error}"}
        gc.collect()
        torch.cuda.empty_cache()
        print(name, facts["jobs"][name], flush=True)
        (options.out / "times.json").write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
