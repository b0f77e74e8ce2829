"""Alignment of ranks whose clocks differ by more than the time between collectives, before matching by order.

A collective ends on all ranks at nearly the same time. Matching by order needs overlaps in time. On clocks that differ
it leaves collectives of a rank unmatched, or matches them with different, neighboring ones: with now these, now those
ranks, and the ends of matches do not coincide. Such a rank is moved by the shift with which its collectives pair, one
by one, with those of another rank, if their ends then coincide, and with no other shift.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import polars as pl
from numpy.typing import NDArray

MIN_PAIRS = 5
"""Collectives that a shift must pair."""
MIN_COVERAGE = 0.8
"""Share of the collectives of the rank with fewer that a shift must pair, and of the pairs that must then overlap."""
MAX_UNMATCHED_SHARE = 0.1
"""A rank with a larger share of unmatched collectives, or of matches with other ranks than usual, is not matched as
recorded."""
COINCIDENT_NS = 50_000
"""A rank is not matched as recorded either if the ends of its matches deviate more from their median difference."""
MAX_DEVIATION_NS = 10_000
"""Largest deviation of the ends with a shift. The ends of one collective differ by a few us, those of different
collectives of ranks in step, such as two tensor-parallel groups, by more."""
MIN_IMPROVEMENT = 4
"""Least ratio of each of three deviations to that with the shift: the deviation as recorded, that of random pairs (a
quarter of the time between collectives), and that with any other shift."""
MAX_SKIPPED = 32
"""Collectives by which the recording of one rank may begin earlier than that of the other."""
_MAX_COLLECTIVES = 2000
"""Collectives of a rank that are compared, so that the time does not grow with the square of their number."""
_KEY = ("where", "group", "rank")


def align_ends(parts: pl.DataFrame, matched: pl.DataFrame) -> pl.DataFrame:
    """Move start and end (ns) of ranks that are not matched as recorded to the clock of another rank of their group.

    Args:
        parts: Participations of all ranks with ``part`` and ``group``; the result is for matching by order only.
        matched: Columns part and instance of those that match as recorded.
    """
    timed = parts.filter(pl.col("collective") != "message", pl.col("end").is_not_null())
    collectives = timed.join(matched.select("part", "instance"), on="part", how="left", maintain_order="left")
    shifts: list[tuple[object, ...]] = []
    for (where, group), rows in collectives.group_by("where", "group", maintain_order=True):
        if rows["rank"].n_unique() > (rows["group_size"].min() or math.inf):  # type: ignore[operator]
            continue  # several groups of one name
        shifts += [(where, group, *shift) for shift in _find_shifts(rows).items()]
    if not shifts:
        return parts
    schema = {name: parts.schema[name] for name in _KEY} | {"shift": pl.Int64}
    table = pl.DataFrame(shifts, schema=schema, orient="row")
    moved = parts.join(table, on=_KEY, how="left", nulls_equal=True, maintain_order="left")
    later = pl.col("shift").fill_null(0)
    return moved.with_columns(pl.col("start") - later, pl.col("end") - later).drop("shift")


def _find_shifts(rows: pl.DataFrame) -> Mapping[int, int]:
    """Return how much later (ns) the clocks are of those ranks of a group that are not matched as recorded, where
    known."""
    deviations = _measure_deviations(rows)
    mismatched = [rank for rank, deviation in deviations.items() if deviation > COINCIDENT_NS]
    if not mismatched:
        return {}
    reference = min(set(deviations).difference(mismatched) or deviations)
    ordered = rows.sort("start", "event")
    first = _Sequence(ordered.filter(rank=reference))
    shifts = {
        rank: _find_shift(first, _Sequence(ordered.filter(rank=rank)), deviations[rank])
        for rank in mismatched
        if rank != reference
    }
    return {rank: shift for rank, shift in shifts.items() if shift}


def _measure_deviations(rows: pl.DataFrame) -> dict[int, float]:
    """Return for each rank how much (ns) the ends of its matches deviate from their median difference to those of the
    lowest other rank; infinite if too many are unmatched or with other ranks than usual."""
    pairs = rows.drop_nulls("instance").sort("instance", "rank")
    lowest, second = (pl.col("end").get(at, null_on_oob=True).over("instance") for at in (0, 1))
    is_lowest = pl.col("rank") == pl.col("rank").first().over("instance")
    pairs = pairs.with_columns(
        apart=pl.col("end") - pl.when(is_lowest).then(second).otherwise(lowest),
        ranks=pl.col("rank").hash().sum().over("instance"),
    )
    spread = (pl.col("apart") - pl.col("apart").median()).abs().median()
    deviations = dict(pairs.group_by("rank").agg(spread).iter_rows())
    # At the begin and the end some ranks may not be recorded.
    window = rows.group_by("rank").agg(pl.col("start").min(), pl.col("end").max())
    begin, end = window["start"].max(), window["end"].min()
    inside = pairs.filter(pl.col("start") >= begin, pl.col("end") <= end)
    usual = pl.col("ranks").unique_counts().max() / pl.len()
    shares = [rows.group_by("rank").agg(pl.col("instance").null_count() / pl.len())]
    shares.append(inside.group_by("rank").agg(1 - usual))
    doubtful = {rank for table in shares for rank, share in table.iter_rows() if share > MAX_UNMATCHED_SHARE}
    ranks = rows["rank"].unique().sort().to_list()
    return {rank: math.inf if rank in doubtful else deviations.get(rank, math.inf) for rank in ranks}


class _Sequence:
    """The first collectives of one rank in a group, by start."""

    def __init__(self, rows: pl.DataFrame) -> None:
        rows = rows.head(_MAX_COLLECTIVES)
        self.kinds = rows["collective"].cast(pl.Categorical).to_physical().to_numpy()
        self.starts, self.ends = rows["start"].to_numpy(), rows["end"].to_numpy()


def _find_shift(first: _Sequence, other: _Sequence, recorded: float) -> int:
    """Return how much later (ns) the clock of ``other`` is than that of ``first``; 0 if no shift explains the times.

    Args:
        first: The collectives of a rank.
        other: Those of the rank whose clock differs.
        recorded: The deviation of its ends (ns) as it is matched without a shift.
    """
    count = min(first.ends.size, other.ends.size)
    if count < MIN_PAIRS:
        return 0
    by_chance = float(np.median(np.diff(np.sort(first.ends)))) / 4
    most = min(MAX_SKIPPED, count - math.ceil(MIN_COVERAGE * count))
    pairings = (_pair(first, other, skipped) for skipped in range(-most, most + 1))
    candidates = sorted(pairing for pairing in pairings if pairing is not None)
    if not candidates:
        return 0
    (best, shift), *others = candidates
    limits = [recorded, by_chance, *(deviation for deviation, _ in others[:1])]
    return shift if best <= MAX_DEVIATION_NS and MIN_IMPROVEMENT * best < min(limits) else 0


def _pair(first: _Sequence, other: _Sequence, skipped: int) -> tuple[float, int] | None:
    """Pair the collectives of two ranks, without the first ``skipped`` of ``other`` (if negative: of ``first``).

    Returns:
        The median deviation of the differences of their ends from the median difference, and that (ns). None if they
        are of different kinds or do not overlap with that shift.
    """
    rows, other_rows = (slice(max(0, begin), None) for begin in (-skipped, skipped))
    size = min(first.ends[rows].size, other.ends[other_rows].size)
    (kinds, other_kinds), (starts, other_starts), (ends, other_ends) = (
        (getattr(first, name)[rows][:size], getattr(other, name)[other_rows][:size])
        for name in ("kinds", "starts", "ends")
    )
    if not np.array_equal(kinds, other_kinds):
        return None
    apart: NDArray[np.int64] = other_ends - ends
    middle = int(np.median(apart))
    overlap = (other_starts - middle <= ends) & (starts <= other_ends - middle)
    return (float(np.median(np.abs(apart - middle))), middle) if overlap.mean() >= MIN_COVERAGE else None
