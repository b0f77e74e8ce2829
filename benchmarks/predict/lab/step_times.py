"""Sizes of the emulated trainings, from the environment, and the measurement of their steps.

Environment: LAYERS, WIDTH (a layer's weight is WIDTH x WIDTH float32), FORWARD_MS per layer (backward takes twice as
long), STEPS, PRIORITY (real-time, from the third step on, so that other work hardly delays the job). Compute is a
sleep, so the 2 CPU cores of a small machine serve 8 ranks.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

layers, width = int(os.environ.get("LAYERS", 8)), int(os.environ.get("WIDTH", 512))
forward_s, steps = float(os.environ.get("FORWARD_MS", 10)) / 1e3, int(os.environ.get("STEPS", 14))


def run_steps(step: Callable[[], None]) -> None:
    """Run the steps; rank 0 prints their times in ms, and the median after warm-up."""
    times = []
    priority = int(os.environ.get("PRIORITY", 0))
    for number in range(steps):
        if priority and number == 2:
            for thread in Path("/proc/self/task").iterdir():
                os.sched_setscheduler(int(thread.name), os.SCHED_FIFO, os.sched_param(priority))
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    if dist.get_rank() == 0:
        tail = sorted(times[4:])
        print("STEPS_MS", *(f"{t:.1f}" for t in times), "MEDIAN", f"{tail[len(tail) // 2]:.2f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
