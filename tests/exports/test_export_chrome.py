"""Chrome trace JSON: every event is in it, reads back the same, and no slice is one that Perfetto would drop."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import etloom
from etloom.core.errors import EtloomError, ReadError
from etloom.core.trace import Job, Trace
from etloom.exports import chrome
from etloom.formats.kineto import tracks
from support import random_traces, small_traces
from support.allocator_snapshots import T0, write_snapshot
from support.examples import examples
from support.real_runs import open_run

SIDE_TABLES = ("arguments", "kernels", "syncs", "frames", "memory", "counters")
MOVED = {"id", "event", "pid", "tid", "position", "parent", "depth", "step"}
"""Columns that a file does not hold, or that sub-lanes change."""


def written(trace: Trace | Job) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        chrome.write(trace, Path(folder, "it.json"))
        document: dict[str, Any] = json.loads(Path(folder, "it.json").read_bytes())
        return document


def read_back(trace: Trace | Job) -> Trace:
    with tempfile.TemporaryDirectory() as folder:
        chrome.write(trace, Path(folder, "it.json.gz"))
        back = etloom.read(Path(folder, "it.json.gz"))
        assert isinstance(back, Trace)
        return back


def content(trace: Trace, name: str) -> pl.DataFrame:
    """A table without the columns that move, in an order of its own."""
    table = trace.table(name).cast({pl.Categorical: pl.String})
    kept = [column for column in table.columns if column not in MOVED]
    return table.select(kept).sort(kept, nulls_last=True)


def assert_no_slice_is_dropped(events: list[dict[str, Any]]) -> None:
    """On each thread, of two slices one holds the other or they are apart."""
    lanes = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and "dur" in event:
            start, end = round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)
            lanes[event["pid"], event["tid"]].append((start, -end))
    for lane in lanes.values():
        stack: list[int] = []
        for start, minus_end in sorted(lane):
            while stack and stack[-1] <= start:
                stack.pop()
            assert not stack or stack[-1] >= -minus_end
            stack.append(-minus_end)


REAL = [
    "cpu/coll_4/kineto_trace_1.json.gz", "cpu/pp_4/kineto_trace_2.json.gz", "critical_path/event_sync.json.gz",
    "critical_path/alexnet.json.gz", "nccl_ddp/kineto_trace_0.json.gz", "hta_multirank/sampled_rank-0.json.gz",
    "hta_misc/mi250_minitoy_train_ROCm6_2_kineto.json.gz", "tracelens/b200_eager.json.gz",
    "tracelens/mi300_vllm_graph_execution.json.gz", "tracelens/mi210_gpu_only.json.gz",
]  # fmt: skip


def test_arguments_of_arrows_read_back_the_same(tmp_path: Path) -> None:
    events = [
        {"ph": ph, "cat": "c", "name": "n", "ts": ts, "pid": 10, "tid": 11, "id": 1, **rest}
        for ph, ts, rest in (
            ("s", 1, {"args": {"weight": 2.5, "stream": 7}}),
            ("f", 2, {"bp": "e", "dur": 3}),
        )
    ]
    events.append(small_traces.complete_event("cpu_op", "n", 0, 5, 10, 11))
    (tmp_path / "t.json").write_text(json.dumps({**small_traces.kineto(), "traceEvents": events}))
    trace = etloom.read(tmp_path / "t.json")
    assert trace.flows["args"].to_list() == ['{"weight": 2.5, "stream": 7}', '{".dur": 3}']
    assert content(read_back(trace), "flows").equals(content(trace, "flows"))
    assert "read.unstored_args" not in trace.stats["name"]
    start, end = (event for event in written(trace)["traceEvents"] if event["ph"] in "sf")
    assert start["args"] == {"weight": 2.5, "stream": 7} and (end["dur"], end["bp"]) == (3, "e")


@pytest.mark.slow
@pytest.mark.parametrize("file", REAL)
def test_a_real_trace_reads_back_the_same(data: Path, file: str, tmp_path: Path) -> None:
    read = etloom.read(data / file)
    assert isinstance(read, Trace)
    trace = etloom.link(read)
    back = read_back(trace)
    for name in ("events", *SIDE_TABLES):
        assert content(trace, name).equals(content(back, name)), name
    others = pl.col("cat").cast(pl.String) != "ac2g"
    assert content(trace.replace(flows=trace.flows.filter(others)), "flows").equals(
        content(back.replace(flows=back.flows.filter(others)), "flows")
    )
    arrows = 2 * trace.launches.drop_nulls(["launch", "device_event"]).height
    recorded = trace.flows.filter(~others).height
    assert back.flows.filter(~others).height == (arrows if trace.launches.height else recorded)
    for key in ("clock", "rank", "world_size", "device_properties", "distributed", "host"):
        assert back.meta.get(key) == trace.meta.get(key), key
    relinked = etloom.link(back)
    assert relinked.launches.height == trace.launches.height
    assert relinked.launches["launch"].null_count() == trace.launches["launch"].null_count()
    assert_no_slice_is_dropped(written(trace)["traceEvents"])


@pytest.mark.parametrize("file", ["event_sync", "event_sync_multi_stream", "simple_add"])
def test_waits_for_any_stream_keep_it(data: Path, file: str, tmp_path: Path) -> None:
    source = data / "critical_path" / f"{file}.json.gz"
    etloom.export(source, tmp_path / "out.json.gz")

    def list_waits(path: Path) -> list[tuple[Any, ...]]:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        names = (
            "cuda_sync_kind",
            "stream",
            "wait_on_stream",
            "wait_on_cuda_event_record_corr_id",
            "correlation",
        )
        waits = [event["args"] for event in events if event.get("cat") == "cuda_sync"]
        any_stream = {2**32 - 1: -1}  # in traces of old versions
        return sorted(
            tuple(str(any_stream.get(args.get(name), args.get(name))) for name in names) for args in waits
        )

    waits = list_waits(source)
    assert any(wait[1] == "-1" for wait in waits)
    assert list_waits(tmp_path / "out.json.gz") == waits


def test_lines_are_as_kineto_writes_them(tmp_path: Path) -> None:
    job = etloom.open(small_traces.write_run(tmp_path / "run", (0,)), use_cache=False)
    document = written(job)
    assert document["baseTimeNanoseconds"] == small_traces.BASE_NS + 100_000
    assert document["distributedInfo"] == {"backend": "nccl", "rank": 0, "world_size": 1}
    by_name = {event["name"]: event for event in document["traceEvents"]}
    assert by_name["gemm"] == {
        "ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 300.0, "dur": 600.0,
        "args": {"device": 0, "stream": 7, "correlation": 5, "grid": [2, 1, 1], "block": [64, 1, 1]},
    }  # fmt: skip
    assert by_name["aten::linear"]["args"] == {"Record function id": 2, "Input Dims": [[4, 8], [8, 8]]}
    assert by_name["process_name"] == {
        "ph": "M", "name": "process_name", "pid": 10, "tid": 0, "ts": 0, "args": {"name": "python"},
    }  # fmt: skip
    arrows = [event for event in document["traceEvents"] if event.get("cat") == "ac2g"]
    ends = [
        (event["ph"], event["ts"], event["pid"], event["tid"], event["id"], event.get("bp"))
        for event in arrows
    ]
    assert sorted(ends, key=lambda end: (end[4], -ord(end[0]))) == [
        ("s", 200.0, 10, 11, 1, None), ("f", 300.0, 0, 7, 1, "e"),
        ("s", 550.0, 10, 11, 2, None), ("f", 700.0, 0, 13, 2, "e"),
    ]  # fmt: skip


def test_ranks_are_processes(tmp_path: Path) -> None:
    job = etloom.open(small_traces.write_run(tmp_path / "run"), use_cache=False)
    events = written(job)["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(names.values()) == ["rank 0: GPU 0", "rank 0: python", "rank 1: GPU 0", "rank 1: python"]
    slices = [event for event in events if event["ph"] == "X"]
    assert sorted(names[event["pid"]][:6] for event in slices) == ["rank 0"] * 7 + ["rank 1"] * 7
    starts = [event["id"] for event in events if event["ph"] == "s"]
    assert len(set(starts)) == 4, "arrows of different ranks have different ids"
    with pytest.raises(ReadError, match="several ranks were merged in this file"):
        read_back(job)


def test_processes_without_a_name_are_named_after_their_kind(tmp_path: Path) -> None:
    document = small_traces.kineto()
    document["traceEvents"] = [event for event in document["traceEvents"] if event["name"] != "process_name"]
    document["traceEvents"].append(
        {"ph": "i", "name": "Record Window End", "pid": "", "tid": "", "ts": 1, "s": "g"}
    )
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(document))
    trace = etloom.read(path)
    assert isinstance(trace, Trace)
    events = written(Job({0: trace, 1: trace}))["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert sorted(names) == [
        f"rank {rank}: {name}" for rank in (0, 1) for name in ("GPU 0", "other events", "process 10")
    ]


def test_events_without_a_process_get_one(tmp_path: Path) -> None:
    job = etloom.open(small_traces.write_run(tmp_path / "run"), use_cache=False)
    no_process = pl.when(pl.col("name") == "aten::mm").then(None).otherwise("pid").alias("pid")
    first = job[0].replace(events=job[0].events.with_columns(no_process))
    assert first.events["pid"].null_count()
    events = written(Job({0: first, 1: job[1]}))["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(names.values())[:3] == ["rank 0: GPU 0", "rank 0: other events", "rank 0: python"]
    assert sum(names[event["pid"]] == "rank 0: other events" for event in events if event["ph"] == "X") == 1


def test_a_job_of_ranks_shares_one_clock(tmp_path: Path) -> None:
    run = small_traces.write_run(tmp_path / "run")
    late = small_traces.kineto(1)
    late["baseTimeNanoseconds"] += 5_000_001
    (run / "kineto_trace_1.json").write_text(json.dumps(late))
    events = written(etloom.open(run, use_cache=False))["traceEvents"]
    assert [event["ts"] for event in events if event["name"] == "ProfilerStep#3"] == [0.0, 5000.001]


def test_the_gzip_is_the_plain_file(tmp_path: Path) -> None:
    job = etloom.open(small_traces.write_run(tmp_path / "run"), use_cache=False)
    chrome.write(job, tmp_path / "a.json")
    chrome.write(job, tmp_path / "a.json.gz")
    assert gzip.decompress((tmp_path / "a.json.gz").read_bytes()) == (tmp_path / "a.json").read_bytes()


def test_a_trace_without_times_is_refused(tmp_path: Path) -> None:
    trace = etloom.read(small_traces.write_run(tmp_path / "run") / "torch_et_0.json")
    with pytest.raises(
        EtloomError, match=r"a\.json: the trace has no timed events to draw; export it as Parquet"
    ):
        chrome.write(trace, tmp_path / "a.json")
    assert not (tmp_path / "a.json").exists()


def test_the_memory_of_a_snapshot_is_drawn_as_counters(tmp_path: Path) -> None:
    """A snapshot next to a Kineto trace is part of its rank, and its counters are on the trace's clock."""
    folder = small_traces.write_run(tmp_path / "run", (0,))
    write_snapshot(folder / "rank0_memory_snapshot.pickle")
    job = etloom.open(folder, use_cache=False)
    assert job[0].events.height == etloom.read(folder / "kineto_trace_0.json").events.height  # type: ignore[union-attr]
    assert etloom.simulate_memory(job)["peak_reserved_bytes"].to_list() == [32 << 20]
    document = written(job)
    counters = [event for event in document["traceEvents"] if event["ph"] == "C"]
    assert {event["name"] for event in counters} == {"GPU 0 memory (B)"}
    device = next(event["pid"] for event in document["traceEvents"] if event.get("cat") == "kernel")
    assert {event["pid"] for event in counters} == {device}
    first = T0 + 1 - document["baseTimeNanoseconds"] / 1000  # the entry before it takes the segment
    assert all(event["ts"] == pytest.approx(first, abs=0.1) for event in counters[:3])
    values = [event["args"] for event in counters]
    assert values[:3] == [{"reserved": 2 << 20}, {"allocated": 1 << 20}, {"requested": 1 << 20}]
    assert [args["reserved"] for args in values if "reserved" in args] == [2 << 20, 32 << 20]
    assert [args["allocated"] for args in values if "allocated" in args] == [1 << 20, 0, 30 << 20]


