"""Sets of time intervals: union, intersection, difference and coverage, for overlap and idle time.

An `Intervals` is a set of ticks (int64 nanoseconds), held as half-open, disjoint, sorted intervals that do not touch.
Building one from n unsorted intervals costs a sort; an operation on existing sets is about linear.

    busy = Intervals.of(ts, ts + dur)
    (communication - computation).total        # exposed communication
    busy.covered(step_starts, step_ends)       # busy time of each step
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import ArrayLike, NDArray

from etloom import _native

Ticks = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Intervals:
    """A set of times as disjoint, ascending intervals [start, end), ns. Use `of` to build a set."""

    starts: Ticks  # (n,) ascending
    ends: Ticks  # (n,) starts[i] < ends[i] < starts[i + 1]

    @classmethod
    def of(cls, starts: ArrayLike, ends: ArrayLike) -> Intervals:
        """Return the union of intervals, which may overlap and be in any order; those with end <= start are ignored."""
        merged = _native.merge_intervals(_to_ticks(starts), _to_ticks(ends))
        return cls(*merged) if merged[0].size else EMPTY

    @property
    def total(self) -> int:
        """The total duration of the set, ns."""
        return int((self.ends - self.starts).sum())

    @property
    def span(self) -> tuple[int, int] | None:
        """The start of the first interval and the end of the last one, ns; None for the empty set."""
        return (int(self.starts[0]), int(self.ends[-1])) if len(self) else None

    def __len__(self) -> int:
        """The number of intervals (so the empty set is false)."""
        return len(self.starts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Intervals):
            return NotImplemented
        return np.array_equal(self.starts, other.starts) and np.array_equal(self.ends, other.ends)

    def __or__(self, other: Intervals) -> Intervals:
        return union((self, other))

    def __and__(self, other: Intervals) -> Intervals:
        """Return the intersection of two sets."""
        if not self or not other:
            return EMPTY
        return Intervals(*_native.intersect_intervals(self.starts, self.ends, other.starts, other.ends))

    def __sub__(self, other: Intervals) -> Intervals:
        if not self or not other:
            return self
        return Intervals(*_native.subtract_intervals(self.starts, self.ends, other.starts, other.ends))

    def gaps(self, start: int | None = None, end: int | None = None) -> Intervals:
        """Return the times in [start, end) that are not in the set; default: from the start of the set to its end."""
        if not self:
            return EMPTY if start is None or end is None else Intervals.of([start], [end])
        low = self.starts[0] if start is None else np.int64(start)
        high = self.ends[-1] if end is None else np.int64(end)
        begin = np.clip(np.concatenate(([low], self.ends)), low, high)
        finish = np.clip(np.concatenate((self.starts, [high])), low, high)
        return Intervals(begin[begin < finish], finish[begin < finish])

    def clip(self, start: int, end: int) -> Intervals:
        """Return the intersection of the set with [start, end)."""
        first = int(np.searchsorted(self.ends, start, side="right"))
        last = int(np.searchsorted(self.starts, end, side="left"))
        if first >= last or start >= end:
            return EMPTY
        return Intervals(
            np.maximum(self.starts[first:last], np.int64(start)),
            np.minimum(self.ends[first:last], np.int64(end)),
        )

    def covered(self, starts: ArrayLike, ends: ArrayLike) -> Ticks:
        """Return for each interval [start, end) how much of it the set covers, in ns; 0 if end <= start."""
        return _native.covered(self.starts, self.ends, _to_ticks(starts), _to_ticks(ends))

    def before(self, ticks: Ticks) -> Ticks:
        """Return for each time the total duration of the set's intervals before that time, in ns."""
        return _native.covered_before(self.starts, self.ends, ticks)


EMPTY = Intervals(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


def union(sets: Iterable[Intervals]) -> Intervals:
    """Return the union of several sets of intervals."""
    nonempty = [each for each in sets if each]
    if len(nonempty) < 2:
        return nonempty[0] if nonempty else EMPTY
    return Intervals.of(
        np.concatenate([s.starts for s in nonempty]), np.concatenate([s.ends for s in nonempty])
    )


def _to_ticks(times: ArrayLike) -> Ticks:
    if isinstance(times, pl.Series) and times.dtype == pl.Int64 and not times.null_count():
        ticks: Ticks = times.to_numpy()  # faster than np.asarray
        return ticks
    return np.asarray(times, dtype=np.int64)
