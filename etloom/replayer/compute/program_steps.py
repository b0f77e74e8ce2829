"""The nouns of a computation replay: a recorded tensor, and an operator to run with what it takes, gives and frees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from etloom.replayer.compute.argument_values import DTYPES
from etloom.replayer.compute.operators import Operator

_METADATA_ONLY = frozenset(
    f"aten::{name}_"
    for name in (
        "detach",
        "requires_grad",
        "resize",
        "squeeze",
        "unsqueeze",
        "t",
        "transpose",
        "as_strided",
        "set",
    )
)
"""Operators that write an argument by name, but only what it is called or how it is laid out."""


@dataclass(frozen=True)
class TensorView:
    """A tensor as it was recorded. storage: a version of a storage. offset, stride: in elements."""

    storage: int
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    on_host: bool
    tensor: int | None = (
        None  # its recorded id, where strides were not recorded: a view may differ in them alone
    )

    @property
    def bytes(self) -> int:
        """What its storage must hold at least."""
        if 0 in self.shape:
            return 0
        reach = sum((size - 1) * by for size, by in zip(self.shape, self.stride, strict=True))
        return (self.offset + reach + 1) * int(DTYPES[self.dtype].itemsize)


@dataclass
class ProgramStep:
    """One operator to run.

    et_id: of its node in the file. values: of its arguments, in recorded order, Views in place of tensors. inputs: its
    tensors by their place among those that were recorded. frees: storages that nobody reads afterwards. ranges: (view,
    least, most) of integers. recorded_ns: how long it took, null where no times were recorded.
    """

    node: int
    name: str
    operator: Operator
    values: list[Any]
    results: list[TensorView]
    inputs: dict[int, TensorView] = field(default_factory=dict)
    et_id: int | None = None
    frees: tuple[int, ...] = ()
    ranges: list[tuple[TensorView, int, int]] = field(default_factory=list)
    recorded_ns: int | None = None

    def written(self) -> set[int]:
        """Storages whose elements it changes."""
        if self.operator.name in _METADATA_ONLY:
            return set()
        given = zip(self.operator.arguments, self.values, strict=False)
        return {view.storage for view in tensor_views([value for one, value in given if one.writes])}


def tensor_views(values: list[Any]) -> Iterator[TensorView]:
    """The tensors among the values of arguments."""
    for value in values:
        if isinstance(value, TensorView):
            yield value
        elif isinstance(value, list):
            yield from (one for one in value if isinstance(one, TensorView))
