"""Formats counts, ranges of numbers, ranks and errors as text for messages.

The collector runs in Pythons that have no etloom installed, so it cannot use etloom.core.text.
"""

from __future__ import annotations

_MAX_RANGES = 8


def describe_error(error: Exception) -> str:
    """Return the class name and message of an exception as one line of text."""
    return f"{type(error).__name__}: {error}".split("\n")[0]


def count_noun(count: int, noun: str) -> str:
    """Return a count with its noun: 1 step, 2 steps, 1,234 steps."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def format_ranges(numbers: list[int]) -> str:
    """Format ascending, distinct numbers as `0-3, 7`; after eight ranges the rest is `...`."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges[:_MAX_RANGES]]
    return ", ".join(parts) + (", ..." if len(ranges) > _MAX_RANGES else "")


def format_ranks(ranks: list[int]) -> str:
    """Format ascending ranks: `rank 3`, `ranks 0-2, 7`."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {format_ranges(ranks)}"
