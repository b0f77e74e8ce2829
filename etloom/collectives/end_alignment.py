"""Alignment of ranks whose clocks differ by more than the time between collectives, before matching by order.

A collective ends on all ranks at nearly the same time. If the ends of two ranks do not coincide as recorded, but do
after a shift with which the collectives of one rank pair with those of the other one by one, their clocks differ by the
shift. Without it, matching by order, which needs overlaps in time, would pair each collective with a neighbor of its
own.
"""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

MIN_PAIRS = 5
"""Collectives that a shift must pair."""
MIN_COVERAGE = 0.8
"""Share of the collectives of a rank that a shift must pair, and of the pairs that must then overlap in time."""
MIN_IMPROVEMENT = 4
"""How many times smaller a shift must make the differences of the ends than they are as recorded.

So it must make them, too, than they would be by chance: a quarter of the time between collectives. Ranks of two runs of
one program pair as well, but their ends drift apart.
"""
COINCIDENT_NS = 50_000
"""Ends whose median difference is smaller coincide as recorded."""
MAX_SKIPPED = 32
"""Collectives by which the recording of one rank may begin earlier than that of the other."""
_MAX_COLLECTIVES = 2000
"""Collectives of a rank that are compared, so that the time does not grow with the square of their number."""

_Times = NDArray[np.int64]


def align_ends(parts: pl.DataFrame, *, without: tuple[str, ...]) -> pl.DataFrame:
    """Move start and end (ns) of ranks whose clocks differ to the clock of the lowest rank of their group.

    Args:
        parts: Participations of all ranks with ``group``; the result is for matching by order only.
        without: Collectives whose ends do not coincide.
    """
    compared = parts.filter(~pl.col("collective").is_in(without)).sort("start", "event")
    shifts: list[tuple[str, str | None, int, int]] = []
    for (where, group), rows in compared.group_by("where", "group", maintain_order=True):
        by_rank = {rank: _Sequence(part) for (rank,), part in rows.group_by("rank", maintain_order=True)}
        ranks = sorted(by_rank)  # type: ignore[type-var]
        for rank in ranks[1:]:
            if shift := _find_shift(by_rank[ranks[0]], by_rank[rank]):
                shifts.append((where, group, rank, shift))  # type: ignore[arg-type]
    if not shifts:
        return parts
    key = ("where", "group", "rank")
    schema = {name: parts.schema[name] for name in key} | {"shift": pl.Int64}
    table = pl.DataFrame(shifts, schema=schema, orient="row")
    moved = parts.join(table, on=key, how="left", nulls_equal=True, maintain_order="left")
    later = pl.col("shift").fill_null(0)
    return moved.with_columns(pl.col("start") - later, pl.col("end") - later).drop("shift")


class _Sequence:
    """The first collectives of one rank in a group, by start."""

    def __init__(self, rows: pl.DataFrame) -> None:
        rows = rows.head(_MAX_COLLECTIVES)
        self.kinds = rows["collective"].cast(pl.Categorical).to_physical().to_numpy()
        self.starts, self.ends = rows["start"].to_numpy(), rows["end"].to_numpy()


def _find_shift(first: _Sequence, other: _Sequence) -> int:
    """Return how much later the clock of ``other`` is than that of ``first``, ns; 0 if the ends coincide as recorded or
    no shift explains them."""
    count = min(first.ends.size, other.ends.size)
    if count < MIN_PAIRS:
        return 0
    recorded = _measure_nearest(first.ends, other.ends)
    if recorded <= COINCIDENT_NS:
        return 0
    by_chance = float(np.median(np.diff(np.sort(first.ends)))) / 4
    best, shift = min(recorded, by_chance) / MIN_IMPROVEMENT, 0
    most = min(MAX_SKIPPED, int((1 - MIN_COVERAGE) * count))
    for skipped in sorted(range(-most, most + 1), key=abs):
        rows, other_rows = (slice(max(0, begin), None) for begin in (-skipped, skipped))
        size = min(first.ends[rows].size, other.ends[other_rows].size)
        pairs = [
            (getattr(first, name)[rows][:size], getattr(other, name)[other_rows][:size])
            for name in ("kinds", "starts", "ends")
        ]
        (kinds, other_kinds), (starts, other_starts), (ends, other_ends) = pairs
        if not np.array_equal(kinds, other_kinds):
            continue
        middle = int(np.median(other_ends - ends))
        deviation = float(np.median(np.abs(other_ends - ends - middle)))
        overlap = (other_starts - middle <= ends) & (starts <= other_ends - middle)
        if deviation < best and overlap.mean() >= MIN_COVERAGE:
            best, shift = deviation, middle
    return shift


def _measure_nearest(ends: _Times, others: _Times) -> float:
    """Return the median difference (ns) between each end and the nearest of the other rank."""
    ordered = np.sort(others)
    after = np.searchsorted(ordered, ends).clip(1, ordered.size - 1)
    nearest = np.minimum(np.abs(ordered[after] - ends), np.abs(ordered[after - 1] - ends))
    return float(np.median(nearest))
