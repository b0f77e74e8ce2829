"""Costs of memory-bound operators: elementwise, reductions, softmax, normalization, lookups, copies.

flops: any elementwise function is one operation per element (a fused one as many as it consists of), so they are
inaccurate for expensive functions; bytes are the relevant cost here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial

from etloom.analyses.flops.gemm import broadcast_shapes
from etloom.analyses.flops.operator_call import (
    Call,
    Cost,
    Formula,
    NotRecorded,
    Tensor,
    add_or_none,
    count_bytes,
)
from etloom.core import categories

_COMPARE = (
    "eq ne lt le gt ge logical_and logical_or logical_xor logical_not isnan isinf isfinite isneginf isposinf"
)
_UNARY = (
    "abs neg exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh sigmoid relu "
    "relu6 silu gelu elu selu celu mish hardtanh hardswish hardsigmoid leaky_relu softplus softshrink threshold sgn "
    "sign floor ceil round trunc frac reciprocal square erf erfc erfinv bitwise_not nan_to_num "
    "log_sigmoid_forward lgamma digamma"
)
_BINARY = (
    "add sub rsub mul div true_divide floor_divide remainder fmod pow maximum minimum fmax fmin atan2 hypot xlogy "
    "bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__ copysign polar clamp_min clamp_max"
)
_GRADIENT = (
    "threshold sigmoid tanh gelu silu leaky_relu hardtanh hardswish hardsigmoid softplus mish native_dropout"
)
_GRADIENT_ARITY = {**dict.fromkeys(_GRADIENT.split(), 2), "log_sigmoid": 3, "elu": 6}
_REDUCTIONS = "sum mean max min amax amin argmax argmin all any prod nansum count_nonzero"
_TERNARY = "where masked_fill clamp"
_TERNARY_ARITHMETIC = {"addcmul": 3, "addcdiv": 3, "lerp": 3}
_FILLS = ("fill_", "zero_", "uniform_", "normal_", "bernoulli_", "random_", "exponential_")


def _elementwise(arity: int, each: int, in_place: bool, result: str | None, call: Call) -> Cost:
    """Return the cost of an elementwise operator that reads its first ``arity`` tensor arguments and writes the result.

    The result has the broadcast shape; a tensor after the inputs is the result (the variant with out=).
    """
    inputs = [tensor for tensor in call.tensors[:arity] if isinstance(tensor, Tensor)]
    if not inputs:
        raise NotRecorded
    shape = broadcast_shapes(*(tensor.shape for tensor in inputs))
    dtype = inputs[0].dtype if in_place else result or promote_types(inputs)
    outputs = [tensor for tensor in call.tensors[arity:] if isinstance(tensor, Tensor)]
    out = call.output() or (outputs[0] if outputs else Tensor(shape, dtype))
    return Cost(each * math.prod(shape), add_or_none(count_bytes(*inputs), count_bytes(out, as_result=True)))


_DTYPE_KINDS = ("bool", "int", "float", "complex")


def promote_types(tensors: Iterable[Tensor]) -> str | None:
    """Return the result type of tensors by the rules of torch.result_type; None if a type is unknown.

    It is of the highest kind and among these the widest; a zero-dimensional tensor only counts with a higher kind.
    """
    types = [(_rank_dtype_kind(tensor.dtype), bool(tensor.shape), tensor.dtype) for tensor in tensors]
    if any(dtype is None for _, _, dtype in types):
        return None
    highest = max(kind for kind, _, _ in types)
    shaped = max((kind for kind, dimensioned, _ in types if dimensioned), default=-1)
    if shaped == highest:
        types = [entry for entry in types if entry[1]]
    elif shaped >= 0:
        # A scalar of a higher kind promotes to the default type of that kind, not to its own width.
        return {"int": "long", "float": "float", "complex": "complexfloat"}[_DTYPE_KINDS[highest]]
    fitting = [dtype for kind, _, dtype in types if kind == highest]
    widest = max(categories.itemsize(dtype) or 0 for dtype in fitting)
    widths = {dtype for dtype in fitting if categories.itemsize(dtype) == widest}
    # Half and bfloat16 promote to float.
    return (
        "float"
        if len(widths) > 1 and widest == 2 and _DTYPE_KINDS[highest] == "float"
        else min(map(str, widths))
    )


def _rank_dtype_kind(dtype: str | None) -> int:
    name = (dtype or "").lower()
    if "complex" in name:
        return 3
    if "bool" in name:
        return 0
    return 2 if any(word in name for word in ("float", "half", "double", "bf16")) else 1


def _reduction(each: int, call: Call) -> Cost:
    """Return the cost of a reduction; its bytes are a lower bound unless the dimensions of the result were recorded."""
    x = call.tensor(0)
    if call.name in ("aten::min", "aten::max") and call.optional(1) is not None:
        return _elementwise(2, 1, False, None, call)
    result = call.output()
    return Cost(
        each * x.numel,
        add_or_none(count_bytes(x), count_bytes(result) if result else _reduced_bytes(call, x)),
    )


def _reduced_bytes(call: Call, x: Tensor) -> int | None:
    item_bytes = count_bytes(Tensor((), x.dtype))
    dims = call.value(1)
    if isinstance(dims, int) and not isinstance(dims, bool):
        dims = [dims]
    if item_bytes is None or not isinstance(dims, list) or any(type(dim) is not int for dim in dims):
        return 0 if item_bytes is not None else None
    reduced = {dim % len(x.shape) for dim in dims} if x.shape else set()
    remaining = [size for at, size in enumerate(x.shape) if dims and at not in reduced]
    return item_bytes * math.prod(remaining)


def _scan(call: Call) -> Cost:
    x = call.tensor(0)
    return Cost(x.numel, add_or_none(count_bytes(x), count_bytes(x, as_result=True)))


def _softmax(call: Call) -> Cost:
    """Return the cost of softmax, 5 FLOPs per element: maximum, subtraction, exp, sum, division."""
    x = call.tensor(0)
    out = call.output() or Tensor(x.shape, "float" if call.value(2) is True else x.dtype)
    return Cost(5 * x.numel, add_or_none(count_bytes(x), count_bytes(out)))


def _softmax_backward(call: Call) -> Cost:
    """Return the cost of the gradient of softmax, 4 FLOPs per element: product, sum, subtraction, product."""
    grad, out = call.tensor(0), call.tensor(1)
    return Cost(4 * grad.numel, add_or_none(count_bytes(grad, out), count_bytes(out, as_result=True)))


def _normalisation(call: Call) -> Cost:
    """Return the cost of normalization, 8 FLOPs per element: mean (1), variance (3), normalize (2), scale and shift
    (2)."""
    x = call.tensor(0)
    return Cost(8 * x.numel, add_or_none(count_bytes(*call.every()), count_bytes(Tensor(x.shape, x.dtype))))


def _normalisation_backward(call: Call) -> Cost:
    """Return the cost of the gradient of normalization, about 11 FLOPs per element, which includes two sums per
    group.

    The gradients of weight and bias are written unless the output mask says otherwise; the bias is not read.
    """
    first, second = call.tensor(0), call.tensor(1)
    if first.shape != second.shape:
        raise NotRecorded
    weight_at = next((at for name, at in _WEIGHT_AT.items() if name in call.name), 2)
    weight = call.optional(weight_at)
    reads = [
        tensor
        for tensor in call.every()
        if tensor is not call.optional(_LAYER_NORM_BIAS_AT) or weight_at != 5
    ]
    mask = call.value(len(call.tensors) - 1)
    is_mask = isinstance(mask, list) and all(isinstance(entry, bool) for entry in mask)
    gradients = sum(mask[1:]) if is_mask else 2
    written = [Tensor(first.shape, first.dtype)] if not is_mask or mask[0] else []
    written += [weight] * gradients if weight is not None else []
    return Cost(11 * first.numel, add_or_none(count_bytes(*reads), count_bytes(*written)))


_WEIGHT_AT, _LAYER_NORM_BIAS_AT = {"layer_norm": 5, "group_norm": 4, "rms_norm": 4}, 6
"""The place of the weight among the arguments of the gradient of a normalization (of batch norms: 2)."""


def _rms_norm(call: Call) -> Cost:
    """Return the cost of RMS norm, 4 FLOPs per element: square and sum (2), scale by the root (1), by the weight
    (1)."""
    x = call.tensor(0)
    return Cost(4 * x.numel, add_or_none(count_bytes(*call.every()), count_bytes(Tensor(x.shape, x.dtype))))


def _look_up_rows(at_table: int, at_index: int, call: Call) -> Cost:
    """Return the cost of looking up table rows by index: the index is read, and each selected row is read and
    written."""
    table, index = call.tensor(at_table), call.tensor(at_index)
    dim = call.value(1) if at_index == 2 else 0
    if not table.shape or type(dim) is not int:
        raise NotRecorded
    row = table.numel // max(1, table.shape[dim])
    row_bytes = count_bytes(Tensor((index.numel, row), table.dtype))
    return Cost(0, add_or_none(count_bytes(index), row_bytes, row_bytes))


def _gather(call: Call) -> Cost:
    table, index = call.tensor(0), call.tensor(2)
    row_bytes = count_bytes(Tensor(index.shape, table.dtype))
    return Cost(0, add_or_none(count_bytes(index), row_bytes, row_bytes))


def _embedding_backward(call: Call) -> Cost:
    """Return the cost of an embedding's backward: the gradient of every table row is written, each looked-up row is
    added."""
    grad, index = call.tensor(0), call.tensor(1)
    table = Tensor((call.ints(2, 1)[0], grad.shape[-1]), grad.dtype)
    return Cost(grad.numel, add_or_none(count_bytes(grad, index), count_bytes(table)))


def _copy(call: Call) -> Cost:
    target, source = call.tensor(0), call.tensor(1)
    return Cost(0, add_or_none(count_bytes(target, as_result=True), count_bytes(source)))


def _quantize(call: Call) -> Cost:
    """Return the cost of a conversion to 8 bits: the largest value and the division."""
    x = call.tensor(0)
    return Cost(2 * x.numel, add_or_none(count_bytes(x), x.numel))


def _fill(call: Call) -> Cost:
    return Cost(0, count_bytes(call.tensor(0), as_result=True))


def _cat(call: Call) -> Cost:
    inputs = call.tensors[0]
    if not isinstance(inputs, tuple):
        raise NotRecorded
    total = count_bytes(*inputs)
    return Cost(0, add_or_none(total, total))


def _foreach(each: int, call: Call) -> Cost:
    """Return the cost of an elementwise operator on lists of tensors; the first list has the results' shapes."""
    first = call.tensors[0]
    if not isinstance(first, tuple):
        raise NotRecorded
    elements = sum(tensor.numel for tensor in first)
    return Cost(each * elements, add_or_none(count_bytes(*call.every()), count_bytes(*first, as_result=True)))


