"""A call of an operator as its recording describes it, and what one costs.

A formula is a pure function from a Call to a Cost. What it needs and the recording does not say raises Unsaid (an
index, a type or a value that is not there does the same), and the call is then not counted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from etloom.core import categories


class NotRecorded(ValueError):
    """A formula needs something that the recording does not say."""


@dataclass(frozen=True)
class Tensor:
    """shape in elements; dtype as recorded, None where unknown; strides in elements, where recorded."""

    shape: tuple[int, ...]
    dtype: str | None = None
    strides: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stored(self) -> int:
        """Elements that lie in memory: what an expanded tensor repeats (stride 0) is there once."""
        if self.strides is None or len(self.strides) != len(self.shape):
            return self.numel
        return math.prod(
            size if stride else min(size, 1) for size, stride in zip(self.shape, self.strides, strict=True)
        )


@dataclass(frozen=True)
class Cost:
    """flops: multiplications and additions that the operator does. bytes: the least that memory must move for it: each
    input read once, each output written once. model_flops: without what it computes a second time; None: all of flops.
    dtype: what it computes in, where that matters. None: unknown.
    """

    flops: int | None
    bytes: int | None
    model_flops: int | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class Call:
    """tensors: for each argument a Tensor, a tuple of them (a list of tensors), or None. values: for each argument
    what else is known of it. outputs: the results, where recorded (an execution trace does, Kineto does not).
    """

    name: str
    tensors: tuple[Tensor | tuple[Tensor, ...] | None, ...]
    values: tuple[Any, ...] = ()
    outputs: tuple[Tensor | None, ...] = ()

    def tensor(self, at: int, rank: int | None = None) -> Tensor:
        """The tensor that argument ``at`` is, of ``rank`` dimensions. Raises Unsaid."""
        found = self.optional(at)
        if found is None or (rank is not None and len(found.shape) != rank):
            raise NotRecorded
        return found

    def optional(self, at: int) -> Tensor | None:
        """The tensor that argument ``at`` is, or None where it is none."""
        found = self.tensors[at] if at < len(self.tensors) else None
        return found if isinstance(found, Tensor) else None

    def every(self) -> list[Tensor]:
        """All tensors among the arguments, those in lists too."""
        given = [one if isinstance(one, tuple) else (one,) for one in self.tensors]
        return [tensor for group in given for tensor in group if tensor is not None]

    def value(self, at: int) -> Any:
        return self.values[at] if at < len(self.values) else None

    def flag(self, at: int) -> bool:
        """Argument ``at``, which is true or false. Raises Unsaid."""
        found = self.value(at)
        if not isinstance(found, bool):
            raise NotRecorded
        return found

    def ints(self, at: int, length: int) -> list[int]:
        """Argument ``at``, a list of integers; a single one stands for ``length`` of them. Raises Unsaid."""
        found = self.value(at)
        numbers = found if isinstance(found, list) else [found]
        if not numbers or any(type(number) is not int for number in numbers):
            raise NotRecorded
        return numbers * length if len(numbers) == 1 else numbers

    def output(self, at: int = 0) -> Tensor | None:
        return self.outputs[at] if at < len(self.outputs) else None


Formula = Callable[[Call], Cost]


def count_bytes(*tensors: Tensor | None, whole: bool = False) -> int | None:
    """The bytes of these tensors, None where a type is unknown; whole: repeated elements too, as in a result."""
    total = 0
    for tensor in tensors:
        if tensor is None:
            continue
        size = categories.itemsize(tensor.dtype)
        if size is None:
            return None
        total += size * (tensor.numel if whole else tensor.stored)
    return total


def add_known(*parts: int | None) -> int | None:
    """The sum, None where a part is unknown."""
    return None if any(part is None for part in parts) else sum(part for part in parts if part is not None)


def parse_kineto_call(
    name: str, dims: str, types: str | None, strides: str | None, values: str | None
) -> Call:
    """The call that Kineto's Input Dims, Input type, Input Strides and Concrete Inputs describe.

    Raises ValueError for what is no JSON list. Types of the elements of a list of tensors are not recorded.
    """
    shapes = json.loads(dims)
    if not isinstance(shapes, list):
        raise ValueError("dims is no list")
    kind = _padded(types, len(shapes))
    stride = _padded(strides, len(shapes))
    concrete = _padded(values, len(shapes))
    tensors = tuple(map(_kineto_tensor, shapes, kind, stride))
    return Call(name, tensors, tuple(map(_concrete, concrete)))


def _padded(text: str | None, length: int) -> list[Any]:
    listed = json.loads(text) if text else []
    listed = listed if isinstance(listed, list) else []
    return [*listed, *[None] * (length - len(listed))][:length]


def _kineto_tensor(shape: Any, kind: Any, stride: Any) -> Tensor | tuple[Tensor, ...] | None:
    if isinstance(shape, list) and shape and all(isinstance(one, list) for one in shape):
        strides = stride if isinstance(stride, list) and len(stride) == len(shape) else [None] * len(shape)
        listed = [_tensor(one, None, at) for one, at in zip(shape, strides, strict=True)]
        return tuple(one for one in listed if one is not None)
    dtype = kind if isinstance(kind, str) and categories.itemsize(kind) is not None else None
    # No dimensions and no type: a number, a list, nothing.
    return None if shape == [] and dtype is None else _tensor(shape, dtype, stride)


def _tensor(shape: Any, dtype: str | None, stride: Any) -> Tensor | None:
    sizes = _ints(shape)
    return None if sizes is None or any(size < 0 for size in sizes) else Tensor(sizes, dtype, _ints(stride))


def _ints(listed: Any) -> tuple[int, ...] | None:
    return tuple(listed) if isinstance(listed, list) and all(type(one) is int for one in listed) else None


def _concrete(text: Any) -> Any:
    """The value that a text of Concrete Inputs stands for; None for none."""
    if not isinstance(text, str) or not text:
        return None
    try:
        return json.loads(text.replace("True", "true").replace("False", "false"))
    except ValueError:
        return None


def parse_node_call(name: str, tensors: Sequence[dict[str, Any]], inputs: str | None) -> Call:
    """The call that a node of an execution trace describes: its rows of ``tensors`` and its ``inputs``."""
    given = json.loads(inputs) if inputs else []
    values = given if isinstance(given, list) else []
    arguments: dict[int, Any] = {}
    results: dict[int, Tensor | None] = {}
    for row in tensors:
        made = _node_tensor(row)
        if row["io"]:
            results.setdefault(row["index"], made)
        elif row["item"] is None:
            arguments[row["index"]] = made
        elif made is not None:
            arguments[row["index"]] = (*arguments.get(row["index"], ()), made)
    width = max([len(values), *(at + 1 for at in arguments)])
    outputs = tuple(results.get(at) for at in range(max(results, default=-1) + 1))
    return Call(name, tuple(arguments.get(at) for at in range(width)), tuple(values), outputs)


def _node_tensor(row: dict[str, Any]) -> Tensor | None:
    if not row["shape"] or categories.itemsize(row["dtype"]) is None:
        return None
    return _tensor(
        json.loads(row["shape"]), row["dtype"], json.loads(row["stride"]) if row["stride"] else None
    )