def test_totals_of_a_snapshot_are_left_out_of_events_on_another_clock(tmp_path: Path) -> None:
    folder = small_traces.write_run(tmp_path / "run", (0,))
    write_snapshot(folder / "rank0_memory_snapshot.pickle")
    path = folder / "kineto_trace_0.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "baseTimeNanoseconds": 0}))
    trace = etloom.open(folder, use_cache=False)[0]
    assert trace.meta["clock"] == "relative" and trace.events.height
    assert trace.memory.height == 0 and trace.allocator.height
    (row,) = trace.stats.filter(name="read.memory_on_other_clock").rows()
    assert row[1] == "data_loss" and row[2] > 0 and "relative" in row[3]


def test_a_snapshot_alone_is_drawn(tmp_path: Path) -> None:
    job = etloom.open(write_snapshot(tmp_path / "a.pickle"), use_cache=False)
    assert sum(event["ph"] == "C" for event in written(job)["traceEvents"]) == 8
    relative = job[0].replace(meta={"clock": "relative"})
    assert not any(event["ph"] == "C" for event in written(relative)["traceEvents"])


TIMES = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9), st.integers(0, 1)), max_size=12)


def timeline(rows: list[tuple[int, int, int]], base: int = 0, name: str = "k") -> pl.DataFrame:
    frame = pl.DataFrame(rows, schema={"ts": pl.Int64, "dur": pl.Int64, "tid": pl.Int64}, orient="row")
    return (
        frame.with_columns(pl.col("ts") + base, pid=pl.lit(0, pl.Int64), name=pl.lit(name), ph=pl.lit("X"))
        .sort("ts", -pl.col("dur"), maintain_order=True)
        .with_row_index("id")
    )


