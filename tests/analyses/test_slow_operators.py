"""Slow operators: planted ones with the reason from their shapes, and clean traces, which have none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import etloom
from etloom.analyses.flops.shape_reasons import explain_shapes
from etloom.core.trace import Job
from support.planted_operators import NOT_FIRST_FINDING, PLANTED
from support.small_traces import OperatorTraceBuilder

BF16 = "c10::BFloat16"
NAMES = {
    "gemm": "aten::mm",
    "convolution": "aten::convolution",
    "attention": "aten::_scaled_dot_product_flash_attention",
    "moe": "vllm::rocm_aiter_fused_moe",
}
REASONS: list[tuple[str, list[Any], list[str], str, str | None]] = [
    ("gemm", [[256, 65536], [65536, 512]], [], BF16, "too few tiles"),
    ("gemm", [[8192, 32], [32, 32]], [], BF16, "skinny"),
    ("gemm", [[8192, 8192], [8192, 8193]], [], BF16, "not multiples of 8"),
    ("gemm", [[8192, 8192], [8192, 8194]], [], "float", "not multiples of 4"),
    ("gemm", [[1408, 8192], [8192, 1408]], [], BF16, "mostly empty"),
    ("gemm", [[8192, 8192], [8192, 8192]], [], BF16, None),
    ("gemm", [[64, 512, 512], [64, 512, 512]], [], BF16, None),
    ("convolution", [[8, 512, 32, 32], [512, 1, 3, 3]], [], "float", "depthwise"),
    ("convolution", [[8, 512, 32, 32], [256, 512, 1, 1]], [], "float", "pointwise"),
    ("convolution", [[8, 512, 32, 32], [512, 512, 3, 3]], ["", "", "", "1", "1", "[2, 2]"], "float", "dilated"),
    ("convolution", [[1, 3, 1024, 1024], [64, 3, 7, 7]], [], "float", "3 input channels"),
    ("convolution", [[8, 96, 64, 64], [96, 24, 3, 3]], [], "float", "4 groups of 24 channels"),
    ("convolution", [[8, 256, 32, 32], [256, 256, 3, 1]], [], "float", "asymmetric window (3 x 1)"),
    ("convolution", [[2, 1024, 7, 7], [1024, 1024, 3, 3]], [], "float", "read for few pixels"),
    ("convolution", [[2, 256, 16, 16], [256, 128, 4, 4]], ["", "", "", "2", "1", "1", "True"], "float", "transposed"),
    ("convolution", [[8, 512, 32, 32], [512, 512, 3, 3]], ["", "", "", "1", "1", "[1, 1]"], "float", None),
    ("attention", [[1, 32, 32768, 128]] * 3, [], BF16, "long sequence"),
    ("attention", [[16, 32, 128, 128]] * 3, [], BF16, "short sequences"),
    ("attention", [[4, 16, 2048, 256]] * 3, [], BF16, "heads of 256"),
    ("attention", [[4, 16, 2048, 128]] * 3, [], BF16, None),
    ("moe", [[16, 64], [64, 256, 64], [64, 64, 128], [16, 2]], [], BF16, "64 experts with 0.5 tokens"),
    ("moe", [[512, 64], [16, 256, 64], [16, 64, 128], [512, 1]], [], BF16, "16 experts, 1 for a token, 32 tokens"),
    ("softmax", [[512, 64]], [], BF16, None),
]  # fmt: skip


@pytest.mark.parametrize(("family", "shapes", "values", "dtype", "words"), REASONS)
def test_shapes_show_the_reason(
    family: str, shapes: list[Any], values: list[str], dtype: str, words: str | None
) -> None:
    reason = explain_shapes(
        NAMES.get(family, family), family, json.dumps(shapes), json.dumps(values), dtype, None
    )
    assert (reason is None) if words is None else (reason is not None and words in reason.text)


SQUARE, SCALES = [[8192, 8192]] * 2, [[8192, 1], [1, 8192]]
LARGE = [8, 64, 56, 56]


@pytest.mark.parametrize(
    ("name", "family", "shapes", "values", "words"),
    [
        ("aten::addmm", "gemm", [[4096], [8192, 4096], [4096, 4096]], [], None),
        ("aten::addmm", "gemm", [[32], [8192, 4096], [4096, 32]], [], "skinny"),
        ("aten::_scaled_mm", "gemm", SQUARE + SCALES, [], None),
        ("_C::cutlass_scaled_mm", "gemm", [[8192, 8192], *SQUARE, *SCALES], [], None),
        ("aten::convolution_backward", "convolution", [LARGE, LARGE, [64, 64, 7, 7]],
         ["", "", "", "[0]", "[1, 1]", "[3, 3]", "[1, 1]"], None),
        ("aten::convolution_backward", "convolution", [LARGE, [8, 1, 56, 56], [64, 1, 7, 7]], [], "1 input channels"),
        ("aten::convolution", "convolution", [LARGE, [64, 1, 3, 3], [64]], [], "depthwise"),
        ("vllm::unified_attention", "attention", [[256, 32, 128], [256, 8, 128], [256, 8, 128]], [], None),
        ("aten::_scaled_dot_product_flash_attention", "attention",
         [[64, 32, 1, 128], [64, 32, 32768, 128], [64, 32, 32768, 128]], [], None),
    ],
)  # fmt: skip
def test_arguments_are_taken_by_their_positions(
    name: str, family: str, shapes: list[Any], values: list[str], words: str | None
) -> None:
    reason = explain_shapes(name, family, json.dumps(shapes), json.dumps(values), BF16, None)
    assert (reason is None) if words is None else (reason is not None and words in reason.text)


@pytest.mark.parametrize("dims", [None, "[", "{}", "[null, 3]", '[[1, "a"]]', "[[], []]", "[[5], [5]]"])
def test_damaged_shapes_show_nothing(dims: str | None) -> None:
    for family in ("gemm", "convolution", "attention", "moe"):
        assert explain_shapes(NAMES[family], family, dims, "[]", BF16, 132) is None


def run_product(
    folder: Path, sizes: list[list[int]], each_us: float, device: str | None, kernel: str = "gemm"
) -> Job:
    builder = OperatorTraceBuilder()
    for call in range(8):
        builder.operator("aten::mm", 100 * call, 50, sizes).kernel(
            kernel, 100 * call + 5, 2000 + call * each_us, each_us
        )
    return builder.open(folder, device)


def titles(job: Job) -> list[str]:
    table = etloom.analyze(job, "findings", pattern="slow-operators", min_pct=0)
    return [str(title) for title in table["title"]]


FEW_TILES = [[256, 65536], [65536, 512]]  # 17.2 GFLOP: 0.017 ms on an H100


def test_a_dominant_product_of_few_tiles_is_named_with_the_reason(tmp_path: Path) -> None:
    (title,) = titles(run_product(tmp_path, FEW_TILES, 400, "NVIDIA H100 80GB HBM3"))
    assert "8 calls of slow operators in aten::mm" in title
    assert "too few tiles" in title


def test_without_a_device_only_what_the_shapes_explain_is_named(tmp_path: Path) -> None:
    (title,) = titles(run_product(tmp_path, FEW_TILES, 400, None))
    assert "this device, which has no name, are unknown" in title
    (tmp_path / "square").mkdir()
    assert titles(run_product(tmp_path / "square", [[4096, 4096]] * 2, 400, None)) == []


@pytest.mark.parametrize(
    ("kernel", "each_us", "words"),
    [
        ("sm100_xmma_gemm_bf16bf16_bf16f32_tn_n_tilesize256x128x64", 1000, "devices with kernels of sm100"),
        ("cutlass3x_sm90_tensorop_gemm_bf16", 10_000, "devices with kernels of sm90"),
        ("Cijk_Ailk_Bljk_BBS_BH_MT128x128x32_ISA90a_K1", 10_000, "devices with kernels of gfx90a"),
        ("cutlass3x_sm90_tensorop_gemm_bf16", 1000, None),  # the product takes 0.93 ms at the peak of an H20
        ("sm80_xmma_gemm_bf16", 10_000, None),  # runs on every later device
        ("void Sm90Visitor<float>", 10_000, None),
    ],
)
def test_kernels_that_name_their_architecture_have_its_peaks(
    kernel: str, each_us: float, words: str | None, tmp_path: Path
) -> None:
    job = run_product(tmp_path, [[4096, 4096]] * 2, each_us, None, kernel)
    assert [words in title for title in titles(job)] == ([] if words is None else [True])


def test_arithmetic_without_a_known_peak_is_not_slow(tmp_path: Path) -> None:
    """An A100 has no units for 8-bit floats: that the memory needs 8 % of the time says nothing about the product."""
    builder = OperatorTraceBuilder()
    for call in range(8):
        builder.operator("aten::_scaled_mm", 100 * call, 50, [[4096, 4096]] * 2, dtype="c10::Float8_e4m3fn")
        builder.kernel("gemm", 100 * call + 5, 2000 + call * 400, 400)
    job = builder.open(tmp_path, "NVIDIA A100-SXM4-80GB")
    assert titles(job) == []
    assert etloom.analyze(job, "tasks", min_pct=0)["rests_on"].to_list() == []


def test_products_near_the_roofline_are_not_slow(tmp_path: Path) -> None:
    """137 GFLOP take 0.14 ms at the peak of an H100."""
    assert titles(run_product(tmp_path, [[4096, 4096]] * 2, 200, "NVIDIA H100 80GB HBM3")) == []


@pytest.mark.parametrize("name", [name for name in PLANTED if name not in NOT_FIRST_FINDING])
def test_planted_operators_come_first(name: str, data: Path) -> None:
    path = data / "kernels" / "standalone" / f"{name}.json.gz"
    if not path.exists():
        pytest.skip("needs the traces with planted operators")
    first = etloom.analyze(etloom.open(path, use_cache=False), "findings").row(0, named=True)
    assert first["pattern"] == "slow-operators"
    assert PLANTED[name] in first["title"]
    assert first["confidence"] == "low"


def run_call(
    folder: Path, name: str, sizes: list[Any], values: list[str], dtype: str, kernel: str, before: Any = None
) -> Job:
    """A run of eight calls of an operator of 8 ms each; ``before``: an operator that prepares the keys."""
    builder = OperatorTraceBuilder()
    for call in range(8):
        at = 100 * call
        if before is not None:
            prepare, shapes, numbers = before
            builder.operator(prepare, at + 51, 20, shapes, dtype, **{"Concrete Inputs": numbers})
        builder.operator(name, at, 50, sizes, dtype, **{"Concrete Inputs": values})
        builder.kernel(kernel, at + 5, 2000 + 8000 * call, 8000)
    return builder.open(folder)


IMAGES = [[64, 256, 28, 28], [256, 256, 3, 3], *[[]] * 7]
PLAIN = ["", "", "", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"]


@pytest.mark.parametrize(
    ("kernel", "dtype", "words"),
    [
        ("implicit_convolve_sgemm", "float", "a convolution in fp32, without tensor cores"),
        ("sm80_xmma_fprop_implicit_gemm_tf32f32", "float", "a convolution in tf32"),
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16", BF16, None),
    ],
)
def test_a_convolution_states_that_its_type_is_wide(
    tmp_path: Path, kernel: str, dtype: str, words: str | None
) -> None:
    job = run_call(tmp_path, "aten::convolution", IMAGES, PLAIN, dtype, kernel)
    (task,) = etloom.analyze(job, "tasks").iter_rows(named=True)
    assert (task["reason"] or "").startswith(words) if words else task["reason"] is None
    (title,) = titles(job)
    assert words is None or words in title


KEYS = [4, 8, 4096, 128]
REPEATED = ("aten::repeat_interleave", [KEYS, [], [], []], ["", "4", "1", ""])
EXPANDED = ("aten::expand", [[4, 8, 1, 4096, 128], [], []], ["", "[4, 8, 4, 4096, 128]", "False"])


@pytest.mark.parametrize(
    ("queries", "before", "is_named"),
    [
        (1, REPEATED, True),
        (1, EXPANDED, True),
        (4096, EXPANDED, True),
        (1, None, False),
        (1, ("aten::repeat_interleave", [KEYS, [], [], []], ["", "2", "1", ""]), False),
        (1, ("aten::repeat_interleave", [KEYS, [], [], []], ["", "4", "2", ""]), False),
        (1, ("aten::expand", [[4, 8, 1, 4096, 128], [], []], ["", "[x", "False"]), False),
    ],
)
def test_attention_of_expanded_heads_is_named(
    tmp_path: Path, queries: int, before: Any, is_named: bool
) -> None:
    shapes = [[4, 32, queries, 128], [4, 32, 4096, 128], [4, 32, 4096, 128], [], []]
    name = "aten::_scaled_dot_product_flash_attention"
    job = run_call(tmp_path, name, shapes, ["", "", "", "0.", "False"], BF16, "flash_fwd_kernel", before)
    tasks = etloom.analyze(job, "tasks").filter(name=name)
    reason = tasks["reason"].item() or ""
    assert reason.startswith("keys and values of 8 heads, expanded to 32 before it") == is_named
