"""Compiled kernels have their source where the trace states it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl

import etloom
from support.small_traces import complete_event


def test_kernels_of_inductor_and_of_a_user(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    facts = {"kernel_backend": "triton", "kernel_file": "/tmp/torchinductor/a.py"}
    kernels = [
        ("triton_poi_fused_add_bitwise_and_0", "triton_poi_fused_add_bitwise_and_0", facts),
        ("triton_poi_fused_add_bitwise_and_0", "triton_poi_fused_add_bitwise_and_0", facts),
        ("triton_per_fused_native_layer_norm_12", "CompiledFunction", {}),
        ("my_kernel", "my_kernel", {"kernel_backend": "triton"}),
        ("ampere_sgemm", "aten::mm", {}),
    ]
    for i, (kernel, operator, args) in enumerate(kernels):
        at = 100.0 * i
        events += [
            complete_event("cpu_op", operator, at, 50, 1, 1, **args),
            complete_event("cuda_runtime", "cuLaunchKernel", at + 5, 5, 1, 1, correlation=i + 1),
            complete_event("kernel", kernel, at + 20, 10, 0, 7, correlation=i + 1, device=0, stream=7),
        ]
    (tmp_path / "rank0.json").write_text(json.dumps({"traceEvents": events}))
    trace = etloom.open(tmp_path, use_cache=False)[0]
    table = etloom.analyze(trace, "compiled-kernels")
    pointwise, norm = kernels[0][0], kernels[2][0]
    columns = ("name", "backend", "form", "fused", "source", "count", "total_ns", "total_pct")
    assert table.select(columns).rows() == [
        (pointwise, "triton", "pointwise", "add_bitwise_and", facts["kernel_file"], 2, 20_000, 40.0),
        ("my_kernel", "triton", None, None, None, 1, 10_000, 20.0),
        (norm, "triton", "persistent reduction", "native_layer_norm", None, 1, 10_000, 20.0),
    ]  # fmt: skip


def test_the_source_in_a_recorded_trace(data: Path) -> None:
    trace = etloom.open(data / "hta_misc" / "triton_example.json.gz", use_cache=False)[0]
    row = etloom.analyze(trace, "compiled-kernels").row(0, named=True)
    assert (row["name"], row["form"], row["fused"]) == (
        "triton_poi_fused_add_cos_sin_0",
        "pointwise",
        "add_cos_sin",
    )
    assert row["source"].endswith("qa/cqaokwf2bph4egogzevc22vluasiyuui4i54zpemp6knbsggfbuu.py")
    assert pl.Series([row["total_pct"]]).is_between(0, 100).all()
