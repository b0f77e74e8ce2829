"""A recorded call of an operator, and its cost.

A formula is a pure function from a Call to a Cost. If it needs data that was not recorded, it raises NotRecorded
(missing indices, types or values have the same effect), and the call is not counted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from etloom.core import categories


class NotRecorded(ValueError):
    """Raised when a cost formula needs data that was not recorded."""


@dataclass(frozen=True)
class Tensor:
    """Shape, recorded dtype, and strides in elements; dtype and strides are None if not recorded."""

    shape: tuple[int, ...]
    dtype: str | None = None
    strides: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stored(self) -> int:
        """Number of elements in memory; the repeated elements of an expanded tensor (stride 0) count once."""
        if self.strides is None or len(self.strides) != len(self.shape):
            return self.numel
        return math.prod(
            size if stride else min(size, 1) for size, stride in zip(self.shape, self.strides, strict=True)
        )


@dataclass(frozen=True)
class Cost:
    """The cost of an operator call (flops, bytes); a value is None if it is unknown.

    Attributes:
        flops: Multiplications and additions.
        bytes: Minimum memory traffic: each input is read once, each output written once.
        model_flops: Without recomputation; None: equal to flops.
        dtype: Type of the computation, if relevant.
        assumed: What the cost assumes, because it was not recorded.
    """

    flops: int | None
    bytes: int | None
    model_flops: int | None = None
    dtype: str | None = None
    assumed: str | None = None


@dataclass(frozen=True)
class Call:
    """A recorded operator call with its arguments.

    Attributes:
        name: The operator.
        tensors: For each argument a Tensor, a tuple of them (a list of tensors), or None.
        values: For each argument its value, if recorded.
        outputs: The results, if recorded (in execution traces, not by Kineto).
        context: Numbers that surrounding events contain, see `etloom.analyses.flops.call_context`.
    """

    name: str
    tensors: tuple[Tensor | tuple[Tensor, ...] | None, ...]
    values: tuple[Any, ...] = ()
    outputs: tuple[Tensor | None, ...] = ()
    context: Mapping[str, int] = field(default_factory=dict)

    def tensor(self, at: int, rank: int | None = None) -> Tensor:
        """Return argument ``at`` if it is a tensor (with ``rank`` dimensions, unless None); raise NotRecorded
        otherwise."""
        tensor = self.optional(at)
        if tensor is None or (rank is not None and len(tensor.shape) != rank):
            raise NotRecorded
        return tensor

    def optional(self, at: int) -> Tensor | None:
        """Return argument ``at`` if it is a tensor, else None."""
        argument = self.tensors[at] if at < len(self.tensors) else None
        return argument if isinstance(argument, Tensor) else None

    def every(self, without: Collection[int] = ()) -> list[Tensor]:
        """Return all tensors among the arguments, including those in lists, except those at positions ``without``."""
        remaining = (argument for at, argument in enumerate(self.tensors) if at not in without)
        groups = [argument if isinstance(argument, tuple) else (argument,) for argument in remaining]
        return [tensor for group in groups for tensor in group if tensor is not None]

    def value(self, at: int) -> Any:
        return self.values[at] if at < len(self.values) else None

    def flag(self, at: int) -> bool:
        """Return argument ``at`` if it is a boolean; raise NotRecorded otherwise."""
        value = self.value(at)
        if not isinstance(value, bool):
            raise NotRecorded
        return value

    def ints(self, at: int, length: int) -> list[int]:
        """Return argument ``at`` as a list of integers; a single integer is repeated ``length`` times.

        Raises:
            NotRecorded: It is not an integer or a list of them.
        """
        value = self.value(at)
        numbers = value if isinstance(value, list) else [value]
        if not numbers or any(type(number) is not int for number in numbers):
            raise NotRecorded
        return numbers * length if len(numbers) == 1 else numbers

    def output(self, at: int = 0) -> Tensor | None:
        return self.outputs[at] if at < len(self.outputs) else None


Formula = Callable[[Call], Cost]


def count_bytes(*tensors: Tensor | None, as_result: bool = False) -> int | None:
    """Return the total bytes of tensors; None if a type is unknown.

    ``as_result``: count the repeated elements of expanded tensors, too.
    """
    total = 0
    for tensor in tensors:
        if tensor is None:
            continue
        size = categories.itemsize(tensor.dtype)
        if size is None:
            return None
        total += size * (tensor.numel if as_result else tensor.stored)
    return total


def add_or_none(*parts: int | None) -> int | None:
    """Return the sum of values; None if one of them is None."""
    return None if any(part is None for part in parts) else sum(part for part in parts if part is not None)


def parse_kineto_call(
    name: str,
    dims: str,
    types: str | None,
    strides: str | None,
    values: str | None,
    context: str | None = None,
) -> Call:
    """Return the call described by Kineto's Input Dims, Input type, Input Strides and Concrete Inputs.

    The element types of a list of tensors are not recorded. ``context``: a JSON object, see `Call`.

    Raises:
        ValueError: Not a JSON list.
    """
    shapes = json.loads(dims)
    if not isinstance(shapes, list):
        raise ValueError("dims is not a list")
    kind = _parse_padded(types, len(shapes))
    stride = _parse_padded(strides, len(shapes))
    concrete = json.loads(values) if values else []
    concrete = concrete if isinstance(concrete, list) else []
    tensors = tuple(map(_kineto_tensor, shapes, kind, stride))
    return Call(
        name, tensors, tuple(map(_parse_concrete, concrete)), context=json.loads(context) if context else {}
    )


def _parse_padded(text: str | None, length: int) -> list[Any]:
    items = json.loads(text) if text else []
    items = items if isinstance(items, list) else []
    return [*items, *[None] * (length - len(items))][:length]


def _kineto_tensor(shape: Any, kind: Any, stride: Any) -> Tensor | tuple[Tensor, ...] | None:
    if isinstance(shape, list) and shape and all(isinstance(item, list) for item in shape):
        strides = stride if isinstance(stride, list) and len(stride) == len(shape) else [None] * len(shape)
        tensors = [_tensor(item, None, at) for item, at in zip(shape, strides, strict=True)]
        return tuple(item for item in tensors if item is not None)
    dtype = kind if isinstance(kind, str) and categories.itemsize(kind) is not None else None
    # Without dimensions and type it is a number, a list or absent.
    return None if shape == [] and dtype is None else _tensor(shape, dtype, stride)


def _tensor(shape: Any, dtype: str | None, stride: Any) -> Tensor | None:
    sizes = _to_int_tuple(shape)
    return (
        None
        if sizes is None or any(size < 0 for size in sizes)
        else Tensor(sizes, dtype, _to_int_tuple(stride))
    )


def _to_int_tuple(items: Any) -> tuple[int, ...] | None:
    return tuple(items) if isinstance(items, list) and all(type(item) is int for item in items) else None


_PARENTHESES = str.maketrans("()", "[]")


def _parse_concrete(text: Any) -> Any:
    """Return the value of an entry of Kineto's Concrete Inputs; None if the entry is empty or not a literal."""
    if not isinstance(text, str) or not text:
        return None
    try:
        return json.loads(text.translate(_PARENTHESES).replace("True", "true").replace("False", "false"))
    except ValueError:
        return None


def parse_node_call(name: str, tensors: Sequence[dict[str, Any]], inputs: str | None) -> Call:
    """Return the call of a node of an execution trace, from its rows of ``tensors`` and its ``inputs``."""
    parsed = json.loads(inputs) if inputs else []
    values = parsed if isinstance(parsed, list) else []
    arguments: dict[int, Any] = {}
    results: dict[int, Tensor | None] = {}
    for row in tensors:
        tensor = _node_tensor(row)
        if row["io"]:
            results.setdefault(row["index"], tensor)
        elif row["item"] is None:
            arguments[row["index"]] = tensor
        elif tensor is not None:
            arguments[row["index"]] = (*arguments.get(row["index"], ()), tensor)
    width = max([len(values), *(at + 1 for at in arguments)])
    outputs = tuple(results.get(at) for at in range(max(results, default=-1) + 1))
    return Call(name, tuple(arguments.get(at) for at in range(width)), tuple(values), outputs)


def _node_tensor(row: dict[str, Any]) -> Tensor | None:
    if not row["shape"] or categories.itemsize(row["dtype"]) is None:
        return None
    return _tensor(
        json.loads(row["shape"]), row["dtype"], json.loads(row["stride"]) if row["stride"] else None
    )
