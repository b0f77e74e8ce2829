"""Tables whose events name no process or thread: a null is one process, and no join loses it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl

import etloom
from etloom.core.trace import Trace
from etloom.linker import link


def anonymous(trace: Trace, *columns: str) -> Trace:
    tables = {
        name: trace.table(name).with_columns(
            pl.lit(None, dtype=pl.Int64).alias(column)
            for column in columns
            if column in trace.table(name).columns
        )
        for name in ("events", "memory")
    }
    return trace.replace(**tables)


def event(cat: str, name: str, ts: int, dur: int, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid, "args": args}


def example(tmp_path: Path) -> Trace:
    rows = [
        event("user_annotation", "ProfilerStep#3", 0, 100),
        event("cpu_op", "op", 5, 40),
        event("cuda_runtime", "cudaLaunchKernel", 10, 2, correlation=1),
        event("kernel", "k1", 20, 5, device=0, stream=7, correlation=1),
        event("cuda_runtime", "cudaEventRecord", 15, 1, correlation=2),
        event("cuda_runtime", "cudaStreamWaitEvent", 17, 1, correlation=3),
        event("cuda_runtime", "cudaLaunchKernel", 19, 2, correlation=4),
        event("kernel", "k2", 30, 5, device=0, stream=9, correlation=4),
        event("cuda_runtime", "cudaDeviceSynchronize", 40, 3, correlation=5),
        {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": 1, "ts": 12,
         "args": {"Addr": 1, "Bytes": 512, "Total Allocated": 512, "Device Type": 1, "Device Id": 0}},
    ]  # fmt: skip
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": rows}))
    trace = etloom.read(path)
    assert isinstance(trace, Trace)
    return trace


def test_a_trace_without_processes_is_linked_as_one_with_them(tmp_path: Path) -> None:
    trace = example(tmp_path)
    whole, lacking = link(trace), link(anonymous(trace, "pid"))
    assert whole.events["step"].null_count() == 0
    assert whole.sync_dependencies["kind"].n_unique() > 1
    for name in ("launches", "sync_dependencies", "thread_dependencies"):
        assert lacking.table(name).equals(whole.table(name)), name
    for column in ("step", "parent", "depth"):
        assert lacking.events[column].equals(whole.events[column]), column


def test_allocations_without_a_process_have_their_operator(tmp_path: Path) -> None:
    trace = link(example(tmp_path))
    expected = etloom.analyze(trace, "memory-timeline")
    found = etloom.analyze(anonymous(trace, "pid"), "memory-timeline")
    assert found.equals(expected) and "op" in found.to_dicts()[0].values()


def test_steps_of_events_with_and_without_a_process_are_separate(tmp_path: Path) -> None:
    trace = example(tmp_path)
    other = trace.events.with_columns(pl.lit(None, dtype=pl.Int64).alias("pid"), ts=pl.col("ts") + 200_000)
    names = pl.col("name").cast(pl.String).str.replace("#3", "#4").cast(pl.Categorical)
    events = pl.concat([trace.events, other.with_columns(names)])
    events = events.drop("id").with_row_index("id").select(trace.events.columns)
    steps = link(trace.replace(events=events)).events
    is_host = pl.col("cat").cast(pl.String).is_in(["cpu_op", "user_annotation"])
    assert steps.filter(is_host).group_by("pid").agg(pl.col("step").unique()).sort("pid").rows() == [
        (None, [4]),
        (1, [3]),
    ]
