"""The parts of a computation replay's program: recorded tensors, and the operator calls that use them."""

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
"""Operators that write an argument according to their schema, but change only its metadata or layout."""


@dataclass(frozen=True)
class TensorView:
    """A recorded tensor as a view of a storage: dtype, shape, and offset and strides in elements.

    Attributes:
        storage: Number of the storage version (`StorageVersions`).
        offset, stride: In elements.
        tensor: Recorded id, if strides were not recorded: two views may then differ in their strides alone.
    """

    storage: int
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    on_host: bool
    tensor: int | None = None

    @property
    def bytes(self) -> int:
        """Minimum size in bytes of the storage that holds this tensor."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return (self.offset + last + 1) * int(DTYPES[self.dtype].itemsize)


@dataclass
class ProgramStep:
    """An operator call of a computation replay: recorded node, operator, argument values and results.

    Attributes:
        node: Node of the recording.
        values: Values of the arguments in recorded order, with TensorViews for tensors.
        results: The tensors it returns.
        inputs: Its input tensors by their index among the recorded input tensors.
        saved_under: Beginnings of the names of files with its tensors: those of torch, and of etloom's observer.
        frees: Storages that no later step uses.
        ranges: (view, minimum, maximum) of recorded integers.
        recorded_ns: Recorded duration; None if no times were recorded.
    """

    node: int
    name: str
    operator: Operator
    values: list[Any]
    results: list[TensorView]
    inputs: dict[int, TensorView] = field(default_factory=dict)
    saved_under: tuple[str, str] = ("", "")
    frees: tuple[int, ...] = ()
    ranges: list[tuple[TensorView, int, int]] = field(default_factory=list)
    recorded_ns: int | None = None

    def written(self) -> set[int]:
        """Return the numbers of the storages whose contents the operator call modifies."""
        if self.operator.name in _METADATA_ONLY:
            return set()
        arguments = zip(self.operator.arguments, self.values, strict=False)
        return {
            view.storage for view in tensor_views([value for argument, value in arguments if argument.writes])
        }


def tensor_views(values: list[Any]) -> Iterator[TensorView]:
    """Yield the tensors in a list of argument values, including those in lists of tensors."""
    for value in values:
        if isinstance(value, TensorView):
            yield value
        elif isinstance(value, list):
            yield from (item for item in value if isinstance(item, TensorView))
