"""Steps that one file marks more than once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import etloom
from etloom.core.errors import DataLoss
from support.small_traces import complete_event


@pytest.mark.parametrize(("processes", "counted"), [((7, 8), 2), ((7, 7), 0)])
def test_steps_of_several_processes_are_counted(
    tmp_path: Path, processes: tuple[int, int], counted: int
) -> None:
    """Two processes, or two threads of one, mark steps 0 and 1; 10 ms lie between them."""
    events = []
    for at, pid in enumerate(processes):
        for step in range(2):
            start = 10_000.0 * at + 200 * step
            events.append(complete_event("user_annotation", f"ProfilerStep#{step}", start, 100, pid, at))
            events.append(complete_event("cpu_op", "aten::mm", start + 10, 50, pid, at))
    (tmp_path / "trace.json").write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    trace = etloom.open(tmp_path)[0]
    assert etloom.analyze(trace, "steps")["operators"].to_list() == [2, 2]
    said = trace.stats.filter(name="link.steps_of_several_processes").select("severity", "count").rows()
    assert said == ([("error", counted)] if counted else [])
    with pytest.raises(DataLoss):
        trace.check_lossless()
    repeated = trace.stats.filter(name="link.repeated_steps").select("severity", "count").rows()
    assert repeated == ([] if counted else [("error", 2)])


def test_two_threads_of_a_process_annotate_a_step_at_the_same_time(tmp_path: Path) -> None:
    events = [complete_event("user_annotation", "ProfilerStep#0", 10 * tid, 100, 7, tid) for tid in range(2)]
    (tmp_path / "trace.json").write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    assert not etloom.open(tmp_path)[0].stats["name"].str.contains("link.*step").any()


def test_events_in_nested_steps_belong_to_the_innermost(tmp_path: Path) -> None:
    """Step 1 lies in step 0, which goes on when it has ended."""
    events = [
        complete_event("user_annotation", "ProfilerStep#0", 0, 1000, 1, 1),
        complete_event("user_annotation", "ProfilerStep#1", 100, 100, 1, 1),
    ]
    for at in (50, 150, 500, 1500):
        events.append(complete_event("cpu_op", f"aten::at_{at}", at, 10, 1, 1))
        events.append(complete_event("cuda_runtime", "cudaLaunchKernel", at + 2, 2, 1, 1, correlation=at))
        events.append(complete_event("kernel", "k", at + 6, 5, 0, 7, device=0, stream=7, correlation=at))
    (tmp_path / "trace.json").write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    trace = etloom.open(tmp_path)[0]
    operators = trace.events.filter(cat="cpu_op")
    assert operators["step"].to_list() == [0, 1, 0, None]
    steps = etloom.analyze(trace, "steps")
    assert steps.select("step", "operators", "kernels").rows() == [(0, 2, 2), (1, 1, 1)]
