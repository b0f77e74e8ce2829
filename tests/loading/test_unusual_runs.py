"""Runs that no profiler writes on a good day: each verb answers, or says in one line why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import etloom
from etloom.cli import main
from etloom.comparison.gate import judge_regression
from etloom.core.errors import AnalysisError, EtloomError, InvalidValue, ReadError
from etloom.core.trace import Job
from support import small_traces


def opened(tmp_path: Path, events: list[dict[str, Any]], **header: Any) -> Job:
    file = tmp_path / "kineto_trace_0.json"
    file.write_text(json.dumps({"traceEvents": events, **header}))
    return etloom.open(file, use_cache=False)


def streams(tmp_path: Path) -> Job:
    """Five steps, each with a launched kernel on each of two streams; before them one that nothing launched."""
    events = [small_traces.complete_event("kernel", "left", 5, 20, 0, 7, device=0, stream=7, correlation=999)]
    for step in range(5):
        at = 100 * step + 10
        events.append(small_traces.complete_event("user_annotation", f"ProfilerStep#{step}", at, 90, 1, 1))
        for stream in (7, 9):
            own = {"correlation": 10 * step + stream}
            events.append(
                small_traces.complete_event("cuda_runtime", "cudaLaunchKernel", at + stream, 1, 1, 1, **own)
            )
            events.append(
                small_traces.complete_event(
                    "kernel", "k", at + 30 + stream, 5, 0, stream, device=0, stream=stream, **own
                )
            )
    return opened(tmp_path, events)


def test_work_of_several_streams_is_compared(tmp_path: Path) -> None:
    job = streams(tmp_path)
    found = etloom.diff(job, job)
    assert any(
        "up to 0.01 ms (before) and 0.01 ms (after) of a rank's GPU time was launched outside" in line
        for line in found.notes
    )
    assert found.table("kernel").select("kernel", "count_before").rows() == [("k", 2.0)]


@pytest.mark.slow
def test_analyses_of_the_job_have_rows_without_a_rank(data: Path) -> None:
    for name in ("collectives", "collective-summary", "imbalance"):
        assert main(["analyze", name, str(data / "dlrm")]) == 0


def test_ids_far_apart_take_no_table_of_their_size(tmp_path: Path) -> None:
    job = etloom.open(small_traces.write_run(tmp_path / "run"), use_cache=False)
    first = job[0]
    far = {"id": pl.col("id") + 2_000_000_000}
    known = etloom.analyze(Job({0: first}), "top-ops")
    events = first.events.with_columns(**far, parent=pl.col("parent") + 2_000_000_000)
    launches = first.launches.with_columns(pl.col("launch", "device_event", "operator") + 2_000_000_000)
    moved = first.replace(events=events, launches=launches)
    assert etloom.analyze(Job({0: moved}), "top-ops").equals(known)
    etloom.export(Job({0: moved}), tmp_path / "moved.parquet")
    assert len(etloom.open(tmp_path / "moved.parquet", use_cache=False)) == 1
    beyond = first.replace(events=first.events.with_columns(id=pl.col("id") + (1 << 31)))
    etloom.export(Job({0: beyond}), tmp_path / "beyond.parquet")
    with pytest.raises(ReadError, match="ids are row numbers"):
        etloom.open(tmp_path / "beyond.parquet", use_cache=False)


def test_step_annotations_outside_any_stack_have_a_step_time(tmp_path: Path) -> None:
    job = streams(tmp_path)
    flat = Job({0: job[0].replace(events=job[0].events.with_columns(depth=pl.lit(None, pl.Int16)))})
    assert judge_regression([flat], [job], 3.0)["verdict"].to_list() == ["passed"]


@pytest.mark.slow
def test_a_step_number_beyond_64_bits_is_not_a_step(tmp_path: Path) -> None:
    job = opened(tmp_path, [small_traces.complete_event("user_annotation", f"ProfilerStep#{10**22}", 1, 900, 1, 1),
                            small_traces.complete_event("cpu_op", "aten::mm", 5, 10, 1, 1)])  # fmt: skip
    etloom.report(job, tmp_path / "r.html")
    with pytest.raises(AnalysisError, match=f"unknown step {10**30}"):
        etloom.select(job, step=10**30)
    with pytest.raises(InvalidValue, match="expected a time range"):
        etloom.select(job, time="99999999999999999999s:")
    with pytest.raises(EtloomError, match="too large"):
        etloom.analyze(job, "top-ops", top=10**30)


@pytest.mark.slow
def test_a_report_of_steps_without_length_and_work_without_names(tmp_path: Path) -> None:
    events = [
        small_traces.complete_event("user_annotation", f"ProfilerStep#{step}", step, 0, 1, 1)
        for step in range(5)
    ]
    events += [
        small_traces.complete_event("cpu_op", "", 10, 5, 1, 1),
        small_traces.complete_event("gpu_memcpy", "", 12, 5, 0, 7, stream=7),
    ]
    for event in events[5:]:
        del event["name"]
    job = opened(tmp_path, events, deviceProperties=[{"id": 0, "name": 7}, "x", None])
    etloom.report(job, tmp_path / "r.html")
    assert "unnamed" in (tmp_path / "r.html").read_text()
    assert etloom.analyze(job, "memory-bandwidth-summary").height == 1


@pytest.mark.slow
def test_ranks_of_different_time_bases_are_reported(data: Path) -> None:
    device, host = etloom.open(data / "dlrm")[0], etloom.open(data / "cpu/ddp_2")[1]
    found = etloom.diff(Job({0: device, 1: host}), Job({0: device}))
    assert any("refer to the GPU for some ranks and to the host for others" in line for line in found.notes)
    assert found.explanation is None


def test_a_job_without_ranks_is_not_a_run() -> None:
    for ask in (lambda: etloom.diff(Job({}), Job({})), lambda: etloom.analyze(Job({}), "collectives")):
        with pytest.raises(EtloomError, match="the Job has no ranks"):
            ask()
