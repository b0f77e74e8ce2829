"""Costs that are declared as rows: built-in ones by hand, users' rows, and what the surroundings of a call add."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import etloom
from etloom.analyses.flops.call_costs import compute_cost
from etloom.analyses.flops.declared_costs import BUILT_IN
from etloom.analyses.flops.operator_call import Call, Tensor
from etloom.cli import app
from etloom.core import names
from etloom.core.errors import InvalidValue
from etloom.core.trace import Job
from support.small_traces import OperatorTraceBuilder, complete_event

BF16, FP8, INT, LONG = "c10::BFloat16", "c10::Float8_e4m3fn", "int", "long int"
BYTE, FLOAT = "unsigned char", "float"


def tensor(*shape: int, dtype: str = BF16) -> Tensor:
    return Tensor(shape, dtype)


X = tensor(6, 8)  # 48 elements, 96 B
W = tensor(8)  # 16 B
KNOWN: list[tuple[str, tuple[Any, ...], tuple[Any, ...], int, int]] = [
    # operator, tensors, values, FLOPs, bytes
    ("_C::rms_norm", (X, X, W), (), 4 * 48, 96 + 96 + 16),
    ("sgl_kernel::rmsnorm", (X, X, W), (), 4 * 48, 96 + 96 + 16),
    ("_C::fused_add_rms_norm", (X, X, W), (), 5 * 48, 4 * 96 + 16),
    ("aiter::rmsnorm2d_fwd_with_add_ck", (X, X, X, X, W), (), 5 * 48, 4 * 96 + 16),
    ("vllm::rocm_aiter_rmsnorm2d_fwd_with_add", (X, X, W), (), 5 * 48, 4 * 96 + 16),
    ("_C::silu_and_mul", (X, tensor(6, 16)), (), 4 * 48, 96 + 192),
    ("_C::rotary_embedding", (tensor(6, dtype=LONG), X, tensor(6, 4), None, tensor(99, 4)), (), 3 * 72, 48 + 192 + 96),
    (
        "_C_cache_ops::reshape_and_cache_flash",
        (tensor(6, 2, 4), tensor(6, 2, 4), *[tensor(99, 16, 2, 4, dtype=BYTE)] * 2, tensor(6, dtype=LONG)),
        (),
        0,
        96 + 96 + 48 + 48 + 48,
    ),
    ("_C::static_scaled_fp8_quant", (tensor(6, 8, dtype=FP8), X, tensor(1, dtype=FLOAT)), (), 2 * 48, 48 + 96 + 4),
    (
        "sgl_kernel::sgl_per_token_quant_fp8",
        (X, tensor(6, 8, dtype=FP8), tensor(6, 1, dtype=FLOAT)),
        (),
        2 * 48,
        96 + 48 + 24,
    ),
    (
        "_C::cutlass_scaled_mm",
        (tensor(6, 4), tensor(6, 8, dtype=FP8), tensor(8, 4, dtype=FP8), *[tensor(1, dtype=FLOAT)] * 2),
        (),
        2 * 6 * 8 * 4,
        48 + 48 + 32 + 8,
    ),
    ("sgl_kernel::fp8_scaled_mm", (tensor(6, 8, dtype=FP8), tensor(8, 4, dtype=FP8)), (), 2 * 6 * 8 * 4, 48 + 32 + 48),
    ("sgl_kernel::fp8_scaled_mm", (tensor(6, 8, dtype=FP8), tensor(4, 8, dtype=FP8)), (), 2 * 6 * 8 * 4, 48 + 32 + 48),
    (
        "_C::cutlass_scaled_fp4_mm",
        (tensor(6, 4), tensor(6, 8, dtype=BYTE), tensor(4, 8, dtype=BYTE)),
        (),
        2 * 6 * 16 * 4,
        48 + 48 + 32,
    ),
    (
        "_C::gptq_marlin_gemm",
        (tensor(6, 128), None, tensor(8, 64, dtype=INT)),
        (*[None] * 10, 6, 32, 128),
        2 * 6 * 128 * 32,
        6 * 128 * 2 + 8 * 64 * 4 + 6 * 32 * 2,
    ),
    ("_C::gptq_gemm", (tensor(6, 64), tensor(8, 64, dtype=INT)), (), 2 * 6 * 64 * 64, 768 + 2048 + 768),
    ("_C::awq_gemm", (tensor(6, 64), tensor(64, 8, dtype=INT)), (), 2 * 6 * 64 * 64, 768 + 2048 + 768),
    ("vllm::rocm_unquantized_gemm", (X, tensor(4, 8), tensor(4)), (), 2 * 6 * 8 * 4, 96 + 64 + 8 + 48),
    ("aiter::gemm_a16w16", (X, tensor(4, 8)), (), 2 * 6 * 8 * 4, 96 + 64 + 48),
    ("aiter::_gemm_a4w4_asm", (tensor(6, 4, dtype=BYTE), tensor(32, 4, dtype=BYTE)), (), 2 * 6 * 8 * 32,
     24 + 128 + 6 * 32 * 2),
    ("aiter::batched_gemm_a8w8", (tensor(3, 6, 8), tensor(3, 4, 8, dtype=FP8)), (), 2 * 3 * 6 * 8 * 4,
     288 + 96 + 3 * 6 * 4 * 2),
    ("primus_turbo::grouped_gemm", (X, tensor(2, 8, 4), tensor(2, dtype=LONG)), (), 2 * 6 * 8 * 4, 96 + 128 + 16 + 48),
    ("vllm::gemm_with_dynamic_quant", (X, tensor(4, 8, dtype=FP8)), (), 2 * 6 * 8 * 4, 96 + 32 + 48),
    ("LigerSiLUMulFunction", (X, X), (), 5 * 48, 3 * 96),
    ("LigerGELUMulFunction", (X, X), (), 5 * 48, 3 * 96),
    ("LigerSiLUMulFunctionBackward", (X,), (), 10 * 48, 5 * 96),
    ("LigerGELUMulFunctionBackward", (X,), (), 10 * 48, 5 * 96),
    ("LigerDyTFunction", (X, tensor(1), W, W), (), 4 * 48, 2 * 96 + 2 + 2 * 16),
    ("LigerRMSNormFunction", (X, W), (None, None, 1e-6, 0.0), 4 * 48, 2 * 96 + 16),
    ("LigerRMSNormFunctionBackward", (X,), (), 8 * 48, 3 * 96),
    ("LigerFusedAddRMSNormFunction", (X, X, W), (), 5 * 48, 4 * 96 + 16),
    ("LigerLayerNormFunction", (X, W, W), (), 8 * 48, 2 * 96 + 2 * 16),
    ("LigerLayerNormFunctionBackward", (X,), (), 11 * 48, 3 * 96),
    ("LigerSoftmaxFunction", (X,), (), 5 * 48, 2 * 96),
    ("LigerKLDivLossFunction", (X, X), (), 4 * 48, 2 * 96),
    ("LigerRopeFunction", (tensor(2, 3, 5, 4), tensor(2, 1, 5, 4), *[tensor(1, 5, 4)] * 2), (), 3 * (120 + 40),
     2 * 2 * (120 + 40) + 2 * 40),
    ("LigerRopeFunctionBackward", (tensor(2, 3, 5, 4), tensor(2, 1, 5, 4)), (), 3 * (120 + 40), 2 * 2 * (120 + 40)),
    ("LigerCrossEntropyFunction", (X, tensor(6, dtype=LONG)), (), 7 * 48, 2 * 96 + 48),
    # TransformerEngine
    ("_Linear", (tensor(4, 8), tensor(2, 3, 8), tensor(4)), (), 2 * 6 * 8 * 4, 64 + 96 + 8 + 48),
    ("_LayerNormLinear", (X, W, W, tensor(4, 8), tensor(4)), (), 2 * 6 * 8 * 4, 96 + 32 + 64 + 8 + 48),
    ("_LayerNormMLP", (X, W, W, tensor(20, 8), tensor(20), tensor(8, 10), tensor(8)), (),
     2 * 6 * 8 * 20 + 2 * 6 * 10 * 8, 96 + 32 + 320 + 40 + 160 + 16 + 96),
    *(  # forward (TN), gradient of the input (NN) and of the weight (NT): (6 x 8) by (8 x 4), of 8 bits
        ("tex_ts::te_gemm_ts",
         (a, tensor(1, dtype=FLOAT), tensor(1), None, None, b, tensor(1, dtype=FLOAT), tensor(1), None, None, d,
          *[None] * 7, tensor(33554432, dtype=BYTE)), (), 2 * 6 * 8 * 4, a.numel + b.numel + 2 * d.numel)
        for a, b, d in (
            (tensor(4, 8, dtype=BYTE), tensor(6, 8, dtype=BYTE), tensor(6, 4)),
            (tensor(4, 8, dtype=BYTE), tensor(6, 4, dtype=BYTE), tensor(6, 8)),
            (tensor(6, 8, dtype=BYTE), tensor(6, 4, dtype=BYTE), tensor(4, 8)),
        )
    ),
    ("_QuantizeFunc", (X,), (), 2 * 48, 96 + 48),
    ("_ToFloat8Func", (X,), (), 2 * 48, 96 + 48),
    ("FusedRoPEFunc", (tensor(5, 2, 3, 4), tensor(5, 1, 1, 4, dtype=FLOAT)), (), 3 * 120, 2 * 240 + 80),
    ("FusedRoPEFuncBackward", (tensor(5, 2, 3, 4),), (), 3 * 120, 2 * 240),
    ("CrossEntropyFunction", (tensor(2, 3, 8), tensor(2, 3, dtype=LONG)), (), 7 * 48, 2 * 96 + 48),
    # Mamba: u and delta (2, 6, 5) = 60 elements, A (6, 4), B and C (2, 4, 5), D (6,)
    ("SelectiveScanFn", (tensor(2, 6, 5), tensor(2, 6, 5), tensor(6, 4, dtype=FLOAT), *[tensor(2, 4, 5)] * 2,
                         tensor(6, dtype=FLOAT)), (), 7 * 60 * 4, 2 * 120 + 96 + 2 * 80 + 24 + 120),
    ("_C::selective_scan_fwd", (tensor(6, 5), tensor(6, 5), tensor(6, 4, dtype=FLOAT), *[tensor(1, 4, 5)] * 2, None,
                                tensor(6, 5), None, None, *[None] * 3, tensor(99, 6, 4)), (), 7 * 30 * 4,
     3 * 60 + 96 + 2 * 40 + 60),
    ("DaoAILab::_causal_conv1d_fwd_cpp", (tensor(2, 6, 5), tensor(6, 4), tensor(6), None, None, tensor(2, 6, 5)), (),
     2 * 60 * 4, 120 + 48 + 12 + 120),
    ("CausalConv1dFn", (tensor(2, 6, 5), tensor(6, 4), tensor(6)), (), 2 * 60 * 4, 120 + 48 + 12 + 120),
    ("_C::causal_conv1d_fwd", (tensor(6, 5), tensor(6, 4), tensor(6), tensor(99, 6, 3)), (), 2 * 30 * 4,
     60 + 48 + 12 + 60),
    ("_C::causal_conv1d_update", (tensor(2, 6), tensor(99, 6, 3), tensor(6, 4), None), (), 2 * 12 * 4, 24 + 48 + 24),
    ("aiter::topk_softmax", (tensor(6, 2, dtype=FLOAT), tensor(6, 2, dtype=INT), tensor(6, 2, dtype=INT),
                             tensor(6, 8, dtype=FLOAT)), (), 5 * 48, 48 * 3 + 192),
    ("aiter::moe_sum", (tensor(6, 2, 8), X), (), 96, 192 + 96),
    ("aten::nll_loss_forward", (tensor(6, 8), tensor(6, dtype=LONG)), (), 6, 12 + 48 + 2),
    ("aten::nll_loss_backward", (tensor(), tensor(6, 8), tensor(6, dtype=LONG)), (), 6, 2 + 48 + 96),
    ("aten::mse_loss", (X, X), (), 3 * 48, 2 * 96 + 2),
    (  # one expert of two, half of two reached by one token: (1 - 1/2) 2 = 1 expert of (16 x 8 + 8 x 8) weights
        "vllm::rocm_aiter_fused_moe",
        (tensor(1, 8), tensor(2, 16, 8), tensor(2, 8, 8), tensor(1, 1, dtype=FLOAT)),
        (),
        2 * (128 + 64),
        16 + 16 + 2 * (128 + 64),
    ),
    ("_moe_C::topk_softmax", (tensor(6, 2, dtype=FLOAT), tensor(6, 2, dtype=INT), tensor(6, 2, dtype=INT),
                              tensor(6, 8, dtype=FLOAT)), (), 5 * 48, 48 * 3 + 192),
]  # fmt: skip


@pytest.mark.parametrize(("name", "tensors", "values", "flops", "bytes_"), KNOWN)
def test_costs_by_hand(
    name: str, tensors: tuple[Any, ...], values: tuple[Any, ...], flops: int, bytes_: int
) -> None:
    cost = compute_cost(Call(name, tensors, values))
    assert cost is not None
    assert (cost.flops, cost.bytes, cost.assumed) == (flops, bytes_, None)


def count_chunked_scan(length: int, chunk: int, heads: int, size: int, groups: int, states: int) -> int:
    """Count the products of Mamba-2's algorithm for one sequence, position by position."""
    flops = 0
    for position in range(length):
        earlier = position % chunk + 1  # positions of the chunk up to this one
        flops += groups * earlier * 2 * states  # C B^T
        flops += heads * earlier * 2 * size  # times the sequence
        flops += heads * 2 * 2 * size * states  # into the state, and out of the earlier one
    return flops


