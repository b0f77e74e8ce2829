"""Formulas of flops and bytes: values computed by hand, and laws that hold for all shapes."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etloom.analyses.flops.attention import count_pairs
from etloom.analyses.flops.call_costs import compute_cost
from etloom.analyses.flops.convolution import compute_result_shape
from etloom.analyses.flops.formulas import REGISTRY, find_entry
from etloom.analyses.flops.gemm import broadcast_shapes
from etloom.analyses.flops.memory_bound import promote_types
from etloom.analyses.flops.operator_call import Call, Cost, Tensor, parse_kineto_call, parse_node_call

SIZE = st.integers(1, 40)
BF16 = "c10::BFloat16"


def cost(name: str, *arguments: Any, dtype: str = "float", outputs: tuple[Tensor, ...] = ()) -> Cost:
    """Of a call whose tuples are shapes, whose Tensors stand for themselves, and whose rest are values."""
    tensors = [
        Tensor(one, dtype) if isinstance(one, tuple) else one if isinstance(one, Tensor) else None
        for one in arguments
    ]
    values = [None if isinstance(one, tuple | Tensor) else one for one in arguments]
    found = compute_cost(Call(name, tuple(tensors), tuple(values), outputs))
    assert found is not None, f"{name} {arguments} has no cost"
    return found


def uncounted(name: str, *arguments: Any) -> bool:
    tensors = tuple(Tensor(one, "float") if isinstance(one, tuple) else None for one in arguments)
    values = tuple(None if isinstance(one, tuple) else one for one in arguments)
    return compute_cost(Call(name, tensors, values)) is None


def test_matrix_products_by_hand() -> None:
    assert cost("aten::mm", (3, 4), (4, 5)) == Cost(120, 4 * (12 + 20 + 15), dtype="float")
    assert cost("aten::bmm", (2, 3, 4), (2, 4, 5), dtype=BF16) == Cost(240, 2 * 2 * 47, dtype=BF16)
    assert cost("aten::addmm", (5,), (3, 4), (4, 5), 1, 1) == Cost(120, 4 * (5 + 47), dtype="float")
    assert cost("aten::addmm", (5,), (3, 4), (4, 5), 0, 1).bytes == 4 * 47, "beta 0: the bias is not read"
    assert cost("aten::linear", (2, 3, 4), (5, 4), (5,)).flops == 2 * 6 * 4 * 5
    assert cost("aten::matmul", (7, 2, 3, 4), (4, 5)).flops == 2 * 7 * 2 * 3 * 4 * 5
    assert cost("aten::mv", (3, 4), (4,)).flops == 24
    assert cost("aten::dot", (9,), (9,)).flops == 18
    assert cost("aten::_int_mm", (3, 4), (4, 5), dtype="signed char").bytes == 12 + 20 + 4 * 15
    assert cost("aten::_scaled_mm", (3, 4), (4, 5), dtype="c10::Float8_e4m3fn").bytes == 12 + 20 + 2 * 15
    assert cost("aten::_grouped_mm", (6, 4), (3, 4, 5), dtype=BF16).flops == 2 * 6 * 4 * 5
    assert uncounted("aten::mm", (3, 4), (5, 6)), "shapes that do not fit are no product"


@given(SIZE, SIZE, SIZE, SIZE)
def test_a_batched_product_is_the_sum_of_its_products(b: int, m: int, k: int, n: int) -> None:
    one, all_of_them = cost("aten::mm", (m, k), (k, n)), cost("aten::bmm", (b, m, k), (b, k, n))
    assert one.flops and one.bytes
    assert (all_of_them.flops, all_of_them.bytes) == (b * one.flops, b * one.bytes)
    assert cost("aten::matmul", (b, m, k), (k, n)).flops == b * one.flops
    assert cost("aten::linear", (b, m, k), (n, k)).flops == b * one.flops


def test_an_expanded_tensor_is_read_once() -> None:
    wide = Tensor((8, 3, 4), "float", (0, 4, 1))
    assert (wide.numel, wide.stored) == (96, 12)
    assert cost("aten::bmm", wide, (8, 4, 5)).bytes == 4 * (12 + 160 + 120)
    assert Tensor((8, 0), "float", (0, 0)).stored == 0


@given(st.integers(0, 12), st.integers(0, 12), st.sampled_from(["none", "top_left", "bottom_right"]))
def test_pairs_of_a_mask_are_those_it_leaves(queries: int, keys: int, mask: str) -> None:
    shift = {"none": keys, "top_left": 0, "bottom_right": keys - queries}[mask]
    left = sum(key <= query + shift for query in range(queries) for key in range(keys))
    assert count_pairs(queries, keys, mask) == left


SDPA = "aten::_scaled_dot_product_"
Q, K, V = (2, 8, 16, 4), (2, 2, 24, 4), (2, 2, 24, 6)  # 8 query heads share 2 of the keys


def test_attention_by_hand() -> None:
    full = 2 * 2 * 8 * 16 * 24 * (4 + 6)
    assert cost(f"{SDPA}flash_attention", Q, K, V, 0.0, False).flops == full
    assert cost(f"{SDPA}efficient_attention", Q, K, V, None, True, 0.0, False).flops == full
    assert cost(f"{SDPA}cudnn_attention", Q, K, V, None, True, 0.0, False).flops == full
    causal = cost(f"{SDPA}flash_attention", Q, K, V, 0.0, True)
    assert causal.flops == 2 * 2 * 8 * sum(range(1, 17)) * 10, "query i sees keys 0 to i"
    # q, k, v in, out and one float a query out
    elements = math.prod(Q) + math.prod(K) + math.prod(V) + 2 * 8 * 16 * 6
    assert causal.bytes == 4 * elements + 4 * 2 * 8 * 16
    assert uncounted(f"{SDPA}flash_attention", Q, K, V, 0.0), "whether it is causal was not recorded"


def test_attention_with_lengths_first() -> None:
    q, k = (2, 16, 8, 4), (2, 24, 2, 4)
    rest = (None, None, 16, 24, 0.0, True, False, None, None, None)
    bottom_right = sum(24 - 16 + 1 + query for query in range(16))
    assert cost("aten::_flash_attention_forward", q, k, k, *rest).flops == 2 * 2 * 8 * bottom_right * 8
    assert uncounted("aten::_flash_attention_forward", q, k, k, *rest[:-2], 128, 0), "a sliding window"


def test_packed_sequences_count_if_all_have_one_length() -> None:
    q = (32, 8, 4)
    same = cost("aten::_flash_attention_forward", q, q, q, (3,), (3,), 16, 16, 0.0, False, False)
    assert same.flops == 2 * 2 * 8 * 16 * 16 * 8
    assert uncounted("aten::_flash_attention_forward", q, q, q, (3,), (3,), 20, 20, 0.0, False, False)


def test_attention_backward_executes_five_products_but_the_model_needs_four() -> None:
    grad = (2, 8, 16, 6)
    found = cost(
        f"{SDPA}flash_attention_backward", grad, Q, K, V, grad, (2, 8, 16), None, None, 16, 24, 0.0, False
    )
    product = 2 * 2 * 8 * 16 * 24
    assert found.flops == product * (3 * 4 + 2 * 6)
    assert found.model_flops == 2 * product * (4 + 6)


def convolution(x: tuple[int, ...], w: tuple[int, ...], transposed: bool = False, **more: Any) -> Cost:
    d = len(w) - 2
    options = {"stride": 1, "padding": 0, "dilation": 1, "output_padding": 0, "groups": 1} | more
    lists = [[options[name]] * d for name in ("stride", "padding", "dilation")]
    rest = (transposed, [options["output_padding"]] * d, options["groups"])
    return cost("aten::convolution", x, w, None, *lists, *rest)


def test_convolutions_by_hand() -> None:
    # ResNet's first: 112 x 112 places
    assert (
        convolution((32, 3, 224, 224), (64, 3, 7, 7), stride=2, padding=3).flops == 2 * 32 * 112**2 * 64 * 147
    )
    assert convolution((1, 8, 10), (4, 4, 3), groups=2).flops == 2 * 8 * 4 * 4 * 3, (
        "a group sees half the input"
    )
    assert convolution((1, 4, 10), (4, 6, 3), transposed=True, stride=2).flops == 2 * 10 * 4 * 6 * 3
    x, w, out = (2, 3, 8, 8), (4, 3, 3, 3), (2, 4, 6, 6)
    assert convolution(x, w).bytes == 4 * (math.prod(x) + math.prod(w) + math.prod(out))
    assert compute_result_shape((1, 4, 10), (4, 6, 3), [2], [1], [1], True, [1], 1) == (1, 6, 20)
    assert compute_result_shape((1, 4, 10), (4, 4, 3), [2], [1], [2], False, [0], 1) == (1, 4, 4)
    assert uncounted("aten::convolution", x, w), "the stride was not recorded"


def test_a_recorded_result_stands_for_the_stride() -> None:
    x, w = Tensor((2, 3, 8, 8), "float"), Tensor((4, 3, 3, 3), "float")
    call = Call("aten::convolution", (x, w), (None,) * 6 + (False,), (Tensor((2, 4, 6, 6), "float"),))
    assert compute_cost(call) == Cost(2 * 2 * 36 * 4 * 27, 4 * (384 + 108 + 288), dtype="float")


@pytest.mark.parametrize(
    ("mask", "times"), [([True, True, True], 2), ([False, True, True], 1), ([False] * 3, 0)]
)
def test_a_gradient_of_a_convolution_costs_as_much_as_the_convolution(mask: list[bool], times: int) -> None:
    x, w, grad = (2, 6, 8, 8), (4, 3, 3, 3), (2, 4, 6, 6)
    lists = ([0], [1, 1], [0, 0], [1, 1], False, [0, 0], 2, mask)
    forward = convolution(x, w, groups=2).flops
    assert forward
    assert cost("aten::convolution_backward", grad, x, w, *lists).flops == times * forward


def test_operators_that_memory_bounds_by_hand() -> None:
    assert cost("aten::add", (8, 1), (1, 4), 1) == Cost(32, 4 * (8 + 4 + 32))
    assert cost("aten::mul_", (8, 4), (4,)) == Cost(32, 4 * (32 + 4 + 32))
    assert cost("aten::eq", (8,), (8,)) == Cost(8, 4 * 16 + 8), "a comparison writes a byte"
    assert cost("aten::mul", (8,), Tensor((), "double"), (8,)).bytes == 4 * 8 + 8 + 4 * 8, "the third is out="
    assert cost("aten::mul", Tensor((8,), BF16), Tensor((8,), BF16), (8,)).bytes == 16 + 16 + 32
    assert cost("aten::gelu_backward", (8,), (8,), "none") == Cost(16, 4 * 24)
    assert cost("aten::where", Tensor((8,), "bool"), (8,), (8,)).bytes == 8 + 4 * 24
    assert cost("aten::copy_", Tensor((8,), BF16), Tensor((8,), "float"), False) == Cost(0, 16 + 32)
    assert cost("aten::fill_", (8,), 0) == Cost(0, 32)
    assert cost("aten::sum", (8, 4), [1], False) == Cost(32, 4 * (32 + 8))
    assert cost("aten::mean", (8, 4), [-1], True).bytes == 4 * (32 + 8)
    assert cost("aten::sum", (8, 4)).bytes == 4 * 32, "what is not known of the result is left out"
    assert cost("aten::_softmax", (8, 4), 1, False) == Cost(160, 4 * 64)
    assert cost("aten::embedding", (100, 16), Tensor((6,), "long int"), -1).bytes == 48 + 2 * 6 * 16 * 4
    assert cost("aten::index_select", (100, 16), 1, Tensor((6,), "long int")).bytes == 48 + 2 * 6 * 100 * 4
    assert cost(
        "aten::embedding_dense_backward", (6, 16), Tensor((6,), "long int"), 100, -1, False
    ).bytes == (6 * 16 * 4 + 48 + 100 * 16 * 4)
    assert cost("aten::native_layer_norm", (8, 4), None, (4,), (4,), 1e-5) == Cost(256, 4 * (32 + 4 + 4 + 32))


def test_lists_of_tensors() -> None:
    pair = (Tensor((3,), "float"), Tensor((4, 2), "float"))
    assert compute_cost(Call("aten::cat", (pair,), (None, 0))) == Cost(0, 2 * 4 * 11)
    assert compute_cost(Call("aten::_foreach_add_", (pair, pair))) == Cost(11, 4 * 33)
    adam = compute_cost(Call("aten::_fused_adamw_", (pair,) * 4))
    assert adam == Cost(14 * 11, 4 * 11 * (4 + 3)), "parameter and moments are written, the gradient is not"
    untyped = (Tensor((3,)), Tensor((4, 2)))
    assert compute_cost(Call("aten::_foreach_mul_", (untyped, untyped))) == Cost(11, None)


def test_types_of_results() -> None:
    def of(*given: tuple[str, tuple[int, ...]]) -> str | None:
        return promote_types(Tensor(shape, dtype) for dtype, shape in given)

    assert of((BF16, (3,)), ("double", ())) == BF16, "a number does not widen"
    assert of((BF16, (3,)), ("float", (3,))) == "float"
    assert of((BF16, (3,)), ("c10::Half", (3,))) == "float"
    assert of(("long int", (3,)), ("double", ())) == "float"
    assert of(("bool", (3,)), ("int", (3,))) == "int"
    assert promote_types([Tensor((3,), None)]) is None


@given(st.lists(st.lists(st.integers(1, 4), max_size=3).map(tuple), min_size=1, max_size=3))
def test_shapes_broadcast_as_numpy_s_do(shapes: list[tuple[int, ...]]) -> None:
    numpy = pytest.importorskip("numpy")
    try:
        expected = numpy.broadcast_shapes(*shapes)
    except ValueError:
        with pytest.raises(ValueError):
            broadcast_shapes(*shapes)
    else:
        assert broadcast_shapes(*shapes) == expected


def test_a_call_as_kineto_describes_it() -> None:
    call = parse_kineto_call(
        "aten::addmm",
        "[[4], [2, 3], [3, 4], [], [], [[2], [3]], []]",
        json.dumps(["float", BF16, BF16, "Scalar", "Scalar", "TensorList", "double"]),
        "[[0], [3, 1], [1, 3], [], [], [], []]",
        json.dumps(["", "", "", "1", "True", "", ""]),
    )
    assert call.tensors[:3] == (
        Tensor((4,), "float", (0,)),
        Tensor((2, 3), BF16, (3, 1)),
        Tensor((3, 4), BF16, (1, 3)),
    )
    assert call.tensors[3] is None
    assert call.tensors[5] == (Tensor((2,)), Tensor((3,)))
    assert call.tensors[6] == Tensor((), "double", ())
    assert call.values[3:5] == (1, True)


def test_a_call_as_an_execution_trace_describes_it() -> None:
    def row(io: int, index: int, item: int | None, dtype: str, shape: str) -> dict[str, Any]:
        return {"io": io, "index": index, "item": item, "dtype": dtype, "shape": shape, "stride": None}

    rows = [row(0, 0, 0, "float", "[3]"), row(0, 0, 1, "float", "[4]"), row(1, 0, None, "float", "[7]")]
    rows += [row(0, 2, None, "nullptr (uninitialized)", "[]")]
    call = parse_node_call("aten::cat", rows, "[[null, null], 0, null]")
    assert call.tensors == ((Tensor((3,), "float"), Tensor((4,), "float")), None, None)
    assert (call.value(1), call.output()) == (0, Tensor((7,), "float"))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.sampled_from(["", "float", "True", "[1]"]),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=12,
)


@given(st.sampled_from(sorted(REGISTRY)), st.lists(JSON, max_size=12), JSON, JSON, JSON)
def test_no_arguments_break_a_formula(name: str, dims: Any, types: Any, strides: Any, values: Any) -> None:
    texts = [json.dumps(one) for one in (dims, types, strides, values)]
    found = compute_cost(parse_kineto_call(name, *texts))
    for number in () if found is None else (found.flops, found.bytes, found.model_flops):
        assert number is None or (type(number) is int and 0 <= number < 2**56)


@given(st.sampled_from(sorted(REGISTRY)), st.lists(st.lists(SIZE, max_size=4), max_size=6))
def test_bytes_grow_with_the_type(name: str, shapes: list[list[int]]) -> None:
    narrow, wide = (
        compute_cost(
            parse_kineto_call(name, json.dumps(shapes), json.dumps([dtype] * len(shapes)), None, None)
        )
        for dtype in ("c10::Half", "float")
    )
    assert (narrow is None) == (wide is None)
    if narrow and wide and narrow.bytes is not None and wide.bytes is not None:
        assert narrow.bytes <= wide.bytes <= 2 * narrow.bytes
        assert narrow.flops == wide.flops


def test_every_operator_has_one_family() -> None:
    assert len(REGISTRY) > 300
    names = list(itertools.chain(REGISTRY))
    assert len(names) == len(set(names))


def test_an_operator_without_a_name_has_no_formula() -> None:
    assert find_entry(None) is None