def _adam(call: Call) -> Cost:
    """Return the cost of a fused Adam step, 14 FLOPs per parameter: moments (6), their correction (2), update (6)."""
    lists = [tensors for tensors in call.tensors[:4] if isinstance(tensors, tuple)]
    if len(lists) != 4:
        raise NotRecorded
    parameters, gradients, *moments = lists
    written = [tensor for group in (parameters, *moments) for tensor in group]
    return Cost(
        14 * sum(tensor.numel for tensor in parameters),
        add_or_none(count_bytes(*written, *gradients), count_bytes(*written, as_result=True)),
    )


def _compare(each: int, call: Call) -> Cost:
    """Return the cost of a loss of two tensors of one shape: ``each`` FLOPs per element with the sum of all."""
    values, target = call.tensor(0), call.tensor(1)
    result = call.output() or Tensor((), values.dtype)
    return Cost(each * values.numel, add_or_none(count_bytes(values, target), count_bytes(result)))


def _select_losses(call: Call) -> Cost:
    """Return the cost of a negative log likelihood: one number per target is read and added."""
    scores, target = call.tensor(0), call.tensor(1)
    selected = Tensor(target.shape, scores.dtype)
    return Cost(target.numel, count_bytes(selected, target, call.output() or Tensor((), scores.dtype)))


