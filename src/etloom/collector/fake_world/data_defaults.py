"""Defaults for values, and for shapes that depend on data, that a script reads from tensors without data.

A storage whose elements have a known mean keeps it: constants, copies and sums of them, and the counts of a histogram,
which are equal for all bins, so the splits of experts are equal parts. Other values are 0.0 (so that a GradScaler sees
no overflow), False, or the integer 1. Shapes are the largest possible ones: a mask takes all.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from torch.utils._pytree import tree_leaves

_ATTRIBUTE = "_etloom_mean"
_COPIES = {
    "_to_copy",
    "clone",
    "copy_",
    "lift_fresh",
    "lift_fresh_copy",
    "repeat",
    "flip",
    "mean",
    "index_select",
}
_COPIES |= {"gather", "amax", "amin", "max", "min", "wait_tensor", "_amp_update_scale_"}
_COPIES |= {"all_to_all_single", "all_gather_into_tensor", "broadcast"}
_CONSTANTS = {
    "zeros": 0,
    "zeros_like": 0,
    "new_zeros": 0,
    "zero_": 0,
    "ones": 1,
    "ones_like": 1,
    "new_ones": 1,
}
_FILLS = {"full": 1, "full_like": 1, "new_full": 2, "fill_": 1, "scalar_tensor": 0}
"""Operator -> the position of the value that it fills a tensor with."""
_COPYING_COLLECTIVES = ("alltoall_base_", "_allgather_base_", "broadcast_")
_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "mul": operator.mul,
    "add": operator.add,
    "sub": operator.sub,
    "div": operator.truediv,
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "ge": operator.ge,
    "lt": operator.lt,
    "le": operator.le,
}


def install(torch: Any) -> None:
    """Define the results of fake tensors that depend on data."""
    from torch._subclasses import fake_impls, fake_tensor

    fake: Any = fake_tensor.FakeTensor
    aten = torch.ops.aten
    fake_impls.op_implementations_dict.update(
        {
            aten._local_scalar_dense.default: lambda _mode, _function, tensor: _read(tensor),
            aten.equal.default: lambda *_: True,
            aten.nonzero.default: lambda _mode, _function, tensor: _list_indices(tensor),
            aten.masked_select.default: _select_all,
            aten._unique2.default: _unique,
            aten._unique.default: _unique_without_counts,
            aten.unique_consecutive.default: _unique_consecutive,
            aten.unique_dim.default: _unique_along,
            aten.repeat_interleave.Tensor: _repeat,
            aten.bincount.default: _count_values,
        }
    )
    fake.tolist = _to_list
    fake.numpy = _to_numpy


def follow(func: Any, args: Any, kwargs: Any, outputs: list[Any]) -> None:
    """Update the known means after an operator."""
    import torch

    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    name = func._schema.name.partition("::")[2]
    mean = _infer(name, args, kwargs, tensors, outputs)
    if func._schema.name.startswith("c10d::") and tensors:  # its schemas do not say what is written
        if name != "send":
            _set_mean(tensors[0], mean)
        return
    written = [args[i] for i, each in enumerate(func._schema.arguments[: len(args)]) if _is_written(each)]
    written += [
        kwargs[each.name] for each in func._schema.arguments if _is_written(each) and each.name in kwargs
    ]
    for tensor in tree_leaves(written):
        if isinstance(tensor, torch.Tensor):
            _set_mean(tensor, mean)
    if mean is None:
        return
    storages = {tensor.untyped_storage()._cdata for tensor in tensors}
    for tensor in outputs:
        if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in storages:
            _set_mean(tensor, mean)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _infer(name: str, args: Any, kwargs: Any, tensors: list[Any], outputs: list[Any]) -> Any:
    """Return the mean of the elements of an operator's result, if known."""
    if name in _CONSTANTS:
        return _CONSTANTS[name]
    if name in _FILLS:
        value = args[_FILLS[name]] if len(args) > _FILLS[name] else kwargs.get("fill_value")
        return value if isinstance(value, (int, float)) else None
    if name in _COPYING_COLLECTIVES:  # the result is the first argument, the input the last tensor
        return _mean(tensors[-1])
    if name in ("cat", "stack"):
        means = [_mean(tensor) for tensor in tensors]
        if None in means:
            return None
        total = sum(tensor.numel() for tensor in tensors)
        weighted = (
            mean * tensor.numel() for mean, tensor in zip(means, tensors, strict=True) if mean is not None
        )
        return sum(weighted) / max(1, total)
    if name in _COPIES:
        sources = tensors[1:2] if name == "copy_" else tensors[:1]
        return _mean(sources[0]) if sources else None
    if name in ("histc", "bincount") and tensors:
        return tensors[0].numel() / max(1, outputs[0].numel())
    if name == "sum" and (mean := _mean(tensors[0])) is not None:
        return mean * tensors[0].numel() / max(1, outputs[0].numel())
    if name in ("scatter_", "scatter") and len(args) > 3 and isinstance(args[3], (int, float)):
        before = _mean(args[0])
        return args[3] * args[2].numel() / max(1, args[0].numel()) if before == 0 else None
    if (
        (calculate := _ARITHMETIC.get(name.removesuffix("_"))) is not None
        and len(args) >= 2
        and "alpha" not in kwargs
    ):
        values = [each if isinstance(each, (int, float)) else _mean(each) for each in args[:2]]
        if calculate is operator.mul and 0 in values:
            return 0
        if None not in values and not (calculate is operator.truediv and not values[1]):
            return calculate(*values)
    return None


