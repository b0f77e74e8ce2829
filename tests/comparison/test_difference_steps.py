"""What is a step's: work launched in it, communications a rank takes part in, memory that was there when it began."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

import etloom
from etloom.analyses import memory_timeline
from etloom.comparison.measures import step_values
from etloom.core.trace import Job, Trace
from support import small_traces
from support.examples import examples

HOST = (10, 11)


def write(folder: Path, ranks: dict[int, list[dict[str, Any]]]) -> Job:
    folder.mkdir(parents=True)
    for rank, events in ranks.items():
        trace = {**small_traces.kineto(rank, len(ranks)), "host_name": "host", "traceEvents": events}
        (folder / f"kineto_trace_{rank}.json").write_text(json.dumps(trace))
    return etloom.open(folder)


def step(number: int, at: float) -> dict[str, Any]:
    return small_traces.complete_event("user_annotation", f"ProfilerStep#{number}", at, 1000, *HOST)


def kernel(name: str, at: float, dur: float, call: float, link: int, **args: Any) -> list[dict[str, Any]]:
    """A launch at ``call`` and its kernel."""
    device = {"device": 0, "stream": 7, "correlation": link}
    return [
        small_traces.complete_event("cuda_runtime", "cudaLaunchKernel", call, 2, *HOST, correlation=link),
        small_traces.complete_event("kernel", name, at, dur, 0, 7, **device, **args),
    ]


def all_reduce(at: float, call: float, number: int, group: list[int]) -> list[dict[str, Any]]:
    said = {"Collective name": "allreduce", "In msg nelems": 1024, "Out msg nelems": 1024, "dtype": "Float"}
    said |= {"Group size": len(group), "Process Group Name": str(group[0]), "Seq": number}
    said |= {"Process Group Ranks": str(group)}
    return kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", at, 100, call, 1000 + number, **said)


def communicating(folder: Path, groups: list[list[int]], before: int = 0) -> Job:
    """An all-reduce of 100 us in each of four steps, and so many before the first of them."""

    def events(group: list[int]) -> list[dict[str, Any]]:
        found = [event for one in range(before) for event in all_reduce(500 * one, 500 * one, one, group)]
        for one in range(4):
            at = 20_000.0 + 1000 * one
            found += [step(one, at), small_traces.complete_event("cpu_op", "aten::mm", at + 5, 50, *HOST)]
            found += kernel("gemm", at + 30, 300, at + 10, one + 1)
            found += all_reduce(at + 400, at + 70, before + one, group)
        return found

    return write(folder, {rank: events(group) for group in groups for rank in group})


@pytest.mark.slow
def test_a_collective_counts_in_the_step_that_launched_it(tmp_path: Path) -> None:
    """Twenty all-reduces before the first step are none of a step's."""
    plain, warm = (communicating(tmp_path / str(n), [[0, 1]], n) for n in (0, 20))
    (row,) = etloom.diff(plain, warm).table("collective").to_dicts()
    assert (row["collective"], row["group_size"], row["bytes"], row["in"]) == ("all_reduce", 2, 4096, "both")
    assert (row["count_before"], row["count_after"]) == (1.0, 1.0)
    assert (row["before_ns"], row["after_ns"], row["transfer_after_ns"]) == (100_000, 100_000, 100_000)
    etloom.report(etloom.diff(plain, warm), tmp_path / "diff.html")
    page = (tmp_path / "diff.html").read_text()
    assert "all_reduce" in page and "2,100" not in page


@pytest.mark.slow
def test_collectives_are_means_over_ranks(tmp_path: Path) -> None:
    """Each rank of four takes part in one all-reduce a step, as each of two does."""
    two, four = (communicating(tmp_path / str(len(g)), g) for g in ([[0, 1]], [[0, 1], [2, 3]]))
    (row,) = etloom.diff(two, four).table("collective").to_dicts()
    assert (row["count_before"], row["count_after"], row["change_ns"]) == (1.0, 1.0, 0)


