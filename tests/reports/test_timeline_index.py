"""What a server answers about a timeline: slices, sums, calls and search, next to plain Python over all events."""

from __future__ import annotations

import gzip
import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etloom.core.trace import Trace
from etloom.reports.timeline_index import Part, TimelineIndex
from etloom.reports.timeline_selection import pack_timeline
from etloom.reports.timeline_tracks import MAX_ROWS
from reports.test_report import unpack
from support.examples import examples
from support.random_traces import traces
from support.reports import host_row, kernel_row, link_events

EVENTS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 900), st.integers(0, 40), st.integers(0, 3)),
    min_size=1,
    max_size=80,
)


def build_trace(rows: list[tuple[int, int, int, int]]) -> Trace:
    """Return kernels of two streams, and operators of a thread; the last number is that of the name."""
    return link_events(
        [
            host_row("cpu_op", f"name {name}", start, length, 0)
            if track == 2
            else kernel_row(f"name {name}", start, length, stream=track)
            for track, start, length, name in rows
        ]
    )


def unpack_slice(data: bytes, zero: int) -> dict[str, Any]:
    content = unpack(gzip.compress(data))
    content["start"] = [start - content["zero"] for start in content["start"]]
    assert zero >= content["zero"] - 1_000_000
    return content


def list_rows(index: TimelineIndex) -> list[tuple[int, int, int]]:
    return [(track, 0, 64) for track in range(len(index._headers))]


