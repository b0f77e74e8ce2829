"""Timelines of unitrace and Ray, which Kineto's reader reads: categories, links and geometry."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

import etloom
from support.chrome_timelines import DEVICE, START, write_ray_timeline, write_unitrace


def test_work_of_intel_s_devices(tmp_path: Path) -> None:
    path = write_unitrace(tmp_path / "app.1.json")
    trace = etloom.open(path, use_cache=False)[0]
    events = trace.events.with_columns(pl.col("name", "cat").cast(pl.String))
    work = events.filter(pl.col("cat").is_in(["kernel", "gpu_memcpy"])).sort("ts")
    rows = json.loads(path.read_text())["traceEvents"]
    expected = [
        (row["name"], round((row["ts"]) * 1000), round(row["dur"] * 1000))
        for row in rows
        if row.get("cat") == "gpu_op"
    ]
    assert work.select("name", "ts", "dur").rows() == expected
    assert set(work.select("pid", "device", "stream").iter_rows()) == {(DEVICE, 0, 1)}
    kernels = trace.kernels.join(work, left_on="event", right_on="id", maintain_order="right")
    assert kernels.select("grid_x", "grid_y", "block_x", "bytes").rows() == [
        (64, 2, 256, None), (8, 1, 128, None), (None, None, None, 4096),
    ]  # fmt: skip
    names = events.select("id", "name")
    links = trace.launches.join(names, left_on="device_event", right_on="id")
    links = links.join(names, left_on="launch", right_on="id", suffix="_call")
    links = links.join(names, left_on="operator", right_on="id", suffix="_operator").sort("device_event")
    assert links.select("name_call", "name_operator").rows() == [
        ("zeCommandListAppendLaunchKernel", "aten::mm"),
        ("zeCommandListAppendLaunchKernel", "aten::mm"),
        ("zeCommandListAppendMemoryCopy", "aten::mm"),
    ]
    table = etloom.analyze(trace, "kernel-breakdown")
    assert dict(table.group_by("kind").agg(pl.col("total_ns").sum()).iter_rows()) == {
        "computation": 121_000, "memory": 60_500,
    }  # fmt: skip


def test_ranks_of_mpi_are_ranks(tmp_path: Path) -> None:
    for rank in range(2):
        write_unitrace(tmp_path / f"app.{4100 + rank}.json", rank)
    assert etloom.open(tmp_path, use_cache=False).ranks == [0, 1]


def test_tasks_of_ray(tmp_path: Path) -> None:
    trace = etloom.open(write_ray_timeline(tmp_path / "timeline.json"), use_cache=False)[0]
    table = etloom.analyze(trace, "top-ops", top=10)
    rows = dict(table.select("name", "count").iter_rows())
    assert rows["task:execute"] == 2 and rows["ray.get"] == 1
    tasks = trace.events.filter(pl.col("name").cast(pl.String) == "train_step")
    assert tasks.select("ts", "dur").rows() == [(START * 1000, 4_000_000)]
    assert json.loads(tasks["args"].cast(pl.String)[0])["ray_category"] == "task::train_step"
    phases = trace.events.filter(pl.col("name").cast(pl.String) == "task:execute")
    assert phases["depth"].to_list() == [1, 1], "phases are inside their task"


@pytest.mark.parametrize("name", ["gemm_kernel", "HOST"])
def test_other_timelines_stay_as_they_are(name: str, tmp_path: Path) -> None:
    path = write_unitrace(tmp_path / "a.json")
    path.write_text(path.read_text().replace("HOST<", f"{name} ").replace("DEVICE<", "device "))
    trace = etloom.read(path)
    assert "gpu_op" in set(trace.events["cat"].cast(pl.String))
