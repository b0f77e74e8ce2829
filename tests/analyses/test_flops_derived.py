"""Flops of backward operators without shapes: what follows from forward, and what does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import etloom
from etloom.analyses.flops import counting
from etloom.core.arrays import rows_of_ids
from etloom.core.nesting import find_nearest_ancestor
from etloom.core.trace import Job, Trace
from support.small_traces import OperatorTraceBuilder

FORWARD, BACKWARD = {"Sequence number": 8, "Fwd thread id": 0}, {"Sequence number": 8, "Fwd thread id": 1}


def row(job: Job, analysis: str, name: str | None = None, **options: Any) -> dict[str, Any]:
    table = etloom.analyze(job, analysis, **options)
    return (table if name is None else table.filter(pl.col("name") == name)).row(0, named=True)


LINEAR = [[5], [3, 4], [4, 5], [], []]
ONE = 2 * 3 * 4 * 5
Q = [2, 8, 128, 64]  # batch, length, heads, size


def forward() -> OperatorTraceBuilder:
    made = (
        OperatorTraceBuilder()
        .operator("aten::addmm", 100, 50, LINEAR, **FORWARD)
        .kernel("gemm", 110, 2000, 10)
    )
    return made.operator("LinearBackward", 1000, 500, **BACKWARD)


def backward(tmp_path: Path, made: OperatorTraceBuilder, name: str = "LinearBackward") -> dict[str, Any]:
    return row(made.open(tmp_path), "flops", name)


def test_each_product_in_backward_costs_as_much_as_in_forward(tmp_path: Path) -> None:
    made = forward().kernel("ampere_bf16_s16816gemm_nn", 1010, 2100, 10)
    made.kernel("splitKreduce_kernel", 1020, 2200, 2).kernel("vectorized_elementwise_kernel", 1030, 2300, 1)
    found = backward(tmp_path, made)
    assert (found["family"], found["flops"], found["counted"], found["bytes"]) == ("gemm", ONE, 1, None)
    assert found["covered_pct"] == 100
    both = backward(tmp_path, made.kernel("ampere_bf16_s16816gemm_nt", 1040, 2400, 10))
    assert (both["flops"], both["time_ns"]) == (2 * ONE, 23_000)
    whole = row(made.open(tmp_path), "mfu")
    assert (whole["flops"], whole["model_flops"], whole["precision"]) == (3 * ONE, 3 * ONE, "bf16")


def test_operators_without_shapes_are_products_too(tmp_path: Path) -> None:
    made = forward().operator("aten::mm", 1010, 50).kernel("gemm", 1020, 2100, 10)
    assert backward(tmp_path, made, "aten::mm")["flops"] == ONE
    # The other gradient says its shapes: both count, each by what is known of it.
    made.operator("aten::mm", 1110, 50, [[4, 3], [3, 5]]).kernel("gemm", 1120, 2200, 10)
    assert backward(tmp_path, made, "aten::mm")["flops"] == 2 * ONE


@pytest.mark.slow
def test_costs_that_cannot_be_derived_are_reported_as_unknown(tmp_path: Path) -> None:
    three = forward()
    for at in range(3):
        three.kernel("gemm", 1010 + at, 2100 + 20 * at, 10)
    found = backward(tmp_path, three)
    assert (found["flops"], found["counted"], found["covered_pct"]) == (None, 0, 0.0)
    assert row(three.open(tmp_path), "flops", by="all")["covered_pct"] == pytest.approx(25)
    # Of two products in forward nobody knows which one a kernel is the gradient of.
    two = OperatorTraceBuilder().operator("Expert", 100, 200, **FORWARD)
    two.operator("aten::mm", 110, 20, [[3, 4], [4, 5]]).kernel("gemm", 115, 2000, 10)
    two.operator("aten::mm", 140, 20, [[3, 5], [5, 6]]).kernel("gemm", 145, 2020, 10)
    two.operator("ExpertBackward", 1000, 500, **BACKWARD).kernel("gemm", 1010, 2100, 10)
    assert backward(tmp_path, two, "ExpertBackward")["flops"] is None
    alone = (
        OperatorTraceBuilder().operator("aten::mm", 100, 50, [[3, 4], [4, 5]]).kernel("gemm", 110, 2000, 10)
    )
    alone.operator("MmBackward0", 1000, 500, **BACKWARD).kernel("gemm", 1010, 2100, 10)
    assert backward(tmp_path, alone, "MmBackward0")["flops"] is None, "nothing says which forward it is of"


def attention(value_size: int) -> OperatorTraceBuilder:
    shapes = [Q, Q, [*Q[:3], value_size], [], [], [], [], [], [], [], [], [], []]
    values = ["", "", "", "", "", "128", "128", "0.", "False", "False", "", "", ""]
    made = OperatorTraceBuilder().operator(
        "aten::_flash_attention_forward", 100, 50, shapes, **FORWARD, **{"Concrete Inputs": values}
    )
    made.kernel("flash_fwd_kernel", 110, 2000, 10)
    return made.operator("FlashAttnFuncBackward", 1000, 500, **BACKWARD)


@pytest.mark.slow
def test_attention_backward_is_five_products_if_forward_is_two(tmp_path: Path) -> None:
    made = (
        attention(64)
        .kernel("flash_bwd_dot_do_o_kernel", 1010, 2100, 5)
        .kernel("flash_bwd_dq_dk_dv", 1020, 2110, 20)
    )
    job = made.open(tmp_path)
    ahead = row(job, "flops", "aten::_flash_attention_forward")["flops"]
    found = row(job, "flops", "FlashAttnFuncBackward")
    assert found["family"] == "attention" and ahead > 0
    assert found["flops"] * 2 == ahead * 5
    whole = row(job, "mfu")
    assert (whole["flops"], whole["model_flops"]) == (ahead * 7 // 2, ahead * 3)
    other = attention(32).kernel("flash_bwd_dq_dk_dv", 1020, 2110, 20)
    assert backward(tmp_path, other, "FlashAttnFuncBackward")["flops"] is None


NCHW = [[8, 16, 10, 10], [32, 16, 3, 3], [32], [], [], [], [], [], []]
CONVOLVED = 2 * 8 * 8 * 8 * 32 * 16 * 3 * 3  # without padding of each 10 places 8 remain


@pytest.mark.parametrize(
    ("kernels", "gradients"),
    [
        (["sm80_xmma_dgrad_implicit_gemm", "nchwToNhwcKernel", "sm80_xmma_wgrad_implicit_gemm"], 2),
        (["cudnn::winograd_nonfused::winogradWgradData4x4", "volta_sgemm_64x64_nt", "dgrad_engine"], 2),
        (["igemm_wrw_gtcx2_nhwc", "igemm_bwd_gtcx2_nhwc"], 2),
        (["wgrad_alg0_engine", "reduce_wgrad_nchw_helper", "vectorized_elementwise_kernel"], 1),
        (["winogradWgradData4x4", "volta_sgemm_64x64_nt"], None),
        (["cudnn_infer_volta_scudnn_128x64_stridedB_small_nn_v1", "wgrad_alg0_engine"], None),
        (["cutlass_80_tensorop_s1688gemm_64x64_nt", "cutlass_80_tensorop_s1688gemm_64x64_tn"], None),
    ],
)
def test_a_gradient_of_a_convolution_costs_as_much_as_forward(
    tmp_path: Path, kernels: list[str], gradients: int | None
) -> None:
    values = ["", "", "", "[1, 1]", "[0, 0]", "[1, 1]", "False", "[0, 0]", "1"]
    made = OperatorTraceBuilder().operator(
        "aten::convolution", 100, 50, NCHW, **FORWARD, **{"Concrete Inputs": values}
    )
    made.kernel("fprop", 110, 2000, 10).operator("ConvolutionBackward0", 1000, 500, **BACKWARD)
    made.operator("aten::convolution_backward", 1005, 400)
    for at, name in enumerate(kernels):
        made.kernel(name, 1010 + 10 * at, 2100 + 20 * at, 10)
    job = made.open(tmp_path)
    assert row(job, "flops", "aten::convolution")["flops"] == CONVOLVED
    found = row(job, "flops", "aten::convolution_backward")
    assert (found["family"], found["flops"]) == ("convolution", gradients and gradients * CONVOLVED)
    assert found["covered_pct"] == (100 if gradients else 0)


def blinded(trace: Trace) -> tuple[Trace, np.ndarray]:
    """The trace without the shapes of what ran in a backward operator, and which events those are."""
    events, joins = trace.events, trace.thread_dependencies.filter(pl.col("kind") == "fwd_bwd")
    is_backward = np.zeros(events.height, np.bool_)
    is_backward[rows_of_ids(events, joins["event"])] = True
    inside = (
        find_nearest_ancestor(rows_of_ids(events, events["parent"]), is_backward, np.arange(events.height))
        >= 0
    )
    gone = events.select("id").filter(pl.Series(inside)).rename({"id": "event"})
    tables = {
        name: getattr(trace, name).join(gone, on="event", how="anti") for name in ("arguments", "links")
    }
    return trace.replace(**tables), inside


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "products", "attentions", "convolutions"),
    [
        ("cpu/ddp_2", 64, 8, 0),
        ("cpu/pp_4", 128, 16, 0),
        ("nccl_ddp", 6, 0, 75),  # of 159: the kernels of the others are plain products
        ("dlrm", 15, 0, 0),
        ("hta_misc/mi250_minitoy_train_ROCm6_2_kineto.json.gz", 1, 0, 0),
    ],
)
def test_derived_costs_equal_recorded_ones(
    data: Path, run: str, products: int, attentions: int, convolutions: int
) -> None:
    trace = etloom.open(data / run)[0]
    blind, inside = blinded(trace)
    told, derived = (
        {
            found["row"]: (found["family"], found["flops"], found["model_flops"], found["dtype"])
            for found in counting.count_calls(one).filter(pl.col("row") >= 0).rows(named=True)
            if inside[found["row"]] and found["family"] in ("gemm", "attention", "convolution")
        }
        for one in (trace, blind)
    )
    known = {row: found for row, found in derived.items() if found[1] is not None}
    families = [found[0] for found in known.values()]
    assert [families.count(one) for one in ("gemm", "attention", "convolution")] == [
        products,
        attentions,
        convolutions,
    ]
    assert {row: told[row] for row in known} == known
    assert all(told[row][0] == "convolution" for row in told.keys() - known.keys())
