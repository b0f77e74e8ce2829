"""Why an operator is slow, as far as its shapes show: few tiles, skinny or misaligned products, odd convolutions."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from etloom.core import categories
from etloom.core.trace import Trace

TILE = 128
"""Rows and columns of a matrix product that a multiprocessor computes at a time, in the usual kernels."""
MULTIPROCESSORS = 100
"""Of a device that does not state its number; data-center GPUs have 80 to 304."""
SKINNY = 64
"""A product with a dimension of at most this size does little arithmetic for each value that it reads."""
FEW_CHANNELS = 16
SHORT, LONG = 512, 8192
"""Sequence lengths below which attention has little work for each head, and above which its square dominates."""
LARGE_HEAD = 128
FEW_TOKENS = 16
"""Tokens of an expert that do not fill a tile."""
WASTED_WAVE = 1.3
"""Time of the tiles, if a device computes a whole number of them at a time, relative to the time without that limit."""


@dataclass(frozen=True)
class Reason:
    """What the shapes show, and what to do about it."""

    text: str
    advice: str


SLOW_MEMORY = Reason(
    "it reads and writes memory slowly", "a kernel with wider accesses, contiguous tensors, or fusion"
)
"""The reason of an operator that does little arithmetic, if its shapes show none."""


def count_multiprocessors(trace: Trace) -> int | None:
    """Return the number of multiprocessors of the devices; None if it was not recorded, or if they differ."""
    numbers = {
        device.get("numSms")
        for device in trace.meta.get("device_properties") or ()
        if isinstance(device, dict)
    }
    number = numbers.pop() if len(numbers) == 1 else None
    return number if type(number) is int and number > 0 else None


def explain_shapes(
    family: str, dims: str | None, values: str | None, dtype: str | None, multiprocessors: int | None
) -> Reason | None:
    """Return why an operator call is slow; None if its shapes show nothing.

    Args:
        family: Family of the operator.
        dims: Shapes of its arguments, a JSON list.
        values: Its other arguments, a JSON list of texts, if recorded.
        dtype: Type of the computation.
        multiprocessors: Of the device, if known.
    """
    try:
        shapes = [shape for shape in json.loads(dims or "[]") if _is_shape(shape)]
        arguments = json.loads(values or "[]")
    except ValueError:
        return None
    if not isinstance(arguments, list):
        arguments = []
    if family == "gemm" and len(matrices := [shape for shape in shapes if len(shape) > 1]) > 1:
        return _explain_product(matrices[-2], matrices[-1], dtype, multiprocessors or MULTIPROCESSORS)
    if family == "convolution" and len(shapes) > 1 and len(shapes[-1]) > 2:
        return _explain_convolution(shapes, arguments)
    if family == "attention" and shapes and len(shapes[0]) > 2:
        return _explain_attention(shapes[0])
    if family == "moe" and len(shapes) > 3 and len(shapes[1]) == 3:
        return _explain_experts(shapes[0], shapes[1], shapes[3])
    return None


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and bool(shape) and all(type(size) is int and size > 0 for size in shape)


def _explain_product(a: list[int], b: list[int], dtype: str | None, multiprocessors: int) -> Reason | None:
    batch = math.prod(a[:-2]) if len(b) > 2 else 1
    m, k = (a[-2] if len(b) > 2 else math.prod(a[:-1])), a[-1]
    n = b[-1] if b[-2] == k else b[-2]
    product = f"{m:,} x {k:,} times {k:,} x {n:,}" + (f", {batch:,} of them" if batch > 1 else "")
    if min(m, n, k) <= SKINNY:
        return Reason(
            f"a skinny product ({product}), limited by memory",
            "fuse it with what reads or writes its large factor, or batch several of them into one product",
        )
    step = {1: 16, 2: 8, 4: 4}.get(categories.itemsize(dtype) or 0, 1)
    if any(size % step for size in (n, k)):
        return Reason(
            f"dimensions that are no multiple of {step} ({product})",
            f"pad them to multiples of {step}, better of 64, so that kernels for tensor cores apply",
        )
    tiles = batch * math.ceil(m / TILE) * math.ceil(n / TILE)
    if tiles < multiprocessors:
        return Reason(
            f"too few tiles for the device ({product}: {tiles} tiles of {TILE} x {TILE})",
            "split the product along k (split-k, stream-k), or give it more rows or columns (a larger batch)",
        )
    waves = tiles / multiprocessors
    if math.ceil(waves) / waves > WASTED_WAVE:
        return Reason(
            f"a last wave of tiles that is mostly empty ({product}: {tiles} tiles on {multiprocessors} processors)",
            "choose sizes whose tiles fill the device a whole number of times, or stream-k",
        )
    return None


def _explain_convolution(shapes: list[list[int]], values: list[Any]) -> Reason | None:
    x, weight = shapes[0], next(shape for shape in shapes[1:] if len(shape) > 2)
    kernel = weight[2:]
    size = " x ".join(map(str, kernel))
    if weight[1] == 1 and x[1] > 1:
        return Reason(
            f"a depthwise convolution of {x[1]:,} channels ({size}), limited by memory",
            "channels-last layout, or a kernel that fuses it with the pointwise one after it",
        )
    if all(side == 1 for side in kernel):
        return Reason(
            f"a pointwise convolution ({x[1]:,} to {weight[0]:,} channels): a matrix product",
            "channels-last layout, and tf32 or 16 bits, so that it runs as a product on tensor cores",
        )
    dilation = values[5] if len(values) > 5 and isinstance(values[5], str) else ""
    if any(character in "23456789" for character in dilation):
        return Reason(
            f"a dilated convolution ({size}, dilation {dilation})",
            "few libraries have fast kernels for it: another algorithm (cudnn.benchmark), or channels-last layout",
        )
    if x[1] < FEW_CHANNELS:
        return Reason(
            f"{x[1]} input channels on images of {' x '.join(map(str, x[2:]))}: too few to fill a tile",
            "channels-last layout with padded channels, or move pixels into channels (space to depth)",
        )
    return None


def _explain_attention(q: list[int]) -> Reason | None:
    *_, size = q
    length = max(q[-2], q[-3])
    if size > LARGE_HEAD:
        return Reason(
            f"heads of {size} values, which do not fit the fast kernels",
            "heads of 64 or 128 values, and more of them",
        )
    if length >= LONG:
        return Reason(
            f"a long sequence ({length:,}), whose square dominates",
            "a newer attention kernel (FlashAttention-3, cuDNN), a sliding window, or context parallelism",
        )
    if length <= SHORT:
        return Reason(
            f"short sequences ({length}), with little work for each head",
            "pack several sequences into one, or a kernel for short ones",
        )
    return None


def _explain_experts(hidden: list[int], up: list[int], routing: list[int]) -> Reason:
    experts, chosen = up[0], routing[-1]
    each = hidden[0] * chosen / experts
    if each < FEW_TOKENS:
        return Reason(
            f"{experts} experts with {each:.3g} tokens each: their weights are read for few products",
            "larger batches, fewer and larger experts on a rank (expert parallelism), or weights of 8 or 4 bits",
        )
    return Reason(
        f"{experts} experts, {chosen} for a token, {each:.3g} tokens each",
        "a grouped product tuned for these sizes (tile sizes of the fused kernel), or weights of 8 bits",
    )
