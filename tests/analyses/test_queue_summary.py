"""The weights of queue-summary against a count of every tick; what a trace keeps of an answer about a column."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etloom.analyses import queue_summary
from etloom.core.trace import Trace

LIMIT = 3


@st.composite
def queues(draw: st.DrawFn) -> list[list[tuple[int, int]]]:
    """Of one to three streams the times (distinct, ascending) and the length from each on; 0 from the last one on."""
    found = []
    for _ in range(draw(st.integers(1, 3))):
        times = sorted(draw(st.sets(st.integers(0, 30), min_size=1, max_size=8)))
        lengths = draw(st.lists(st.integers(0, 5), min_size=len(times), max_size=len(times)))
        found.append(list(zip(times, [*lengths[:-1], 0], strict=True)))
    return found


windows = st.lists(st.tuples(st.integers(-3, 33), st.integers(-3, 33)), min_size=1, max_size=4)


def by_tick(queue: list[tuple[int, int]], start: int, end: int) -> dict[str, float] | None:
    """The same of one queue and window, tick by tick; None where it has no time there."""
    length = dict.fromkeys(range(queue[0][0], queue[-1][0]), 0)
    for time, waiting in queue:
        length |= dict.fromkeys((tick for tick in length if tick >= time), waiting)
    held = sorted(waiting for tick, waiting in length.items() if start <= tick < end)
    if not held:
        return None
    at = {q: held[int(np.ceil(q * len(held))) - 1] for q in (0.5, 0.95)}
    return {
        "span_ns": len(held),
        "mean": sum(held) / len(held),
        "median": at[0.5],
        "p95": at[0.95],
        "max": held[-1],
        "empty_ns": held.count(0),
        "empty_pct": 100 * held.count(0) / len(held),
        "blocked_ns": (blocked := sum(waiting >= LIMIT for waiting in held)),
        "blocked_pct": 100 * blocked / len(held),
    }


@given(queues(), windows)
def test_a_length_counts_as_long_as_it_lasts(
    streams: list[list[tuple[int, int]]], given: list[tuple[int, int]]
) -> None:
    time = np.array([time for queue in streams for time, _ in queue])
    length = np.array([waiting for queue in streams for _, waiting in queue])
    tail = np.cumsum([len(queue) for queue in streams]) - 1
    head = np.append(0, tail[:-1] + 1)
    start, end = (np.repeat(np.array(one)[:, None], len(streams), axis=1) for one in zip(*given, strict=True))
    piece, count, lasted = queue_summary._split_windows(time, head, tail, start, end)
    there = np.flatnonzero(count)
    said = queue_summary._compute_weighted_stats(count[there], length[piece], lasted, LIMIT)
    expected = [by_tick(queue, *one) for one in given for queue in streams]
    assert there.tolist() == [at for at, one in enumerate(expected) if one]
    for row, one in enumerate(one for one in expected if one):
        assert {name: values[row] for name, values in said.items()} == pytest.approx(one)


def test_a_trace_keeps_each_answer_about_something() -> None:
    trace = Trace({}, {"rank": 3})
    asked: list[str] = []

    def question(one: Trace, about: str) -> str:
        asked.append(about)
        return f"{about} of {one.rank}"

    assert [trace.compute_once(question, about) for about in ("a", "b", "a")] == [
        "a of 3",
        "b of 3",
        "a of 3",
    ]
    assert asked == ["a", "b"]
