"""What a simulation calls a step."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

import etloom
from etloom.simulator.chains import contract_scenario
from etloom.simulator.recorded_run import describe_recording
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


@pytest.mark.parametrize(("kernel_us", "period_us"), [(400, 1_000), (1_500, 1_500)])
def test_the_step_time_is_that_of_a_device_that_lags_behind(
    tmp_path: Path, kernel_us: int, period_us: int
) -> None:
    """The host begins a step each 1,000 us, whether or not the kernel of the last one has ended."""
    run = small_traces.RankBuilder()
    for step in range(4):
        at = 1_000 * step
        run.step(step, at, 990).op("aten::mm", at + 10, 20)
        run.kernel(at + 15, max(at + 20, 20 + kernel_us * step), kernel_us)
    run.trace(tmp_path)
    scenario = describe_recording(etloom.open(tmp_path, use_cache=False))
    chains = contract_scenario(scenario)
    row = chains.durations.rows["scope"].to_list().index("step time")
    assert chains.durations.measure(chains.scenario.graph.time)[row] == period_us * 1_000