def _mean(tensor: Any) -> float | None:
    """Return the known mean of the elements of a tensor."""
    constant = getattr(tensor, "constant", None)  # small tensors on the host that the script writes itself
    if constant is not None and 0 < constant.numel() <= 64 and not constant.is_complex():
        from torch._subclasses.fake_tensor import unset_fake_temporarily

        with unset_fake_temporarily():
            values = tree_leaves(constant.tolist())
        return values[0] if len(set(values)) == 1 else math.fsum(values) / len(values)
    return getattr(tensor.untyped_storage(), _ATTRIBUTE, None) if hasattr(tensor, "untyped_storage") else None


def _set_mean(tensor: Any, mean: float | None) -> None:
    storage = tensor.untyped_storage()
    is_part = tensor.numel() * tensor.element_size() < storage.nbytes()
    if is_part and mean != getattr(storage, _ATTRIBUTE, None):
        mean = None  # the rest of the storage keeps its elements
    if mean is not None or hasattr(storage, _ATTRIBUTE):
        setattr(storage, _ATTRIBUTE, mean)


def _read(tensor: Any) -> Any:
    """Return the value of an element of a tensor without data."""
    mean = _mean(tensor)
    mean = mean if mean is not None and math.isfinite(mean) else None
    if tensor.dtype.is_complex:
        return complex(mean or 0.0)
    if tensor.dtype.is_floating_point:
        return float(mean or 0.0)
    if str(tensor.dtype) == "torch.bool":
        return mean is not None and mean > 0.5
    return 1 if mean is None else round(mean)


def _to_list(tensor: Any) -> Any:
    """Return the elements as nested lists; the tensor is copied to the host once, as on a device."""
    host = tensor.detach().cpu()
    mean, value = _mean(host), _read(host)
    values = [value] * tensor.numel()
    if mean is not None and math.isfinite(mean) and type(value) is int and values:
        each, rest = divmod(round(mean * len(values)), len(values))
        values = [each + (place < rest) for place in range(len(values))]  # the parts sum to the whole
    for size in reversed(tensor.shape[1:]):
        values = [values[at : at + size] for at in range(0, len(values), max(1, size))]
    return values if tensor.dim() else values[0]


def _to_numpy(tensor: Any, *, force: bool = False) -> Any:
    """Return an array on the host, filled with the value that is read from the tensor."""
    import numpy

    kind = str(tensor.dtype).removeprefix("torch.")
    return numpy.full(tuple(tensor.shape), _read(tensor), dtype=kind if hasattr(numpy, kind) else "float32")


def _list_indices(tensor: Any) -> Any:
    """Return the indices of all elements, as if none were zero."""
    import torch

    return tensor.new_empty((tensor.numel(), tensor.dim()), dtype=torch.int64)


def _select_all(_mode: Any, _function: Any, tensor: Any, mask: Any) -> Any:
    import torch

    shape = torch.broadcast_shapes(tensor.shape, mask.shape)  # type: ignore[no-untyped-call]
    return tensor.new_empty((math.prod(shape),))


def _unique(
    _mode: Any, _function: Any, tensor: Any, _sorted: bool = True, inverse: bool = False, counts: bool = False
) -> tuple[Any, Any, Any]:
    """Return all elements, as if they differed."""
    import torch

    return (
        tensor.new_empty((tensor.numel(),)),
        tensor.new_empty(tensor.shape if inverse or counts else (0,), dtype=torch.int64),
        tensor.new_empty((tensor.numel() if counts else 0,), dtype=torch.int64),
    )


def _unique_without_counts(*arguments: Any, **options: Any) -> tuple[Any, Any]:
    return _unique(*arguments, **options)[:2]


def _unique_along(
    _mode: Any,
    _function: Any,
    tensor: Any,
    dim: int,
    _sorted: bool = True,
    inverse: bool = False,
    counts: bool = False,
) -> tuple[Any, Any, Any]:
    import torch

    size = tensor.shape[dim]
    return (
        tensor.new_empty(tensor.shape),
        tensor.new_empty((size,), dtype=torch.int64),
        tensor.new_empty((size if counts else 0,), dtype=torch.int64),
    )


def _unique_consecutive(
    mode: Any, function: Any, tensor: Any, inverse: bool = False, counts: bool = False, dim: int | None = None
) -> tuple[Any, Any, Any]:
    if dim is None:
        return _unique(mode, function, tensor, True, inverse, counts)
    return _unique_along(mode, function, tensor, dim, True, inverse, counts)


def _repeat(_mode: Any, _function: Any, repeats: Any, output_size: int | None = None) -> Any:
    """Return as many indices as the mean of the repeats says, one each if it is not known."""
    if output_size is None:
        mean = _mean(repeats)
        output_size = round(repeats.numel() * (1 if mean is None else mean))
    return repeats.new_empty((output_size,))


def _count_values(_mode: Any, _function: Any, tensor: Any, weights: Any = None, minlength: int = 0) -> Any:
    import torch

    kind = torch.int64 if weights is None else weights.dtype
    return tensor.new_empty((max(1, minlength),), dtype=kind)
