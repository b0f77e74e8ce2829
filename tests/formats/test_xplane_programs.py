"""FLOPs and bytes of XLA's operations, from programs that protobuf's own library wrote, by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

import etloom
from etloom.formats.io.protobuf_fields import MessageData
from etloom.formats.xplane import programs
from etloom.formats.xplane.programs import Estimate, estimate_program
from support.protobuf_messages import declare
from support.xspaces import PlaneBuilder, XSpace, write_space

HloProto = declare(
    "hlo_test",
    {
        "HloProto": "hlo_module=1:Module",
        "Module": "name=1:string computations=3*Computation",
        "Computation": "name=1:string instructions=2*Instruction id=5:int64 root_id=6:int64",
        "Instruction": "name=1:string opcode=2:string shape=3:Shape parameter_number=9:int64 "
        "convolution_dimension_numbers=16:Convolution custom_call_target=28:string dot_dimension_numbers=30:Dot "
        "id=35:int64 operand_ids=36*int64 called_computation_ids=38*int64 backend_config=43:bytes",
        "Shape": "element_type=2:int64 dimensions=3*int64 tuple_shapes=4*Shape",
        "Dot": "lhs_contracting_dimensions=1*int64",
        "Convolution": "kernel_output_feature_dimension=4:int64",
    },
    "HloProto",
)
"""The fields of xla/service/hlo.proto and xla/xla_data.proto that costs depend on."""
F32, BF16, U8 = 11, 16, 6


class Program:
    """A program of one computation after another; the instructions of the last are those of the entry."""

    def __init__(self) -> None:
        self.proto = HloProto()
        self.proto.hlo_module.name = "jit_f"
        self.begin()

    def begin(self) -> int:
        """Begin another computation; return its id."""
        computations = self.proto.hlo_module.computations
        self.computation = computations.add(id=len(computations) + 1)
        return int(self.computation.id)

    def add(self, opcode: str, *operands: int, shape: Any = (), dtype: int = BF16, **more: Any) -> int:
        """Add an instruction named after its opcode and number; the last one is the root."""
        number = sum(len(part.instructions) for part in self.proto.hlo_module.computations) + 1
        instruction = self.computation.instructions.add(
            id=number, name=f"{opcode}.{number}", opcode=opcode, operand_ids=operands, **more
        )
        parts = shape if isinstance(shape, list) else [(dtype, shape)]
        for kind, sizes in parts:
            target = instruction.shape.tuple_shapes.add() if isinstance(shape, list) else instruction.shape
            target.element_type = kind
            target.dimensions.extend(sizes)
        self.computation.root_id = number
        return number

    def estimate(self) -> dict[int, Estimate]:
        content = self.proto.SerializeToString()
        named = estimate_program(MessageData(content), 0, len(content))
        return {int(name.rpartition(".")[2]): estimate for name, estimate in named.items()}


def test_products_and_elementwise_operations() -> None:
    made = Program()
    a, b = made.add("parameter", shape=(3, 4, 5)), made.add("parameter", shape=(3, 5, 6), parameter_number=1)
    dot = made.add("dot", a, b, shape=(3, 4, 6), dot_dimension_numbers={"lhs_contracting_dimensions": [2]})
    added = made.add("add", dot, dot, shape=(3, 4, 6), dtype=F32)
    reduced = made.add("reduce", added, shape=(3,), dtype=F32)
    copied = made.add("transpose", a, shape=(5, 4, 3))
    sorted_ = made.add("sort", a, shape=(3, 4, 5))
    costs = made.estimate()
    assert costs[dot] == Estimate(2 * 3 * 4 * 6 * 5, 2 * (60 + 90 + 72), "dot", "bfloat16")
    assert costs[added] == Estimate(72, 2 * 2 * 72 + 4 * 72, "add", "bfloat16")
    assert (costs[reduced].flops, costs[reduced].bytes) == (72, 4 * 72 + 4 * 3)
    assert (costs[copied].flops, costs[copied].bytes) == (0, 2 * 60 * 2)
    assert (costs[sorted_].flops, costs[sorted_].bytes) == (None, 2 * 60 * 2)


@pytest.mark.parametrize(
    ("target", "operands", "result"),
    [
        ("__cudnn$convForward", [(2, 3, 9, 9), (8, 3, 3, 3)], (2, 8, 7, 7)),
        ("__cudnn$convBackwardInput", [(2, 8, 7, 7), (8, 3, 3, 3)], (2, 3, 9, 9)),
        ("__cudnn$convBackwardFilter", [(2, 3, 9, 9), (2, 8, 7, 7)], (8, 3, 3, 3)),
    ],
)
def test_convolutions_of_a_library(
    target: str, operands: list[tuple[int, ...]], result: tuple[int, ...]
) -> None:
    """3 channels to 8, 3 x 3: each gradient takes as many FLOPs as forward. Scratch memory is not traffic."""
    made = Program()
    inputs = [made.add("parameter", shape=shape, parameter_number=i) for i, shape in enumerate(operands)]
    call = made.add(
        "custom-call", *inputs, shape=[(BF16, result), (U8, (9999,))], custom_call_target=target,
        convolution_dimension_numbers={"kernel_output_feature_dimension": 0},
    )  # fmt: skip
    cost = made.estimate()[call]
    assert cost.flops == 2 * (2 * 8 * 7 * 7) * (3 * 3 * 3)
    assert cost.bytes == 2 * (2 * 3 * 81 + 8 * 27 + 2 * 8 * 49)


def test_a_convolution_of_xla_has_its_kernel_s_output_dimension() -> None:
    made = Program()
    x, w = (
        made.add("parameter", shape=(2, 9, 9, 3)),
        made.add("parameter", shape=(3, 3, 3, 8), parameter_number=1),
    )
    conv = made.add(
        "convolution",
        x,
        w,
        shape=(2, 7, 7, 8),
        convolution_dimension_numbers={"kernel_output_feature_dimension": 3},
    )
    assert made.estimate()[conv].flops == 2 * (2 * 8 * 7 * 7) * (3 * 3 * 3)


@pytest.mark.parametrize("target", ["__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8"])
def test_products_of_a_library(target: str) -> None:
    made = Program()
    a, b = made.add("parameter", shape=(5, 4)), made.add("parameter", shape=(5, 6), parameter_number=1)
    config = {"gemm_backend_config": {"dot_dimension_numbers": {"lhs_contracting_dimensions": ["0"]}}}
    call = made.add(
        "custom-call", a, b, shape=[(BF16, (4, 6)), (U8, (4096,))], custom_call_target=target,
        backend_config=json.dumps(config).encode(),
    )  # fmt: skip
    assert made.estimate()[call] == Estimate(2 * 4 * 6 * 5, 2 * (20 + 30 + 24), "custom-call", "bfloat16")


@pytest.mark.parametrize(("mask", "pairs"), [(0, 7 * 9), (2, 7 * 8 // 2)])
def test_fused_attention(mask: int, pairs: int) -> None:
    config = (
        "{attn_heads = 3 : i64, input_batch = 2 : i64, q_max_seqlen = 7 : i64, kv_max_seqlen = 9 : i64, "
        f"mask_type = {mask} : i64, qk_head_dim = 4 : i64, v_head_dim = 5 : i64, window_size_left = -1 : i64}}"
    ).encode()
    cudnn = {
        "intermediate_tensor_shape": {"dimensions": ["2", "3", "7", "9"]},
        "bmm1_dot_dimension_numbers": {"lhs_contracting_dimensions": ["3"]},
        "mask_type": "CAUSAL" if mask else "NO_MASK",
    }
    made = Program()
    q = made.add("parameter", shape=(2, 7, 3, 4))

    def call(target: str, content: bytes) -> int:
        return made.add(
            "custom-call", q, shape=(2, 7, 3, 4), custom_call_target=target, backend_config=content
        )

    forward, backward = (call(f"te_fused_attn_{way}_ffi", config) for way in ("forward", "backward"))
    content = json.dumps({"cudnn_fmha_backend_config": cudnn}).encode()
    softmax, gradient = (call(f"__cudnn$fmhaSoftmax{way}", content) for way in ("", "Backward"))
    costs = made.estimate()
    assert costs[forward].flops == 2 * 2 * 3 * pairs * (4 + 5)
    assert costs[backward].flops == 2 * 2 * 3 * pairs * (3 * 4 + 2 * 5)
    assert (costs[softmax].flops, costs[gradient].flops) == (2 * 6 * pairs * 8, 2 * 6 * pairs * 20)
    unknown = call("te_unknown_ffi", b"")
    assert made.estimate()[unknown].flops is None


def test_a_fusion_has_the_flops_of_its_operations_and_reads_what_it_slices() -> None:
    made = Program()
    inside = made.begin()
    whole = made.add("parameter", shape=(100, 8))
    row = made.add("dynamic-slice", whole, shape=(1, 8))
    factor = made.add("parameter", shape=(1, 8), parameter_number=1)
    made.add("multiply", row, factor, shape=(1, 8))
    update = made.begin()
    target = made.add("parameter", shape=(100, 8))
    value = made.add("parameter", shape=(1, 8), parameter_number=1)
    made.add("dynamic-update-slice", target, value, shape=(100, 8))
    made.begin()
    a, b = made.add("parameter", shape=(100, 8)), made.add("parameter", shape=(1, 8), parameter_number=1)
    fusion = made.add("fusion", a, b, shape=(1, 8), called_computation_ids=[inside])
    written = made.add("fusion", a, b, shape=(100, 8), called_computation_ids=[update])
    costs = made.estimate()
    assert costs[fusion] == Estimate(8, 2 * (8 + 8 + 8), "fusion", "bfloat16")
    assert (costs[written].flops, costs[written].bytes) == (0, 2 * (8 + 8))


class Walked(dict[int, programs.Instruction]):
    """Counts how often all instructions of a computation are listed."""

    walks = 0

    def values(self) -> Any:
        self.walks += 1
        return super().values()

    def items(self) -> Any:
        self.walks += 1
        return super().items()


def test_instructions_are_not_listed_for_each_fusion() -> None:
    def make(number: int, opcode: str, operands: tuple[int, ...], called: tuple[int, ...] = ()) -> Any:
        shape = programs.Shape("float", (4,), 16)
        return programs.Instruction(f"{opcode}.{number}", opcode, shape, operands, called, 0, "", (), "")

    inside = Walked({1: make(1, "parameter", ()), 2: make(2, "negate", (1,))})
    outside = {3: make(3, "parameter", ())}
    outside |= {number: make(number, "fusion", (3,), (7,)) for number in range(4, 104)}
    computations = {7: programs.Computation(inside, 2), 8: programs.Computation(outside, 103)}
    estimator = programs._Estimator(computations)
    assert estimator.estimate(outside[103], outside) == Estimate(4, 32, "fusion", "float")
    assert inside.walks < 10


@pytest.mark.parametrize(
    ("content", "values"),
    [
        (b"\x05\xac\x02", [5, 300]),
        (b"\xff" * 9 + b"\x7f\x05", [2**64 - 1, 5]),
        (b"\x05" + b"\xff" * 100 + b"\x01", [5]),
    ],
)
def test_packed_numbers_have_64_bits(content: bytes, values: list[int]) -> None:
    data = b"\x1a" + bytes([len(content)]) + content
    messages = MessageData(data)
    fields = messages.scan(np.array([0]), np.array([len(data)]))
    assert programs._read_lists(messages, fields, 3, 1) == [tuple(values)]


def test_a_computation_that_calls_itself_is_unknown() -> None:
    made = Program()
    a = made.add("parameter", shape=(4,))
    for _ in range(50):
        fusion = made.add("fusion", a, shape=(4,), called_computation_ids=[1, 2])
    assert made.estimate()[fusion].flops is None


@given(st.binary(max_size=200))
def test_any_bytes_are_a_program_without_operations(content: bytes) -> None:
    assert all(
        estimate.bytes >= 0 for estimate in estimate_program(MessageData(content), 0, len(content)).values()
    )


@pytest.mark.parametrize("has_others", [True, False])
def test_kernels_of_a_library_call_are_one_call(has_others: bool, tmp_path: Path) -> None:
    made = Program()
    a, b = made.add("parameter", shape=(64, 64)), made.add("parameter", shape=(64, 64), parameter_number=1)
    config = {"gemm_backend_config": {"dot_dimension_numbers": {"lhs_contracting_dimensions": ["1"]}}}
    made.add(
        "custom-call",
        a,
        b,
        shape=(64, 64),
        custom_call_target="__cublas$gemm",
        backend_config=json.dumps(config).encode(),
    )
    space = XSpace()
    programs = PlaneBuilder(space, "/host:metadata").plane
    programs.stat_metadata.add(key=1).value.name = "Hlo Proto"
    entry = programs.event_metadata.add(key=7)
    entry.value.name = "jit_f(7)"
    entry.value.stats.add(metadata_id=1, bytes_value=made.proto.SerializeToString())
    device = PlaneBuilder(space, "/device:GPU:0")
    for step in range(2):
        for part in range(2):
            at = 1000 * step + 300 * part
            device.add(
                "Stream #1(Kernel)",
                f"gemm_{part}",
                at,
                250,
                hlo_op="custom-call.3",
                hlo_module="jit_f",
                program_id=7,
            )
        if has_others:
            device.add("Stream #1(Kernel)", "other", 1000 * step + 700, 50)
    job = etloom.open(write_space(space, tmp_path), use_cache=False)
    row = etloom.analyze(job, "flops").row(by_predicate=pl.col("name") == "custom-call.3", named=True)
    assert (row["family"], row["calls"], row["kernels"], row["time_ns"]) == ("gemm", 2, 4, 1000)
    assert (row["flops"], row["bytes"], row["covered_pct"]) == (2 * 2 * 64**3, 2 * 3 * 2 * 64**2, 100.0)
    (operation,) = etloom.analyze(job, "xla-ops").filter(operation="custom-call.3").iter_rows(named=True)
    assert (operation["count"], operation["flops"]) == (4, 2 * 2 * 64**3)


@pytest.mark.slow
def test_all_time_of_real_profiles_has_costs(data: Path) -> None:
    conv = etloom.open(data / "xplane/jax_conv_mi300.xplane.pb", use_cache=False)
    row = etloom.analyze(conv[7], "flops").row(by_predicate=pl.col("name") == "cudnn-conv.1", named=True)
    # 5120 filters of 16 x 1 x 2 x 2 over 34 x 31 x 53 places, five times
    assert (row["calls"], row["kernels"], row["flops"]) == (
        5,
        10,
        5 * 2 * 5120 * (34 * 31 * 53) * (16 * 1 * 2 * 2),
    )
    job = etloom.open(data / "xplane/jax_te_attention.xplane.pb", use_cache=False)
    assert etloom.analyze(job, "flops", by="all")["covered_pct"].to_list() == [100.0]
    table = dict(etloom.analyze(job, "flops").select("name", "flops").iter_rows())
    attention = 2 * 2 * 16 * (2048 * 2049 // 2) * (128 + 128)
    assert table["te_fused_attn_forward_ffi.10"] == 5 * attention
    assert table["te_fused_attn_backward_ffi.18"] == 5 * attention * 5 // 2
    limits = etloom.analyze(job, "roofline", device="MI300X").filter(
        pl.col("family").is_in(["gemm", "attention"])
    )
    assert limits.height == 10 and limits["roofline_pct"].max() < 100
