"""Cost of attention: products with keys and values for the (query, key) pairs that the mask keeps.

Forward: scores q k^T and their product with v. Backward: gradients of q, k, v and of the scores, and, because a fused
operator does not keep them, the scores again, which model_flops excludes. Softmax, scale and dropout are not counted,
as is customary. With fewer key than query heads (GQA), each query head still uses all keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from etloom.analyses.flops.operator_call import (
    Call,
    Cost,
    Formula,
    NotRecorded,
    Tensor,
    add_or_none,
    count_bytes,
)


def count_pairs(queries: int, keys: int, mask: str) -> int:
    """Return the number of (query, key) pairs that an attention mask keeps.

    Args:
        queries: Number of queries.
        keys: Number of keys.
        mask: none, top_left (query i attends to keys 0..i), or bottom_right (the last query attends to all keys).
    """
    if mask == "none":
        return queries * keys
    shift = 0 if mask == "top_left" else keys - queries
    # Query i sees i + 1 + shift keys, at least none and at most all.
    first, last = max(0, -shift), min(queries, max(0, keys - shift))
    growing = max(0, last - first)
    growing_pairs = growing * (shift + 1) + (first + last - 1) * growing // 2 if growing else 0
    return growing_pairs + (queries - last) * keys


@dataclass(frozen=True)
class Shapes:
    """Sizes of an attention call: query heads times batch, (query, key) pairs per head, key size and value size."""

    heads: int
    pairs: int
    size: int
    value_size: int

    @property
    def forward(self) -> int:
        return 2 * self.heads * self.pairs * (self.size + self.value_size)

    @property
    def backward(self) -> int:
        return 2 * self.heads * self.pairs * (3 * self.size + 2 * self.value_size)

    @property
    def backward_without_scores(self) -> int:
        return 2 * self.forward


Mask = Callable[[Call], str]


@dataclass(frozen=True)
class Signature:
    """Positions of the tensors and options among the arguments of an attention operator.

    Attributes:
        heads_first: Layout (batch, heads, length, size), else (batch, length, heads, size).
        lengths: Positions of the cumulative lengths of sequences and their maxima (queries, keys, max, max), if any.
    """

    q: int
    mask: Mask
    heads_first: bool
    lengths: tuple[int, int, int, int] | None = None
    bias: int | None = None
    window: int | None = None  # position of the two sizes of a sliding window


def _causal(at: int, kind: str) -> Mask:
    return lambda call: kind if call.flag(at) else "none"


def _custom(at: int) -> Mask:
    """Return a function that reads the attention mask of an xformers call, a CustomMaskType number, from argument
    ``at``."""
    return lambda call: ("none", "top_left", "bottom_right")[call.ints(at, 1)[0]]


def _shapes(call: Call, signature: Signature) -> Shapes:
    q, k, v = (call.tensor(signature.q + more) for more in range(3))
    mask = signature.mask(call)
    if signature.window is not None:
        sizes = (call.value(signature.window), call.value(signature.window + 1))
        if any(size not in (None, -1) for size in sizes):
            raise NotRecorded  # sliding windows are not supported
    if signature.lengths and call.optional(signature.lengths[0]) is not None:
        batch, queries, keys, heads = _packed(call, signature, q, k)
    elif signature.heads_first:
        batch, heads, queries, _ = q.shape
        keys = k.shape[2]
    else:
        batch, queries, heads, _ = q.shape
        keys = k.shape[1]
    if k.shape[-1] != q.shape[-1]:
        raise NotRecorded
    return Shapes(batch * heads, count_pairs(queries, keys, mask), q.shape[-1], v.shape[-1])


def _packed(call: Call, signature: Signature, q: Tensor, k: Tensor) -> tuple[int, int, int, int]:
    """Return batch size, queries and keys per sequence, and heads of an attention call on packed sequences.

    Raises:
        NotRecorded: The sequences differ in length; their lengths are data, which is not recorded.
    """
    assert signature.lengths
    at_q, at_k, at_max_q, at_max_k = signature.lengths
    batch = call.tensor(at_q, 1).shape[0] - 1
    queries, keys = call.ints(at_max_q, 1)[0], call.ints(at_max_k, 1)[0]
    *tokens, heads, _ = q.shape
    if tokens[-1] != batch * queries or k.shape[-3] != batch * keys or call.optional(at_k) is None:
        raise NotRecorded
    return batch, queries, keys, heads


def _forward(signature: Signature, call: Call) -> Cost:
    shapes = _shapes(call, signature)
    q, k, v = (call.tensor(signature.q + more) for more in range(3))
    out = Tensor((*q.shape[:-1], v.shape[-1]), v.dtype)
    normaliser = Tensor(q.shape[:-1], "float")
    bias = None if signature.bias is None else call.optional(signature.bias)
    return Cost(
        shapes.forward, add_or_none(count_bytes(q, k, v, bias), count_bytes(out, normaliser)), dtype=q.dtype
    )


def _backward(signature: Signature, call: Call) -> Cost:
    shapes = _shapes(call, signature)
    q, k, v = (call.tensor(signature.q + more) for more in range(3))
    out = Tensor((*q.shape[:-1], v.shape[-1]), v.dtype)
    normaliser = Tensor(q.shape[:-1], "float")
    bias = None if signature.bias is None else call.optional(signature.bias)
    read = count_bytes(call.tensor(0), q, k, v, out, normaliser, bias)
    return Cost(
        shapes.backward,
        add_or_none(read, count_bytes(q, k, v, as_result=True)),
        model_flops=shapes.backward_without_scores,
        dtype=q.dtype,
    )


def _transformer_engine(call: Call) -> Cost:
    """Return the cost of TransformerEngine's fused attention, whose mask and layout are texts, which are not recorded.

    Its second and third arguments are the lengths of sequences; q, k and v are the first tensors with heads.
    """
    q, k, v = [tensor for tensor in call.every() if len(tensor.shape) > 2][:3]
    queries, keys = call.ints(1, 1)[0], call.ints(2, 1)[0]
    heads, size = q.shape[-2:]
    batch, rest = divmod(q.numel, queries * heads * size)
    if rest or k.numel != batch * keys * math.prod(k.shape[-2:]):
        raise NotRecorded
    shapes = Shapes(batch * heads, count_pairs(queries, keys, "top_left"), size, v.shape[-1])
    out = Tensor((*q.shape[:-1], v.shape[-1]), v.dtype)
    return Cost(
        shapes.forward,
        add_or_none(count_bytes(q, k, v), count_bytes(out, Tensor(q.shape[:-1], "float"))),
        dtype=q.dtype,
        assumed=ASSUMED_MASK,
    )


ASSUMED_MASK = "mask of attention: causal (not recorded)"
_SDPA = "aten::_scaled_dot_product_"
_FORWARD = {
    f"{_SDPA}flash_attention": Signature(0, _causal(4, "top_left"), True),
    f"{_SDPA}flash_attention_for_cpu": Signature(0, _causal(4, "top_left"), True, bias=5),
    f"{_SDPA}efficient_attention": Signature(0, _causal(6, "top_left"), True, bias=3),
    f"{_SDPA}cudnn_attention": Signature(0, _causal(6, "top_left"), True, bias=3),
    f"{_SDPA}fused_attention_overrideable": Signature(0, _causal(5, "top_left"), True, bias=3),
    "aten::_flash_attention_forward": Signature(
        0, _causal(8, "bottom_right"), False, (3, 4, 5, 6), window=11
    ),
    "aten::_efficient_attention_forward": Signature(0, _custom(9), False, (4, 5, 6, 7), bias=3),
    **dict.fromkeys(
        (
            "flash_attn::_flash_attn_forward",
            "aiter::_flash_attn_forward",
            "aiter::mha_fwd",
            "aiter::fmha_v3_fwd",
        ),
        Signature(0, _causal(5, "bottom_right"), False, window=6),
    ),
    "flash_attn::_flash_attn_varlen_forward": Signature(
        0, _causal(9, "bottom_right"), False, (3, 4, 5, 6), window=10
    ),
    "flash_attn_3::fwd": Signature(0, _causal(24, "bottom_right"), False, (7, 8, 12, 13), window=25),
}
_BACKWARD = {
    f"{_SDPA}flash_attention_backward": Signature(1, _causal(11, "top_left"), True),
    f"{_SDPA}flash_attention_for_cpu_backward": Signature(1, _causal(7, "top_left"), True, bias=8),
    f"{_SDPA}efficient_attention_backward": Signature(1, _causal(11, "top_left"), True, bias=4),
    f"{_SDPA}cudnn_attention_backward": Signature(1, _causal(14, "top_left"), True, bias=8),
    "aten::_flash_attention_backward": Signature(
        1, _causal(11, "bottom_right"), False, (6, 7, 8, 9), window=15
    ),
    "aten::_efficient_attention_backward": Signature(1, _custom(14), False, (6, 7, 8, 9), bias=4),
    "flash_attn::_flash_attn_backward": Signature(1, _causal(11, "bottom_right"), False, window=12),
    "flash_attn::_flash_attn_varlen_backward": Signature(
        1, _causal(15, "bottom_right"), False, (9, 10, 11, 12), window=16
    ),
}

FORMULAS: dict[str, Formula] = {
    "FusedAttnFunc": _transformer_engine,
    **{name: partial(_forward, signature) for name, signature in _FORWARD.items()},
    **{name: partial(_backward, signature) for name, signature in _BACKWARD.items()},
}
COMPOSITE: dict[str, Formula] = {
    "FlashAttnFunc": partial(_forward, Signature(0, _causal(5, "bottom_right"), False)),
    "FlashAttnVarlenFunc": partial(_forward, Signature(0, _causal(9, "bottom_right"), False, (3, 4, 5, 6))),
}
"""Functions that usually call one of the above; their windows are not recorded."""
SIGNATURES = {**_FORWARD, **_BACKWARD}
