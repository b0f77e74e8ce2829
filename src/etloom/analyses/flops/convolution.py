"""Cost of convolutions: 2 operations per output position and weight that applies to it.

Padding is counted as if it were data, and a bias is not counted, as is customary. Transposed: per input position.
"""

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


def count_convolution_flops(batch: int, places: tuple[int, ...], weight: tuple[int, ...]) -> int:
    """Return the flops of a convolution.

    Args:
        batch: Batch size.
        places: Spatial shape of the result, or of the input of a transposed convolution.
        weight: (channels, channels / groups, *kernel).
    """
    return 2 * batch * math.prod(places) * math.prod(weight)


def compute_result_shape(
    x: tuple[int, ...],
    weight: tuple[int, ...],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> tuple[int, ...]:
    """Return the shape of a convolution's result: (batch, channels, *spatial sizes)."""
    sizes = zip(x[2:], weight[2:], stride, padding, dilation, output_padding, strict=True)
    if transposed:
        places = [(n - 1) * s - 2 * p + d * (k - 1) + o + 1 for n, k, s, p, d, o in sizes]
        return (x[0], weight[1] * groups, *places)
    return (x[0], weight[0], *((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d, _ in sizes))


def _forward(call: Call) -> Cost:
    x, weight = call.tensor(0), call.tensor(1)
    spatial = len(weight.shape) - 2
    if spatial < 1 or len(x.shape) != spatial + 2:
        raise NotRecorded
    transposed = call.flag(6)
    result = call.output()
    if result is None:
        stride, padding, dilation, output_padding = (call.ints(at, spatial) for at in (3, 4, 5, 7))
        groups = call.ints(8, 1)[0]
        shape = compute_result_shape(
            x.shape, weight.shape, stride, padding, dilation, transposed, output_padding, groups
        )
        result = Tensor(shape, x.dtype)
    places = (x if transposed else result).shape[2:]
    flops = count_convolution_flops(x.shape[0], places, weight.shape)
    return Cost(
        flops, add_or_none(count_bytes(x, weight, call.optional(2)), count_bytes(result)), dtype=x.dtype
    )


def _backward(call: Call) -> Cost:
    """Return the cost of a convolution's backward pass: each computed gradient (input, weight) costs as much as
    forward."""
    grad, x, weight = call.tensor(0), call.tensor(1), call.tensor(2)
    mask = call.value(10)
    if call.outputs:
        needs_input, needs_weight = call.output(0) is not None, call.output(1) is not None
    elif isinstance(mask, list) and len(mask) == 3:
        needs_input, needs_weight = bool(mask[0]), bool(mask[1])
    else:
        raise NotRecorded
    places = (x if call.flag(7) else grad).shape[2:]
    flops = count_convolution_flops(x.shape[0], places, weight.shape)
    read = (grad, weight if needs_input else None, x if needs_weight else None)
    written = (x if needs_input else None, weight if needs_weight else None)
    return Cost(
        flops * (needs_input + needs_weight),
        add_or_none(count_bytes(*read), count_bytes(*written, as_result=True)),
        dtype=x.dtype,
    )


FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(("aten::convolution", "aten::_convolution", "aten::convolution_overrideable"), _forward),
    "aten::convolution_backward": _backward,
}
