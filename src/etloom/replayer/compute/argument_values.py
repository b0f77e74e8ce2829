"""Converts the argument values in an execution trace to the Python values that torch's operators expect."""

from __future__ import annotations

import math
from typing import Any

import torch

from etloom.replayer.compute.operators import Argument

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
