"""What a simulation calls a step."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

import etloom
from support import small_traces


@pytest.mark.parametrize(("kernel_us", "before_us"), [(600, 1000), (1500, 1800)])
def test_a_step_lasts_until_its_gpu_activity_ends(tmp_path: Path, kernel_us: int, before_us: int) -> None:
    """Its mark lasts from 100 to 1100 us, its gemm begins at 400 us."""
    run = small_traces.kineto(0, 1)
    for event in run["traceEvents"]:
        if event["name"] == "gemm":
            event["dur"] = kernel_us
    path = tmp_path / "kineto_trace_0.json"
    path.write_text(json.dumps(run))
    job = etloom.open(path, use_cache=False)
    done = etloom.simulate(job, "kernel x1")
    assert done.table.filter(pl.col("scope") == "step")["before_ns"].to_list() == [before_us * 1000]
    assert etloom.analyze(job, "steps")["dur_ns"].to_list() == [1_000_000]
