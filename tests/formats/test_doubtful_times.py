"""Times that cannot be are left out and counted, and change no figure of the other events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

import etloom
from etloom.core.schema import Stat
from etloom.core.trace import Trace
from etloom.formats.kineto.large_file import convert_large_file
from etloom.formats.tables.doubtful_times import judge_times
from tests.support.nccl_profiles import HASH, inspector_line, write_lines

BASE = 1_767_189_312_000_000_000
OFFSETS = (0.0, 500.5, 7_000_000.0, 15_400_000_000_000.5)
"""Microseconds between the base and the recording."""


def list_launches(count: int, offset: float, streams: int = 1) -> list[dict[str, Any]]:
    """Return operators, each with a launch and a kernel of 20 us."""
    events = []
    for i in range(count):
        at = offset + 30 * i
        host = {"ph": "X", "pid": 4, "tid": 4}
        work = {"correlation": 100 + i, "device": 0, "stream": 7 + i % streams}
        kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7 + i % streams}
        events += [
            {**host, "cat": "cpu_op", "name": "aten::mm", "ts": at + 1, "dur": 8.0},
            {**host, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at + 2, "dur": 4.0,
             "args": {"correlation": 100 + i}},
            {**kernel, "ts": at + 40, "dur": 20.0, "args": work},
        ]  # fmt: skip
    return events


def write_trace(path: Path, events: list[dict[str, Any]], base: int | None = BASE, **header: Any) -> Path:
    stated = {} if base is None else {"baseTimeNanoseconds": base}
    path.write_text(json.dumps({"schemaVersion": 1, **stated, **header, "traceEvents": events}))
    return path


def read_rows(path: Path) -> tuple[list[Any], dict[str, int]]:
    """Return start, duration and name of the events, and the counts of what was lost."""
    trace = etloom.read(path)
    assert isinstance(trace, Trace)
    lost = trace.stats.filter(pl.col("severity") != "info").group_by("name").agg(pl.col("count").sum()).rows()
    return trace.events.select("ts", "dur", pl.col("name").cast(pl.String)).rows(), dict(lost)


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("base", [BASE, None])
@pytest.mark.parametrize("share", [1, 2, 40])
def test_zeros_are_unknown_and_change_nothing_else(
    tmp_path: Path, offset: float, base: int | None, share: int
) -> None:
    events = list_launches(40, offset)
    zeros = [{**event, "ts": 0.0, "dur": 0.0} for event in events[: len(events) // share]]
    expected, _ = read_rows(write_trace(tmp_path / "a.json", events, base))
    rows, lost = read_rows(write_trace(tmp_path / "b.json", [*events, *zeros], base))
    assert rows == expected
    assert lost == {"read.unknown_time": len(zeros)}


def test_zeros_of_absolute_times_do_not_hide_the_clock(tmp_path: Path) -> None:
    events = list_launches(5, 1_615_207_265_000_000.0)
    trace = etloom.read(write_trace(tmp_path / "a.json", [*events, {**events[2], "ts": 0, "dur": 7}], None))
    assert isinstance(trace, Trace)
    assert (trace.meta["clock"], trace.events.height) == ("epoch", 15)


def test_an_event_at_the_zero_that_reaches_into_the_recording_is_kept(tmp_path: Path) -> None:
    program = {"ph": "X", "cat": "user_annotation", "name": "all", "pid": 4, "tid": 4, "ts": 0, "dur": 9e6}
    rows, lost = read_rows(write_trace(tmp_path / "a.json", [program, *list_launches(5, 7e6)], None))
    assert (len(rows), lost) == (16, {})


@pytest.mark.slow
@given(count=st.integers(8, 40), place=st.integers(0, 3), raw=st.sampled_from([1.6e6, 7e9]), data=st.data())
def test_an_overlong_kernel_changes_no_other_event(
    tmp_path_factory: pytest.TempPathFactory, count: int, place: int, raw: float, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("run")
    streams = data.draw(st.integers(1, 2))
    events = list_launches(count, 500.5, streams)
    row = 3 * place + 2
    expected, _ = read_rows(write_trace(folder / "a.json", events))
    events[row] = {**events[row], "name": "long", "dur": raw}
    rows, lost = read_rows(write_trace(folder / "b.json", events))
    follows = (count - 1 - place) // streams
    assert lost == ({"read.impossible_duration": 1} if follows >= 3 or raw > 4e9 else {})
    assert [row for row in rows if row[2] != "long"] == [
        row for row in expected if row[0] != next(ts for ts, _, name in rows if name == "long")
    ]


def test_branches_of_one_graph_launch_may_overlap(tmp_path: Path) -> None:
    events = [event for event in list_launches(20, 500.5) if event["cat"] == "kernel"]
    for event in events:
        event["args"] = {**event["args"], "correlation": 100}
    events[3]["dur"] = 400.0
    assert read_rows(write_trace(tmp_path / "a.json", events))[1] == {}


@pytest.mark.parametrize("away_us", [3.7e9, -3.7e9, 1e14])
def test_times_far_from_the_recording_are_not_of_it(tmp_path: Path, away_us: float) -> None:
    events = list_launches(20, 1e13)
    expected, _ = read_rows(write_trace(tmp_path / "a.json", events))
    stray = {**events[4], "ts": events[4]["ts"] + away_us}
    sample = {"ph": "C", "name": "power", "pid": 1, "ts": events[4]["ts"] + away_us, "args": {"W": 3}}
    rows, lost = read_rows(write_trace(tmp_path / "b.json", [*events, stray, sample]))
    assert (rows, lost) == (expected, {"read.outside_recording": 2})


def test_two_windows_of_one_recording_are_kept(tmp_path: Path) -> None:
    events = [*list_launches(20, 1e13), *list_launches(12, 1e13 + 3 * 3.6e9)]
    assert read_rows(write_trace(tmp_path / "a.json", events))[1] == {}


@pytest.mark.parametrize(
    ("name", "dur", "lost"), [("Memcpy HtoD", 15.8, 1), ("Memcpy HtoD", 2000.0, 0), ("Memcpy DtoD", 700.0, 0)]
)
def test_a_copy_is_not_faster_than_its_link(tmp_path: Path, name: str, dur: float, lost: int) -> None:
    copy = {"ph": "X", "cat": "gpu_memcpy", "name": name, "pid": 0, "tid": 7, "ts": 600, "dur": dur}
    copy["args"] = {"device": 0, "stream": 7, "bytes": 1 << 30, "correlation": 5}
    rows, counts = read_rows(write_trace(tmp_path / "a.json", [copy]))
    assert counts.get("read.impossible_duration", 0) == lost
    assert (rows[0][1] is None) == bool(lost)


def test_a_large_file_is_judged_like_a_small_one(tmp_path: Path) -> None:
    events = list_launches(300, 15_400_000_000_000.5)
    events[29] = {**events[29], "dur": 1.6e6}
    events[100:103] = [{**event, "ts": 0.0, "dur": 0.0} for event in events[100:103]]
    path = write_trace(tmp_path / "a.json", events)
    convert_large_file(path, tmp_path, part_rows=200)
    trace = etloom.read(path)
    assert isinstance(trace, Trace)
    columns = ["ts", "dur"]
    large = pl.read_parquet(tmp_path / "events.parquet", glob=False)
    assert large.select(columns).rows() == trace.events.select(columns).rows()
    assert large["dur"].null_count() == 1
    kernels = pl.read_parquet(tmp_path / "kernels.parquet", glob=False)
    assert kernels["event"].is_in(large["id"].implode()).all()


def test_judging_twice_changes_nothing(tmp_path: Path) -> None:
    events = list_launches(20, 1e13)
    trace = etloom.read(write_trace(tmp_path / "a.json", [*events, {**events[0], "ts": 0, "dur": 0}]))
    assert isinstance(trace, Trace)
    assert judge_times(trace) is trace


def test_the_profiler_states_what_it_lost(tmp_path: Path) -> None:
    events = list_launches(3, 1)
    warning = {"WARNING": ["Dropped 4 activity records"], "droppedEvents": 7, "ERROR": []}
    trace = etloom.read(write_trace(tmp_path / "a.json", events, **warning))
    row = trace.stats.row(by_predicate=pl.col("name") == "read.profiler_problem", named=True)
    assert Stat(row["name"], row["severity"], row["count"], row["example"]) == Stat(
        "read.profiler_problem", "data_loss", 2, "Dropped 4 activity records; droppedEvents: 7"
    )


def test_the_time_of_a_call_is_not_that_of_its_transfer(tmp_path: Path) -> None:
    args = {"CommHash": HASH, "Rank": 0, "Peer": 1, "Count": 1 << 28, "Datatype": "ncclFloat32"}
    head = {"pid": 4, "tid": 1, "id": 0}
    times = (("P2P_API", 0.0, 1001.0), ("P2P", 2000.0, 2100.0), ("GPU", 9000.0, 0.0))
    lines = []
    for cat, start, _ in times:
        lines.append({"name": cat, "cat": cat, "ph": "b", **head, "ts": start, "args": args})
    for cat, _, end in reversed(times):
        lines.append({"name": cat, "cat": cat, "ph": "e", **head, "ts": end})
    path = tmp_path / "nccl.json"
    path.write_text("[\n" + ",\n".join(json.dumps(line) for line in [*lines, {}]) + "\n]")
    rows, lost = read_rows(path)
    assert [row[1] for row in rows] == [None, None]
    assert lost == {"read.unknown_time": 1, "read.negative_dur": 1}
    table = etloom.analyze(etloom.open(path, use_cache=False), "nccl-bandwidth")
    assert table.select("total_ns", "algo_gb_per_s").rows() == [(None, None)]


def test_inspector_files_state_what_they_lost(tmp_path: Path) -> None:
    stats = {**inspector_line(2, 1), "dump_stats": {"dropped": 5, "dumped": 9}}
    del stats["coll_perf"]
    lines = [stats, *(inspector_line(2, number) for number in (1400, 1407, 1408, 1415))]
    trace = etloom.read(write_lines(tmp_path, lines))
    assert isinstance(trace, Trace)
    lost = trace.stats.filter(pl.col("severity") == "data_loss").select("name", "count").rows()
    assert sorted(lost) == [("read.nccl_lost", 5), ("read.nccl_lost", 12)]
    assert trace.events.height == 4


def test_healthy_dump_stats_and_complete_numbers_are_no_loss(tmp_path: Path) -> None:
    stats = {"header": inspector_line(2, 1)["header"], "dump_stats": {"dropped": 0, "dumped": 9}}
    lines = [stats, *(inspector_line(2, number) for number in (7, 8, 9))]
    assert read_rows(write_lines(tmp_path, lines))[1] == {}


@pytest.mark.parametrize("base", [BASE, None])
def test_times_of_the_host_that_are_all_zero_are_unknown(tmp_path: Path, base: int | None) -> None:
    events = [{**event, "ts": 0} if event["pid"] == 4 else event for event in list_launches(20, 0)]
    rows, lost = read_rows(write_trace(tmp_path / "a.json", events, base))
    assert [name for _, _, name in rows] == ["gemm"] * 20
    assert lost == {"read.unknown_time": 40}
    rows, lost = read_rows(write_trace(tmp_path / "b.json", [{**event, "ts": 0} for event in events], base))
    assert (rows, lost) == ([], {"read.unknown_time": 60})


def test_a_file_with_few_of_the_numbered_operators_is_a_sample(tmp_path: Path) -> None:
    def write(name: str, stride: int) -> Path:
        events = list_launches(600, 0)
        for number, event in enumerate(event for event in events if event["cat"] == "cpu_op"):
            event["args"] = {"External id": 7 + stride * number}
        return write_trace(tmp_path / name, events)

    sample, complete = write("sample.json", 30), write("complete.json", 10)
    missing = 30 * 587 + 1 - 588  # without the smallest and largest hundredth
    assert read_rows(sample)[1] == {"read.missing_operators": missing}
    assert read_rows(complete)[1] == {}
    convert_large_file(sample, tmp_path)
    stats = pl.read_parquet(tmp_path / "stats.parquet")
    assert stats.filter(pl.col("name") == "read.missing_operators")["count"].to_list() == [missing]


@pytest.mark.slow
def test_an_annotation_that_was_open_when_the_profiler_stopped_ends_there(tmp_path: Path) -> None:
    host = {"ph": "X", "pid": 4, "tid": 4}
    step = {**host, "cat": "user_annotation", "name": "ProfilerStep#1", "ts": 0, "dur": 9e6}
    span = {**host, "cat": "Trace", "name": "PyTorch Profiler (0)", "ts": 0, "dur": 700.0}
    events = [step, span, *list_launches(20, 10)]
    trace = etloom.read(write_trace(tmp_path / "a.json", events))
    assert isinstance(trace, Trace)
    kernels_end = 10 + 30 * 19 + 60
    assert trace.events.filter(pl.col("cat") == "user_annotation")["dur"].to_list() == [700_000]
    assert kernels_end < 700 and "read.open_annotation" in trace.stats["name"].to_list()
    convert_large_file(tmp_path / "a.json", tmp_path, part_rows=10)
    large = pl.read_parquet(tmp_path / "events.parquet")
    assert large.filter(pl.col("cat").cast(pl.String) == "user_annotation")["dur"].to_list() == [700_000]
    assert "read.open_annotation" in pl.read_parquet(tmp_path / "stats.parquet")["name"].to_list()
    span["name"] = "warm-up"  # of another program
    without = etloom.read(write_trace(tmp_path / "b.json", [step, span, *events[2:]]))
    assert isinstance(without, Trace)
    assert without.events.filter(pl.col("cat") == "user_annotation")["dur"].to_list() == [9_000_000_000]


def test_threads_that_all_begin_at_the_zero_have_times(tmp_path: Path) -> None:
    events = [{**event, "ts": 0, "tid": number} for number, event in enumerate(list_launches(20, 0)[::3])]
    rows, lost = read_rows(write_trace(tmp_path / "a.json", events))
    assert (len(rows), lost) == (20, {})


def test_a_stray_number_makes_no_sample(tmp_path: Path) -> None:
    events = list_launches(600, 0)
    operators = [event for event in events if event["cat"] == "cpu_op"]
    for number, event in enumerate(operators):
        event["args"] = {"External id": number}
    operators[300]["args"] = {"External id": 10**9}
    assert read_rows(write_trace(tmp_path / "a.json", events))[1] == {}
