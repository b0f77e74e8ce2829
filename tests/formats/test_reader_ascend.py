"""Ascend's trace_view.json: kernels, calls and collectives by the names of processes and of tasks."""

from __future__ import annotations

import polars as pl
import pytest

import etloom
from etloom.core.trace import Trace
from support.ascend_traces import START, write_trace_view


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return etloom.open(write_trace_view(tmp_path_factory.mktemp("ascend")), use_cache=False)[0]


def test_work_of_the_device(trace: Trace) -> None:
    table = etloom.analyze(trace, "kernel-breakdown")
    rows = {name: (kind, total) for kind, name, total in table.select("kind", "name", "total_ns").iter_rows()}
    assert rows == {
        "MatMulV2": ("computation", 100_000),
        "hcom_allReduce__503_0_1": ("communication", 70_000),
        "Cast": ("computation", 30_000),
        "MEMCPY_ASYNC": ("memory", 10_000),
    }
    work = trace.events.filter(pl.col("cat").cast(pl.String) == "kernel")
    assert set(work["device"]) == {2}  # also of communication, whose process has no number
    assert trace.events["ts"].min() == START * 1000
    assert dict(trace.stats.select("name", "count").iter_rows())["read.ascend_tasks"] == 1


def test_work_has_its_launch_and_step(trace: Trace) -> None:
    names = trace.events.select("id", pl.col("name").cast(pl.String), "step")
    joined = trace.launches.join(names, left_on="device_event", right_on="id").join(
        names, left_on="launch", right_on="id", suffix="_launch"
    )
    assert dict(joined.select("name", "name_launch").iter_rows()) == {
        "MatMulV2": "Node@launch", "Cast": "Node@launch", "hcom_allReduce__503_0_1": "Hccl@launch"
    }  # fmt: skip
    assert set(joined["step"]) == {4}


def test_collectives_have_size_and_group(trace: Trace) -> None:
    row = etloom.analyze(etloom.Job({0: trace}), "collectives").row(0, named=True)
    assert (row["collective"], row["group"], row["bytes"], row["duration_ns"]) == (
        "all_reduce",
        "503",
        4096,
        70_000,
    )
