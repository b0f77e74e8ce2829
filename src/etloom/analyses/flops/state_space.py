"""Cost of state-space models (Mamba): scans, causal convolutions, and the chunked scans of Mamba-2.

A scan takes 7 operations per element of the sequence and of the state: the decay (a product and its exponential), the
input (a product), the state (a product and a sum) and the output (a product and a sum). A chunked scan consists of
products: within each chunk for the pairs of positions that causality leaves (C B^T per group, and with the sequence per
head), and per position into and out of the state. Softplus, gates, biases and the skip connection are not counted.
"""

from __future__ import annotations

import math
from functools import partial

from etloom.analyses.flops.attention import count_pairs
from etloom.analyses.flops.gemm import count_gemm_flops
from etloom.analyses.flops.operator_call import (
    Call,
    Cost,
    Formula,
    NotRecorded,
    Tensor,
    add_or_none,
    count_bytes,
)


def count_chunked_flops(
    batch: int, length: int, chunk: int, channels: int, group_states: int, states: int
) -> int:
    """Return the FLOPs of a chunked scan.

    Args:
        batch: Number of sequences.
        length: Positions of each.
        chunk: Positions of a chunk.
        channels: Channels of all heads.
        group_states: Sizes of the states of all groups, added up.
        states: Size of the state of a channel.
    """
    chunks, rest = divmod(length, chunk)
    pairs = chunks * count_pairs(chunk, chunk, "top_left") + count_pairs(rest, rest, "top_left")
    return batch * (2 * pairs * (group_states + channels) + 4 * length * channels * states)


def _scan(call: Call) -> Cost:
    """Return the cost of a scan of u (.., channels, length) with A (channels, states); y has the shape of u."""
    u, decay = call.tensor(0), call.tensor(2, 2)
    inputs = [tensor for at in range(8) if (tensor := call.optional(at)) is not None]
    return Cost(
        7 * u.numel * decay.shape[1], add_or_none(count_bytes(*inputs), count_bytes(Tensor(u.shape, u.dtype)))
    )


def _convolve(weight_at: int, call: Call) -> Cost:
    """Return the cost of a causal convolution of x with a weight (channels, taps); the result has the shape of x."""
    x, weight, bias = call.tensor(0), call.tensor(weight_at, 2), call.optional(weight_at + 1)
    return Cost(
        2 * x.numel * weight.shape[1],
        add_or_none(count_bytes(x, weight, bias), count_bytes(Tensor(x.shape, x.dtype))),
    )


def _scan_chunks(call: Call) -> Cost:
    """Return the cost of a chunked scan of x (batch, length, heads, size) with B (batch, length, groups, states)."""
    x, b = call.tensor(0, 4), call.tensor(3, 4)
    batch, length, heads, size = x.shape
    groups, states = b.shape[2:]
    chunk = call.ints(5, 1)[0]
    return Cost(
        count_chunked_flops(batch, length, chunk, heads * size, groups * states, states),
        add_or_none(count_bytes(*call.every()), count_bytes(Tensor(x.shape, x.dtype))),
        dtype=x.dtype,
    )


def _run_block(call: Call) -> Cost:
    """Return the cost of the block of Mamba-2: the convolution, the chunked scan, and the projection, if it has one.

    The input (batch, length, width) has the gate, the convolved channels (the sequence, B and C) and a step per head.
    """
    x, weight, heads = call.tensor(0, 3), call.tensor(1, 2), call.tensor(4, 1).shape[0]
    batch, length, width = x.shape
    convolved, taps = weight.shape
    channels = width - convolved - heads
    group_states, odd = divmod(convolved - channels, 2)
    numbers = [value for value in call.values if type(value) is int]
    groups = numbers[-1] if len(numbers) > 1 else 0  # behind the chunk's size and that of a head
    if odd or min(channels, group_states, groups) <= 0 or group_states % groups:
        raise NotRecorded
    projection = next(
        (tensor for at in range(9, 16) if (tensor := call.optional(at)) and len(tensor.shape) == 2), None
    )
    out = channels if projection is None else projection.shape[0]
    flops = 2 * batch * length * convolved * taps
    flops += count_chunked_flops(
        batch, length, call.ints(6, 1)[0], channels, group_states, group_states // groups
    )
    if projection is not None:
        flops += count_gemm_flops(batch * length, out, math.prod(projection.shape) // out)
    return Cost(
        flops,
        add_or_none(count_bytes(*call.every()), count_bytes(Tensor((batch, length, out), x.dtype))),
        dtype=x.dtype,
    )


FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(("SelectiveScanFn", "_C::selective_scan_fwd"), _scan),
    **dict.fromkeys(
        ("CausalConv1dFn", "DaoAILab::_causal_conv1d_fwd_cpp", "_C::causal_conv1d_fwd"), partial(_convolve, 1)
    ),
    "_C::causal_conv1d_update": partial(_convolve, 2),
    "MambaChunkScanCombinedFn": _scan_chunks,
    "MambaSplitConv1dScanCombinedFn": _run_block,
}