def test_collectives_sum_to_the_kernels_of_communication(data: Path) -> None:
    job = etloom.open(data / "nccl_ddp")
    found = etloom.diff(job, job)
    kernels = found.table("kernel").filter(pl.col("kind") == "communication")
    assert kernels["before_ns"].sum() == pytest.approx(15_625_000, abs=20_000)
    assert found.table("collective")["before_ns"].sum() == pytest.approx(kernels["before_ns"].sum(), abs=20)


def test_work_launched_before_the_first_step_is_none_of_it(tmp_path: Path) -> None:
    """Of ten kernels that a warm-up launched five run in the first step: no operator's, kernel's or family's of it."""

    def run(name: str, warm: bool) -> Job:
        events = []
        if warm:
            events.append(small_traces.complete_event("cpu_op", "aten::warm", 0, 40, *HOST))
            for one in range(10):
                events += kernel("warm_kernel", 100 + 20 * one, 20, 1 + 2 * one, 50 + one)
        for one in range(5):
            at = 200.0 + 1000 * one
            events += [step(one, at), small_traces.complete_event("cpu_op", "aten::mm", at + 10, 50, *HOST)]
            events += kernel("gemm", at + 400, 300, at + 20, one + 1)
        return write(tmp_path / name, {0: events})

    found = etloom.diff(run("plain", False), run("warm", True))
    for by in ("operator", "kernel", "family"):
        assert found.table(by)["in"].to_list() == ["both"], by
    (note,) = (line for line in found.notes if "outside the recorded steps" in line)
    assert "0.00 ms (before) and 0.10 ms (after)" in note


def remembering(events: list[tuple[int, int, int, int]], windows: list[tuple[int, int]]) -> Trace:
    """(ts, bytes, total, device) and steps."""
    memory = pl.DataFrame(
        events, schema=dict.fromkeys(("ts", "bytes", "total_allocated", "device"), pl.Int64), orient="row"
    ).with_columns(device_type=pl.lit(1, pl.Int32), device=pl.col("device").cast(pl.Int32))
    rows = [("user_annotation", f"ProfilerStep#{n}", a, b - a, 0, 1, 1) for n, (a, b) in enumerate(windows)]
    schema = {"cat": pl.Categorical, "name": pl.Categorical, "ts": pl.Int64, "dur": pl.Int64}
    schema |= {"depth": pl.Int16, "pid": pl.Int64, "tid": pl.Int64}
    frame = pl.DataFrame(rows, schema=schema, orient="row").with_row_index("id")
    frame = etloom.core.schema.TABLES["events"].conform(frame)
    memory = etloom.core.schema.TABLES["memory"].conform(memory.with_row_index("id"))
    return Trace({"events": frame, "memory": memory}, {"rank": 0, "linked": True})


def test_memory_allocated_when_a_step_begins_counts() -> None:
    """100 MB are there before the first step; of the third, which has no event, the level it begins with."""
    events = [(5, 100, 100, 0), (20, -50, 50, 0), (30, 50, 100, 0), (120, -50, 50, 0)]
    trace = remembering(events, [(10, 110), (110, 210), (210, 310)])
    assert step_values(Job({0: trace}), "peak-memory") == [100, 100, 50]
    assert step_values(Job({0: remembering(events, [])}), "peak-memory") == [100]


@settings(max_examples=examples(30))
@given(
    changes=some.lists(
        some.tuples(some.integers(0, 40), some.integers(-50, 50), some.integers(0, 1)), min_size=1
    ),
    ends=some.lists(some.integers(1, 15), max_size=4),
    already=some.integers(0, 100),
)
def test_peaks_of_steps_are_those_of_memory_timeline(
    changes: list[tuple[int, int, int]], ends: list[int], already: int
) -> None:
    total = {0: already, 1: already // 2}
    events = []
    for at, change, device in sorted(changes, key=lambda change: change[0]):
        total[device] += change
        events.append((at, change, total[device], device))
    edges = [sum(ends[:n]) for n in range(len(ends) + 1)]
    trace = remembering(events, list(pairwise(edges)))
    table = memory_timeline.analyze(trace).filter(pl.col("step").is_not_null() == bool(ends))
    wanted = table.group_by("step").agg(pl.col("peak_bytes").max()).sort("step")["peak_bytes"].to_list()
    assert step_values(Job({0: trace}), "peak-memory") == wanted
