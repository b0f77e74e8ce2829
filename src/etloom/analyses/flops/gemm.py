"""Cost of matrix products: 2 m n k; adding a bias is not counted, as is customary."""

from __future__ import annotations

import math

from etloom.analyses.flops.operator_call import (
    Call,
    Cost,
    Formula,
    NotRecorded,
    Tensor,
    add_or_none,
    count_bytes,
)


def count_gemm_flops(m: int, n: int, k: int, batch: int = 1) -> int:
    """Return the flops of ``batch`` products (m, k) x (k, n)."""
    return 2 * batch * m * n * k


def _product(a: Tensor, b: Tensor, *more: Tensor | None, out: str | None = None) -> Cost:
    """Return the cost of the product a (.., m, k) x b (.., k, n) with equal batches; the tensors ``more`` are read,
    too."""
    (*batch, m, k), (*b_batch, b_k, n) = a.shape, b.shape
    if k != b_k or batch != b_batch:
        raise NotRecorded
    result = Tensor((*batch, m, n), out or a.dtype)
    return Cost(
        count_gemm_flops(m, n, k, math.prod(batch)),
        add_or_none(count_bytes(a, b, *more), count_bytes(result)),
        dtype=a.dtype,
    )


def _mm(call: Call) -> Cost:
    return _product(call.tensor(0, 2), call.tensor(1, 2))


def _bmm(call: Call) -> Cost:
    return _product(call.tensor(0, 3), call.tensor(1, 3))


def _addmm(call: Call) -> Cost:
    bias = None if call.value(3) == 0 else call.tensor(0)
    return _product(call.tensor(1, 2), call.tensor(2, 2), bias)


def _baddbmm(call: Call) -> Cost:
    bias = None if call.value(3) == 0 else call.tensor(0)
    return _product(call.tensor(1, 3), call.tensor(2, 3), bias)


def _mv(call: Call) -> Cost:
    return _product(call.tensor(0, 2), _column(call.tensor(1, 1)))


def _addmv(call: Call) -> Cost:
    return _product(call.tensor(1, 2), _column(call.tensor(2, 1)), call.tensor(0))


def _dot(call: Call) -> Cost:
    a, b = call.tensor(0, 1), call.tensor(1, 1)
    return _product(Tensor((1, *a.shape), a.dtype), _column(b))


def _column(vector: Tensor) -> Tensor:
    return Tensor((*vector.shape, 1), vector.dtype)


def _int_mm(call: Call) -> Cost:
    return _product(call.tensor(0, 2), call.tensor(1, 2), out="int")


def _scaled_mm(call: Call) -> Cost:
    """Return the cost of an 8-bit product; the result type is as recorded, else 16 bits, the usual choice."""
    result = call.output()
    scales = (call.optional(at) for at in (2, 3, 4))
    dtype = result.dtype if result else "bfloat16"
    return _product(call.tensor(0, 2), call.tensor(1, 2), *scales, out=dtype)


def _grouped_mm(call: Call) -> Cost:
    """Return the cost of a grouped product: each row of a (m, k) is multiplied by its group's matrix in b (groups, k,
    n)."""
    a, b = call.tensor(0, 2), call.tensor(1, 3)
    (m, k), (_, b_k, n) = a.shape, b.shape
    if k != b_k:
        raise NotRecorded
    return Cost(
        count_gemm_flops(m, n, k),
        add_or_none(count_bytes(a, b), count_bytes(Tensor((m, n), "bfloat16"))),
        dtype=a.dtype,
    )


def _linear(call: Call) -> Cost:
    """Return the cost of x (.., k) times the transposed weight (n, k)."""
    x, weight = call.tensor(0), call.tensor(1, 2)
    n, k = weight.shape
    if not x.shape or x.shape[-1] != k:
        raise NotRecorded
    rows = math.prod(x.shape[:-1])
    result = Tensor((rows, n), x.dtype)
    return Cost(
        count_gemm_flops(rows, n, k),
        add_or_none(count_bytes(x, weight, call.optional(2)), count_bytes(result)),
        dtype=x.dtype,
    )


def _matmul(call: Call) -> Cost:
    """Return the cost of a product like numpy's matmul: a vector is a row or column, and leading dimensions are
    broadcast."""
    a, b = call.tensor(0), call.tensor(1)
    if not a.shape or not b.shape:
        raise NotRecorded
    m, k = (1, *a.shape)[-2:]
    b_k, n = b.shape[-2:] if len(b.shape) > 1 else (*b.shape, 1)
    batch = broadcast_shapes(a.shape[:-2], b.shape[:-2])
    if k != b_k:
        raise NotRecorded
    result = Tensor((*batch, m, n), a.dtype)
    return Cost(
        count_gemm_flops(m, n, k, math.prod(batch)),
        add_or_none(count_bytes(a, b), count_bytes(result)),
        dtype=a.dtype,
    )


def broadcast_shapes(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape to which the shapes ``shapes`` broadcast; raise NotRecorded if they are incompatible."""
    width = max(map(len, shapes), default=0)
    padded = [(1,) * (width - len(shape)) + shape for shape in shapes]
    result = []
    for sizes in zip(*padded, strict=True):
        sizes_above_one = {size for size in sizes if size != 1}
        if len(sizes_above_one) > 1:
            raise NotRecorded
        result.append(sizes_above_one.pop() if sizes_above_one else 1)
    return tuple(result)


FORMULAS: dict[str, Formula] = {
    "aten::mm": _mm,
    "aten::bmm": _bmm,
    **dict.fromkeys(("aten::addmm", "aten::addmm_", "aten::_addmm_activation"), _addmm),
    **dict.fromkeys(("aten::baddbmm", "aten::baddbmm_"), _baddbmm),
    "aten::mv": _mv,
    **dict.fromkeys(("aten::addmv", "aten::addmv_"), _addmv),
    **dict.fromkeys(("aten::dot", "aten::vdot"), _dot),
    "aten::_int_mm": _int_mm,
    "aten::_scaled_mm": _scaled_mm,
    **dict.fromkeys(("aten::_grouped_mm", "aten::_scaled_grouped_mm"), _grouped_mm),
    **dict.fromkeys(("mkldnn::_linear_pointwise", "aten::mkldnn_linear", "aten::_mps_linear"), _linear),
}
COMPOSITE: dict[str, Formula] = {"aten::linear": _linear, "aten::matmul": _matmul}
"""Operators that usually call one of the above; they are counted if they do not."""
