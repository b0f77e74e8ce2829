"""Cost formulas that are declared as rows: operators of inference engines and fused libraries, and users' own.

A row names operators by a regular expression, their family, one of four models, and the positions of the arguments that
the model needs; ``wraps`` (any number) if they usually call an operator with a formula, which then counts instead.
Users' rows are the section ``costs`` of a file of names (docs/flops.md) and come first.

arguments  memory-bound: each tensor in ``write`` is written, in ``update`` read and written, the others (or those in
           ``read``) read; ``result``: a tensor like this argument is returned ("0:2": of the type of argument 2).
           ``flops``: operations per element of ``elements`` (default: the first tensor that is written).
product    ``a`` (.., k) times the matrix ``b``, in either layout, also of packed numbers, or one of several of the
           same size (a batch, groups of rows). The columns are those of ``out``; with ``sizes`` (any number) the call
           states rows, columns and k one after the other; else as in b. ``then``: a matrix by which the result is
           multiplied next. ``read``: the tensors that are read, by default all. ``whole`` (any number): bytes hold one
           number each.
experts    a mixture of experts: each row of ``hidden`` runs through as many experts as ``routing`` has columns; the
           weights are ``up`` and ``down`` (experts, rows, columns). Without weights (``router``: one column per expert)
           the intermediate size is assumed to be the hidden one, and the number of experts a token comes from the
           operator that selects them. The weights of as many experts are read as even routing would reach.
attention  over pages: ``q``, ``k``, ``v`` (tokens, heads, size) of the new tokens; the pairs of queries and keys come
           from the sums in the name of the engine's iteration. A sliding window is not considered.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

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
from etloom.core.names import list_names

Row = Mapping[str, Any]
PACKED = "4 bits"
"""Type of the arithmetic on packed 4-bit numbers, of which no peak is known."""
ASSUMED_SIZE = "intermediate size of experts: the hidden size (not recorded)"


def _row(pattern: str, family: str, model: str, **arguments: str) -> Row:
    return {"pattern": f"^(?:{pattern})$", "family": family, "model": model, **arguments}


BUILT_IN = (
    # Normalization: square and sum (2), scale by the root (1), by the weight (1); with the residual's addition 5.
    _row("(?:_C|aiter)::rms_norm|aiter::rmsnorm2d_fwd(?:_ck)?", "normalisation", "arguments", write="0", flops="4"),
    _row("_C::rms_norm_(?:static_fp8|dynamic_per_token)_quant", "normalisation", "arguments", write="0", flops="5"),
    _row("_C::fused_add_rms_norm|sgl_kernel::(?:gemma_)?fused_add_rmsnorm", "normalisation", "arguments",
         update="0 1", flops="5"),
    _row("_C::fused_add_rms_norm_static_fp8_quant", "normalisation", "arguments", write="0", update="2", flops="6"),
    _row("sgl_kernel::(?:gemma_)?rmsnorm", "normalisation", "arguments", write="0", flops="4"),
    _row("aiter::rmsnorm2d_fwd_with_add(?:_ck)?", "normalisation", "arguments", write="0 3", flops="5"),
    _row("vllm::rocm_aiter_rms_norm", "normalisation", "arguments", result="0", flops="4"),
    _row("vllm::rocm_aiter_rmsnorm2d_fwd_with_add", "normalisation", "arguments", result="0 0", flops="5"),
    # Activations of the two halves of a projection.
    _row("(?:_C|sgl_kernel|aiter)::(?:silu|gelu|gelu_tanh|fatrelu)_and_mul|_C::mul_and_silu|_C::swigluoai_and_mul",
         "elementwise", "arguments", write="0", flops="4"),
    _row("_C::silu_and_mul_quant|_C::silu_and_mul_nvfp4_quant|_C::gelu_(?:new|fast|quick)", "elementwise", "arguments",
         write="0", flops="5"),
    # Liger's functions, and their gradients, whose arguments are the gradients of the results.
    _row("Liger(?:SiLU|GELU)MulFunction", "elementwise", "arguments", result="0", flops="5"),
    _row("Liger(?:SiLU|GELU)MulFunctionBackward", "elementwise", "arguments", read="0 0 0", result="0 0", flops="10"),
    _row("LigerDyTFunction", "elementwise", "arguments", result="0", flops="4"),
    _row("LigerRMSNormFunction", "normalisation", "arguments", read="0 1", result="0", flops="4"),
    _row("LigerRMSNormFunctionBackward", "normalisation", "arguments", read="0 0", result="0", flops="8"),
    _row("LigerFusedAddRMSNormFunction", "normalisation", "arguments", read="0 1 2", result="0 0", flops="5"),
    _row("LigerLayerNormFunction", "normalisation", "arguments", read="0 1 2", result="0", flops="8"),
    _row("LigerLayerNormFunctionBackward", "normalisation", "arguments", read="0 0", result="0", flops="11"),
    _row("LigerSoftmaxFunction", "softmax", "arguments", result="0", flops="5"),
    _row("LigerKLDivLossFunction", "loss", "arguments", read="0 1", flops="4", elements="0"),
    # Positions: queries and keys are rotated in place, 3 operations per element; a row of the table for each token.
    _row("_C::(?:batched_)?rotary_embedding|sgl_kernel::rotary_embedding", "rope", "arguments",
         read="0", update="1 2", flops="3", elements="1 2"),
    _row("sgl_kernel::apply_rope_pos_ids_cos_sin_cache", "rope", "arguments", read="0 1 5", write="2 3", flops="3",
         elements="0 1"),
    _row("LigerRopeFunction", "rope", "arguments", read="2 3", update="0 1", flops="3", elements="0 1"),
    _row("LigerRopeFunctionBackward", "rope", "arguments", update="0 1", flops="3", elements="0 1"),
    _row("FusedRoPEFunc", "rope", "arguments", read="0 1", result="0", flops="3"),
    _row("FusedRoPEFuncBackward", "rope", "arguments", read="0", result="0", flops="3"),
    # Losses of Liger and TransformerEngine: softmax (5) and its gradient (2), which replaces the scores.
    _row("LigerCrossEntropyFunction|CrossEntropyFunction", "loss", "arguments", read="1", update="0", flops="7"),
    _row("_C_cache_ops::reshape_and_cache(?:_flash)?", "copy", "arguments", read="0 1 4", result="0:2 1:3"),
    _row("_C_cache_ops::concat_and_cache_mla", "copy", "arguments", read="0 1 3", result="0:2 1:2"),
    _row("sgl_kernel::set_kv_buffer", "copy", "arguments", read="0 1 2", result="0 1"),
    # Quantization: the largest value and the division.
    _row("_C::(?:static_scaled|dynamic_scaled|dynamic_per_token_scaled)_(?:fp8|int8)_quant|_C::scaled_fp4_quant"
         "|(?:_C|sgl_kernel)::(?:per_token_group_fp8_quant|per_token_group_quant_int8)"
         "|aiter::(?:static|dynamic)_per_(?:tensor|token)_(?:scaled_)?quant", "quantization", "arguments",
         write="0", flops="2"),
    _row("sgl_kernel::sgl_per_(?:tensor|token)(?:_group)?_quant_(?:fp8|int8|8bit)|sgl_kernel::scaled_fp4_quant",
         "quantization", "arguments", write="1", flops="2"),
    # Products with quantized factors.
    _row("_C::cutlass_scaled_(?:fp4_)?mm(?:_azp)?|(?:_C|sgl_kernel)::cutlass_scaled_fp4_mm", "gemm", "product",
         out="0", a="1", b="2"),
    _row("sgl_kernel::(?:fp8|int8|fp8_blockwise)_scaled_mm", "gemm", "product", a="0", b="1"),
    _row("_C::gptq_marlin_gemm", "gemm", "product", a="0", b="2", sizes="1"),
    _row("_C::(?:awq|gptq)_gemm", "gemm", "product", a="0", b="1"),
    _row("vllm::rocm_unquantized_gemm(?:_impl)?|vllm::rocm_aiter_tuned_gemm|vllm::(?:apply_)?w8a8_block_fp8_\\w+"
         "|vllm::rocm_aiter_gemm_\\w+", "gemm", "product", a="0", b="1", wraps="1"),
    _row("aiter::_?(?:batched_)?gemm_a\\d+w(?:fp)?\\d+\\w*", "gemm", "product", a="0", b="1"),
    _row("vllm::gemm_with_dynamic_quant|bitsandbytes::int8_linear_matmul"
         "|primus_turbo(?:_cpp_extension)?::(?:ck_)?grouped_gemm(?:_impl)?", "gemm", "product", a="0", b="1"),
    # TransformerEngine: the layer norm before a product is not counted.
    _row("_Linear", "gemm", "product", a="1", b="0"),
    _row("_LayerNormLinear", "gemm", "product", a="0", b="3"),
    _row("_LayerNormMLP", "gemm", "product", a="0", b="3", then="5"),
    _row("tex_ts::te_gemm_ts", "gemm", "product", a="5", b="0", out="10", read="0 5", whole="1"),
    _row("_rocm_C::LLMM1", "gemm", "product", a="1", b="0"),
    _row("_rocm_C::wvSplitKQ?", "gemm", "product", a="1", b="0"),
    # Mixtures of experts.
    _row("vllm::(?:rocm_aiter_fused_moe|outplace_fused_experts|inplace_fused_experts|fused_experts)"
         "|sglang::(?:outplace|inplace)_fused_experts", "moe", "experts", hidden="0", up="1", down="2", routing="3"),
    _row("vllm::moe_forward(?:_shared)?", "moe", "experts", hidden="0", router="1",
         wraps="1"),
    _row("_moe_C::topk_softmax", "routing", "arguments", write="0 1", flops="5", elements="3"),
    _row("sgl_kernel::topk_softmax", "routing", "arguments", write="0 1", flops="5", elements="2"),
    _row("aiter::topk_softmax(?:_asm)?", "routing", "arguments", write="0 1 2", flops="5", elements="3"),
    _row("(?:_moe_C|sgl_kernel|aiter)::moe_align_block_size", "routing", "arguments", read="0"),
    _row("(?:_moe_C|sgl_kernel|aiter)::moe_sum(?:_reduce)?", "reduction", "arguments", write="1", flops="1",
         elements="0"),
    # Attention over pages.
    _row("(?:vllm|sglang)::unified_attention(?:_with_output)?", "attention", "attention", q="0", k="1", v="2"),
)  # fmt: skip


_ALL = re.compile("|".join(f"({row['pattern']})" for row in BUILT_IN))
"""One expression for all rows, because the names of a trace are many; the number of its group is that of the row."""


def find_row(operator: str) -> Row | None:
    """Return the first row that matches an operator, users' rows first; None if there is none."""
    for row in list_names("costs"):
        if row["pattern"].search(operator):
            return row
    match = _ALL.match(operator)
    return None if match is None or match.lastindex is None else BUILT_IN[match.lastindex - 1]


