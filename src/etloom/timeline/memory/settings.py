"""Settings of PyTorch's caching allocator, read from text in the form of PYTORCH_CUDA_ALLOC_CONF.

Names, defaults and rules: https://docs.pytorch.org/docs/stable/notes/cuda.html and c10/core/AllocatorConfig.h. One name
is etloom's own: ``capacity``, the bytes that the allocator can get from the driver.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from etloom.core.errors import InvalidValue

MIB = 1 << 20
MIN_BLOCK = 512
UNLIMITED = 1 << 62
_INTERVALS = 16
"""Powers of two from 1 MiB to 64 GiB, each with a number of divisions; the last one also covers what is larger."""
_UNITS = {"": 1, "B": 1, **{f"{prefix}iB": 1 << 10 * power for power, prefix in enumerate("KMGT", 1)}}
_UNITS |= {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)} | {"kB": 1000}


@dataclass(frozen=True)
class Settings:
    """Settings that decide where the allocator puts a request; sizes in bytes.

    ``capacity`` 0 means unlimited. Garbage collection works as after torch.cuda.set_per_process_memory_fraction() with
    ``capacity`` as the limit: without a limit PyTorch never collects.
    """

    capacity: int = 0
    max_split_size: int = UNLIMITED
    max_non_split_rounding: int = 20 * MIB
    large_segment_size: int = 20 * MIB
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    roundup_power2_divisions: tuple[int, ...] = (0,) * _INTERVALS

    @property
    def collects_garbage(self) -> bool:
        return self.garbage_collection_threshold > 0 and self.capacity > 0

    def round_size(self, size: int) -> int:
        """Return the bytes of the smallest block for a request of ``size`` bytes."""
        index = min(max(size.bit_length() - 21, 0), _INTERVALS - 1)
        divisions = self.roundup_power2_divisions[index]
        if divisions > 1 and size > MIN_BLOCK * divisions:
            power = 1 << (size.bit_length() - 1)
            step = power >> (divisions.bit_length() - 1)
            if power == size:
                return size
            return 2 * power if step == 0 else -(-size // step) * step
        return max(-(-size // MIN_BLOCK), 1) * MIN_BLOCK

    def describe(self) -> str:
        """Return the settings that differ from the default, as text in the form of PYTORCH_CUDA_ALLOC_CONF."""
        changed = [
            (f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default
        ]
        return ",".join(_describe_setting(name, value) for name, value in changed)


def parse_settings(text: str, base: Settings | None = None) -> Settings:
    """Parse settings such as "expandable_segments:True,max_split_size_mb:128" or "capacity=40GiB".

    Args:
        text: Names and values; ":" and "=" are the same, spaces are ignored.
        base: The settings that apply where the text names none.

    Raises:
        InvalidValue: A name or value is unknown.
    """
    settings = base or Settings()
    for name, value in split_settings(text):
        if name not in _PARSERS:
            raise InvalidValue(
                f"unknown setting {name!r} of the allocator; expected one of {', '.join(_PARSERS)}, checkpoint, batch, "
                "empty_cache",
                option="memory",
            )
        field, parse = _PARSERS[name]
        try:
            settings = replace(settings, **{field: parse(value)})
        except (ValueError, OverflowError):
            limit = "; it must exceed 20 MiB" if parse is _parse_split_size else ""
            raise InvalidValue(
                f"invalid value {value!r} of the setting {name}{limit}", option="memory"
            ) from None
    return settings


def split_settings(text: str) -> list[tuple[str, str]]:
    """Split text into pairs of name and value; a value in brackets may contain commas and colons."""
    parts = re.findall(r"(?:[^,\[]|\[[^\]]*\])+", re.sub(r"\s", "", text))
    pairs = [re.split("[:=]", part, maxsplit=1) for part in parts]
    for pair in pairs:
        if len(pair) != 2:
            raise InvalidValue(
                f"expected a setting as name:value, got {pair[0]!r}",
                remedy='write --memory "expandable_segments:True"',
                option="memory",
            )
    return [(name, value) for name, value in pairs]


def read_settings(recorded: Mapping[str, Any]) -> Settings:
    """Return the settings that a snapshot states (``allocator_settings``); what it does not state has its default."""
    settings = Settings()
    size = recorded.get("max_split_size")
    if isinstance(size, int) and 0 < size < UNLIMITED:
        settings = replace(settings, max_split_size=size)
    expandable = recorded.get("expandable_segments") is True
    settings = replace(settings, expandable_segments=expandable)
    divisions = recorded.get("roundup_power2_divisions")
    if isinstance(divisions, Mapping):
        values = [divisions.get(str(1 << i)) for i in range(_INTERVALS)]
        numbers = [value if isinstance(value, int) and 0 <= value <= 1 << 20 else 0 for value in values]
        settings = replace(settings, roundup_power2_divisions=tuple(numbers))
    threshold = recorded.get("garbage_collection_threshold")
    if isinstance(threshold, float) and 0 < threshold < 1:
        settings = replace(settings, garbage_collection_threshold=threshold)
    return settings


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 40GiB, 80GB or 1024.

    Raises:
        ValueError: The text is not a size of 0 to 2**50 bytes.
    """
    match = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", text)
    if match is None or match[2] not in _UNITS:
        raise ValueError(text)
    size = round(float(match[1]) * _UNITS[match[2]])
    if not 0 < size <= 1 << 50:
        raise ValueError(text)
    return size


