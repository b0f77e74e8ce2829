"""Text for messages: ranges of numbers, rank lists, counts with plurals."""

from __future__ import annotations

from collections.abc import Iterable

from etloom.core.errors import AnalysisError


def format_ranges(numbers: Iterable[int], most: int = 8) -> str:
    """Return whole numbers as ranges, such as "0-7, 9, 12-14"; more than ``most`` parts end in ", ..."."""
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


def unknown_rank_error(requested: int | Iterable[int], available: Iterable[int]) -> AnalysisError:
    """Return the error for ranks that a run does not hold."""
    named = format_ranges([requested] if isinstance(requested, int) else requested)
    return AnalysisError(f"there is no rank {named}", remedy=f"the run holds {format_ranks(available)}")


def _split_ranges(numbers: list[int], most: int) -> list[str]:
    """Return the parts of `format_ranges`; may stop after more than ``most`` parts."""
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
