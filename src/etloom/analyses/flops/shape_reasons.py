"""Why an operator is slow, as far as its shapes show: few tiles, skinny or misaligned products, odd convolutions."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from etloom.analyses.flops.attention import SIGNATURES
from etloom.analyses.flops.declared_costs import find_row
from etloom.analyses.flops.formulas import MATRIX
from etloom.analyses.flops.peaks import Peaks
from etloom.core import categories
from etloom.core.trace import Trace

TILE = 128
"""Rows and columns of a matrix product that a multiprocessor computes at a time, in the usual kernels."""
MULTIPROCESSORS = 100
"""Number assumed for a device that does not state it; data-center GPUs have 80 to 304."""
SKINNY = 64
"""A product with a dimension of at most this size does little arithmetic for each value that it reads."""
FEW_CHANNELS = 16
SHORT, LONG = 512, 8192
"""Sequence lengths below which attention has little work for each head, and above which its square dominates."""
LARGE_HEAD = 128
FEW_TOKENS = 16
"""Tokens of an expert that do not fill a tile."""
MIN_TENSOR_CORE_GAIN = 1.5
"""Peak of 16-bit types relative to fp32 from which a device has units for products of narrow types."""
WASTED_WAVE = 1.3
"""Time of the tiles, if a device computes a whole number of them at a time, relative to the time without that limit."""


@dataclass(frozen=True)
class Reason:
    """A cause of slowness that shapes show, and how to remove it."""

    text: str
    advice: str


_SLOW_MEMORY = Reason(
    "it reads and writes memory slowly", "a kernel with wider accesses, contiguous tensors, or fusion"
)


def count_multiprocessors(trace: Trace) -> int | None:
    """Return the number of multiprocessors of the devices; None if it was not recorded, or if they differ."""
    numbers = {
        device.get("numSms")
        for device in trace.meta.get("device_properties") or ()
        if isinstance(device, dict)
    }
    number = numbers.pop() if len(numbers) == 1 else None
    return number if type(number) is int and number > 0 else None


@dataclass(frozen=True)
class CallSetting:
    """Facts about a rank that explain slow calls.

    Attributes:
        multiprocessors: of a device; None if unknown.
        has_tensor_cores: the device multiplies 16-bit types much faster than fp32.
        expanded: shape of expanded keys or values of attention -> their number of heads before.
    """

    multiprocessors: int | None
    has_tensor_cores: bool
    expanded: Mapping[tuple[int, ...], int]


def describe_setting(trace: Trace, peaks: Peaks | None) -> CallSetting:
    """Return the setting of the calls of a rank; ``peaks``: of its device, None if unknown."""
    rates = [0.0] if peaks is None else [peaks.tflops(name) or 0.0 for name in ("fp16", "bf16")]
    plain = None if peaks is None else peaks.tflops("fp32")
    has_tensor_cores = plain is not None and max(rates) > MIN_TENSOR_CORE_GAIN * plain
    return CallSetting(count_multiprocessors(trace), has_tensor_cores, find_expanded_heads(trace))


def find_expanded_heads(trace: Trace) -> dict[tuple[int, ...], int]:
    """Return {shape of the result: heads before} of operators that repeat the heads of keys or values.

    These are aten::repeat_interleave of (batch, heads, length, size), and aten::expand of a dimension of 1 after the
    heads, as transformers writes it.
    """
    expanded: dict[tuple[int, ...], int] = {}
    if not trace.arguments.height:
        return expanded
    names = pl.col("name").cast(pl.String).is_in(["aten::repeat_interleave", "aten::expand"])
    calls = trace.events.filter(names).select(pl.col("name").cast(pl.String), event="id")
    arguments = trace.arguments.select("event", pl.col("dims", "concrete_inputs").cast(pl.String))
    rows = calls.join(arguments, on="event").select("name", "dims", "concrete_inputs").unique()
    for name, dims, values in rows.iter_rows():
        shape, sizes = _shape(_read_list(dims), 0), _read_list(values)
        if name == "aten::expand" and len(shape) == 5 and shape[2] == 1:
            target = _read_list(_text(sizes, 1))
            if len(target) == 5 and type(target[2]) is int and target[2] > 1:
                expanded[(shape[0], shape[1] * target[2], *shape[3:])] = shape[1]
        elif name == "aten::repeat_interleave" and len(shape) == 4:
            repeats, axis = (_text(sizes, at) for at in (1, 2))
            if repeats.isdecimal() and axis in ("1", "-3") and int(repeats) > 1:
                expanded[(shape[0], shape[1] * int(repeats), *shape[2:])] = shape[1]
    return expanded


def _read_list(text: str | None) -> list[Any]:
    try:
        values = json.loads(text or "[]")
    except ValueError:
        return []
    return values if isinstance(values, list) else []


def explain_call(call: Mapping[str, Any], setting: CallSetting, has_limits: bool) -> Reason | None:
    """Return why a call of a GPU is slow; None for an unknown reason.

    It is what the shapes show; else that a convolution does not use narrower types, or that an operator that does
    little arithmetic uses the memory badly.

    Args:
        call: name, family, dims, concrete_inputs, dtype, precision; see `explain_shapes`.
        setting: see `describe_setting`.
        has_limits: Whether the limits of the device are known.
    """
    family, dims, dtype = (call[name] for name in ("family", "dims", "dtype"))
    repeated = _explain_expansion(call["name"], dims, setting.expanded) if family == "attention" else None
    if repeated is not None and repeated[1]:
        return repeated[0]
    reason = explain_shapes(
        call["name"], family, dims, call["concrete_inputs"], dtype, setting.multiprocessors
    )
    if reason is None and repeated is not None:
        return repeated[0]
    if reason is None and family == "convolution":
        return _explain_precision(call["precision"], setting.has_tensor_cores)
    return _SLOW_MEMORY if reason is None and has_limits and family not in MATRIX else reason


def _explain_precision(precision: str | None, has_tensor_cores: bool) -> Reason | None:
    if precision == "fp32" and has_tensor_cores:
        return Reason(
            "a convolution in fp32, without tensor cores",
            "allow tf32 (torch.backends.cudnn.allow_tf32, the default), or use autocast with bfloat16 and "
            "channels-last layout",
        )
    if precision == "tf32":
        return Reason(
            "a convolution in tf32, at half of the rate of 16-bit types",
            "autocast with bfloat16, with channels-last layout",
        )
    return None


def _explain_expansion(
    name: str, dims: str | None, expanded: Mapping[tuple[int, ...], int]
) -> tuple[Reason, bool] | None:
    """Return the reason of attention whose keys were expanded, and whether reading these is most of its work."""
    signature, shapes = SIGNATURES.get(name), _read_list(dims)
    if signature is None or not expanded:
        return None
    q, k = _shape(shapes, signature.q), _shape(shapes, signature.q + 1)
    before = expanded.get(tuple(k))
    if len(q) != 4 or before is None or q[1] != k[1]:
        return None
    reason = Reason(
        f"keys and values of {before} heads, expanded to {k[1]} before it: it reads each {k[1] // before} times",
        "scaled_dot_product_attention(..., enable_gqa=True), FlashAttention or FlexAttention, which read grouped heads "
        "as they are",
    )
    return reason, q[2] * FEW_TOKENS <= k[2]


def explain_shapes(
    name: str,
    family: str,
    dims: str | None,
    values: str | None,
    dtype: str | None,
    multiprocessors: int | None,
) -> Reason | None:
    """Return why an operator call is slow; None if its shapes show nothing.

    Args:
        name: The operator.
        family: Its family.
        dims: Shapes of its arguments, a JSON list.
        values: Its arguments other than tensors, a JSON list of texts, if recorded.
        dtype: Type of the computation.
        multiprocessors: Of the device, if known.
    """
    try:
        shapes, arguments = json.loads(dims or "[]"), json.loads(values or "[]")
    except ValueError:
        return None
    if not isinstance(shapes, list):
        return None
    arguments = arguments if isinstance(arguments, list) else []
    row = find_row(name) or {}
    if family == "gemm":
        two = _PRODUCT_OF_OTHERS if "addmm" in name else (0, 1)
        a, b = (_shape(shapes, at) for at in (int(row.get("a", two[0])), int(row.get("b", two[1]))))
        return _explain_product(a, b, dtype, multiprocessors or MULTIPROCESSORS)
    if family == "convolution":
        is_backward = int("backward" in name)
        x, weight = _shape(shapes, is_backward), _shape(shapes, is_backward + 1)
        dilation, transposed = (_text(arguments, at + is_backward) for at in (5, 6))
        return _explain_convolution(x, weight, dilation, transposed == "True")
    if family == "attention":
        signature = SIGNATURES.get(name)
        at = signature.q if signature else int(row.get("q", 0))
        q, k = _shape(shapes, at), _shape(shapes, at + 1)
        axis = None if signature is None or len(q) != 4 or len(k) != 4 else 2 if signature.heads_first else 1
        return _explain_attention(q, k, axis)
    if family == "moe" and "up" in row:
        return _explain_experts(*(_shape(shapes, int(row[key])) for key in ("hidden", "up", "routing")))
    return None


_PRODUCT_OF_OTHERS = (1, 2)
"""Positions of the factors if a tensor is added to their product."""


def _shape(shapes: list[Any], at: int) -> list[int]:
    """Return the shape of an argument; empty for a number, and for a tensor without dimensions or elements."""
    shape = shapes[at] if at < len(shapes) else None
    is_shape = isinstance(shape, list) and all(type(size) is int and size > 0 for size in shape)
    return shape if isinstance(shape, list) and is_shape else []


def _text(arguments: list[Any], at: int) -> str:
    return arguments[at] if at < len(arguments) and isinstance(arguments[at], str) else ""


def _explain_product(a: list[int], b: list[int], dtype: str | None, multiprocessors: int) -> Reason | None:
    if len(a) < 2 or len(b) not in (2, 3) or a[-1] not in b[-2:]:
        return None
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
            f"dimensions that are not multiples of {step} ({product})",
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


def _explain_convolution(x: list[int], weight: list[int], dilation: str, transposed: bool) -> Reason | None:
    if len(x) < 3 or len(weight) != len(x):
        return None
    kernel = weight[2:]
    size = " x ".join(map(str, kernel))
    if weight[1] == 1 and x[1] > 1 and weight[0] % x[1] == 0 and not transposed:
        return Reason(
            f"a depthwise convolution of {x[1]:,} channels ({size}), limited by memory",
            "channels-last layout, or a kernel that fuses it with the pointwise one after it",
        )
    if all(side == 1 for side in kernel):
        return Reason(
            f"a pointwise convolution ({x[1]:,} to {weight[0]:,} channels): a matrix product",
            "channels-last layout, and tf32 or 16 bits, so that it runs as a product on tensor cores",
        )
    if not transposed and weight[1] < x[1]:
        return Reason(
            f"a grouped convolution ({x[1] // weight[1]} groups of {weight[1]:,} channels, {size})",
            "fewer and wider groups, or channels-last layout: libraries tune few grouped kernels",
        )
    if transposed:
        return Reason(
            f"a transposed convolution ({x[1]:,} channels, {size})",
            "an upsampling and a plain convolution, or channels-last layout",
        )
    if any(character in "23456789" for character in dilation):
        return Reason(
            f"a dilated convolution ({size}, dilation {dilation})",
            "few libraries have fast kernels for it: another algorithm (cudnn.benchmark), or channels-last layout",
        )
    if len(set(kernel)) > 1:
        return Reason(
            f"a convolution with an asymmetric window ({size})",
            "another algorithm (cudnn.benchmark), channels-last layout, or the product that it is (unfold)",
        )
    image = " x ".join(map(str, x[2:]))
    if x[1] < FEW_CHANNELS:
        return Reason(
            f"{x[1]} input channels on images of {image}: too few to fill a tile",
            "channels-last layout with padded channels, or move pixels into channels (space to depth)",
        )
    if x[0] * math.prod(x[2:]) < TILE:
        return Reason(
            f"{x[0]} images of {image} with {x[1]:,} channels: large weights are read for few pixels",
            "a larger batch, or weights of 16 or 8 bits",
        )
    return None


def _explain_attention(q: list[int], k: list[int], axis: int | None) -> Reason | None:
    """Return the reason of attention with queries and keys of these shapes; ``axis``: of the length, if stated."""
    if q and q[-1] > LARGE_HEAD:
        return Reason(
            f"heads of {q[-1]} values, which do not fit the fast kernels",
            "heads of 64 or 128 values, and more of them",
        )
    if axis is None or q[axis] == 1:  # packed sequences, or one token of each
        return None
    queries, keys = q[axis], k[axis]
    if keys >= LONG:
        return Reason(
            f"a long sequence ({keys:,}), whose square dominates",
            "a newer attention kernel (FlashAttention-3, cuDNN), a sliding window, or context parallelism",
        )
    if max(queries, keys) <= SHORT:
        return Reason(
            f"short sequences ({keys}), with little work for each head",
            "pack several sequences into one, or a kernel for short ones",
        )
    return None


def _explain_experts(hidden: list[int], up: list[int], routing: list[int]) -> Reason | None:
    if len(hidden) != 2 or len(up) != 3 or not routing:
        return None
    experts, chosen = up[0], routing[-1]
    each = hidden[0] * chosen / experts
    if each < FEW_TOKENS:
        return Reason(
            f"{experts} experts with {_format_tokens(each)} tokens each: their weights are read for few products",
            "larger batches, fewer and larger experts on a rank (expert parallelism), or weights of 8 or 4 bits",
        )
    return Reason(
        f"{experts} experts, {chosen} for a token, {_format_tokens(each)} tokens each",
        "a grouped product tuned for these sizes (tile sizes of the fused kernel), or weights of 8 bits",
    )


def _format_tokens(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
