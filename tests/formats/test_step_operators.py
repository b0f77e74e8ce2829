"""Step annotations that torch 1.8 and 1.9 record with the category of operators."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

import etloom
from support import small_traces


@pytest.mark.parametrize("category", ["Operator", "cpu_op", "user_annotation"])
def test_steps_of_any_category_are_steps(tmp_path: Path, category: str) -> None:
    document = small_traces.kineto(world=1)
    for event in document["traceEvents"]:
        if event["name"].startswith("ProfilerStep"):
            event["cat"] = category
    path = tmp_path / "kineto_trace_0.json"
    path.write_text(json.dumps(document))
    job = etloom.open(path)
    steps = etloom.analyze(job, "steps")
    assert steps["step"].to_list() == [3] and steps["operators"].to_list() == [2]
    top = etloom.analyze(job, "top-ops")["name"].cast(pl.String).to_list()
    assert not any(name.startswith("ProfilerStep") for name in top)
    stats = etloom.read(path).stats.filter(pl.col("name") == "read.step_operators")
    assert stats["count"].sum() == (category != "user_annotation")