def make_formula(row: Row) -> Formula:
    """Return the cost formula that a row declares."""
    return partial(_MODELS[row["model"]], row)


def _places(row: Row, key: str) -> list[int]:
    return [int(place) for place in row.get(key, "").split()]


def _place(row: Row, key: str) -> int:
    if key not in row:
        raise NotRecorded
    return int(row[key])


def _count_arguments(row: Row, call: Call) -> Cost:
    written, updated = ([call.tensor(at) for at in _places(row, key)] for key in ("write", "update"))
    results = []
    for text in row.get("result", "").split():
        shape_at, _, type_at = text.partition(":")
        results.append(Tensor(call.tensor(int(shape_at)).shape, call.tensor(int(type_at or shape_at)).dtype))
    if "read" in row:
        read = [tensor for at in _places(row, "read") if (tensor := call.optional(at)) is not None]
    else:
        read = call.every(without=(*_places(row, "write"), *_places(row, "update")))
    elements = [call.tensor(at) for at in _places(row, "elements")] or [*written, *updated, *results][:1]
    flops = int(row.get("flops", 0)) * sum(tensor.numel for tensor in elements)
    return Cost(
        flops,
        add_or_none(count_bytes(*read, *updated), count_bytes(*written, *updated, *results, as_result=True)),
    )