@pytest.mark.slow
@settings(max_examples=examples(100))
@given(EVENTS, st.integers(0, 900), st.integers(1, 600), st.integers(1, 60), st.sampled_from(["", "name 1"]))
def test_a_slice_hides_only_events_next_to_one_that_it_has(
    rows: list[tuple[int, int, int, int]], start: int, length: int, cells: int, query: str
) -> None:
    trace = build_trace(rows)
    index = TimelineIndex(trace, 0, 100)
    part = Part(start - 100, start - 100 + length, list_rows(index))
    content = unpack_slice(index.pack(part, cells, query), 100)
    whole = unpack(pack_timeline(trace, rank=0, origin=0, max_events=10**6).data)
    size = max(length // cells, 1)
    shown = set(content["id"])
    names = {whole["id"][i]: whole["strings"][whole["name"][i] - 1] for i in range(whole["events"])}
    for track, drawn in zip(whole["tracks"], content["tracks"], strict=True):
        assert [drawn[key] for key in ("name", "gpu", "stack")] == [
            track[key] for key in ("name", "gpu", "stack")
        ]
        for row, (first, last) in enumerate(zip(track["rows"], track["rows"][1:], strict=False)):
            inside = [
                i
                for i in range(first, last)
                if whole["start"][i] < start + length and whole["start"][i] + (whole["dur"][i] or 0) > start
            ]
            low, high = drawn["rows"][row], drawn["rows"][row + 1]
            chosen = [i for i in inside if whole["id"][i] in shown]
            assert [whole["id"][i] for i in chosen] == content["id"][low:high]
            assert len(chosen) + sum(content["hidden"][low:high]) == len(inside)
            # What is drawn covers each cell in which there is an event.
            cover = {c for i in chosen for c in cells_of(whole, i, size)}
            for i in inside:
                cell = set(cells_of(whole, i, size))
                assert cell & cover, "an event stands for each hidden one"
                if query and names[whole["id"][i]] == query:
                    assert any(
                        names[whole["id"][j]] == query and cell & set(cells_of(whole, j, size))
                        for j in chosen
                    )
                if (whole["dur"][i] or 0) > 2 * size:
                    assert i in chosen, "an event of more than a cell is never hidden"


def cells_of(whole: dict[str, Any], i: int, size: int) -> range:
    """Return the cells that an event touches, and those next to them, as its mark is a pixel wide."""
    start = whole["start"][i]
    return range(start // size - 1, (start + (whole["dur"][i] or 0)) // size + 2)


def test_a_long_event_of_a_shared_row_does_not_hide_those_that_start_in_it() -> None:
    crowd = [kernel_row("long", ts, 10_000_000) for ts in range(MAX_ROWS)]
    index = TimelineIndex(
        link_events([*crowd, *(kernel_row("k", 1000 * i, 500) for i in range(1, 300))]), 0, 0
    )
    content = unpack(gzip.compress(index.pack(Part(0, 300_000, list_rows(index)), 100)))
    first, last = content["tracks"][0]["rows"][-2:]
    assert last - first < 120
    assert {start // 3000 for start in content["start"][first:last]} == set(range(100))


@settings(max_examples=examples(100))
@given(EVENTS, st.integers(0, 900), st.integers(1, 600))
def test_sums_are_those_of_all_events(rows: list[tuple[int, int, int, int]], start: int, length: int) -> None:
    index = TimelineIndex(build_trace(rows), 0, 0)
    part = Part(start, start + length, list_rows(index))
    expected: dict[str, list[int]] = {}
    for _, at, dur, name in rows:
        if at < start + length and at + dur > start:
            sums = expected.setdefault(f"name {name}", [0, 0, 0])
            sums[0] += 1
            sums[1] += min(at + dur, start + length) - max(at, start)
            sums[2] = max(sums[2], dur)
    assert {name: sums for name, _, *sums in index.sum_names(part, by_track=False)} == expected
    by_track: dict[str, list[int]] = {}
    for name, track, count, time, longest in index.sum_names(part, by_track=True):
        assert 0 <= track < len(index._headers)
        sums = by_track.setdefault(name, [0, 0, 0])
        sums[0] += count
        sums[1] += time
        sums[2] = max(sums[2], longest)
    assert by_track == expected
    calls = index.sum_calls(part)
    top = [call for call in calls if call[0] < 0]
    assert sum(call[3] for call in calls) == sum(
        1 for track, at, dur, _ in rows if track == 2 and at < start + length and at + dur > start
    )
    assert len({call[1] for call in top}) == len(top)


@pytest.mark.slow
@settings(max_examples=examples(100))
@given(
    EVENTS,
    st.text(st.sampled_from("name 0123NAME"), max_size=6),
    st.none() | st.tuples(st.integers(0, 900), st.integers(901, 1500)),
)
def test_a_search_finds_every_match_once(
    rows: list[tuple[int, int, int, int]], query: str, span: tuple[int, int] | None
) -> None:
    trace = build_trace(rows)
    index = TimelineIndex(trace, 0, 0)
    text = query.strip().lower()
    matches = [event for event in trace.events.iter_rows(named=True) if text and text in str(event["name"])]
    if span is not None:
        matches = [
            event for event in matches if event["ts"] < span[1] and event["ts"] + event["dur"] > span[0]
        ]
    answer = index.search(query, span)
    assert answer == {"events": len(matches), "time": sum(event["dur"] for event in matches)}
    visited = [index.find_match(query, number, span) for number in range(len(matches))]
    assert sorted(visited) == [event["id"] for event in matches]
    starts = dict(trace.events.select("id", "ts").iter_rows())
    assert [starts[event] for event in visited] == sorted(starts[event] for event in visited)
    assert index.find_match(query, len(matches), span) is None
    assert index.find_match(query, -1, span) is None


@settings(max_examples=examples(40))
@given(EVENTS)
def test_neighbors_are_those_of_the_row(rows: list[tuple[int, int, int, int]]) -> None:
    trace = build_trace(rows)
    index = TimelineIndex(trace, 0, 0)
    whole = unpack(pack_timeline(trace, rank=0, origin=0, max_events=10**6).data)
    for track in whole["tracks"]:
        for first, last in zip(track["rows"], track["rows"][1:], strict=False):
            ids = [None, *whole["id"][first:last], None]
            for before, event, after in zip(ids, ids[1:], ids[2:], strict=False):
                assert (index.find_neighbor(event, -1), index.find_neighbor(event, 1)) == (before, after)
    assert index.find_neighbor(10**6, 1) is None


@pytest.mark.slow
@settings(max_examples=examples(40))
@given(traces)
def test_any_trace_is_answered(trace: Trace) -> None:
    if trace.events["ts"].drop_nulls().is_empty():
        return
    index = TimelineIndex(trace, 0, 0)
    content = unpack(gzip.compress(index.pack_overview(100, 2)))
    assert content["total"] == trace.events["ts"].drop_nulls().len()
    part = Part(-(10**18), 10**18, list_rows(index))
    counts = Counter(
        name for name, _, count, *_ in index.sum_names(part, by_track=False) for _ in range(count)
    )
    timed = trace.events.filter(pl.col("ts") + pl.col("dur").fill_null(0) > -(10**18))
    assert counts.total() == timed["ts"].drop_nulls().len()
    for event in trace.events["id"].drop_nulls().head(3):
        ids = unpack(gzip.compress(index.pack(part._replace(rows=[]), 10, ids=[event])))["id"]
        assert event in ids or trace.events.filter(id=event)["ts"].item() is None


def test_sums_by_track_need_no_room_for_names_of_other_tracks() -> None:
    events = [kernel_row(f"name {row}", 10 * row, 5, stream=row % 300) for row in range(3000)]
    index = TimelineIndex(link_events(events), 0, 0)
    part = Part(0, 10**9, list_rows(index))
    assert len(part.rows) == 300
    tracemalloc.start()
    try:
        found = index.sum_names(part, by_track=True)
        assert tracemalloc.get_traced_memory()[1] < 3_000_000  # a table of all tracks and names has 14 MB
    finally:
        tracemalloc.stop()
    assert len({track for _, track, *_ in found}) == 300
    assert {(name, *sums) for name, _, *sums in found} == {(f"name {row}", 1, 5, 5) for row in range(3000)}


def test_the_index_does_not_depend_on_the_order_of_questions() -> None:
    rows = [(2, start, 10, start % 3) for start in range(0, 900, 12)]
    index = TimelineIndex(build_trace(rows), 0, 0)
    part = Part(0, 900, list_rows(index))
    first = index.pack(part, 20, "name 1", [3])
    for number in range(30):
        index.search(f"{number}")
        index.pack(part, 20, ids=[number])
    assert index.pack(part, 20, "name 1", [3]) == first
    assert np.frombuffer(first, np.uint8).size < 20_000