def _spread_losses(call: Call) -> Cost:
    """Return the cost of its gradient: the whole gradient of the scores is written, one number per target not zero."""
    gradient, scores, target = call.tensor(0), call.tensor(1), call.tensor(2)
    return Cost(target.numel, add_or_none(count_bytes(gradient, target), count_bytes(scores, as_result=True)))


def _fused(call: Call) -> Cost:
    """Return the cost of a fused Triton kernel: its tensor arguments are each read or written once; its FLOPs are
    unknown.

    A pointwise kernel with a single tensor of the full size reads and writes that one in place.
    """
    tensors = call.every()
    if not tensors:
        raise NotRecorded
    largest = max(tensors, key=lambda tensor: tensor.numel)
    is_in_place = call.name.startswith(POINTWISE) and [t.numel for t in tensors].count(largest.numel) == 1
    return Cost(None, count_bytes(*tensors, *([largest] if is_in_place else [])))


def _make_formulas(names: str, arity: int, each: int = 1, result: str | None = None) -> dict[str, Formula]:
    """Return the cost formulas (FLOPs and bytes) of the named operators and of their in-place variants, by operator
    name."""
    formulas: dict[str, Formula] = {}
    for name in names.split():
        formulas[f"aten::{name}"] = partial(_elementwise, arity, each, False, result)
        formulas[f"aten::{name}_"] = partial(_elementwise, arity, each, True, None)
    return formulas