def test_a_chunked_scan_by_hand() -> None:
    x, b = tensor(2, 7, 3, 4), tensor(2, 7, 1, 5)
    call = Call("MambaChunkScanCombinedFn", (x, tensor(2, 7, 3), tensor(3), b, b), (*[None] * 5, 3))
    cost = compute_cost(call)
    assert cost is not None
    assert cost.flops == 2 * count_chunked_scan(7, 3, heads=3, size=4, groups=1, states=5)
    assert cost.bytes == 2 * (168 + 42 + 3 + 2 * 70 + 168)


@pytest.mark.parametrize("projection", [None, (16, 12)])
def test_the_block_of_mamba_2_by_hand(projection: tuple[int, int] | None) -> None:
    """3 heads of 4 channels, 2 groups of 5 states, convolutions of 4 taps over 12 + 2 * 2 * 5 = 32 channels."""
    x, weight = tensor(2, 7, 12 + 32 + 3), tensor(32, 4)
    more = (None, None) if projection is None else (tensor(12), None, tensor(*projection))
    tensors = (x, weight, tensor(32), tensor(3), tensor(3), tensor(3), *[None] * 5, *more)
    values = (*[None] * 6, 3, *[None] * 4, *(None for _ in more), 4, 2, True)
    cost = compute_cost(Call("MambaSplitConv1dScanCombinedFn", tensors, values))
    assert cost is not None
    flops = 2 * (2 * 7 * 32 * 4 + count_chunked_scan(7, 3, heads=3, size=4, groups=2, states=5))
    out = 12 if projection is None else 16
    assert cost.flops == flops + (0 if projection is None else 2 * 14 * 12 * 16)
    given = sum(part.numel for part in tensors if part is not None)
    assert cost.bytes == 2 * (given + 2 * 7 * out)