def _count_product(row: Row, call: Call) -> Cost:
    a, b = call.tensor(_place(row, "a")), call.tensor(_place(row, "b"))
    b = replace(b, shape=b.shape[-2:], strides=None)
    out_at = _places(row, "out")
    out = call.optional(out_at[0]) if out_at else call.output()
    if len(a.shape) < 2 or len(b.shape) < 2:
        raise NotRecorded
    *rows, k = a.shape
    a_is_packed = "whole" not in row and _is_packed(a)
    if "sizes" in row:
        columns = _find_stated_columns(call, math.prod(rows), k)
    elif out is not None:
        columns = out.shape[-1]
    else:
        columns = _find_columns(k, b)
    flops = 2 * math.prod(rows) * columns * k * (2 if a_is_packed else 1)
    for at in _places(row, "then"):
        then = call.tensor(at, 2)
        flops += 2 * math.prod(rows) * then.numel
        columns = then.shape[0]
    read = [call.optional(at) for at in _places(row, "read")] or call.every(without=out_at)
    result = out or Tensor(
        (*rows, columns), a.dtype if (categories.itemsize(a.dtype) or 0) > 1 else "bfloat16"
    )
    return Cost(
        flops,
        add_or_none(count_bytes(*read), count_bytes(result, as_result=True)),
        dtype=PACKED if a_is_packed else a.dtype,
    )


