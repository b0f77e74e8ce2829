"""The tree of calls: by hand, against a walk from call to caller, on real traces; and folded stacks."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import etloom
from etloom import linker
from etloom.cli import app
from etloom.core import categories
from etloom.core.errors import AnalysisError, EtloomError, InvalidValue, UnknownName
from etloom.core.nesting import compute_exclusive_time
from etloom.core.trace import Trace
from etloom.timeline.call_tree import UNLAUNCHED, build_call_tree
from support.examples import examples
from support.random_traces import LinkedTraceGenerator
from support.real_runs import open_run

US = 1000


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 9, "tid": tid, "args": args}


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    """Two steps of a;b on thread 1, the backward of b on thread 2, three kernels, one of no recorded launch."""
    events = [
        event("user_annotation", "ProfilerStep#4", 0, 100),
        event("cpu_op", "a", 10, 50, **{"Sequence number": 7, "Fwd thread id": 0}),
        event("cpu_op", "b;c", 20, 30, **{"Sequence number": 8, "Fwd thread id": 0}),
        event("cuda_runtime", "cudaLaunchKernel", 25, 5, correlation=1),
        event("user_annotation", "ProfilerStep#5", 100, 60),
        event("cpu_op", "a", 110, 20),
        event("cpu_op", "eval: B0", 62, 20, 2, **{"Sequence number": 8, "Fwd thread id": 3}),
        event("cpu_op", "B0", 64, 10, 2, **{"Sequence number": 8, "Fwd thread id": 3}),
        event("cuda_runtime", "cudaLaunchKernel", 66, 2, 2, correlation=2),
        event("kernel", "k1", 40, 7, 70, stream=7, device=0, correlation=1),
        event("kernel", "k2", 80, 11, 70, stream=7, device=0, correlation=2),
        event("kernel", "k3", 95, 13, 70, stream=7, device=0, correlation=99),
    ]
    path = tmp_path / "kineto_trace_0.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return etloom.open(path, use_cache=False)[0]


SHORT = (
    "tid",
    "parent",
    "depth",
    "name",
    "count",
    "total_ns",
    "self_ns",
    "device_ns",
    "self_device_ns",
    "kernels",
)


def rows(tree: pl.DataFrame) -> list[tuple[Any, ...]]:
    scale = pl.col("^.*_ns$") // US
    return tree.select(SHORT).with_columns(scale).rows()


def test_the_tree_of_a_small_trace(trace: Trace) -> None:
    tree = etloom.analyze(trace, "call-stacks", min_pct=0.0)
    assert tree["node"].to_list() == list(range(8))
    assert rows(tree) == [
        (1, None, 0, "ProfilerStep#*", 2, 160, 90, 7, 0, 1),
        (1, 0, 1, "a", 2, 70, 40, 7, 0, 1),
        (1, 1, 2, "b;c", 1, 30, 25, 7, 0, 1),
        (1, 2, 3, "cudaLaunchKernel", 1, 5, 5, 7, 7, 1),
        (2, None, 0, "eval: B0", 1, 20, 10, 11, 0, 1),
        (2, 4, 1, "B0", 1, 10, 8, 11, 0, 1),
        (2, 5, 2, "cudaLaunchKernel", 1, 2, 2, 11, 11, 1),
        (None, None, 0, UNLAUNCHED, 0, 0, 0, 13, 13, 1),
    ]


def test_joined_puts_backward_under_its_forward_operator(trace: Trace) -> None:
    tree = etloom.analyze(trace, "call-stacks", joined=True, kernels=True, min_pct=0.0)
    assert rows(tree) == [
        (1, None, 0, "ProfilerStep#*", 2, 180, 90, 18, 0, 2),
        (1, 0, 1, "a", 2, 90, 40, 18, 0, 2),
        (1, 1, 2, "b;c", 1, 50, 25, 18, 0, 2),
        (1, 2, 3, "eval: B0", 1, 20, 10, 11, 0, 1),
        (1, 3, 4, "B0", 1, 10, 8, 11, 0, 1),
        (1, 4, 5, "cudaLaunchKernel", 1, 2, 2, 11, 0, 1),
        (1, 5, 6, "k2", 1, 0, 0, 11, 11, 1),
        (1, 2, 3, "cudaLaunchKernel", 1, 5, 5, 7, 0, 1),
        (1, 7, 4, "k1", 1, 0, 0, 7, 7, 1),
        (None, None, 0, UNLAUNCHED, 0, 0, 0, 13, 0, 1),
        (None, 9, 1, "k3", 1, 0, 0, 13, 13, 1),
    ]


def test_small_shares_and_deep_calls_may_be_left_out(trace: Trace) -> None:
    # Of 180 us of host time and 31 us of device time: B0 (10 us) stays for its 11 us of kernels.
    names = etloom.analyze(trace, "call-stacks", min_pct=30.0)["name"].to_list()
    assert names == ["ProfilerStep#*", "a", "eval: B0", "B0", "cudaLaunchKernel", UNLAUNCHED]
    assert etloom.analyze(trace, "call-stacks", depth=0)["depth"].unique().to_list() == [0]
    with pytest.raises(InvalidValue, match="expected a percentage from 0 to 100"):
        etloom.analyze(trace, "call-stacks", min_pct=101.0)


def test_without_gpu_activity_its_columns_are_null(trace: Trace) -> None:
    host = trace.replace(events=trace.events.filter(pl.col("cat") != "kernel"))
    tree = etloom.analyze(host, "call-stacks", min_pct=0.0)
    assert tree["device_ns"].null_count() == tree.height == 7
    with pytest.raises(AnalysisError, match="no calls on any thread"):
        etloom.analyze(linker.link(Trace({}, {})), "call-stacks")


def test_folded_stacks(trace: Trace, tmp_path: Path) -> None:
    out = etloom.export(trace, tmp_path / "x.folded")
    assert out.read_text().splitlines() == [
        "thread 1;ProfilerStep#* 90000",
        "thread 1;ProfilerStep#*;a 40000",
        "thread 1;ProfilerStep#*;a;b:c 25000",
        "thread 1;ProfilerStep#*;a;b:c;cudaLaunchKernel 5000",
        "thread 2;eval: B0 10000",
        "thread 2;eval: B0;B0 8000",
        "thread 2;eval: B0;B0;cudaLaunchKernel 2000",
    ]
    etloom.export(etloom.Job({0: trace, 3: trace}), out, time="device")
    assert out.read_text().splitlines()[3:] == [
        "rank 3;thread 1;ProfilerStep#*;a;b:c;cudaLaunchKernel;k1 7000",
        "rank 3;thread 2;eval: B0;B0;cudaLaunchKernel;k2 11000",
        f"rank 3;{UNLAUNCHED};k3 13000",
    ]
    with pytest.raises(UnknownName, match="gpu"):
        etloom.export(trace, out, time="gpu")
    host = trace.replace(events=trace.events.filter(pl.col("cat") != "kernel"))
    with pytest.raises(EtloomError, match="with device time"):
        etloom.export(host, out, time="device")


def test_exports_of_events_without_a_thread_name_none(tmp_path: Path) -> None:
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "a", "ts": 0, "dur": 9},
        {"ph": "X", "cat": "kernel", "name": "k", "ts": 2, "dur": 9, "args": {"device": 0, "stream": 7}},
    ]
    source = tmp_path / "run.json"
    source.write_text(json.dumps({"traceEvents": events}))
    job = etloom.open(source)
    assert etloom.export(job, tmp_path / "x.folded").read_text() == "a 9000\n"
    written = json.loads(etloom.export(job, tmp_path / "x.json").read_text())["traceEvents"]
    assert [event["args"]["name"] for event in written if event["ph"] == "M"] == ["no thread (2)"]


def test_folded_stacks_at_the_command_line(own: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.folded"
    done = CliRunner().invoke(app, ["export", str(own / "ddp_2"), "--out", str(out), "-O", "joined=true"])
    assert done.exit_code == 0, done.output
    lines = out.read_text().splitlines()
    assert lines[0].startswith("rank 0;")
    # Whatever hangs where: the time is that of all events in themselves.
    whole = 0
    for one in open_run(own / "ddp_2").values():
        on_lane = one.events["depth"].is_not_null()
        whole += compute_exclusive_time(one.events).filter(on_lane).sum()
    assert sum(int(line.rpartition(" ")[2]) for line in lines) == whole


def by_walking(trace: Trace, joined: bool) -> dict[tuple[Any, ...], list[int]]:
    """(tid, names from the outermost in) -> count, self, device, kernels, of each event by its own chain of parents."""
    events = {row["id"]: row for row in trace.events.iter_rows(named=True)}
    forward = {}
    if joined:
        pairs = trace.thread_dependencies.filter(pl.col("kind") == "fwd_bwd").select("event", "after").rows()
        forward = dict(pairs)
        forward = {
            one: after
            for one, after in pairs
            if events[after]["ts"] < events[one]["ts"] and forward.get(events[one]["parent"]) != after
        }

    def path(one: int) -> tuple[Any, ...]:
        row = events[one]
        above = forward.get(one, row["parent"])
        name = "ProfilerStep#*" if row["name"].startswith("ProfilerStep#") else row["name"]
        return (*((row["tid"],) if above is None else path(above)), (row["cat"], name))

    found: dict[tuple[Any, ...], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for one, own in zip(events, compute_exclusive_time(trace.events), strict=True):
        if events[one]["depth"] is not None:
            sums = found[path(one)]
            sums[0] += 1
            sums[1] += own
    calls = dict(trace.launches.select("device_event", "launch").rows())
    for one, row in events.items():
        if row["cat"] in categories.DEVICE_CATEGORIES:
            call = calls.get(one)
            sums = found[(None, (None, UNLAUNCHED)) if call is None else path(call)]
            sums[2] += row["dur"]
            sums[3] += 1
    return found


@given(st.integers(0, 2**32), st.booleans())
@settings(max_examples=examples(25))
def test_the_tree_equals_walking_from_each_call(seed: int, joined: bool) -> None:
    trace = linker.link(LinkedTraceGenerator(random.Random(seed)).linked.host())
    tree = build_call_tree(trace, joined=joined)
    paths: dict[int, tuple[Any, ...]] = {}
    found = {}
    above: list[int] = []
    for row in tree.iter_rows(named=True):
        # A node stands after its parent, in whose subtree it is: what a table read from above shows.
        del above[row["depth"] :]
        assert row["parent"] == (above[-1] if above else None)
        above.append(row["node"])
        start = (row["tid"],) if row["parent"] is None else paths[row["parent"]]
        paths[row["node"]] = (*start, (row["category"], row["name"]))
        below = tree.filter(pl.col("parent") == row["node"])
        assert row["total_ns"] == row["self_ns"] + below["total_ns"].sum()
        assert row["device_ns"] == row["self_device_ns"] + below["device_ns"].sum()
        assert below["total_ns"].is_sorted(descending=True)
        own_kernels = row["kernels"] - below["kernels"].sum()
        found[paths[row["node"]]] = [row["count"], row["self_ns"], row["self_device_ns"], own_kernels]
    assert found == dict(by_walking(trace, joined))
    fine = build_call_tree(trace, joined=joined, kernels=True)
    assert fine["self_device_ns"].sum() == tree["self_device_ns"].sum()
    assert fine.filter(pl.col("depth") == 0)["device_ns"].sum() == tree["self_device_ns"].sum()


@pytest.mark.parametrize("file", ["hta_misc/negative_queue_a100.json.gz", "tracelens/mi300_qwen.json.gz"])
def test_a_real_trace_s_times_are_all_in_its_tree(data: Path, file: str) -> None:
    job = open_run(data / file)
    trace = job[job.ranks[0]]
    work = trace.events.filter(pl.col("cat").is_in(list(categories.DEVICE_CATEGORIES)))["dur"].sum()
    for joined in (False, True):
        tree = build_call_tree(trace, joined=joined)
        top = tree.filter(pl.col("depth") == 0)
        assert top["device_ns"].sum() == tree["self_device_ns"].sum() == work
        on_lane = trace.events["depth"].is_not_null()
        assert top["total_ns"].sum() == compute_exclusive_time(trace.events).filter(on_lane).sum()


def test_nested_steps_have_the_times_of_their_annotations(data: Path) -> None:
    job = open_run(data / "hta_misc" / "negative_queue_a100.json.gz")
    steps = build_call_tree(job[0]).filter(pl.col("name") == "ProfilerStep#*")
    assert steps["count"].to_list() == [5]
    assert steps["total_ns"].sum() == etloom.analyze(job[0], "steps")["dur_ns"].sum() == 1_074_033_000