@pytest.mark.parametrize("q", [tensor(2, 5, 3, 8), tensor(5, 2, 3, 8), tensor(10, 3, 8)])
def test_attention_of_transformer_engine_has_the_lengths_of_its_arguments(q: Tensor) -> None:
    """The layout (bshd, sbhd or thd) and the mask are texts, which are not recorded."""
    k = replace(q, shape=(*(7 if size == 5 else 14 if size == 10 else size for size in q.shape),))
    lengths = (None, tensor(3, dtype=INT), tensor(3, dtype=INT))
    cost = compute_cost(Call("FusedAttnFunc", (None, None, *lengths, q, k, k), (True, 5, 7)))
    assert cost is not None
    assert cost.flops == 2 * 2 * 3 * (1 + 2 + 3 + 4 + 5) * 16
    assert cost.bytes == 2 * (240 + 2 * 336 + 240) + 4 * 30
    assert cost.assumed == "mask of attention: causal (not recorded)"
    assert compute_cost(Call("FusedAttnFunc", (None, None, q, k, k), (True, 4, 7))) is None, (
        "packed lengths differ"
    )


def test_functions_of_flash_attention_count_as_their_operators() -> None:
    q, k = tensor(2, 4, 3, 8), tensor(2, 5, 3, 8)
    flops = 2 * 2 * 3 * (2 + 3 + 4 + 5) * 16
    cost = compute_cost(Call("FlashAttnFunc", (q, k, k), (None, None, None, 0.0, 1.0, True)))
    assert cost is not None and cost.flops == flops
    third = (q, k, k, *[None] * 21)
    cost = compute_cost(Call("flash_attn_3::fwd", third, (*[None] * 24, True, -1, -1)))
    assert cost is not None and cost.flops == flops


