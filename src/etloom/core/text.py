"""Text of messages and arguments: ranges of numbers, rank lists, counts with plurals, units, time ranges."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from etloom.core.errors import InvalidValue, UnknownRank

NS_PER_UNIT = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
"""Units of time that users write."""
TIME_UNITS = (("s", 1e9), ("ms", 1e6), ("µs", 1e3), ("ns", 1.0))
"""Units of time in output, largest first, in ns."""
SIZE_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))
"""Units of size in output, largest first, in bytes."""
TimeRange = tuple[int | None, int | None]
"""Start and end, ns; None: unlimited."""
_MAX_NS = 1 << 63


def format_ranges(numbers: Iterable[int], most: int = 8) -> str:
    """Format whole numbers as ranges, such as "0-7, 9, 12-14"; ", ..." replaces all after ``most`` ranges."""
    parts = _split_ranges(sorted(set(numbers)), most)
    return ", ".join(parts[:most]) + (", ..." if len(parts) > most else "")


def format_ranks(ranks: Iterable[int], most: int = 8) -> str:
    """Return ranks as text: "rank 3", "ranks 0-7, 9", or if that is too long "1,000 ranks (0, 2, 4, ...)"."""
    distinct = sorted(set(ranks))
    if not distinct:
        return "no ranks"
    if len(_split_ranges(distinct, most)) > most:
        return f"{len(distinct):,} ranks ({format_ranges(distinct, most)})"
    return f"rank{'s' * (len(distinct) > 1)} {format_ranges(distinct, most)}"


def unknown_rank_error(requested: int | Iterable[int], available: Iterable[int]) -> UnknownRank:
    """Return the error for ranks that a run does not hold."""
    named = format_ranges([requested] if isinstance(requested, int) else requested)
    return UnknownRank(f"unknown rank {named}", remedy=f"the run holds {format_ranks(available)}")


def _split_ranges(numbers: list[int], most: int) -> list[str]:
    """Convert sorted numbers to texts of ranges, "0-7" or "9"; may stop after more than ``most`` ranges."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        elif len(runs) > 2 * most:
            break
        else:
            runs.append([number, number])
    parts: list[str] = []
    for first, last in runs:
        parts += [f"{first}-{last}"] if last - first > 1 else map(str, dict.fromkeys((first, last)))
    return parts


def count_noun(count: int, noun: str, plural: str | None = None) -> str:
    """Return a count with its noun, such as "1 rank" or "1,024 ranks"."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def format_bytes(size: int) -> str:
    """Return a size with its unit, such as "61.11 GB" or "512 B"."""
    unit, factor = next((pair for pair in SIZE_UNITS if size >= pair[1]), SIZE_UNITS[-1])
    return f"{size} B" if factor == 1 else f"{size / factor:.2f} {unit}"


def choose_unit(value: float, units: tuple[tuple[str, float], ...]) -> tuple[str, float]:
    """Return name and factor of the largest unit that does not exceed the value, or of the smallest unit."""
    return next((unit for unit in units if abs(value) >= unit[1]), units[-1])


def format_number(value: float, digits: int = 4) -> str:
    """Format a number with ``digits`` significant digits; from 1000 on as an integer, grouped by thousands."""
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    decimals = 0 if value == 0 else max(0, min(6, digits - 1 - math.floor(math.log10(size))))
    return f"{value + 0.0:.{decimals}f}"  # a zero without a sign


def format_duration(ns: float) -> str:
    """Format a time in ns with 4 significant digits and a suitable unit, such as 187.3 ms."""
    unit, factor = choose_unit(float(f"{ns:.4g}"), TIME_UNITS)
    return f"{format_number(ns / factor)} {unit}"


def parse_time_range(text: str) -> TimeRange:
    """Return (start, end) in ns of text such as "10ms:1.5s"; either may be missing. Raises InvalidValue."""
    match = re.fullmatch(
        r"(?:([\d.]+)(ns|us|ms|s))?:(?:([\d.]+)(ns|us|ms|s))?", text.strip().replace("µ", "u")
    )
    try:
        if match is None:
            raise ValueError(text)
        start = None if match[1] is None else round(float(match[1]) * NS_PER_UNIT[match[2]])
        end = None if match[3] is None else round(float(match[3]) * NS_PER_UNIT[match[4]])
        if (start is not None and end is not None and start >= end) or max(start or 0, end or 0) >= _MAX_NS:
            raise ValueError(text)
    except ValueError:
        raise InvalidValue(
            f"expected a time range, got {text!r}",
            remedy="write START:END with a unit each, such as 10ms:1.5s, 250us: or :2s",
            option="time",
        ) from None
    return start, end