@given(TIMES)
def test_sub_tracks_contain_nested_slices_and_are_few(rows: list[tuple[int, int, int]]) -> None:
    events = timeline(rows)
    lanes = tracks.assign_sub_tracks(events)
    assert len(lanes) == events.height
    placed = events.with_columns(lanes)
    drawn = [
        {"ph": "X", "pid": tid, "tid": lane, "ts": ts, "dur": dur}
        for ts, dur, tid, lane in placed.select("ts", "dur", "tid", "sub_track").iter_rows()
    ]
    assert_no_slice_is_dropped(drawn)
    for at in placed.filter(pl.col("sub_track") > 0).iter_rows(named=True):
        before = placed.filter(pl.col("tid") == at["tid"], pl.col("sub_track") == at["sub_track"] - 1)
        end = pl.col("ts") + pl.col("dur")
        crossed = before.filter(pl.col("ts") <= at["ts"], end > at["ts"], end < at["ts"] + at["dur"])
        assert crossed.height, "a sub-track is used only if the slice does not fit on the one before"


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(TIMES, st.sampled_from([0, small_traces.BASE_NS]), random_traces.TEXT.filter(len))
@example(
    [(1, 0, 0)] * 3 + [(2, 0, 0)], small_traces.BASE_NS, "three that begin the recording without duration"
)
def test_any_events_read_back(rows: list[tuple[int, int, int]], base: int, name: str) -> None:
    # Three events without time and duration are a recorder's unknown times, wherever they were written.
    assume(rows and sum(row[:2] == (0, 0) for row in rows) < 3)
    trace = Trace(
        {"events": timeline(rows, base, name)}, {"rank": 0, "clock": "epoch" if base else "relative"}
    )
    back = read_back(trace)
    kept = ["name", "ts", "dur", "ph"]
    assert content(trace, "events").select(kept).rows() == content(back, "events").select(kept).rows()
    assert back.meta["clock"] == ("epoch" if base else "relative")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dlrm", "tracelens/h100_qwen.json.gz", "cpu/ddp_2"])
