"""Files in which some rows do not state their process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import etloom
from support import small_traces

LOSSES: dict[str, Callable[[dict[str, Any]], bool]] = {
    "steps": lambda row: "ProfilerStep" in row.get("name", ""),
    "operators": lambda row: row.get("cat") == "cpu_op",
    "calls": lambda row: row.get("cat") == "cuda_runtime",
    "some": lambda row: len(row.get("name", "")) % 2 == 0,
    "all": lambda row: row.get("cat") is not None,
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.slow
def test_rows_without_a_process_are_of_the_only_one(loss: str, tmp_path: Path) -> None:
    small_traces.write_run(tmp_path)
    whole = etloom.open(tmp_path, use_cache=False)
    for file in tmp_path.glob("kineto*"):
        trace = json.loads(file.read_text())
        for row in trace["traceEvents"]:
            if row.get("cat") != "kernel" and LOSSES[loss](row):
                row.pop("pid", None)
        file.write_text(json.dumps(trace))
    job = etloom.open(tmp_path, use_cache=False)
    for rank in job:
        columns = ["name", "parent", "depth", "step"]
        assert job[rank].events.select(columns).equals(whole[rank].events.select(columns))
        assert job[rank].launches.equals(whole[rank].launches)
    assert job.stats.filter(name="read.absent_value").height == len(job)
    assert job.stats.filter(name="link.processes_differ").is_empty()
