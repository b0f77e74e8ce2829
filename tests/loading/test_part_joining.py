"""Files of the stages of one rank are one trace; processes that are not ranks are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl

import etloom
from support.small_traces import complete_event

BASE = 1_700_000_000_000_000_000


def write_stage(folder: Path, name: str, start_us: float, *, base: int | None = BASE, steps: int = 2) -> Path:
    """A stage of an engine: in each step an operator launches a kernel; ids begin anew in each file."""
    events: list[dict[str, Any]] = []
    for i in range(steps):
        at = start_us + 100 * i
        stage = "DECODE" if "DECODE" in name else "EXTEND"
        ids = {"correlation": i + 1, "External id": i + 1}
        launch = complete_event("cuda_runtime", "cudaLaunchKernel", at + 5, 5, 1, 1)
        kernel = complete_event("kernel", f"gemm_{stage}", at + 20, 30, 0, 7)
        launch["args"] = dict(ids)
        kernel["args"] = {**ids, "device": 0, "stream": 7}
        events += [
            complete_event("user_annotation", f"step[{stage} bs={i + 1} toks=4]", at, 90, 1, 1),
            complete_event("cpu_op", "aten::mm", at + 2, 20, 1, 1),
            launch,
            kernel,
        ]
    document = {"traceEvents": events} | ({} if base is None else {"baseTimeNanoseconds": base})
    path = folder / name
    path.write_text(json.dumps(document))
    return path


def test_stages_of_a_rank_are_one_trace(tmp_path: Path) -> None:
    write_stage(tmp_path, "171-TP-0-DECODE.trace.json", 1000, steps=3)
    write_stage(tmp_path, "171-TP-0-EXTEND.trace.json", 0)
    write_stage(tmp_path, "171-TP-1-DECODE.trace.json", 1000)
    job = etloom.open(tmp_path, use_cache=False)
    assert job.ranks == [0, 1]
    trace = job[0]
    assert [Path(file).name for file in trace.meta["files"]] == [
        "171-TP-0-EXTEND.trace.json", "171-TP-0-DECODE.trace.json"
    ]  # fmt: skip
    assert trace.events["ts"].is_sorted()
    assert trace.events["id"].to_list() == list(range(trace.events.height))
    assert trace.events["position"].is_unique().all()
    assert not trace.stats["severity"].is_in(["data_loss", "error"]).any()
    # Each kernel is of the call of its own file, although both files use the same numbers.
    names = trace.events.select("id", pl.col("name").cast(pl.String), "ts", "step")
    pairs = trace.launches.join(names, left_on="device_event", right_on="id").join(
        names, left_on="launch", right_on="id", suffix="_launch"
    )
    assert pairs.sort("ts").select(pl.col("ts") - pl.col("ts_launch")).to_series().to_list() == [15_000] * 5
    assert pairs.sort("ts")["name"].to_list() == ["gemm_EXTEND"] * 2 + ["gemm_DECODE"] * 3
    table = etloom.analyze(trace, "iterations")
    assert table["phase"].to_list() == ["prefill"] * 2 + ["decode"] * 3
    assert table["requests"].to_list() == [1, 2, 1, 2, 3]


def test_stages_that_overlap_in_time_are_not_joined(tmp_path: Path) -> None:
    write_stage(tmp_path, "rank0-EXTEND.trace.json", 0)
    write_stage(tmp_path, "rank0-DECODE.trace.json", 50, steps=3)
    trace = etloom.open(tmp_path, use_cache=False)[0]
    rows = dict(trace.stats.select("name", "example").iter_rows())
    assert "EXTEND.trace.json is ignored" in rows["job.duplicate_rank_files"]
    assert set(trace.events["name"].cast(pl.String)) >= {"gemm_DECODE"}
    assert "gemm_EXTEND" not in set(trace.events["name"].cast(pl.String))


def test_times_without_a_common_zero_are_not_joined(tmp_path: Path) -> None:
    write_stage(tmp_path, "rank0-EXTEND.trace.json", 0, base=None)
    write_stage(tmp_path, "rank0-DECODE.trace.json", 1000, base=None)
    trace = etloom.open(tmp_path, use_cache=False)[0]
    assert trace.stats["name"].is_in(["job.duplicate_rank_files"]).sum() == 1


def test_processes_that_are_not_ranks_are_named(tmp_path: Path) -> None:
    for rank in (0, 1):
        write_stage(tmp_path, f"dp0_rank{rank}.171.pt.trace.json", 0)
    for name in (
        "host_17.async_llm.171.pt.trace.json",
        "171-tokenizer_manager.trace.json",
        "detokenizer.trace.json",
    ):
        write_stage(tmp_path, name, 0)
    job = etloom.open(tmp_path, use_cache=False)
    assert job.ranks == [0, 1]
    assert sorted(job.meta["processes"]) == ["async_llm", "detokenizer", "tokenizer_manager"]
    assert (job.run_stats["name"] == "job.other_process").sum() == 3


def test_the_only_trace_of_a_scheduler_is_a_rank(tmp_path: Path) -> None:
    write_stage(tmp_path, "scheduler.trace.json", 0)
    job = etloom.open(tmp_path, use_cache=False)
    assert job.ranks == [0]
    assert "processes" not in job.meta
