"""Nesting and exclusive time: against forests whose nesting is known, and by the law that times tile."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etloom._native import draw_lines, stack_tracks, sum_calls
from etloom.core import arrays, nesting
from etloom.core.schema import TABLES


def events(rows: list[dict[str, Any]]) -> pl.DataFrame:
    """A table of events from rows of ts, dur and what else matters, sorted as a reader does."""
    frame = pl.DataFrame(
        [
            {"ph": "X", "cat": "cpu_op", "name": "op", "pid": 1, "tid": 1, "position": at} | row
            for at, row in enumerate(rows)
        ]
    )
    frame = frame.sort(pl.col("ts"), -pl.col("dur").fill_null(0), "position")
    return TABLES["events"].conform(frame.with_row_index("id"))


def parents(frame: pl.DataFrame) -> dict[str, str | None]:
    at = nesting.nest_events(frame)
    names = frame["name"].to_list()
    return {name: None if row < 0 else names[row] for name, row in zip(names, at.parent, strict=True)}


def span(name: str, start: int, end: int, **other: Any) -> dict[str, Any]:
    return {"name": name, "ts": start, "dur": end - start} | other


def grow(draw: random.Random, start: int, end: int, depth: int, parent: int | None, out: list[Any]) -> None:
    """A random tree in [start, end]: rows (start, end, parent), children disjoint, ends touching at times."""
    me = len(out)
    out.append((start, end, parent))
    at = start + draw.choice((0, 0, 1, 5))
    while depth and at + 2 < end and draw.random() < 0.7:
        until = min(end, at + draw.randint(1, max(1, (end - at) // 2)))
        if (at, until) == (start, end):
            break
        grow(draw, at, until, depth - 1, me, out)
        at = until + draw.choice((0, 0, 3))


def forest(draw: random.Random, tid: int) -> list[dict[str, Any]]:
    rows: list[Any] = []
    at = draw.randint(0, 50)
    for _ in range(draw.randint(1, 4)):
        end = at + draw.randint(1, 400)
        grow(draw, at, end, 4, None, rows)
        at = end + draw.choice((0, 1, 100))
    return [
        span(
            f"{tid}.{at}",
            start,
            end,
            tid=tid,
            rf_id=1 + at,
            args=None if parent is None else f"{tid}.{parent}",
        )
        for at, (start, end, parent) in enumerate(rows)
    ]


@pytest.mark.slow
@given(st.randoms(use_true_random=False))
def test_known_forests_nest_as_they_were_grown(draw: random.Random) -> None:
    rows = [row for tid in range(1, 4) for row in forest(draw, tid)]
    draw.shuffle(rows)
    frame = events(rows)
    truth = dict(zip(frame["name"].to_list(), frame["args"].to_list(), strict=True))
    assert parents(frame) == truth
    at = nesting.nest_events(frame)
    above = np.append(at.depth, -1)[at.parent]
    assert (at.depth == above + 1).all()
    assert not at.crossed.size and not at.detached.size and not at.clamped.size


@given(st.randoms(use_true_random=False))
def test_exclusive_times_of_a_thread_sum_to_the_time_its_events_cover(draw: random.Random) -> None:
    rows = [
        span(f"{tid}.{at}", start, start + draw.randint(0, 3000), tid=tid, cat="user_annotation")
        for tid in (1, 2)
        for at, start in enumerate(draw.randint(0, 9000) for _ in range(draw.randint(1, 20)))
    ]
    frame = events(rows).with_columns(nesting.compute_exclusive_time(events(rows)).alias("own"))
    assert frame["own"].min() >= 0  # type: ignore[operator]
    for tid in (1, 2):
        lane = frame.filter(pl.col("tid") == tid)
        covered, until = 0, -1
        for start, dur in lane.select("ts", "dur").rows():
            covered += max(0, start + dur - max(start, until))
            until = max(until, start + dur)
        # What sticks out of its parent by at most the tolerance is cut off, so it may be missing.
        assert covered - nesting.TOLERANCE_NS * lane.height <= lane["own"].sum() <= covered


PROGRAM = {
    "layer": ("linear", "view", "view", "relu"),
    "linear": ("t", "addmm"),
    "t": ("transpose",),
    "relu": ("clamp",),
}
PROGRAM["transpose"] = ("as_strided",)


def record(draw: random.Random, name: str, start: int, parent: int | None, scale: int, out: list[Any]) -> int:
    """Append the events of a call of PROGRAM in ns, (name, start, end, parent), and return when it ends."""
    me = len(out)
    out.append([name, start, start, parent])
    at = start + draw.randint(1, 300) * scale
    for callee in PROGRAM.get(name, ()):
        at = record(draw, callee, at, me, scale, out) + draw.randint(1, 300) * scale
    out[me][2] = at
    return at


@settings(max_examples=25)
@given(st.randoms(use_true_random=False))
def test_calls_of_less_than_a_microsecond_nest_as_they_were_called(draw: random.Random) -> None:
    """A clock of whole microseconds: External ids are the order, and calls that took longer tell what nests."""
    calls: list[Any] = []
    at = record(draw, "layer", 0, None, 5000, calls)
    for _ in range(8):
        at = record(draw, "layer", at + draw.randint(1, 900), None, 1, calls)
    us = 1000
    rows = [
        span(f"{name}", start // us * us, end // us * us, external_id=at + 1)
        for at, (name, start, end, _) in enumerate(calls)
    ]
    draw.shuffle(rows)
    frame = events(rows)
    ids = frame["external_id"].to_list()
    parent = nesting.nest_events(frame).parent
    found = {id: None if row < 0 else ids[row] for id, row in zip(ids, parent, strict=True)}
    assert found == {at + 1: None if up is None else up + 1 for at, (*_, up) in enumerate(calls)}


def test_operator_that_began_first_is_not_inside_the_longer_one_of_its_microsecond() -> None:
    rows = [
        span("first", 10_000, 10_000, external_id=1),
        span("second", 10_000, 12_000, external_id=2),
        span("inner", 10_000, 11_000, external_id=3),
        span("call", 10_000, 10_000, cat="cuda_runtime", correlation=9),
    ]
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        frame = events([rows[at] for at in order])
        assert parents(frame) == {"first": None, "second": None, "inner": "second", "call": "inner"}


def test_python_functions_of_one_microsecond_nest_by_their_ids() -> None:
    frame = events(
        [span(name, 0, end, cat="python_function") for name, end in (("a", 0), ("b", 9000), ("c", 0))]
    )
    ids = frame["name"].replace_strict({"a": 1, "b": 2, "c": 3}, return_dtype=pl.Int64)
    parent = nesting.nest_events(frame, python_ids=ids).parent
    names = frame["name"].to_list()
    assert {name: names[row] if row >= 0 else None for name, row in zip(names, parent, strict=True)} == {
        "a": None,
        "b": None,
        "c": "b",
    }


def test_python_function_without_a_return_closes_nothing() -> None:
    """Its end is where the recording ends: the operator, its frame and what they call stay open."""
    rows = [
        span("main()", 0, 90_000, cat="python_function"),
        span("op", 10_000, 50_000),
        span("inside()", 12_000, 40_000, cat="python_function"),
        span("next()", 15_000, 99_000, cat="python_function"),
        span("launch", 20_000, 21_000, cat="cuda_runtime"),
        span("late", 60_000, 61_000),
        span("after", 92_000, 93_000),
    ]
    frame = events(rows)
    at = nesting.nest_events(frame)
    assert parents(frame) == {
        "main()": None,
        "op": "main()",
        "inside()": "op",
        "next()": None,
        "launch": "inside()",
        "late": "main()",
        "after": "next()",
    }
    assert at.crossed.tolist() == [3] and at.exclusive.sum() == 99_000
    assert at.exclusive.tolist() == [49_000, 12_000, 27_000, 8_000, 1000, 1000, 1000]


def test_a_call_belongs_to_the_event_it_starts_in_and_an_annotation_keeps_operators_open() -> None:
    rows = [
        span("op", 0, 50_000),
        span("call", 10_000, 60_000, cat="cuda_runtime"),
        span("op 2", 100_000, 150_000),
        span("range", 110_000, 190_000, cat="user_annotation"),
        span("launch", 120_000, 121_000, cat="cuda_runtime"),
        span("op 3", 160_000, 161_000),
    ]
    expected = {"op": None, "call": "op", "op 2": None, "range": None, "launch": "op 2", "op 3": "range"}
    assert parents(events(rows)) == expected


@pytest.mark.slow
@settings(max_examples=25)
@given(st.randoms(use_true_random=False))
def test_python_functions_do_not_change_which_operator_is_around(draw: random.Random) -> None:
    rows = [row | {"dur": row["dur"] * 10_000, "ts": row["ts"] * 10_000} for row in forest(draw, 1)]
    until = max(row["ts"] + row["dur"] for row in rows)
    frames = [
        span(f"frame {at}", start, draw.randint(start, until + 50_000), cat="python_function", tid=1)
        for at, start in enumerate(draw.randint(0, until) for _ in range(12))
    ]
    plain, mixed = events(rows), events(rows + frames)
    at = nesting.nest_events(mixed)
    operator = (mixed["cat"] == "cpu_op").to_numpy()
    names = mixed["name"].to_list()
    around = nesting.find_nearest_ancestor(at.parent, operator, at.parent)
    found = {
        names[row]: names[around[row]] if around[row] >= 0 else None
        for row in np.flatnonzero(operator).tolist()
    }
    # A clock of 10 us: what ends a microsecond after its frame is not in question here.
    assert found == parents(plain)


def nest_slowly(rows: list[tuple[int, int, int, int]]) -> list[int]:
    """Parents of (track, start, end, kind) in the order of entry, by looking at all events before each.

    Times are so far apart that none is within the tolerance of another, and no event is of no length.
    """
    parent = []
    ends = [end for _, _, end, _ in rows]
    above: dict[int, list[int]] = {}  # track -> its events, outermost first
    for me, (track, start, end, kind) in enumerate(rows):
        stack = above.setdefault(track, [])
        stack[:] = [at for at in stack if ends[at] > start]
        while stack and kind == 4 and rows[stack[-1]][3] == 0 and ends[stack[-1]] < end:
            if ends[stack[-1]] - start >= (end - start) // 2:
                break
            ends[stack.pop()] = start
        crossed = [at for at in stack if ends[at] < end]
        crosses = {rows[at][3] for at in crossed}
        if kind == 1 and crosses - {2}:
            parent.append(-2)
            continue
        if kind == 4:
            ends[me] = min([end, *(ends[at] for at in stack)])
            crossed = []
        elif kind == 1 or (kind == 0 and 1 not in crosses):
            stack[:] = [at for at in stack if at not in crossed]
            crossed = []
        outside = [at for at in stack if at not in crossed]
        parent.append(outside[-1] if outside else -1)
        stack[:] = [*outside, me, *crossed]
    return parent


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 40), st.integers(1, 40), st.sampled_from([0, 1, 2, 4])),
        max_size=16,
    )
)
def test_native_stacks_equal_a_slow_search(drawn: list[tuple[int, int, int, int]]) -> None:
    rows = sorted((track, 9000 * start, 9000 * (start + dur), kind) for track, start, dur, kind in drawn)
    rows.sort(key=lambda row: (row[0], row[1], -row[2]))
    track, start, end, kind = (np.array([row[at] for row in rows], np.int64) for at in range(4))
    parent, depth, exclusive, *_ = stack_tracks(
        track, start, end, kind.astype(np.uint8), np.zeros(len(rows), np.int64), nesting.TOLERANCE_NS
    )
    slow = nest_slowly(rows)
    assert [-2 if deep < 0 else up for up, deep in zip(parent.tolist(), depth.tolist(), strict=True)] == slow
    assert all(depth[at] == (depth[up] + 1 if up >= 0 else 0) for at, up in enumerate(slow) if up != -2)
    for number in (0, 1):
        nested = [at for at, up in enumerate(slow) if rows[at][0] == number and up != -2]
        covered, until = 0, -1
        for at in nested:
            stop = end[at] if kind[at] != 4 or slow[at] < 0 else min(end[at], until)
            covered += max(0, int(stop) - max(int(start[at]), until))
            until = max(until, int(stop))
        assert sum(exclusive[nested]) == covered


def test_parent_that_starts_with_its_child_keeps_the_rest() -> None:
    frame = events([span("parent", 0, 10), span("child", 0, 8), span("inner", 0, 3)])
    assert parents(frame) == {"parent": None, "child": "parent", "inner": "child"}
    assert nesting.compute_exclusive_time(frame).to_list() == [2, 5, 3]


def test_sibling_that_starts_at_the_end_of_another_is_not_a_child() -> None:
    frame = events([span("first", 0, 10), span("second", 10, 20), span("point", 20, 20)])
    assert parents(frame) == {"first": None, "second": None, "point": None}


def test_child_that_sticks_out_by_a_microsecond_is_clamped() -> None:
    frame = events([span("parent", 0, 5000), span("child", 1000, 6000), span("next", 6000, 7000)])
    at = nesting.nest_events(frame)
    assert parents(frame) == {"parent": None, "child": "parent", "next": None}
    assert at.clamped.tolist() == [1]
    assert at.exclusive.tolist() == [1000, 4000, 1000]


@pytest.mark.parametrize("overlap", [1, 1000])
@pytest.mark.parametrize("category", ["cuda_runtime", "cpu_op", "user_annotation"])
def test_an_event_that_starts_as_the_one_around_it_ends_keeps_its_duration(
    overlap: int, category: str
) -> None:
    rows = [
        span("step", 0, 90_000, cat="user_annotation"),
        span("note", 1000, 10_000, cat="user_annotation"),
        span("wait", 10_000 - overlap, 80_000, cat=category),
    ]
    at = nesting.nest_events(events(rows))
    assert at.parent.tolist() == [-1, 0, 0] and not at.detached.size
    assert at.exclusive.tolist() == [11_000, 9_000 - overlap, 70_000 + overlap]


def test_a_long_call_is_not_cut_to_the_annotation_in_which_it_starts() -> None:
    rows = [span("note", 0, 10_000, cat="user_annotation"), span("wait", 5000, 80_000, cat="cuda_runtime")]
    at = nesting.nest_events(events(rows))
    assert at.parent.tolist() == [-1, -1] and at.exclusive.tolist() == [5000, 75_000]


def test_operator_that_outlasts_its_operator_ended_on_another_thread() -> None:
    rows = [span("parent", 0, 5000), span("later", 1000, 90_000), span("child", 2000, 3000)]
    at = nesting.nest_events(events(rows))
    assert at.detached.tolist() == [1] and at.depth.tolist() == [0, -1, 1]
    assert at.parent.tolist() == [-1, -1, 0]
    assert at.exclusive.tolist() == [4000, 89_000, 1000]


def test_gloo_ranges_never_nest_and_nccl_ranges_do_unless_they_outlast() -> None:
    def nested(name: str, end: int) -> list[int]:
        rows = [span("op", 0, 9000), span(name, 100, end, cat="user_annotation"), span("in", 200, 300)]
        return nesting.nest_events(events(rows)).depth.tolist()

    assert nested("gloo:send", 8000) == [0, -1, 1]
    assert nested("nccl:all_reduce", 8000) == [0, 1, 2]
    assert nested("nccl:all_reduce", 50_000) == [0, -1, 1]


def test_annotation_that_outlasts_a_python_frame_closes_it() -> None:
    rows = [
        span("step()", 0, 5000, cat="python_function"),
        span("ProfilerStep#3", 1000, 90_000, cat="user_annotation"),
        span("op", 7000, 8000),
    ]
    at = nesting.nest_events(events(rows))
    assert at.crossed.tolist() == [1] and not at.detached.size
    assert at.parent.tolist() == [-1, -1, 1]
    assert at.exclusive.tolist() == [1000, 88_000, 1000]


def test_events_of_the_same_time_are_in_the_order_of_entry() -> None:
    rows = [
        span("call", 0, 10, cat="cuda_runtime"),
        span("second", 0, 10, rf_id=8),
        span("frame", 0, 10, cat="python_function"),
        span("first", 0, 10, rf_id=7),
    ]
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        frame = events([rows[at] for at in order])
        assert parents(frame) == {"frame": None, "first": "frame", "second": "first", "call": "second"}


def test_exclusive_time_of_only_operators_includes_their_calls() -> None:
    frame = events(
        [
            span("op", 0, 100),
            span("launch", 10, 30, cat="cuda_runtime"),
            span("inner", 40, 60),
            span("kernel", 50, 70, cat="kernel", pid=0, tid=7),
            {"name": "open", "ts": 80, "dur": None},
        ]
    )
    assert nesting.compute_exclusive_time(frame).to_list() == [60, 20, 20, None, None]
    assert nesting.compute_exclusive_time(frame, operators_only=True).to_list() == [80, None, 20, None, None]
    assert nesting.nest_events(frame).unclosed.tolist() == [4]


def test_nearest_is_the_first_selected_ancestor() -> None:
    parent = np.array([-1, 0, 1, 2, 3, -1])
    wanted = np.array([True, False, True, False, False, False])
    rows = np.array([4, 2, 1, 5, -1])
    assert nesting.find_nearest_ancestor(parent, wanted, rows).tolist() == [2, 2, 0, -1, -1]


def test_rows_of_ids_of_complete_and_partial_tables() -> None:
    ids = pl.Series([2, None, 0, 9, 3], dtype=pl.UInt32)
    assert arrays.rows_of_ids(pl.DataFrame({"id": [0, 1, 2, 3]}), ids).tolist() == [2, -1, 0, -1, 3]
    assert arrays.rows_of_ids(pl.DataFrame({"id": [3, 0]}), ids).tolist() == [-1, -1, 1, -1, 0]
    assert arrays.rows_of_ids(pl.DataFrame({"id": [None, 3, None, 0]}), ids).tolist() == [-1, -1, 3, -1, 1]
    assert arrays.rows_of_ids(pl.DataFrame({"id": [0, 0, 2]}), ids).tolist() == [2, -1, 0, -1, -1]
    assert arrays.rows_of_ids(pl.DataFrame({"id": []}, schema={"id": pl.UInt32}), ids).tolist() == [-1] * 5
    odd = pl.Series([-1, -2, -(2**31), 2**31, 2**62, 3])
    for table_ids in ([0, 1, 2, 3], [3, 0], [0, 3, 10**6]):
        expected = [-1] * 5 + [table_ids.index(3)]
        for dtype in (np.int64, np.int32):
            known = odd if dtype is np.int64 else odd.filter(odd < 2**31)
            rows = arrays.rows_of_ids(pl.DataFrame({"id": table_ids}), known, dtype)
            assert rows.tolist() == expected[-len(known) :]
    rows = arrays.rows_of_ids(pl.DataFrame({"id": [3, 0]}), ids)
    assert arrays.take_rows(pl.Series(["three", "zero"]), rows).to_list() == [
        None,
        None,
        "zero",
        None,
        "three",
    ]


@given(st.lists(st.tuples(st.integers(-1, 11), st.booleans()), max_size=12))
def test_the_nearest_selected_row_is_the_first_enclosing_one(rows: list[tuple[int, bool]]) -> None:
    parent = [at if at < len(rows) else -1 for at, _ in rows]
    wanted = [chosen for _, chosen in rows]

    def nearest(at: int) -> int:
        passed = set()
        while at >= 0 and not wanted[at] and at not in passed:  # what leads around in a circle ends nowhere
            passed.add(at)
            at = parent[at]
        return at if at >= 0 and wanted[at] else -1

    found = nesting.find_nearest_ancestor(np.array(parent, np.int64), np.array(wanted, bool))
    assert found.tolist() == [nearest(at) for at in range(len(rows))]
    asked = np.array([-1, *range(len(rows) - 1, -1, -1)])
    assert nesting.find_nearest_ancestor(
        np.array(parent, np.int32), np.array(wanted, bool), asked
    ).tolist() == [nearest(int(at)) for at in asked]


def test_a_row_around_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no such row"):
        nesting.find_nearest_ancestor(np.array([-1, 2]), np.array([False, False]))
    assert nesting.find_nearest_ancestor(np.array([-1, -1, 1]), np.array([True, True, False])).tolist() == [
        0,
        1,
        1,
    ]


def test_times_before_zero_are_charged_too() -> None:
    at = nesting.nest_events(events([span("out", -100, -40), span("in", -80, -70)]))
    assert at.exclusive.tolist() == [50, 10]


@pytest.mark.slow
def test_functions_that_all_cross_each_other_do_not_take_quadratic_time() -> None:
    """Half a second; minutes if each was compared with all before it. Only a hostile file has such functions."""
    count = 200_000
    start = np.arange(count, dtype=np.int64) * 10_000
    kinds = np.full(count, 2, np.uint8)  # Python functions
    tracks = np.zeros(count, np.int64)
    parent, *_ = stack_tracks(tracks, start, start + count * 10_000, kinds, np.arange(count), 1000)
    assert len(parent) == count


def lines_one_by_one(rows: list[tuple[int, int, int, int]], limit: int) -> tuple[list[int], int]:
    ends: dict[int, list[int]] = {}
    lines, crowded = [], 0
    for track, start, end, first in rows:
        taken = ends.setdefault(track, [])
        line = next((i for i in range(first, limit) if i >= len(taken) or taken[i] <= start), None)
        if line is None:
            line = limit - 1
            crowded += 1
            taken[line] = max(taken[line], end)
        else:
            taken.extend([0] * (line + 1 - len(taken)))
            taken[line] = end
        lines.append(line)
    return lines, crowded


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(1, 12), st.integers(0, 3))))
def test_events_of_a_timeline_take_the_first_free_line(events: list[tuple[int, int, int, int]]) -> None:
    rows = sorted(
        ((track, start, start + length, first) for track, start, length, first in events),
        key=lambda row: (row[1], -row[2]),
    )
    columns = np.array(rows, np.int64).reshape(-1, 4).T
    lines, crowded = draw_lines(*map(np.ascontiguousarray, columns), 4)
    assert (lines.tolist(), crowded) == lines_one_by_one(rows, 4)


def sum_calls_one_by_one(rows: list[tuple[int, int, int, int]], start: int, end: int) -> dict[Any, list[int]]:
    """Return {path of names from the outermost caller: [count, time inside]}."""
    sums: dict[Any, list[int]] = {}
    for track in {row[0] for row in rows}:
        open_calls: list[tuple[tuple[int, ...], int]] = [((), end)]
        for _, begin, stop, name in (row for row in rows if row[0] == track):
            while len(open_calls) > 1 and open_calls[-1][1] <= begin:
                open_calls.pop()
            caller, limit = open_calls[-1]
            path, stop = (*caller, name), min(stop, limit)
            entry = sums.setdefault(path, [0, 0])
            entry[0] += 1
            entry[1] += stop - max(begin, start)
            open_calls.append((path, stop))
    return sums


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 30), st.integers(0, 12), st.integers(0, 2))),
    st.integers(0, 20),
    st.integers(1, 20),
)
def test_the_calls_of_a_time(events: list[tuple[int, int, int, int]], start: int, length: int) -> None:
    end = start + length
    rows = sorted(
        (
            (track, begin, begin + size, name)
            for track, begin, size, name in events
            if begin < end and begin + size > start
        ),
        key=lambda row: (row[0], row[1], -row[2]),
    )
    columns = map(np.ascontiguousarray, np.array(rows, np.int64).reshape(-1, 4).T)
    parents, firsts, counts, times = sum_calls(*columns, start, end)
    paths: list[tuple[int, ...]] = []
    for parent, first in zip(parents, firsts, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), rows[first][3]))
    assert dict(zip(paths, np.stack([counts, times], 1).tolist(), strict=True)) == sum_calls_one_by_one(
        rows, start, end
    )
