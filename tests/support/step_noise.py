"""Jobs of one rank whose step times are known, and noise of step times: what machines do to equal steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.core.trace import Job, Trace

STEP_NS = 10_000_000
Noise = Callable[[np.random.Generator, int], NDArray[np.float64]]
"""Returns the factors of so many step times."""


def write_job(times: Sequence[float] | NDArray[np.float64], has_device: bool = False) -> Job:
    """A job whose steps take these times (ns), half of each in an operator; with a device also half in a kernel."""
    ends = np.cumsum(np.asarray(times, dtype=np.int64))
    starts = np.append(0, ends[:-1])
    rows = [("user_annotation", "ProfilerStep#", 1.0, 0), ("cpu_op", "aten::mm", 0.5, 1)]
    rows += [("kernel", "gemm", 0.5, 0)] * has_device
    frames = [
        pl.DataFrame({"ts": starts, "dur": (share * (ends - starts)).astype(np.int64)}).with_columns(
            cat=pl.lit(cat), name=pl.lit(name), depth=pl.lit(depth), pid=pl.lit(1), tid=pl.lit(1)
        )
        for cat, name, share, depth in rows
    ]
    frames[0] = frames[0].with_columns(name=pl.col("name") + pl.int_range(pl.len()).cast(pl.String))
    events = pl.concat(frames).sort("ts", "depth", maintain_order=True).with_row_index("id")
    return Job({0: Trace({"events": events}, {"rank": 0, "linked": True})})


def white(rng: np.random.Generator, steps: int) -> NDArray[np.float64]:
    """2 %, independent."""
    return rng.lognormal(0, 0.02, steps)


def drift(rng: np.random.Generator, steps: int) -> NDArray[np.float64]:
    """1 %, and 2 % that change within some twenty steps."""
    level = rng.normal(0, 0.02, steps)
    for step in range(1, steps):
        level[step] = 0.95 * level[step - 1] + np.sqrt(1 - 0.95**2) * level[step]
    return np.exp(level) * rng.lognormal(0, 0.01, steps)


def bursts(rng: np.random.Generator, steps: int, share: float = 0.1) -> NDArray[np.float64]:
    """1 %, and a share of the steps that take 1.3 to 3 times as long, some five after each other."""
    slow = np.empty(steps, dtype=bool)
    is_slow = rng.random() < share
    for step, draw in enumerate(rng.random(steps)):
        is_slow = draw < (0.8 if is_slow else 0.2 * share / (1 - share))
        slow[step] = is_slow
    return rng.lognormal(0, 0.01, steps) * np.where(slow, rng.uniform(1.3, 3, steps), 1)


def busy(rng: np.random.Generator, steps: int) -> NDArray[np.float64]:
    """Half of the steps in bursts; and whole runs that differ by 20 %, as other work on the machine comes and goes."""
    return rng.lognormal(0, 0.2) * bursts(rng, steps, 0.5)


NOISES: dict[str, Noise] = {"white": white, "drift": drift, "bursts": bursts, "busy": busy}


def record_runs(
    rng: np.random.Generator,
    noise: Noise,
    runs: int,
    slowdown: float = 1.0,
    steps: int = 60,
    has_device: bool = False,
) -> list[Job]:
    """Return runs of a program with such noise; runs of one program differ by 0.5 % besides."""
    return [
        write_job(slowdown * STEP_NS * rng.lognormal(0, 0.005) * noise(rng, steps), has_device)
        for _ in range(runs)
    ]
