"""Computation replay: a recorded step runs again with the shapes and types that were recorded."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

import etloom
from etloom.replayer.resolve import resolve

pytestmark = pytest.mark.torch


def test_a_recorded_mlp_replays_whole(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch.profiler import ExecutionTraceObserver, profile

    from etloom.replayer.compute import replay

    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    observer = ExecutionTraceObserver().register_callback(str(tmp_path / "torch_et_0.json"))
    with profile(execution_trace_observer=observer):
        model(torch.rand(5, 8)).sum().backward()
    coverage = replay(etloom.read(tmp_path / "torch_et_0.json"), "cpu").coverage
    assert coverage.filter(pl.col("result") == "replayed")["share_of_count"].sum() >= 0.98, coverage
    assert coverage.filter(pl.col("name") == "aten::linear")["count"].to_list() == [2]


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("aten::from_file(str filename) -> Tensor", "not allowed for a trace of unknown origin"),
        ("mine::add(Tensor a) -> Tensor", "namespace mine is not allowed"),
        ("aten::no_such(Tensor a) -> Tensor", "not in this torch"),
    ],
)
def test_what_a_stranger_may_not_run_has_a_reason(schema: str, reason: str) -> None:
    pytest.importorskip("torch")
    assert resolve(schema, frozenset({"aten"}))[2] == reason
