"""Counters of kernels joined to operators by order: by hand, and as HolisticTraceAnalysis finds them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import etloom
from etloom.core.errors import AnalysisError, UnknownName
from etloom.core.trace import Trace
from support.small_traces import COUNTER_EVENTS, counter_event


def opened(tmp_path: Path, events: list[dict[str, Any]]) -> Trace:
    path = tmp_path / "kineto_trace_0.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return etloom.open(path, use_cache=False)[0]


def test_ranges_are_joined_to_launches_in_their_order(tmp_path: Path) -> None:
    found = etloom.analyze(opened(tmp_path, COUNTER_EVENTS), "cupti-counters")
    assert found.rows() == [
        ("dram__bytes", "aten::addmm", "aten::linear", "gemm", 2, 2.0, 1.0, 0.5, 1.5),
        ("dram__bytes", None, None, "alone", 1, 2.0, 2.0, 2.0, 2.0),
        ("inst", "aten::addmm", "aten::linear", "gemm", 2, 40.0, 20.0, 10.0, 30.0),
        ("inst", None, None, "alone", 1, 7.0, 7.0, 7.0, 7.0),
    ]
    chosen = etloom.analyze(opened(tmp_path, COUNTER_EVENTS), "cupti-counters", counter="in*")
    assert chosen["counter"].unique().to_list() == ["inst"]
    with pytest.raises(UnknownName, match="cycles"):
        etloom.analyze(opened(tmp_path, COUNTER_EVENTS), "cupti-counters", counter="cycles")


def test_a_value_beyond_all_floats_is_null(tmp_path: Path) -> None:
    events = json.loads(json.dumps(COUNTER_EVENTS).replace('"inst": 7', '"inst": 7' + "0" * 400))
    assert events != COUNTER_EVENTS
    found = etloom.analyze(opened(tmp_path, events), "cupti-counters", counter="inst")
    assert "alone" not in found["kernel"].to_list()


@pytest.mark.parametrize("change", ["a launch less", "two devices"])
def test_an_ambiguous_order_is_not_guessed(tmp_path: Path, change: str) -> None:
    events = (
        [*COUNTER_EVENTS[:-1], counter_event("alone", 21, 1, inst=7)]
        if change == "two devices"
        else COUNTER_EVENTS[:5] + COUNTER_EVENTS[6:]
    )
    trace = opened(tmp_path, events)
    with pytest.raises(AnalysisError, match=r"cannot be joined by their order.*by=kernel"):
        etloom.analyze(trace, "cupti-counters")
    kernels = etloom.analyze(trace, "cupti-counters", by="kernel").filter(pl.col("counter") == "inst")
    assert kernels.select("operator", "kernel", "total").rows() == [
        (None, "gemm", 40.0),
        (None, "alone", 7.0),
    ]


@pytest.mark.slow
def test_a_trace_without_counters_is_refused_with_how_to_record_them(own: Path) -> None:
    with pytest.raises(AnalysisError, match="profiler_metrics"):
        etloom.analyze(etloom.open(own / "ddp_2"), "cupti-counters")


def test_counters_of_a_real_trace_are_htas(data: Path) -> None:
    """The sums and counts that get_cupti_counter_data_with_operators of HTA 0.6 gives for this file."""
    path = data / "hta_misc" / "benchmark_result_924719_1679055439_trace.json.gz"
    found = etloom.analyze(etloom.open(path)[0], "cupti-counters", counter="*_op_ffma_*")
    sums = found.group_by("operator", "top_operator").agg(pl.col("total", "launches").sum())
    assert {row[:2]: row[2:] for row in sums.iter_rows()} == {
        ("aten::cudnn_convolution", "aten::conv2d"): (23_887_265_792, 28),
        ("aten::addmm", "aten::linear"): (15_067_250_688, 12),
        ("aten::add_", "aten::conv2d"): (124_157_952, 10),
        ("aten::uniform_", "aten::rand"): (38_731_776, 1),
        ("aten::_adaptive_avg_pool2d", "aten::adaptive_avg_pool2d"): (20_146_616, 2),
        ("aten::native_dropout", "aten::dropout"): (4_816_896, 4),
        ("aten::clamp_min_", "aten::relu_"): (0, 14),
        ("aten::max_pool2d_with_indices", "aten::max_pool2d"): (0, 6),
    }