@pytest.mark.parametrize("name", ["aiter::mha_fwd", "aiter::fmha_v3_fwd", "aiter::_flash_attn_forward"])
def test_attention_of_aiter_is_that_of_flash_attention(name: str) -> None:
    q, k = tensor(2, 4, 3, 8), tensor(2, 5, 3, 8)
    cost = compute_cost(Call(name, (q, k, k), (None, None, None, 0.0, 1.0, True, -1, -1)))
    assert cost is not None and cost.flops == 2 * 2 * 3 * (2 + 3 + 4 + 5) * 16


def test_the_rows_of_this_package_pass_the_check_of_users_rows() -> None:
    assert len(names.check_names({"costs": BUILT_IN}, "the built-in rows")["costs"]) == len(BUILT_IN)


def test_attention_over_pages_follows_the_sums_of_the_iteration() -> None:
    q, k = tensor(32, 64, 64), tensor(32, 8, 64)
    pages = Call("vllm::unified_attention_with_output", (q, k, k, q), context={"pairs": 55086, "keys": 55086})
    cost = compute_cost(pages)
    assert cost is not None
    assert cost.flops == 2 * 64 * (64 + 64) * 55086 == 902_529_024
    assert cost.bytes == 2 * (2 * 32 * 64 * 64 + 55086 * 8 * (64 + 64))
    assert compute_cost(Call(pages.name, pages.tensors)) is None, "without sums it is unknown"


