"""Operators by their arguments: by Kineto's shapes, and by those of the execution trace where Kineto has none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import etloom
from etloom.cli import main
from etloom.core.errors import AnalysisError
from support import small_traces

TENSOR, OTHER = [7, 8, 0, 32, 4, "cuda:0"], [9, 10, 0, 3, 4, "cuda:0"]
CALL = {
    "values": [TENSOR, [OTHER, OTHER], 2, "<None>"],
    "shapes": [[4, 8], [[3], [5]], [], []],
    "types": ["Tensor(float)", "GenericList[Tensor(c10::Half),Tensor(c10::Half)]", "Int", "None"],
    "strides": [[8, 1], [[1], [1]], [], []],
}


def run(folder: Path, kineto_shapes: bool, call: dict[str, Any]) -> Path:
    """A run of one rank, whose node of aten::mm holds the call; aten::linear may have shapes in Kineto's trace."""
    small_traces.write_run(folder, (0,))
    nodes = small_traces.execution_trace()
    for node in nodes["nodes"]:
        if node["name"] in ("aten::mm", "aten::linear"):
            node["inputs"] = call
    (folder / "torch_et_0.json").write_text(json.dumps(nodes))
    trace = small_traces.kineto(0, 1)
    if not kineto_shapes:
        for event in trace["traceEvents"]:
            event["args"].pop("Input Dims", None)
    (folder / "kineto_trace_0.json").write_text(json.dumps(trace))
    return folder


NODE = (
    "[[4, 8], [[3], [5]], [], []]",
    '["float", "TensorList", "Int", "None"]',
    '[null, null, 2, "<None>"]',
)


def test_arguments_missing_in_kineto_come_from_the_execution_trace(tmp_path: Path) -> None:
    job = etloom.open(run(tmp_path / "run", True, CALL), use_cache=False)
    table = etloom.analyze(job[0], "unique-args")
    rows = {name: rest for name, *rest in table.select("name", "shapes", "types", "values").rows()}
    assert rows["aten::mm"] == list(NODE)
    assert [json.loads(rows["aten::linear"][0]), *rows["aten::linear"][1:]] == [[[4, 8], [8, 8]], None, None]
    figures = {name: rest for name, *rest in table.select("name", "count", "self_ns", "total_ns").rows()}
    assert figures["aten::mm"] == [1, 230_000, 250_000]


def test_shapes_of_an_execution_trace_without_a_profile(tmp_path: Path) -> None:
    job = etloom.open(run(tmp_path / "run", False, CALL), use_cache=False)
    table = etloom.analyze(job[0], "unique-args", operator="aten::linear")
    assert table.select("shapes", "types", "values").rows() == [NODE]


def alone(folder: Path) -> Path:
    """The execution trace of that run, with one more step after its last operator."""
    run(folder, False, CALL)
    file = folder / "torch_et_0.json"
    trace = json.loads(file.read_text())
    first = min(trace["nodes"], key=lambda node: node["id"] if node["name"].startswith("aten::") else 10**9)
    trace["nodes"].append(first | {"name": "ProfilerStep#4", "id": max(n["id"] for n in trace["nodes"]) + 1})
    file.write_text(json.dumps(trace))
    return file


def test_an_execution_trace_without_a_profile_has_counts_without_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = alone(tmp_path / "run")
    job = etloom.open(file, use_cache=False)
    table = etloom.analyze(job[0], "unique-args")
    known = table.filter(table["shapes"].is_not_null())
    assert sorted(known.select("name", "shapes", "types", "values", "count").rows()) == [
        ("aten::linear", *NODE, 1), ("aten::mm", *NODE, 1)
    ]  # fmt: skip
    assert table["self_ns"].null_count() == table["total_ns"].null_count() == table.height
    assert etloom.analyze(job[0], "unique-args", step=3).equals(table)
    assert etloom.analyze(job[0], "unique-args", step=4).is_empty()  # its mark is the last node
    with pytest.raises(AnalysisError, match="the trace contains no step 5; available steps: 3, 4"):
        etloom.analyze(job[0], "unique-args", step=5)
    for name in ("steps", "top-ops", "findings", "critical-path", "temporal-breakdown"):
        with pytest.raises(
            AnalysisError, match="of an execution trace have no times; use `flops`, `unique-args`"
        ):
            etloom.analyze(job, name)
    assert main(["info", str(file)]) == 0
    assert "\nsteps    2 (numbers 3, 4), without times\n" in capsys.readouterr().out
    etloom.report(job, tmp_path / "r.html")
    assert "no device" not in (tmp_path / "r.html").read_text().partition("</header>")[0]


@pytest.mark.slow
def test_a_trace_without_events_is_refused_with_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in ("[]", '{"traceEvents": []}'):
        (tmp_path / "empty.json").write_text(text)
        assert main(["info", str(tmp_path / "empty.json")]) == 0
        out = capsys.readouterr().out
        assert out.endswith("no events\n")
        assert "no data was lost" not in out
        for name in ("steps", "top-ops", "unique-args", "findings", "critical-path"):
            with pytest.raises(AnalysisError, match="the trace contains no events"):
                etloom.analyze(etloom.open(tmp_path / "empty.json"), name)


def test_without_shapes_the_error_suggests_a_remedy(tmp_path: Path) -> None:
    nothing: dict[str, Any] = {"values": [], "shapes": [], "types": [], "strides": []}
    job = etloom.open(run(tmp_path / "run", False, nothing), use_cache=False)
    with pytest.raises(AnalysisError, match="or add the run's execution trace to the folder"):
        etloom.analyze(job[0], "unique-args")
