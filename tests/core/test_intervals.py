"""Interval algebra against sets of ticks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etloom.core.intervals import EMPTY, Intervals, union
from etloom.core.nesting import find_innermost

PAIRS = st.lists(st.tuples(st.integers(-20, 40), st.integers(-3, 12)), max_size=12)
"""(start, length), lengths that are zero or negative among them."""


def build(pairs: list[tuple[int, int]]) -> tuple[Intervals, set[int]]:
    starts = [start for start, _ in pairs]
    ends = [start + length for start, length in pairs]
    return Intervals.of(starts, ends), {t for a, b in zip(starts, ends, strict=True) for t in range(a, b)}


def ticks(intervals: Intervals) -> set[int]:
    return {
        t
        for a, b in zip(intervals.starts.tolist(), intervals.ends.tolist(), strict=True)
        for t in range(a, b)
    }


def normal(intervals: Intervals) -> bool:
    """Sorted, not empty, not touching: what every operation relies on."""
    return bool(
        (intervals.starts < intervals.ends).all() and (intervals.ends[:-1] < intervals.starts[1:]).all()
    )


@given(PAIRS, PAIRS)
def test_algebra_equals_that_of_sets_of_ticks(
    first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    (a, a_ticks), (b, b_ticks) = build(first), build(second)
    for answer, expected in (
        (a, a_ticks),
        (a | b, a_ticks | b_ticks),
        (a & b, a_ticks & b_ticks),
        (a - b, a_ticks - b_ticks),
    ):
        assert ticks(answer) == expected
        assert answer.total == len(expected)
        assert normal(answer)


@given(PAIRS, st.integers(-25, 55), st.integers(-25, 55))
def test_clip_gaps_and_covered_agree_with_ticks(pairs: list[tuple[int, int]], low: int, high: int) -> None:
    a, a_ticks = build(pairs)
    window = set(range(low, high))
    assert ticks(a.clip(low, high)) == a_ticks & window
    assert ticks(a.gaps(low, high)) == window - a_ticks
    assert normal(a.clip(low, high)) and normal(a.gaps(low, high))
    assert a.covered([low, 0], [high, 7]).tolist() == [len(a_ticks & window), len(a_ticks & set(range(7)))]


@given(PAIRS, PAIRS, PAIRS)
def test_union_of_many_is_the_folded_one(
    first: list[tuple[int, int]], second: list[tuple[int, int]], third: list[tuple[int, int]]
) -> None:
    a, b, c = (build(pairs)[0] for pairs in (first, second, third))
    assert union((a, b, c)) == a | b | c == union((c, a, b))


@given(PAIRS)
def test_gaps_and_set_tile_the_span(pairs: list[tuple[int, int]]) -> None:
    a, a_ticks = build(pairs)
    if a.span is None:
        assert a == EMPTY and not a_ticks and not a.gaps()
        return
    assert a.span == (min(a_ticks), max(a_ticks) + 1)
    assert a.total + a.gaps().total == a.span[1] - a.span[0]
    assert (a | a.gaps()) == Intervals.of([a.span[0]], [a.span[1]])


@given(
    st.lists(st.tuples(st.integers(-20, 20), st.integers(-3, 15)), max_size=12),
    st.lists(st.integers(-25, 40), max_size=20),
)
def test_the_innermost_window_is_that_of_a_search(pairs: list[tuple[int, int]], ticks: list[int]) -> None:
    starts, ends = [at for at, _ in pairs], [at + took for at, took in pairs]
    found = find_innermost(starts, ends, ticks)
    for tick, row in zip(ticks, found, strict=True):
        around = [at for at, end in zip(starts, ends, strict=True) if at <= tick < end]
        shortest = [
            end for at, end in zip(starts, ends, strict=True) if around and at == max(around) and tick < end
        ]
        assert (row < 0) == (not around)
        if around:
            assert (starts[row], ends[row]) == (max(around), min(shortest))


@given(
    st.lists(st.tuples(st.integers(-20, 20), st.integers(0, 15)), max_size=5),
    st.lists(st.integers(-25, 40), min_size=6, max_size=20),
)
def test_sorted_times_are_measured_as_others(pairs: list[tuple[int, int]], ticks: list[int]) -> None:
    times = Intervals.of([at for at, _ in pairs], [at + took for at, took in pairs])
    covered = {tick for at, took in pairs for tick in range(at, at + took)}
    for order in (sorted(ticks), ticks):
        lengths = times.before(np.array(order, np.int64)).tolist()
        assert lengths == [sum(other < tick for other in covered) for tick in order]


def test_touching_intervals_become_one() -> None:
    a = Intervals.of([10, 0, 5], [12, 5, 10])
    assert (a.starts.tolist(), a.ends.tolist()) == ([0], [12])


def test_epoch_nanoseconds_and_the_whole_range_are_exact() -> None:
    epoch = 1_790_000_000_000_000_001
    a = Intervals.of([epoch], [epoch + 3])
    assert (a - Intervals.of([epoch + 1], [epoch + 2])).starts.tolist() == [epoch, epoch + 2]
    assert EMPTY.gaps(0, 4) == Intervals.of([0], [4])


@pytest.mark.slow
def test_operations_on_millions_of_intervals() -> None:
    random = np.random.default_rng(0)
    starts = random.integers(0, 2 * 10**9, 2_000_000)
    a = Intervals.of(starts, starts + random.integers(1, 500, starts.size))
    b = Intervals.of(starts + 300, starts + 900)
    both, without = a & b, a - b
    assert both.total + without.total == a.total


@given(st.integers(0, 2**32 - 1), st.integers(0, 60), st.booleans())
def test_times_between_many_intervals(seed: int, count: int, in_order: bool) -> None:
    draw = np.random.default_rng(seed)
    bounds = np.cumsum(draw.integers(1, 9, 2 * count))
    intervals = Intervals(bounds[::2], bounds[1::2])
    times = draw.integers(-5, 9 * count + 9, 80)
    times = np.sort(times) if in_order else times
    expected = [
        sum(max(min(end, time) - start, 0) for start, end in zip(bounds[::2], bounds[1::2], strict=True))
        for time in times.tolist()
    ]
    assert intervals.before(times).tolist() == expected
    lengths = draw.integers(-9, 60, 80)
    later = intervals.before(times + lengths) - expected
    assert intervals.covered(times, times + lengths).tolist() == np.maximum(later, 0).tolist()