def _parse_mib(text: str) -> int:
    return parse_size(text + "MiB")


def _parse_split_size(text: str) -> int:
    size = _parse_mib(text)
    if size <= 20 * MIB:
        raise ValueError(text)  # PyTorch: must be larger than a segment of small requests
    return size


def _parse_threshold(text: str) -> float:
    value = float(text)
    if not 0 < value < 1 or math.isnan(value):
        raise ValueError(text)
    return value


def _parse_boolean(text: str) -> bool:
    if text not in ("True", "False", "true", "false"):
        raise ValueError(text)
    return text in ("True", "true")


def _parse_divisions(text: str) -> tuple[int, ...]:
    """Parse "4", or a list by size in MiB such as [256:1,512:2,1024:4,>:8]."""
    if not text.startswith("["):
        return (_parse_power(text, allow_zero=True),) * _INTERVALS
    divisions, last = [0] * _INTERVALS, None
    for pair in text.strip("[]").split(","):
        boundary, value = pair.split(":")
        count = _parse_power(value, allow_zero=True)
        if boundary == ">":
            first = 0 if last is None else last + 1
            divisions[first:] = [count] * (_INTERVALS - first)
            continue
        index = min(_parse_power(boundary).bit_length() - 1, _INTERVALS - 1)
        if last is None:
            divisions[:index] = [count] * index
        divisions[index] = count
        last = index
    return tuple(divisions)


def _parse_power(text: str, *, allow_zero: bool = False) -> int:
    value = int(text)
    if not 0 <= value <= 1 << 20 or value & (value - 1) or (value == 0 and not allow_zero):
        raise ValueError(text)
    return value


_PARSERS: dict[str, tuple[str, Any]] = {
    "capacity": ("capacity", parse_size),
    "expandable_segments": ("expandable_segments", _parse_boolean),
    "max_split_size_mb": ("max_split_size", _parse_split_size),
    "max_non_split_rounding_mb": ("max_non_split_rounding", _parse_mib),
    "roundup_power2_divisions": ("roundup_power2_divisions", _parse_divisions),
    "garbage_collection_threshold": ("garbage_collection_threshold", _parse_threshold),
    "large_segment_size_mb": ("large_segment_size", _parse_split_size),
}
"""Name of a setting -> field of `Settings`, and the function that parses its value."""


def _describe_setting(name: str, value: Any) -> str:
    if name == "roundup_power2_divisions":
        if len(set(value)) == 1:
            return f"{name}:{value[0]}"
        return f"{name}:[{','.join(f'{1 << i}:{count}' for i, count in enumerate(value))}]"
    if name in ("max_split_size", "max_non_split_rounding", "large_segment_size"):
        return f"{name}_mb:{value / MIB:g}"
    return f"{name}:{value}"
