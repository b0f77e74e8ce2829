"""Estimate the shift between two samples: Hodges-Lehmann estimate with Mann-Whitney confidence interval.

The estimate is the median of all pairwise differences; the interval ends at those pairwise differences at which a
two-sided Mann-Whitney test of the level would just not reject (Hollander, Wolfe and Chicken, Nonparametric
Statistical Methods, section 4.3). An outlier moves it no further than a slightly slower step. Times are compared as
logarithms if all are positive, so that the shift is a ratio.

Neighbouring steps are not independent: a machine that is busy now is busy in the next step. The interval is widened
by sqrt((1 + r) / (1 - r)), the effect on a mean of a first-order autocorrelation r, taken of the samples' ranks. Where
one side is several runs after each other, r also holds what differs from run to run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import comb, sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

CONFIDENCE = 0.95
"""Of the interval, two-sided."""
_MAX_EXACT_PAIRS = 400
"""Pairs up to which the null distribution is counted out; above, the normal one is within 1 % of it."""
_MIN_FOR_AUTOCORRELATION = 8


@dataclass(frozen=True)
class Shift:
    """The shift of the second sample relative to the first, in percent, with its confidence interval.

    A confidence of 0 means that no interval is known.
    """

    percent: float
    low: float
    high: float
    confidence: float

    @property
    def is_known(self) -> bool:
        """True if the samples are large enough for an interval of the confidence `CONFIDENCE`."""
        return self.confidence >= CONFIDENCE

    @property
    def is_clear(self) -> bool:
        """True if the confidence interval is known and excludes 0."""
        return self.is_known and (self.low > 0 or self.high < 0)


def estimate_shift(before: ArrayLike, after: ArrayLike) -> Shift | None:
    """Estimate the shift from sample ``before`` to sample ``after``, in percent; None if it is undefined.

    It is undefined if a sample is empty, or if only the first is 0.

    It is if a sample is empty, or the first one is 0.

    With too few values for an interval of CONFIDENCE (fewer than 4 on each side), the widest interval and its actual
    confidence are returned; equal samples of any size have a shift of 0.
    """
    first, second = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    if not first.size or not second.size:
        return None
    if np.array_equal(first, second):
        enough = _exact_confidence(first.size, second.size, 1) >= CONFIDENCE
        return Shift(0.0, 0.0, 0.0, CONFIDENCE if enough else 0.0)
    ratio = first.min() > 0 and second.min() > 0
    scale = 100 / np.median(first) if not ratio and np.median(first) > 0 else None
    if not ratio and scale is None:
        return None
    if ratio:
        first, second = np.log(first), np.log(second)
    pairs = np.sort(np.subtract.outer(second, first), axis=None)
    first_rank, confidence = _interval_rank(first.size, second.size, _inflation(first, second))
    ends = np.median(pairs), pairs[first_rank - 1], pairs[-first_rank]
    percent, low, high = (float(100 * np.expm1(end) if scale is None else scale * end) for end in ends)
    return Shift(percent, low, high, confidence)


def _interval_rank(n: int, m: int, inflation: float) -> tuple[int, float]:
    """Return which sorted pairwise difference bounds the interval (1: the extremes), and the interval's confidence."""
    if n * m <= _MAX_EXACT_PAIRS:
        rank = 1
        while rank < n * m // 2 and _exact_confidence(n, m, rank + 1) >= CONFIDENCE:
            rank += 1
        confidence = _exact_confidence(n, m, rank)
    else:
        normal = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
        rank, confidence = max(1, int(n * m / 2 - normal * sqrt(n * m * (n + m + 1) / 12))), CONFIDENCE
    middle = n * m / 2
    return max(1, int(middle - (middle - rank) * inflation)), confidence


def _exact_confidence(n: int, m: int, rank: int) -> float:
    """Return the probability that the shift is between the rank-th smallest and largest pairwise differences."""
    return 1 - 2 * sum(_statistic_counts(n, m)[:rank]) / comb(n + m, n) if n * m <= _MAX_EXACT_PAIRS else 1.0


@lru_cache(maxsize=256)
def _statistic_counts(n: int, m: int) -> tuple[int, ...]:
    """Return the number of orderings of n and m values for each Mann-Whitney statistic from 0 to n * m.

    Gaussian binomial coefficients.
    """
    counts = [1] + [0] * (n * m)
    for part in range(1, n + 1):
        for at in range(n * m, m + part - 1, -1):  # times 1 - q^(m + part)
            counts[at] -= counts[at - m - part]
        for at in range(part, n * m + 1):  # over 1 - q^part
            counts[at] += counts[at - part]
    return tuple(counts)


def _inflation(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    r = max(_autocorrelation(first), _autocorrelation(second))
    return sqrt((1 + r) / (1 - r))


def _autocorrelation(values: NDArray[np.float64]) -> float:
    """Return the lag-1 autocorrelation of the (statistical) ranks of values, up to 0.95; 0 if it is not significant."""
    if values.size < _MIN_FOR_AUTOCORRELATION:
        return 0.0
    ranks = np.argsort(np.argsort(values, kind="stable"), kind="stable") - (values.size - 1) / 2
    correlation = float((ranks[1:] * ranks[:-1]).sum() / (ranks**2).sum())
    # For independent values it is below 1 / sqrt(n) in five of six cases.
    return min(correlation, 0.95) if correlation > 1 / sqrt(values.size) else 0.0
