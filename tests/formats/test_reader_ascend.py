"""Ascend's trace_view.json: kernels, calls and collectives by the names of processes and of tasks."""

from __future__ import annotations

import re
from pathlib import Path

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


def test_tasks_of_unknown_type_are_work_if_they_have_an_operators_name(data: Path) -> None:
    level0 = etloom.open(data / "cases/turn3/ascend_level0.json", use_cache=False)[0]
    names = level0.events.select("id", pl.col("name").cast(pl.String))
    rows = level0.launches
    for column in ("device_event", "launch", "operator"):
        rows = rows.join(names.rename({"id": column, "name": f"{column}_name"}), on=column)
    assert set(rows.select("device_event_name", "launch_name", "operator_name").iter_rows()) == {
        ("aclnnMm_MatMulAiCore_MatMul", "AscendCL@aclnnMm", "aten::mm"),
        ("aclnnAdd_AddAiCore_Add", "AscendCL@aclnnAdd", "aten::add_"),
    }
    assert etloom.analyze(level0, "kernel-breakdown")["total_ns"].sum() == 50_000


def test_tasks_of_unknown_type_with_the_name_of_a_type(tmp_path: Path) -> None:
    path = write_trace_view(tmp_path)
    text = re.sub('"Task Type": "[^"]*"', '"Task Type": "Other"', path.read_text())
    path.write_text(text.replace('"name": "Cast"', '"name": "aclnnLabelSmoothing_StreamingAttention"'))
    categories = etloom.read(path).events.select(pl.col("name", "cat").cast(pl.String))
    expected = {
        "MatMulV2": "kernel",
        "aclnnLabelSmoothing_StreamingAttention": "kernel",
        "EVENT_WAIT": "npu_task",
        "MEMCPY_ASYNC": "gpu_memcpy",
    }
    assert dict(categories.filter(pl.col("name").is_in(list(expected))).iter_rows()) == expected


def test_sums_of_the_file_that_differ_are_stated(tmp_path: Path, trace: Trace) -> None:
    assert "read.summary_differs" not in set(trace.stats["name"])
    path = write_trace_view(tmp_path)
    path.write_text(
        path.read_text().replace('"name": "Cast"', '"name": "EVENT_WAIT"').replace("MIX_AIV", "EVENT_WAIT")
    )
    stats = etloom.read(path).stats.filter(pl.col("name") == "read.summary_differs")
    assert stats["example"].to_list() == [
        "Computing: 130,000 ns in the file's own sums, 100,000 ns in its computation events"
    ]