ITERATION = "execute_9_context_1(sq4sk10sqsq16sqsk40)_generation_5(sq5sk50sqsq5sqsk50)"


def write_engine(folder: Path, router: list[int], chosen: str | None) -> Job:
    """An iteration of an engine with attention over pages and a mixture of experts, a kernel each."""
    made = OperatorTraceBuilder()
    made.events.append(complete_event("user_annotation", ITERATION, 0, 1000, 10, 11))
    made.operator("vllm::unified_attention_with_output", 10, 100, [[9, 2, 4]] * 3)
    made.kernel("kernel_unified_attention_2d", 20, 2000, 50)
    made.operator("vllm::moe_forward", 200, 300, [[9, 8], router])
    if chosen is not None:
        made.operator("TopK", 210, 50, [router, []], **{"Concrete Inputs": ["", chosen]})
    return made.kernel("_matmul_ogs_bf16xbf16xmxfp4", 300, 2100, 50).open(folder)


def test_the_surroundings_of_a_call_complete_its_cost(tmp_path: Path) -> None:
    job = write_engine(tmp_path, [9, 4], "2")
    table = {row["name"]: row for row in etloom.analyze(job, "flops").iter_rows(named=True)}
    attention, experts = table["vllm::unified_attention_with_output"], table["vllm::moe_forward"]
    assert attention["flops"] == 2 * 2 * (4 + 4) * (40 - 16 // 2 + 50)
    assert experts["flops"] == 2 * 9 * 2 * 3 * 8 * 8
    reached = 4 * (1 - (1 - 2 / 4) ** 9)
    assert experts["bytes"] == 2 * (9 * 8 * 2) + round(reached * (3 * 8 * 8 // 2)), "weights of 4 bits"
    assert "intermediate size" in experts["assumed"]
    assert attention["assumed"] is None


@pytest.mark.parametrize("chosen", [None, "9"])
def test_an_unknown_number_of_experts_is_not_guessed(tmp_path: Path, chosen: str | None) -> None:
    table = etloom.analyze(write_engine(tmp_path, [9, 4], chosen), "flops")
    assert table.filter(name="vllm::moe_forward")["flops"].to_list() == [None]


def test_users_declare_costs(tmp_path: Path) -> None:
    OperatorTraceBuilder().operator("mine::norm", 0, 100, [[6, 8], [8]]).kernel("k", 10, 200, 9).open(
        tmp_path
    )
    file = tmp_path / "names.yaml"
    rows = [
        {
            "pattern": "^mine::norm$",
            "family": "normalisation",
            "model": "arguments",
            "result": "0",
            "flops": "7",
        }
    ]
    file.write_text(json.dumps({"costs": rows}))
    result = CliRunner().invoke(
        app, ["analyze", "flops", str(tmp_path / "kineto_trace_0.json"), "--names", str(file), "-f", "json"]
    )
    (row,) = json.loads(result.stdout)
    assert (row["family"], row["flops"], row["bytes"]) == ("normalisation", 7 * 48, 96 + 16 + 96)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "guess"}, "unknown model 'guess'"),
        ({"family": "guess"}, "unknown family 'guess'"),
        ({"write": "first"}, "write is 'first'"),
        ({"speed": "1"}, "unknown key 'speed'"),
        ({"flops": "2 3"}, "flops is '2 3'"),
        ({"model": "attention"}, "has no q"),
    ],
)
def test_wrong_rows_are_refused(change: dict[str, str], words: str) -> None:
    row = {"pattern": "^x$", "family": "gemm", "model": "product", "a": "0", "b": "1", **change}
    with pytest.raises(InvalidValue, match=words):
        names.check_names({"costs": [row]}, "names.yaml")