def _is_packed(tensor: Tensor) -> bool:
    return (tensor.dtype or "").lower() in ("unsigned char", "byte", "uint8", "c10::float4_e2m1fn_x2")


def _find_stated_columns(call: Call, rows: int, k: int) -> int:
    """Return the columns that a call states between its rows and k."""
    for m, n, inner in zip(call.values, call.values[1:], call.values[2:], strict=False):
        if (m, inner) == (rows, k) and type(n) is int and n > 0:
            return n
    raise NotRecorded


def _find_columns(k: int, b: Tensor) -> int:
    """Return the columns of a product with the matrix ``b`` in either layout.

    Bytes may hold two numbers of k each. A 32-bit integer holds eight of 4 bits or four of 8 bits: along k (GPTQ), or
    along the columns (AWQ, 4 bits).
    """
    if (b.dtype or "").lower() in ("int", "int32"):
        if k in (8 * b.shape[0], 4 * b.shape[0]):
            return b.shape[1]
        if b.shape[0] == k:
            return 8 * b.shape[1]
        raise NotRecorded
    for inner in (k, k // 2):
        if inner and inner in b.shape:
            return b.shape[1] if b.shape[0] == inner else b.shape[0]
    raise NotRecorded


def _count_experts(row: Row, call: Call) -> Cost:
    hidden = call.tensor(_place(row, "hidden"), 2)
    tokens, size = hidden.shape
    if "router" in row:
        experts, chosen = call.tensor(_place(row, "router"), 2).shape[1], call.context.get("chosen")
        if chosen is None or not 0 < chosen <= experts:
            raise NotRecorded
        # Two projections up (a gate and a value) and one down, of 16-bit weights unless a kernel's name has 4 bits.
        weights = 3 * size * size
        weight_bytes: int | None = weights // 2 if call.context.get("is_packed") else 2 * weights
        assumed: str | None = ASSUMED_SIZE
    else:
        up, down = call.tensor(_place(row, "up"), 3), call.tensor(_place(row, "down"), 3)
        experts, chosen = up.shape[0], call.tensor(_place(row, "routing")).shape[-1]
        if not experts or down.shape[0] != experts:
            raise NotRecorded
        packing = 2 if _is_packed(up) and up.shape[2] * 2 == size else 1
        weights = packing * (up.numel + down.numel) // experts
        total = count_bytes(up, down)
        weight_bytes, assumed = (None if total is None else total // experts), None
    expected_experts = experts * (1 - (1 - min(1.0, chosen / experts)) ** tokens)
    traffic = add_or_none(count_bytes(hidden), count_bytes(hidden, as_result=True))
    return Cost(
        2 * tokens * chosen * weights,
        add_or_none(traffic, None if weight_bytes is None else round(expected_experts * weight_bytes)),
        dtype=hidden.dtype,
        assumed=assumed,
    )


def _count_attention(row: Row, call: Call) -> Cost:
    q, k, v = (call.tensor(_place(row, key), 3) for key in "qkv")
    pairs, keys = call.context.get("pairs"), call.context.get("keys")
    if pairs is None or keys is None:
        raise NotRecorded
    heads, size = q.shape[1:]
    pages = [Tensor((keys, *tensor.shape[1:]), tensor.dtype) for tensor in (k, v)]
    return Cost(
        2 * heads * pairs * (size + v.shape[2]),
        add_or_none(count_bytes(q, *pages), count_bytes(Tensor((*q.shape[:2], v.shape[2]), v.dtype))),
        dtype=q.dtype,
    )


_MODELS: dict[str, Callable[[Row, Call], Cost]] = {
    "arguments": _count_arguments,
    "product": _count_product,
    "experts": _count_experts,
    "attention": _count_attention,
}
