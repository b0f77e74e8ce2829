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
from numpy.typing import ArrayLike, NDArray

Ticks = NDArray[np.int64]

_FIRST, _LAST = np.iinfo(np.int64).min, np.iinfo(np.int64).max
_LONG_AGO = _FIRST // 2
"""Earlier than any time, but not by more than 64 bits hold."""


@dataclass(frozen=True, eq=False)
class Intervals:
    """A set of times as disjoint, ascending intervals [start, end), ns. Use `of` to build a set."""

    starts: Ticks  # (n,) ascending
    ends: Ticks  # (n,) starts[i] < ends[i] < starts[i + 1]

    @classmethod
    def of(cls, starts: ArrayLike, ends: ArrayLike) -> Intervals:
        """Return the union of intervals, which may overlap and be in any order; those with end <= start are ignored."""
        begin, end = np.asarray(starts, dtype=np.int64), np.asarray(ends, dtype=np.int64)
        empty = end <= begin
        if empty.any():
            begin, end = begin[~empty], end[~empty]
        if not begin.size:
            return EMPTY
        if (begin[1:] < begin[:-1]).any():
            order = np.argsort(begin, kind="stable")
            begin, end = begin[order], end[order]
        reach = np.maximum.accumulate(end)
        fresh = np.flatnonzero(begin[1:] > reach[:-1]) + 1
        return cls(begin[np.concatenate(([0], fresh))], reach[np.concatenate((fresh - 1, [-1]))])

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
        """Return the intersection of two sets.

        Its intervals begin where an interval of one set begins inside the other set.
        """
        if not self or not other:
            return EMPTY
        # Where both begin (or end) at one tick, it counts once: as self's.
        starts = _merge_sorted(
            self.starts[other._at(self.starts, start=True)],
            other.starts[self._at(other.starts)],
        )
        ends = _merge_sorted(self.ends[other._at(self.ends, end=True)], other.ends[self._at(other.ends)])
        return Intervals(starts, ends)

    def __sub__(self, other: Intervals) -> Intervals:
        return self & other.gaps(_FIRST, _LAST) if other else self

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
        low, high = np.asarray(starts, dtype=np.int64), np.asarray(ends, dtype=np.int64)
        inside: Ticks = np.maximum(self.before(high) - self.before(low), 0)
        return inside

    def before(self, ticks: Ticks) -> Ticks:
        """Return for each time the total duration of the set's intervals before that time, in ns."""
        if not self:
            return np.zeros(ticks.shape, dtype=np.int64)
        # The intervals that begin by then, less what the last of them lasts beyond it.
        until = np.concatenate(([0], np.cumsum(self.ends - self.starts)))
        ends = np.concatenate(([_LONG_AGO], self.ends))
        if len(ticks) > len(self) and (ticks[1:] >= ticks[:-1]).all():
            # Sorted ticks: those between two starts are a slice.
            count = np.diff(np.searchsorted(ticks, self.starts), prepend=0, append=len(ticks))
            until, ends = np.repeat(until, count), np.repeat(ends, count)
        else:
            begun = np.searchsorted(self.starts, ticks, side="right")
            until, ends = until[begun], ends[begun]
        # In place: memory that is touched for the first time takes longer than the arithmetic.
        ends -= ticks
        until -= np.maximum(ends, 0, out=ends)
        return until

    def _at(self, ticks: Ticks, *, start: bool = False, end: bool = False) -> NDArray[np.bool_]:
        """Return a mask of the times inside an interval; ``start`` and ``end`` include times at its start or end."""
        last = np.searchsorted(self.starts, ticks, side="right" if start else "left") - 1
        finish = self.ends[last]
        return (last >= 0) & ((ticks <= finish) if end else (ticks < finish))


EMPTY = Intervals(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


def union(sets: Iterable[Intervals]) -> Intervals:
    """Return the union of several sets of intervals."""
    nonempty = [each for each in sets if each]
    if len(nonempty) < 2:
        return nonempty[0] if nonempty else EMPTY
    return Intervals.of(
        np.concatenate([s.starts for s in nonempty]), np.concatenate([s.ends for s in nonempty])
    )


def _merge_sorted(a: Ticks, b: Ticks) -> Ticks:
    """Merge two ascending arrays into one; numpy's stable sort takes linear time for two sorted parts."""
    return np.sort(np.concatenate((a, b)), kind="stable")
