"""Flops, roofline and MFU of whole traces: what counts once, what is nobody's, and figures known from elsewhere."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import etloom
from etloom.analyses import mfu
from etloom.analyses.flops import counting, peaks
from etloom.analyses.flops.formulas import infer_kernel_family
from etloom.cli import app
from etloom.core.errors import AnalysisError, InvalidValue, UnknownName
from etloom.core.trace import Job, Trace
from support.real_runs import open_run
from support.small_traces import OperatorTraceBuilder, matrix_product

BF16 = "c10::BFloat16"
HOST, H100 = (10, 11), "NVIDIA H100 80GB HBM3"
Event = dict[str, Any]


def row(job: Job, analysis: str, name: str | None = None, **options: Any) -> dict[str, Any]:
    table = etloom.analyze(job, analysis, **options)
    return (table if name is None else table.filter(pl.col("name") == name)).row(0, named=True)


def test_of_operators_inside_each_other_the_outermost_with_a_formula_counts(tmp_path: Path) -> None:
    made = (
        OperatorTraceBuilder()
        .operator("aten::linear", 100, 100, [[3, 4], [5, 4], [5]])
        .operator("aten::addmm", 110, 80, [[5], [3, 4], [4, 5], [], []])
        .operator("aten::copy_", 120, 20, [[3, 5], [3, 5], []])
        .kernel("elementwise", 125, 200, 10)
        .kernel("gemm", 150, 205, 20, stream=8)
        .kernel("splitKreduce", 155, 230, 5)
    )
    table = etloom.analyze(made.open(tmp_path), "flops")
    assert table["name"].to_list() == ["aten::addmm"]
    found = table.row(0, named=True)
    assert (found["flops"], found["calls"], found["kernels"]) == (120, 1, 3)
    assert found["time_ns"] == 30_000, "two kernels ran at one time for 5 us"
    assert found["covered_pct"] == 100


@given(
    st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 30), st.integers(0, 9)), max_size=20),
    st.sampled_from([0, 2**62]),
)
def test_the_time_of_a_call_is_the_union_of_its_kernels(
    kernels: list[tuple[int, int, int]], epoch: int
) -> None:
    work = pl.DataFrame(
        [(at, call, epoch + start, dur) for at, (call, start, dur) in enumerate(kernels)],
        schema={"id": pl.UInt32, "row": pl.Int64, "ts": pl.Int64, "dur": pl.Int64},
        orient="row",
    ).with_columns(
        end=pl.col("ts") + pl.col("dur"),
        step=pl.lit(None, dtype=pl.Int64),
        replay=pl.lit(-1, dtype=pl.Int64),
        kernel_family=pl.lit("gemm"),
        tf32=pl.lit(False),
        packed=pl.lit(False),
        bus=pl.lit(False),
        product=pl.lit(True),
        gradient=pl.lit(""),
    )
    found = counting._group_by_call(work)
    alone = sorted(dur for call, _, dur in kernels if call < 0)
    assert sorted(found.filter(pl.col("row") < 0)["time_ns"]) == alone, (
        "work of nobody known is not put together"
    )
    for call in {call for call, _, _ in kernels if call >= 0}:
        ticks = {tick for of, start, dur in kernels if of == call for tick in range(start, start + dur)}
        assert found.filter(pl.col("row") == call)["time_ns"].to_list() == [len(ticks)]


def test_a_composite_operator_counts_if_it_calls_no_counted_one(tmp_path: Path) -> None:
    made = (
        OperatorTraceBuilder()
        .operator("aten::linear", 100, 100, [[3, 4], [5, 4], [5]])
        .operator("aten::matmul", 110, 50, [[3, 4], [4, 5]])
        .kernel("gemm", 120, 200, 10)
        .operator("aten::linear", 300, 100, [[3, 4], [5, 4], [5]])
        .kernel("gemm", 310, 400, 10)
        .operator("aten::linear", 500, 100, [[3, 4], [5, 4], [5]])
        .operator("aten::view", 510, 10, [[3, 4], []])
        .operator("aten::mm", 530, 50, [[3, 4], [4, 5]])
        .kernel("gemm", 540, 600, 10)
    )
    table = etloom.analyze(made.open(tmp_path), "flops").sort("name")
    assert table.select("name", "calls", "flops").rows() == [
        ("aten::linear", 1, 120),
        ("aten::matmul", 1, 120),
        ("aten::mm", 1, 120),
    ]


def test_a_composite_operator_around_a_counted_one_has_only_its_exclusive_kernels(tmp_path: Path) -> None:
    made = (
        OperatorTraceBuilder()
        .operator("aten::linear", 100, 100, [[3, 4], [5, 4], [5]])
        .operator("aten::linear", 110, 60, [[3, 4], [5, 4], [5]])
        .kernel("gemm", 120, 200, 10)
        .kernel("add_bias", 180, 220, 5)
    )
    table = etloom.analyze(made.open(tmp_path), "flops")
    assert table.select("family", "calls", "flops", "time_ns").rows() == [
        ("gemm", 1, 120, 10_000),
        ("other", 1, None, 5_000),
    ]


def test_on_the_host_too_each_product_counts_once(tmp_path: Path) -> None:
    made = (
        OperatorTraceBuilder()
        .operator("aten::linear", 100, 100, [[3, 4], [5, 4]])
        .operator("aten::matmul", 110, 80, [[3, 4], [4, 5]])
    )
    made.operator("aten::mm", 120, 60, [[3, 4], [4, 5]])
    table = etloom.analyze(made.open(tmp_path), "flops").drop_nulls("flops")
    assert table.select("name", "flops", "time_ns").rows() == [("aten::mm", 120, 60_000)]


def test_operators_without_a_formula_have_time_and_no_flops(tmp_path: Path) -> None:
    made = (
        matrix_product(100, 64)
        .kernel("gemm", 110, 200, 30)
        .operator("my::op", 300, 50, [[3, 4]])
        .kernel("flash_fwd_kernel", 310, 400, 50)
        .operator("aten::mm", 500, 50)  # its shapes were not recorded
        .kernel("gemm", 510, 600, 10)
        .kernel("ampere_sgemm_128x64_nn", None, 700, 10)
        .operator("aten::mm", 800, 50, [[64, 64], [64, 64]])  # on the host: it launched nothing
    )
    job = made.open(tmp_path)
    table = etloom.analyze(job, "flops").select(
        "family", "name", "calls", "counted", "flops", "time_ns", "covered_pct"
    )
    assert table.rows() == [
        ("attention", "my::op", 1, 0, None, 50_000, 0.0),
        ("gemm", "aten::mm", 2, 1, 2 * 64**3, 40_000, 75.0),
        ("gemm", None, 1, 0, None, 10_000, 0.0),
    ]
    whole = row(job, "flops", by="all")
    assert (whole["calls"], whole["counted"], whole["time_ns"], whole["covered_pct"]) == (4, 1, 100_000, 30.0)
    families = etloom.analyze(job, "flops", by="family")
    assert families["family"].to_list() == ["gemm", "attention"], "as long as each other: what computed more"
    assert families["time_pct"].to_list() == pytest.approx([50, 50])
    spent = etloom.analyze(job, "kernel-families").select("family", "kernels", "total_ns", "longest")
    assert spent.rows() == [("attention", 1, 50_000, "flash_fwd_kernel"), ("gemm", 3, 50_000, "gemm")]


def test_messages_have_no_flops(tmp_path: Path) -> None:
    made = (
        matrix_product(100)
        .kernel("gemm", 110, 200, 30)
        .kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 120, 240, 50)
    )
    job = made.open(tmp_path)
    assert row(job, "flops", by="all")["time_ns"] == 30_000
    families = etloom.analyze(job, "kernel-families")
    assert families["family"].to_list() == ["communication", "gemm"]


def test_a_roofline_by_hand(tmp_path: Path) -> None:
    made = (
        matrix_product(100)
        .kernel("nvjet_tst_128x256", 110, 200, 200)
        .operator("aten::add", 500, 50, [[2**24], [2**24], []])
        .kernel("vectorized_elementwise_kernel", 510, 600, 50)
        .operator("aten::copy_", 700, 50, [[2**24], [2**24], []])
        .kernel("Memcpy HtoD (Pageable -> Device)", 710, 800, 10, cat="gpu_memcpy")
    )
    table = etloom.analyze(made.open(tmp_path), "roofline")
    mm, add, copy = (table.row(at, named=True) for at in range(3))
    flops, moved = 2 * 4096**3, 2 * 3 * 4096**2
    assert (mm["name"], mm["precision"], mm["bound"]) == ("aten::mm", "bf16", "compute")
    assert (mm["flops"], mm["bytes"], mm["intensity"]) == (flops, moved, flops / moved)
    assert mm["tflops_per_s"] == pytest.approx(flops / 200e-6 / 1e12)
    assert mm["tb_per_s"] == pytest.approx(moved / 200e-6 / 1e12)
    assert mm["attainable_tflops_per_s"] == pytest.approx(989.4)
    assert mm["roofline_pct"] == pytest.approx(100 * 687.19476736 / 989.4)
    assert (add["bound"], add["precision"]) == ("memory", "vector fp32")
    assert add["roofline_pct"] == pytest.approx(100 * (6 * 2**24 / 3352e9) / 50e-6)
    assert add["attainable_tflops_per_s"] == pytest.approx(3.352 / 6)
    assert (copy["roofline_pct"], copy["bound"]) == (None, None), "the host's bus is not the device's memory"


def test_a_roofline_by_kernel_shares_a_call_out_by_time(tmp_path: Path) -> None:
    made = matrix_product(100).kernel("gemm", 110, 200, 150).kernel("splitKreduce_kernel", 120, 350, 50)
    job = made.open(tmp_path)
    table = etloom.analyze(job, "roofline", by="kernel")
    assert table["name"].to_list() == ["gemm", "splitKreduce_kernel"]
    assert table["flops"].to_list() == pytest.approx([2 * 4096**3 * 0.75, 2 * 4096**3 * 0.25])
    whole = row(job, "roofline")["roofline_pct"]
    assert table["roofline_pct"].to_list() == pytest.approx([whole, whole])


def test_float_products_run_in_tf32_if_a_kernel_name_contains_it(tmp_path: Path) -> None:
    shapes = [[64, 64], [64, 64]]
    made = (
        OperatorTraceBuilder()
        .operator("aten::mm", 100, 50, shapes, "float")
        .kernel("cutlass_80_tensorop_s1688gemm_64x64", 110, 200, 20)
        .operator("aten::mm", 300, 50, shapes, "float")
        .kernel("ampere_sgemm_64x64_nn", 310, 400, 10)
    )
    table = etloom.analyze(made.open(tmp_path, "NVIDIA A100-SXM4-40GB"), "roofline")
    assert table.select("precision", "mean_ns").rows() == [("tf32", 20_000), ("fp32", 10_000)]


@pytest.mark.slow
def test_utilisation_by_hand(tmp_path: Path) -> None:
    made = (
        matrix_product(100)
        .step(1, 50, 1000)
        .step(2, 1050, 2000)
        .kernel("gemm", 110, 200, 200)
        .operator("aten::mm", 1100, 50, [[4096, 4096], [4096, 4096]], "float")
        .kernel("gemm", 1110, 1200, 800)
    )
    table = etloom.analyze(made.open(tmp_path), "mfu")
    assert table["step"].to_list() == [1, 2, None]
    first, second, whole = (table.row(at, named=True) for at in range(3))
    flops = 2 * 4096**3
    assert (first["flops"], first["model_flops"], first["dur_ns"]) == (flops, flops, 1_000_000)
    assert first["mfu_pct"] == first["hfu_pct"] == pytest.approx(100 * flops / 989.4e12 / 1e-3)
    assert (first["precision"], first["peak_tflops_per_s"]) == ("bf16", pytest.approx(989.4))
    assert (second["precision"], second["peak_tflops_per_s"]) == ("fp32", pytest.approx(66.9))
    assert second["mfu_pct"] == pytest.approx(100 * flops / 66.9e12 / 2e-3)
    # From the first device work to the last; each product against its own peak.
    assert whole["dur_ns"] == 1_800_000
    assert whole["mfu_pct"] == pytest.approx(100 * (flops / 989.4e12 + flops / 66.9e12) / 1.8e-3)
    assert whole["covered_pct"] == 100
    # As many flops of each: the time at full speed is the sum of both, so the peak lies between.
    assert whole["precision"] == "bf16, fp32"
    assert whole["peak_tflops_per_s"] == pytest.approx(2 / (1 / 989.4 + 1 / 66.9))
    assert list(mfu.remarks(table)) == [
        "the peak of bf16, fp32 is the mean weighted by flops: each call is compared with the peak of its own precision"
    ]
    assert list(mfu.remarks(table.head(2))) == []
    only = etloom.analyze(made.open(tmp_path), "mfu", step=2)
    assert only["step"].to_list() == [2]


def test_devices_of_a_rank_count_together(tmp_path: Path) -> None:
    one = row(matrix_product(100).kernel("gemm", 110, 200, 200).open(tmp_path), "mfu")
    both = matrix_product(100).kernel("gemm", 110, 200, 200)
    both.operator("aten::mm", 160, 40, [[4096, 4096], [4096, 4096]]).kernel("gemm", 165, 200, 200, device=1)
    two = row(both.open(tmp_path), "mfu")
    assert two["flops"] == 2 * one["flops"]
    assert two["mfu_pct"] == pytest.approx(one["mfu_pct"])


def test_utilisation_reports_its_coverage_of_matrix_work(tmp_path: Path) -> None:
    made = matrix_product(100).kernel("gemm", 110, 200, 30).kernel("sm90_xmma_gemm_bf16", None, 300, 10)
    made.kernel("vectorized_elementwise_kernel", None, 400, 60)
    assert row(made.open(tmp_path), "mfu")["covered_pct"] == 75


def test_recomputed_operators_are_not_counted_as_model_flops(tmp_path: Path) -> None:
    """Forward again inside the first backward function that needs it (use_reentrant=False)."""
    node, shapes = "autograd::engine::evaluate_function: AddmmBackward0", [[64, 64], [64, 64]]
    made = (
        OperatorTraceBuilder()
        .operator("aten::mm", 100, 50, shapes, **{"Sequence number": 8, "Fwd thread id": 0})
        .kernel("gemm", 110, 2000, 10)
        .operator(node, 1000, 500, **{"Sequence number": 8, "Fwd thread id": 1})
        .operator("aten::mm", 1100, 50, shapes, **{"Sequence number": 9, "Fwd thread id": 0})
        .kernel("gemm", 1110, 2010, 10)
        .operator("aten::mm", 1200, 50, shapes)
        .kernel("gemm", 1210, 2020, 10)
    )
    found = row(made.open(tmp_path), "mfu")
    assert (found["flops"], found["model_flops"]) == (6 * 64**3, 4 * 64**3)
    assert found["mfu_pct"] == pytest.approx(found["hfu_pct"] * 2 / 3)


@pytest.mark.parametrize(
    ("device", "units", "ghz", "vector", "tensor_ghz", "matrix", "bus", "gbit"),
    [
        ("V100 SXM2", 80, 1.53, 128, 1.53, 1024, 4096, 1.75),
        ("V100 PCIe", 80, 1.37, 128, 1.37, 1024, 4096, 1.75),
        ("V100S PCIe", 80, 1.597, 128, 1.597, 1024, 4096, 2.214),
        ("A100 40GB", 108, 1.41, 128, 1.41, 2048, 5120, 2.43),
        ("A100 80GB SXM", 108, 1.41, 128, 1.41, 2048, 5120, 3.186),
        ("A100 80GB PCIe", 108, 1.41, 128, 1.41, 2048, 5120, 3.024),
        ("H100 SXM", 132, 1.98, 256, 1.83, 4096, 5120, 5.24),
        ("H100 PCIe", 114, 1.755, 256, 1.62, 4096, 5120, 3.186),
        ("H200 SXM", 132, 1.98, 256, 1.83, 4096, 6144, 6.25),
        ("B200", 148, 1.965, 256, 1.85, 8192, 7680, 8.0),
        ("MI210", 104, 1.7, 128, 1.7, 1024, 4096, 3.2),
        ("MI250 (one die)", 104, 1.7, 128, 1.7, 1024, 4096, 3.2),
        ("MI250X (one die)", 110, 1.7, 128, 1.7, 1024, 4096, 3.2),
        ("MI300X", 304, 2.1, 256, 2.1, 2048, 8192, 5.2),
        ("A10", 72, 1.695, 256, 1.695, 1024, 384, 12.5),
        ("A10G", 80, 1.71, 256, 1.71, 512, 384, 12.5),
        ("L4", 58, 2.04, 256, 2.04, 1024, 192, 12.5),
        ("L40S", 142, 2.52, 256, 2.49, 1024, 384, 18),
        ("RTX 4090", 128, 2.52, 256, 2.52, 512, 384, 21),
        ("RTX 5090", 170, 2.407, 256, 2.407, 512, 512, 28),
        ("MI350X", 256, 2.2, 256, 2.2, 4096, 8192, 7.8),
        ("MI355X", 256, 2.4, 256, 2.4, 4096, 8192, 7.8),
    ],
)
def test_peaks_follow_from_the_chips(
    device: str, units: int, ghz: float, vector: int, tensor_ghz: float, matrix: int, bus: int, gbit: float
) -> None:
    """Multiprocessors or compute units, times clock, times what each does a cycle without sparsity."""
    (found,) = (peaks for _, peaks in peaks._load_shipped_peaks() if peaks.name == device)
    assert found.tflops("vector fp32") == pytest.approx(units * ghz * vector / 1e3, rel=0.01)
    assert found.tflops("fp16") == pytest.approx(units * tensor_ghz * matrix / 1e3, rel=0.01)
    assert found.bandwidth_gbs == pytest.approx(bus * gbit / 8, rel=0.01)


def test_peaks_of_the_types_are_in_proportion_and_have_a_source() -> None:
    shipped = json.loads(Path(peaks.__file__).with_name("devices.json").read_text(encoding="utf-8"))[
        "devices"
    ]
    for entry in shipped:
        matrix, vector = entry["matrix_tflops"], entry.get("vector_tflops", {})
        assert re.search(r"(NVIDIA|AMD|Intel|Google|Huawei) .*20\d\d", entry["source"]), entry["name"]
        half = matrix.get("fp16", matrix.get("bf16"))
        assert matrix.get("bf16", half) == half
        assert matrix.get("tf32", half / 2) == pytest.approx(half / 2, rel=1e-3)
        if entry["name"] != "Gaudi 3":  # as fast with 8 bits as with 16
            assert matrix.get("fp8", 2 * half) == pytest.approx(2 * half, rel=2e-3)
        if "B300" not in entry["name"]:  # Blackwell Ultra has few units for integers
            # CDNA 2 and TPU v4 multiply 8 bits as fast as 16.
            whole = 1 if entry["name"].startswith(("MI2", "TPU v4")) else 2
            assert matrix.get("int8", whole * half) == pytest.approx(whole * half, rel=3e-3)
        assert all(matrix[precision] >= peak for precision, peak in vector.items())
    assert len({entry["name"] for entry in shipped}) == len(shipped)


@pytest.mark.parametrize(
    ("device", "name", "bf16", "gbs"),
    [
        ("Tesla V100-SXM2-32GB", "V100 SXM2", None, 900),
        ("Tesla V100-PCIE-16GB", "V100 PCIe", None, 900),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB", 312, 1555),
        ("NVIDIA A100-PG509-200", "A100 40GB", 312, 1555),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM", 312, 2039),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe", 312, 1935),
        ("NVIDIA H100 80GB HBM3", "H100 SXM", 989.4, 3352),
        ("NVIDIA H100 PCIe", "H100 PCIe", 756, 2039),
        ("NVIDIA H100 NVL", "H100 NVL", 835.5, 3938),
        ("NVIDIA H200", "H200 SXM", 989.4, 4800),
        ("NVIDIA B200", "B200", 2250, 7700),
        ("NVIDIA GB200", "GB200", 2500, 8000),
        ("NVIDIA B300 SXM6 AC", "B300", 2250, 8000),
        ("NVIDIA GB300", "GB300", 2500, 8000),
        ("NVIDIA GH200 480GB", "GH200 480GB", 989.4, 4000),
        ("NVIDIA H20", "H20", 148, 4000),
        ("NVIDIA H800", "H800 SXM", 989.4, 3352),
        ("NVIDIA A800-SXM4-80GB", "A800 80GB", 312, 2039),
        ("NVIDIA A10G", "A10G", 70, 600),
        ("NVIDIA A10", "A10", 125, 600),
        ("NVIDIA L4", "L4", 121, 300),
        ("NVIDIA L40S", "L40S", 362, 864),
        ("NVIDIA GeForce RTX 4090", "RTX 4090", 165.2, 1008),
        ("NVIDIA GeForce RTX 5090", "RTX 5090", 209.5, 1792),
        ("AMD Instinct MI325X", "MI325X", 1307.4, 6000),
        ("AMD Instinct MI355X", "MI355X", 2516.6, 8000),
        ("AMD Instinct MI210", "MI210", 181, 1638.4),
        ("AMD Instinct MI250X / MI250", "MI250X (one die)", 191.5, 1638.4),
        ("AMD Instinct MI250", "MI250 (one die)", 181.05, 1638.4),
        ("AMD Instinct MI300X VF", "MI300X", 1307.4, 5300),
    ],
)
def test_devices_are_known_by_their_names(device: str, name: str, bf16: float | None, gbs: float) -> None:
    trace = Trace({}, {"device_properties": [{"id": 1, "name": "other"}, {"id": 0, "name": device}]})
    found = peaks.find_peaks(trace, [0])
    assert (found.name, found.tflops("bf16"), found.bandwidth_gbs) == (name, bf16, gbs)
    assert found.tflops("vector fp32") and found.tflops("fp64")


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("GAUDI3", "Gaudi 3"),
        ("Ascend910ProA", "Ascend 910"),
        ("TPU v4", "TPU v4"),
        ("TPU v5 lite", "TPU v5e"),
        ("TPU v5", "TPU v5p"),
        ("TPU v6 lite", "TPU v6e"),
        ("TPU7x", "TPU7x (one device)"),
    ],
)
def test_accelerators_that_are_no_gpus_are_known(device: str, name: str) -> None:
    assert peaks.find_peaks(Trace({}, {"device_properties": [{"id": 0, "name": device}]}), [0]).name == name


@pytest.mark.parametrize(
    "device",
    [
        *("TPU v4 lite", "Ascend910B4"),
        *("NVIDIA GeForce RTX 2080 Ti", "NVIDIA GB10", "NVIDIA GH200 144G HBM3e", "NVIDIA A100-SXM-64GB"),
        *("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "", None),
    ],
)
def test_an_unknown_device_is_reported_in_one_sentence(tmp_path: Path, device: str | None) -> None:
    job = matrix_product(100).kernel("gemm", 110, 200, 200).open(tmp_path, device)
    for analysis in ("roofline", "mfu"):
        with pytest.raises(AnalysisError, match=r"peaks of .* are unknown; specify --peak-tflops") as raised:
            etloom.analyze(job, analysis)
        assert (device or "does not name") in str(raised.value)
        assert ("--bandwidth-gbs" in str(raised.value)) == (analysis == "roofline"), "only what it takes"
    assert row(job, "roofline", peak_tflops=1000.0, bandwidth_gbs=1000.0)["roofline_pct"] == pytest.approx(
        68.719476736
    )
    assert row(job, "mfu", peak_tflops=1000.0)["mfu_pct"] == pytest.approx(68.719476736)


@pytest.mark.slow
def test_peaks_of_a_file_come_first(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    entry = {
        "name": "mine",
        "match": "h100",
        "bandwidth_gbs": 10_000,
        "matrix_tflops": {"bf16": 1374.38953472},
    }
    file.write_text(json.dumps({"devices": [entry]}))
    job = matrix_product(100).kernel("gemm", 110, 200, 200).open(tmp_path)
    assert row(job, "roofline", device_peaks=str(file))["roofline_pct"] == pytest.approx(50)
    assert row(job, "mfu", device_peaks=str(file))["device"] == "mine"
    file.write_text(json.dumps({"devices": [entry | {"match": "T4"}]}))
    assert row(job, "mfu", device_peaks=str(file))["device"] == "H100 SXM"
    for content in ("{", "[]", '{"devices": [{}]}', json.dumps({"devices": [entry | {"match": "("}]})):
        file.write_text(content)
        with pytest.raises(AnalysisError, match="not a valid file of device peaks"):
            etloom.analyze(job, "mfu", device_peaks=str(file))
    with pytest.raises(AnalysisError, match="cannot read the device peaks"):
        etloom.analyze(job, "mfu", device_peaks=str(tmp_path / "absent.json"))
    with pytest.raises(InvalidValue, match="expected a positive number"):
        etloom.analyze(job, "mfu", peak_tflops=0.0)


@pytest.mark.slow
def test_on_the_host_only_durations_of_operators_count_and_device_peaks_do_not(tmp_path: Path) -> None:
    job = (
        matrix_product(100).operator("aten::view", 120, 10, [[3]]).operator("my::op", 200, 150).open(tmp_path)
    )
    table = etloom.analyze(job, "flops")
    assert table.select("name", "basis", "flops", "time_ns").rows() == [
        ("my::op", "host", None, 150_000),
        ("aten::mm", "host", 2 * 4096**3, 50_000),
    ]
    for analysis in ("roofline", "mfu"):
        with pytest.raises(AnalysisError, match="no GPU activity"):
            etloom.analyze(job, analysis)
    assert row(job, "roofline", peak_tflops=5.0, bandwidth_gbs=100.0)["tflops_per_s"] == pytest.approx(
        2748.77906944
    )


def test_shapes_of_operators_without_a_formula_are_not_missing(tmp_path: Path) -> None:
    run = OperatorTraceBuilder().operator("mine::attention", 100, 50, [[4, 64], [4, 8]])
    with pytest.raises(AnalysisError, match=r"shapes are recorded, but .* \(mine::attention\)") as error:
        etloom.analyze(run.kernel("gemm", 110, 200, 10).open(tmp_path), "flops")
    assert "record_shapes" not in str(error.value)


@pytest.mark.slow
def test_without_shapes_the_error_suggests_a_remedy(tmp_path: Path) -> None:
    job = OperatorTraceBuilder().operator("aten::mm", 100, 50).kernel("gemm", 110, 200, 10).open(tmp_path)
    for analysis in ("flops", "roofline", "mfu"):
        with pytest.raises(AnalysisError, match="record_shapes=True"):
            etloom.analyze(job, analysis)
        with pytest.raises(AnalysisError, match="no step 9"):
            etloom.analyze(matrix_product(100).kernel("gemm", 110, 200, 10).open(tmp_path), analysis, step=9)
    for analysis in ("flops", "roofline"):
        with pytest.raises(UnknownName):
            etloom.analyze(job, analysis, by="colour")
        with pytest.raises(InvalidValue, match="expected at least 1 row"):
            etloom.analyze(job, analysis, top=0)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_128x64>(Params)", "gemm"),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_MT256x128x64", "gemm"),
        ("bmm_MxE4m3_MxE2m1MxE4m3_Fp32_t128x16x256", "gemm"),
        ("void fbgemm_gpu::permute_2D_data_kernel<false, int>(int, int)", "embedding"),
        ("void split_embedding_codegen_forward_unweighted_kernel<c10::Half>(fbgemm_gpu::X)", "embedding"),
        ("void pytorch_flash::flash_fwd_kernel<64>(Flash_fwd_params)", "attention"),
        ("attn_fwd", "attention"),
        ("sm80_xmma_fprop_implicit_gemm_tf32f32", "convolution"),
        ("igemm_wrw_gtcx2_nhwc_bf16_bx0", "convolution"),
        ("void at::native::(anonymous namespace)::softmax_warp_forward<float>(float*)", "softmax"),
        # As Nsight Systems spells them.
        ("void <unnamed>::softmax_warp_forward<float, float, float, (int)6, (bool)0>(T2 *)", "softmax"),
        (
            "void at::native::vectorized_elementwise_kernel<(int)4, at::native::FillFunctor<float>, "
            "std::array<char *, (unsigned long)1>>(int, T2, T3)",
            "copy",
        ),
        ("void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*)", "rope"),
        ("void vllm::rms_norm_kernel<c10::BFloat16, 8>(attention*)", "normalisation"),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, __nv_bfloat16>(unsigned short*)", "copy"),
    ],
)
def test_the_family_of_a_kernel_follows_from_its_name(name: str, family: str) -> None:
    frame = pl.DataFrame({"kind": ["computation"], "name": [name]})
    assert frame.select(infer_kernel_family(pl.col("kind"), pl.col("name"))).item() == family


@pytest.mark.slow
def test_on_the_command_line(tmp_path: Path) -> None:
    matrix_product(100).kernel("gemm", 110, 200, 200).open(tmp_path, None)
    command = ["analyze", "roofline", str(tmp_path), "--format", "csv"]
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 1
    answered = CliRunner().invoke(app, [*command, "--peak-tflops", "1000", "--bandwidth-gbs", "1000"])
    assert answered.exit_code == 0
    assert "aten::mm" in answered.stdout
    assert CliRunner().invoke(app, ["analyze", "flops", str(tmp_path), "--by", "family"]).exit_code == 0


@pytest.mark.slow
def test_one_model_costs_the_same_on_two_vendors_devices(data: Path) -> None:
    keys = ["family", "name", "shapes", "types"]
    tables = [
        etloom.analyze(open_run(data / "tracelens" / f"{device}_qwen.json.gz"), "roofline", top=1000)
        .select(*keys, "calls", "flops", "bytes")
        .sort(keys)
        for device in ("h100", "mi300")
    ]
    assert tables[0].height == 32
    assert tables[0].equals(tables[1])


@pytest.mark.slow
def test_no_operator_of_a_real_run_beats_the_roofline(data: Path) -> None:
    for file in (
        "tracelens/h100_qwen",
        "tracelens/mi300_qwen",
        "tracelens/b200_eager",
        "hta_misc/negative_queue_a100",
    ):
        table = etloom.analyze(open_run(data / f"{file}.json.gz"), "roofline", top=10_000)
        assert 10 < table["roofline_pct"].max() <= 100, file  # type: ignore[operator]


def resnet_50_convolutions() -> list[int]:
    """Multiply-adds of each convolution, for one picture of 224 x 224; the first one first."""
    found, channels, size = [112**2 * 64 * 3 * 49], 64, 56
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            out = size // stride
            found += [size**2 * channels * width, out**2 * width * width * 9, out**2 * width * 4 * width]
            if not block:
                found.append(out**2 * channels * 4 * width)
            channels, size = 4 * width, out
    return found


@pytest.mark.slow
def test_the_flops_of_a_resnet_match_its_architecture(data: Path) -> None:
    """Shapes come from the execution trace, since Kineto recorded none; float convolutions ran in TF32."""
    table = etloom.analyze(open_run(data / "nccl_ddp"), "mfu")
    layers = resnet_50_convolutions()
    linear = 2048 * 1000
    # Backward costs twice what forward does, but the gradient of the pictures is not asked for.
    expected = 2 * 32 * (3 * (sum(layers) + linear) - layers[0])
    assert table["model_flops"].to_list()[:2] == [expected, expected]
    assert table["precision"].unique().to_list() == [
        "tf32, fp32"
    ]  # of a few convolutions no kernel says tf32
    assert math.isclose(table["covered_pct"][0], 100)


@pytest.mark.slow
def test_an_execution_trace_without_a_profile_has_flops_without_times(data: Path) -> None:
    run = open_run(data / "et_schemas" / "1.1.0-chakra.0.0.4_resnet_2gpu.json.gz")
    table = etloom.analyze(run, "flops", by="family").filter(pl.col("family").is_in(["convolution", "gemm"]))
    layers = resnet_50_convolutions()
    # Three iterations of the same network.
    assert table["flops"].sum() == 3 * 2 * 32 * (3 * (sum(layers) + 2048 * 1000) - layers[0])
    assert table.select("basis", "time_ns", "covered_pct").unique().rows() == [("none", None, None)]
    with pytest.raises(AnalysisError, match="no times"):
        etloom.analyze(run, "roofline")


def test_types_missing_in_kineto_come_from_the_execution_trace(data: Path) -> None:
    """Of the tensors in a list."""
    together = row(open_run(data / "cpu" / "ddp_2"), "flops", "aten::cat")
    alone = row(open_run(data / "cpu" / "ddp_2" / "kineto_trace_0.json.gz"), "flops", "aten::cat")
    assert together["bytes"] > 0
    assert alone["bytes"] is None


def test_operators_without_flops_are_named(tmp_path: Path) -> None:
    made = matrix_product(100).kernel("gemm", 110, 2000, 100)
    made.operator("vllm::moe_forward", 300, 100, [[888, 3072], [888, 128], []])
    made.kernel("bmm_MxE4m3", 310, 2200, 250).kernel("finalizeKernel", 320, 2450, 50)
    made.kernel("elementwise_kernel", None, 2600, 100).open(tmp_path)

    def said(name: str, *flags: str) -> str:
        return CliRunner().invoke(app, ["analyze", name, str(tmp_path), *flags, "--format", "csv"]).stderr

    lacking = "etloom: flops and bytes are unknown for 2 calls, 80.0 % of the time"
    named = "vllm::moe_forward (60.0 %), elementwise kernels without known operator (20.0 %)"
    assert said("flops") == f"{lacking}: {named}\n"
    assert said("flops", "--top", "1").endswith(f"{lacking}: {named}\n"), "of all rows, shown or not"
    assert said("flops", "--by", "family") == f"{lacking}: moe (60.0 %), elementwise (20.0 %)\n"
    assert said("flops", "--by", "all") == f"{lacking}\n"
    assert said("flops", "--name", "aten::mm") == ""
    assert said("mfu") == (
        "etloom: the flops of up to 75.0 % of the time of matrix operations are unknown: both utilizations are "
        "underestimated; see `etloom analyze flops`\n"
    )


@pytest.mark.parametrize(
    ("name", "operator", "bytes_per_call"),
    [
        ("min_of_two_tensors", "aten::min", 6_291_456),
        ("norm_backward_bytes", "aten::native_layer_norm_backward", 1_769_536),
        ("norm_backward_bytes", "aten::native_group_norm_backward", 1_573_312),
        ("triton_in_place", "triton_poi_fused_addmm_gelu_view_15", 318_786_560),
    ],
)
def test_bytes_that_operators_write(name: str, operator: str, bytes_per_call: int, data: Path) -> None:
    """Gradients of weights, results of two-argument min and tensors that a fused kernel changes in place."""
    table = etloom.analyze(etloom.open(data / f"cases/turn3/{name}.json"), "flops")
    assert table.filter(pl.col("name") == operator)["bytes"].to_list() == [bytes_per_call]


def test_the_smaller_of_two_tensors_is_no_reduction(data: Path) -> None:
    table = etloom.analyze(etloom.open(data / "cases/turn3/min_of_two_tensors.json"), "flops")
    assert table["family"].to_list() == ["elementwise"]