ELEMENTWISE: dict[str, Formula] = {
    **_make_formulas(_UNARY, 1),
    **_make_formulas(_BINARY, 2),
    **_make_formulas(_TERNARY, 3),
    **_make_formulas(_COMPARE, 2, result="bool"),
    **{
        name: formula
        for stem, each in _TERNARY_ARITHMETIC.items()
        for name, formula in _make_formulas(stem, 3, each).items()
    },
    **{
        f"aten::{name}_backward": partial(_elementwise, arity, 2, False, None)
        for name, arity in _GRADIENT_ARITY.items()
    },
    **{
        f"aten::_foreach_{name}{mark}": partial(_foreach, _TERNARY_ARITHMETIC.get(name, 1))
        for name in f"{_UNARY} {_BINARY} {' '.join(_TERNARY_ARITHMETIC)}".split()
        for mark in ("", "_")
    },
    "aten::native_dropout": partial(_elementwise, 1, 2, False, None),
}
OPTIMIZER: dict[str, Formula] = dict.fromkeys(("aten::_fused_adam_", "aten::_fused_adamw_"), _adam)
LOSS: dict[str, Formula] = {
    "aten::mse_loss": partial(_compare, 3),
    "aten::l1_loss": partial(_compare, 3),
    "aten::binary_cross_entropy": partial(_compare, 7),
    "aten::nll_loss_forward": _select_losses,
    "aten::nll_loss_backward": _spread_losses,
}
REDUCTION: dict[str, Formula] = {
    **{f"aten::{name}": partial(_reduction, 1) for name in _REDUCTIONS.split()},
    **{f"aten::{name}": partial(_reduction, 2) for name in ("norm", "linalg_vector_norm", "logsumexp")},
    **{f"aten::{name}": partial(_reduction, 3) for name in ("var", "std", "var_mean", "std_mean")},
    **dict.fromkeys(("aten::cumsum", "aten::cumprod"), _scan),
}
SOFTMAX: dict[str, Formula] = {
    **dict.fromkeys(("aten::_softmax", "aten::_log_softmax"), _softmax),
    **dict.fromkeys(("aten::_softmax_backward_data", "aten::_log_softmax_backward_data"), _softmax_backward),
}
_BATCH_NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
NORMALISATION: dict[str, Formula] = {
    **{
        f"aten::{name}": _normalisation
        for name in (*_BATCH_NORMS, "_batch_norm_with_update", "native_layer_norm", "native_group_norm")
    },
    **{
        f"aten::{name}_backward": _normalisation_backward
        for name in (*_BATCH_NORMS, "batch_norm", "native_layer_norm", "native_group_norm", "_fused_rms_norm")
    },
    "aten::_fused_rms_norm": _rms_norm,
}
EMBEDDING: dict[str, Formula] = {
    "aten::embedding": partial(_look_up_rows, 0, 1),
    "aten::index_select": partial(_look_up_rows, 0, 2),
    "aten::gather": _gather,
    "aten::embedding_dense_backward": _embedding_backward,
}
COPY: dict[str, Formula] = {
    "aten::copy_": _copy,
    **{f"aten::{name}": _fill for name in _FILLS},
    "aten::cat": _cat,
}
QUANTIZATION: dict[str, Formula] = dict.fromkeys(("_QuantizeFunc", "_ToFloat8Func"), _quantize)
POINTWISE = "triton_poi_"
FUSED = "triton_"
"""Prefix of operators that stand for one Triton kernel."""
FUSED_FORMULA: Formula = _fused
