"""Estimate the change of a measure between two sides, each one run or several, with a bootstrap interval.

The level of a run is the median over its steps, and the level of a side is the mean over its runs. With three runs or
more, the interval shows how much runs of a side differ: the deviations of the runs from their side are drawn again.
A single run on each side shows its steps only: each run is drawn again as a few blocks of consecutive steps, because a
machine that is busy now is busy in the next step (circular block bootstrap: Politis and Romano, 1992).

Few runs or blocks vary too little. So the deviations of resamples are multiplied by sqrt(n / (n - 1)), and each by a
random factor that turns a normal distribution into Student's. The seed is fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
"""Probability with which the two-sided interval contains the change."""
MIN_STEPS = 4
"""Minimum number of steps of a single run on each side."""
MIN_RUNS = 3
"""Minimum number of runs, of both sides together, for an interval from the differences between runs."""
RESAMPLES = 1000
BLOCKS, LONG_BLOCKS = 7, 3
"""Blocks per run; LONG_BLOCKS if neighbouring steps are alike, because blocks must be longer than what they share."""
MAX_STEPS_AT_ONCE = 5000
"""Largest number of steps of a run whose resamples are computed at once; they take 80 MB."""
Values = Sequence[float] | NDArray[np.float64]


@dataclass(frozen=True)
class Shift:
    """The change between two levels, in percent of the first, with its confidence interval.

    ``low``, ``high``: None if there are too few steps or runs.
    """

    percent: float
    low: float | None = None
    high: float | None = None

    @property
    def is_known(self) -> bool:
        """True if there are enough steps or runs for an interval."""
        return self.low is not None

    @property
    def is_clear(self) -> bool:
        """True if the interval is known and excludes 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def measure_level(runs: Sequence[Values]) -> float | None:
    """Return the mean over runs of the median over their values; None without values."""
    medians = [np.median(run) for run in runs if len(run)]
    return float(np.mean(medians)) if medians else None


def estimate_shift(before: Sequence[Values], after: Sequence[Values]) -> Shift | None:
    """Estimate the change between two sides of runs, each run a sequence of the values of its steps.

    None if a side has no values, or if the level before is not positive and the values changed.
    """
    sides = [[np.asarray(run, dtype=np.float64) for run in side if len(run)] for side in (before, after)]
    first, second = (measure_level(side) for side in sides)
    if first is None or second is None:
        return None
    runs = [run for side in sides for run in side]
    is_known = len(runs) >= MIN_RUNS or min(map(len, runs)) >= MIN_STEPS
    if len(runs) == 2 and np.array_equal(runs[0], runs[1]):
        return Shift(0.0, 0.0, 0.0) if is_known else Shift(0.0)
    if first <= 0:
        return None
    change = second - first
    if not is_known:
        return Shift(100 * change / first)
    rng = np.random.default_rng(0)
    low, high = _resample_runs(sides, rng) if len(runs) >= MIN_RUNS else _resample_steps(sides, rng)
    return Shift(*(100 * ns / first for ns in (change, change + low, change + high)))


def _resample_steps(
    sides: Sequence[Sequence[NDArray[np.float64]]], rng: np.random.Generator
) -> tuple[float, float]:
    """Return the interval of the change's error, from blocks of consecutive steps of the run of each side."""
    deviations, freedom = [], 0
    for (run,) in sides:
        blocks = _count_blocks(run)
        length = -(-run.size // blocks)
        starts = rng.integers(run.size, size=(RESAMPLES, blocks, 1))
        medians = [
            np.median(
                run[(part + np.arange(length)) % run.size].reshape(len(part), -1)[:, : run.size], axis=1
            )
            for part in np.array_split(starts, 1 + run.size // MAX_STEPS_AT_ONCE)
        ]
        deviations.append(sqrt(blocks / (blocks - 1)) * (np.concatenate(medians) - np.median(run)))
        freedom += blocks - 1
    return _interval(deviations[1] - deviations[0], freedom, rng)


def _count_blocks(run: NDArray[np.float64]) -> int:
    """Return the number of blocks of a run: one per step of a short run, fewer if neighbouring steps are alike.

    They are if the lag-1 autocorrelation of the ranks of the steps is significant (5 %, one-sided).
    """
    if run.size <= 2 * BLOCKS:
        return int(run.size)
    ranks = np.argsort(np.argsort(run, kind="stable")) - (run.size - 1) / 2
    correlation = float(ranks[1:] @ ranks[:-1] / (ranks @ ranks))
    return LONG_BLOCKS if correlation > 1.64 / sqrt(run.size) else BLOCKS


def _resample_runs(
    sides: Sequence[Sequence[NDArray[np.float64]]], rng: np.random.Generator
) -> tuple[float, float]:
    """Return the interval of the change's error, from the deviations of runs from their side, of both sides."""
    medians = [np.array([np.median(run) for run in side]) for side in sides]
    deviations = np.concatenate([values - values.mean() for values in medians])
    freedom = deviations.size - 2
    first, second = (rng.choice(deviations, (RESAMPLES, len(side))).mean(axis=1) for side in sides)
    return _interval(sqrt(deviations.size / freedom) * (second - first), freedom, rng)


def _interval(deviations: NDArray[np.float64], freedom: int, rng: np.random.Generator) -> tuple[float, float]:
    """Return the interval that contains CONFIDENCE of the deviations, widened to Student's distribution."""
    widened = deviations * np.sqrt(freedom / rng.chisquare(freedom, deviations.size))
    low, high = np.quantile(widened, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    return float(low), float(high)