def test_the_critical_path_is_drawn_from_slice_to_slice(data: Path, tmp_path: Path, name: str) -> None:
    job = open_run(data / name)
    etloom.export(job, tmp_path / "path.json", overlay="critical-path")
    etloom.export(job, tmp_path / "plain.json")
    drawn, plain = (
        json.loads((tmp_path / f"{one}.json").read_text())["traceEvents"] for one in ("path", "plain")
    )
    assert [event for event in drawn if event.get("cat") != "critical path"] == plain
    ends = [event for event in drawn if event.get("cat") == "critical path"]
    arrows: dict[int, dict[str, dict[str, Any]]] = {}
    for end in ends:
        arrows.setdefault(end["id"], {})[end["ph"]] = end
    taken = {event["id"] for event in plain if event["ph"] in "sf"}
    assert arrows and not taken & arrows.keys()
    lanes: dict[tuple[Any, Any], list[tuple[float, float]]] = {}
    for event in plain:
        if event["ph"] == "X":
            lanes.setdefault((event["pid"], event["tid"]), []).append(
                (event["ts"], event["ts"] + event["dur"])
            )
    for both in list(arrows.values())[:200]:
        assert both.keys() == {"s", "f"}
        assert both["f"]["bp"] == "e"
        assert both["s"]["ts"] <= both["f"]["ts"] + 1e-3
        for end in both.values():
            around = lanes[end["pid"], end["tid"]]
            assert any(start <= end["ts"] <= stop for start, stop in around)


def test_another_overlay_is_an_error(data: Path, tmp_path: Path) -> None:
    with pytest.raises(EtloomError, match="overlay: unknown overlay 'slack'; expected one of critical-path"):
        etloom.export(open_run(data / "cpu/ddp_2"), tmp_path / "x.json", overlay="slack")
