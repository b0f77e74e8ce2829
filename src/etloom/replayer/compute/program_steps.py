"""The parts of a computation replay's program: recorded tensors and values, and the operator calls that use them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from etloom.replayer.compute.operators import Argument, Operator

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


# Converts the argument values in an execution trace to the Python values that torch's operators expect.

_SCALAR_TYPES = (
    "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex32", "complex64",
    "complex128", "bool", "qint8", "quint8", "qint32", "bfloat16", None, None, None, None, None, None, None,
    "float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz", "uint16", "uint32", "uint64",
)  # fmt: skip
"""c10::ScalarType by its number."""

_MEMORY_FORMATS = (
    torch.contiguous_format,
    torch.preserve_format,
    torch.channels_last,
    torch.channels_last_3d,
)
"""c10::MemoryFormat by its number."""

DTYPES = {
    "float": torch.float32, "double": torch.float64, "c10::Half": torch.float16, "c10::BFloat16": torch.bfloat16,
    "long int": torch.int64, "long": torch.int64, "long long": torch.int64, "int": torch.int32,
    "short int": torch.int16, "short": torch.int16, "signed char": torch.int8, "unsigned char": torch.uint8,
    "bool": torch.bool, "c10::complex<float>": torch.complex64, "c10::complex<double>": torch.complex128,
    "c10::complex<c10::Half>": torch.complex32, "unsigned short": torch.uint16, "unsigned int": torch.uint32,
    "unsigned long": torch.uint64, "c10::Float8_e4m3fn": torch.float8_e4m3fn, "c10::Float8_e5m2": torch.float8_e5m2,
    "c10::Float8_e4m3fnuz": torch.float8_e4m3fnuz, "c10::Float8_e5m2fnuz": torch.float8_e5m2fnuz,
}  # fmt: skip
"""C++ type name, as execution traces record it -> dtype."""


def convert_value(recorded: Any, argument: Argument, device: torch.device) -> Any:
    """Convert the recorded value of an argument that is not a tensor to the Python value for the operator call.

    Raises:
        ValueError: With the reason why there is no value.
    """
    kind = argument.kind.removeprefix("Optional[").removesuffix("]")
    if recorded is None or recorded in ("<None>", "None", ""):
        return None
    if isinstance(recorded, list):
        return [_convert_number(item) for item in recorded]
    if kind == "Device":
        return device
    if kind == "ScalarType":
        is_number = isinstance(recorded, int) and 0 <= recorded < len(_SCALAR_TYPES)
        name = _SCALAR_TYPES[recorded] if is_number else None
        if name is None:
            raise ValueError(f"unknown dtype {recorded!r}")
        return getattr(torch, name)
    if kind == "Layout":
        return torch.strided
    if kind == "MemoryFormat":
        return _MEMORY_FORMATS[recorded] if recorded in range(len(_MEMORY_FORMATS)) else None
    if kind == "str":
        return recorded
    if argument.name == "pin_memory":
        return None
    if isinstance(recorded, str) and recorded.startswith("<"):
        raise ValueError(f"the value of {argument.name} was not recorded")
    return _convert_number(recorded)


def _convert_number(recorded: Any) -> Any:
    """Return a recorded number; infinities and NaN, which JSON cannot represent, are converted from words to floats."""
    if isinstance(recorded, str):
        word = recorded.lower().lstrip("+")
        if word.removeprefix("-") in ("inf", "infinity", "nan"):
            return math.nan if word.endswith("nan") else float(word)
        raise ValueError(f"{recorded[:40]!r} is not a number")
    if not isinstance(recorded, (bool, int, float, type(None))):
        raise ValueError(f"{str(recorded)[:40]!r} is not a number")
    return recorded
