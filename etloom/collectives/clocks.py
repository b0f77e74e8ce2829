"""How far the clocks of ranks differ, told from what they did together.

Of a communication in which every rank both brings and gets data, no rank can leave before the last has come: this
bounds the offset of two clocks from both sides, whatever the network does. Its ranks also leave at nearly the same
time: the median difference of their ends estimates the offset, and the spread of the differences says how well.
A clock that may be right, since zero lies within its bounds and within the spread, is left as it is.

How far it may still be off, the residual, follows from the same: three spreads about the estimate (of fewer than MANY
ends, all that they differ by), as far as the bounds allow them. Processes of one host read one clock, so where ranks
name the same host and nothing contradicts it, the residual is what reading it costs (TRUSTED_NS), however unevenly
they leave; or, of times that devices took, what putting these on the host's clock costs (DEVICE_NS).

Ranks are compared with the lowest rank of each group, and through it with each other. Ranks that share no group, not
even through others, have a reference each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl

SYNCHRONIZING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Collectives after which all ranks have heard of all."""

MIN_FOR_DRIFT = 16
"""Communications, over a second or more, from which a drift is told."""

HOST_CLOCK_ERROR_NS = 10_000
"""Clocks of one host differ by less than this."""

MIN_FOR_SPREAD = 3
"""Of fewer communications the ends tell no spread: only the bounds are told."""

MIN_FOR_RELIABLE_SPREAD = 10
"""Ends, of which the spread is no accident."""

GENERIC_HOST_NAMES = ("", "localhost", "localhost.localdomain", "(none)")
"""Names of hosts that say nothing."""

COMPARABLE = ("reference", "agrees", "unsure", "corrected")
"""Verdicts on ranks whose times can be compared with those of their reference, within residual_ns."""

DEVICE_CLOCK_ERROR_NS = 100_000
"""Profilers put the times of devices of one host on its clock within this."""

TIMESTAMP_RESOLUTION_NS = 2_000
"""Times that are kept in whole us may contradict each other by this much."""

COLUMNS = {
    "rank": pl.Int32,
    "reference": pl.Int32,  # the rank whose clock this one is compared with
    "communications": pl.Int64,
    "offset_ns": pl.Int64,  # this clock minus the reference's, at since_ns; null where nothing tells
    "lower_bound_ns": pl.Int64,  # bounds of it, by cause and effect
    "upper_bound_ns": pl.Int64,
    "spread_ns": pl.Int64,  # of ends after the offset (and drift) was taken out: half of them lie within
    "drift_ppm": pl.Float64,  # how much faster this clock runs; null where it is not told or none
    "since_ns": pl.Int64,  # on the clock of the reference
    "residual_ns": pl.Int64,  # the two clocks may differ by so much still, once offset and drift are taken out
    "same_host": pl.Boolean,  # as the reference, by name; null where one does not say
    "verdict": pl.String,  # reference | agrees | unsure | corrected | impossible | unknown
}


@dataclass(frozen=True)
class _RankPair:
    rank: int
    hub: int
    count: int
    offset: float
    lowest: float
    highest: float
    spread: float
    margin: float
    """How far from the offset the truth may lie, bounds aside."""
    drift: float | None


def estimate_clocks(matched: pl.DataFrame, hosts: Mapping[int, str | None] | None = None) -> pl.DataFrame:
    """A row a rank (COLUMNS) from parts with their meetings (`meetings.meet`).

    hosts: what each rank calls its host. verdict: "agrees", the clock is right, as far as it could be told within
    TRUSTED_NS, or by the host; "unsure", it may be right or off by residual_ns, and is left; "corrected", it is off by
    offset_ns; "impossible", no offset is in accord with what was recorded; "unknown", the rank did nothing together
    with others.
    """
    hosts = hosts or {}
    ranks = sorted(matched["rank"].unique().to_list())
    since = matched.select(pl.col("end").filter(pl.col("meeting").is_not_null()).min()).item()
    pairs = _compare_with_hubs(matched, since)
    compared_ranks = {end for pair in pairs for end in (pair.rank, pair.hub)}
    pair_by_rank: dict[int, _RankPair] = {}
    for rank in ranks:
        if rank in pair_by_rank or (rank not in compared_ranks and rank != ranks[0]):
            continue
        pair_by_rank[rank] = _RankPair(rank, rank, 0, 0, 0, 0, 0, 0, None)
        while edge := _next_edge(pairs, pair_by_rank):
            pair, towards = edge
            through = pair_by_rank[pair.hub if towards else pair.rank]
            pair_by_rank[pair.rank if towards else pair.hub] = _chain_pairs(through, pair, towards)
    on_device = set(matched.filter(pl.col("where") == "device")["rank"].unique())
    error = {rank: DEVICE_CLOCK_ERROR_NS if rank in on_device else HOST_CLOCK_ERROR_NS for rank in ranks}
    rows = [_build_row(pair_by_rank.get(rank), rank, ranks[0], since, hosts, error) for rank in ranks]
    return pl.DataFrame(rows, schema=COLUMNS, orient="row")


def correct_clocks(parts: pl.DataFrame, table: pl.DataFrame) -> pl.DataFrame:
    """The parts with start and end on the reference's clock, where a rank's verdict is "corrected"."""
    off = table.filter(pl.col("verdict") == "corrected").select("rank", "offset_ns", "drift_ppm", "since_ns")
    drift = pl.col("drift_ppm").fill_null(0.0) / 1e6

    def moved(time: str) -> pl.Expr:
        ahead = pl.col("offset_ns") + drift * (pl.col(time) - pl.col("since_ns"))
        return pl.col(time) - ahead.round().cast(pl.Int64).fill_null(0)

    joined = parts.join(off, on="rank", how="left", maintain_order="left")
    return joined.with_columns(start=moved("start"), end=moved("end")).select(parts.columns)


def _compare_with_hubs(matched: pl.DataFrame, since: int | None) -> list[_RankPair]:
    """Each rank against the lowest rank of its meetings."""
    is_synchronizing = pl.col("collective").is_in(SYNCHRONIZING)
    matched = matched.filter(
        pl.col("meeting").is_not_null() & (is_synchronizing | (pl.col("collective") == "message"))
    )
    hubs = matched.sort("rank").unique("meeting", keep="first").select("meeting", "rank", "start", "end")
    both = matched.join(hubs, on="meeting", suffix="_hub").filter(pl.col("rank") != pl.col("rank_hub"))
    heard = is_synchronizing | (pl.col("destination") == pl.col("rank"))
    was_heard = is_synchronizing | (pl.col("source") == pl.col("rank"))
    bounds = both.select(
        "rank",
        "rank_hub",
        at=pl.col("end_hub") - (since or 0),
        apart=pl.when(is_synchronizing).then(pl.col("end") - pl.col("end_hub")).cast(pl.Float64),
        lowest=pl.when(was_heard).then(pl.col("start") - pl.col("end_hub")),
        highest=pl.when(heard).then(pl.col("end") - pl.col("start_hub")),
    )
    return [
        _compare_clocks(rank, hub, rank_bounds)  # type: ignore[arg-type]
        for (rank, hub), rank_bounds in bounds.group_by("rank", "rank_hub", maintain_order=True)
    ]


def _compare_clocks(rank: int, hub: int, bounds_table: pl.DataFrame) -> _RankPair:
    bounds = _offset_bounds(bounds_table, 0.0)
    half = max(bounds[1] - bounds[0], 0.0) / 2
    ends = bounds_table.drop_nulls("apart")
    if not ends.height:
        # Messages bound the offset only: zero, where it may be, else the middle.
        middle = 0.0 if bounds[0] <= 0 <= bounds[1] else sum(bounds) / 2
        return _RankPair(
            rank, hub, bounds_table.height, middle, *bounds, spread=half, margin=2 * half, drift=None
        )
    at, differences = ends["at"].to_numpy(), ends["apart"].to_numpy()
    if len(differences) < MIN_FOR_SPREAD:
        return _RankPair(
            rank, hub, bounds_table.height, float(np.median(differences)), *bounds, half, 2 * half, None
        )
    slope = (
        _theil_sen_slope(at, differences) if len(differences) >= MIN_FOR_DRIFT and np.ptp(at) >= 1e9 else 0.0
    )
    level = differences - slope * at
    drifts = _median_deviation(level) < 0.5 * _median_deviation(differences)
    if not drifts:
        slope, level = 0.0, differences
    spread, drift = _median_deviation(level), 1e6 * slope if drifts else None
    margin = TIMESTAMP_RESOLUTION_NS + (
        3 * spread if len(level) >= MIN_FOR_RELIABLE_SPREAD else float(np.ptp(level))
    )
    return _RankPair(
        rank,
        hub,
        bounds_table.height,
        float(np.median(level)),
        *_offset_bounds(bounds_table, slope),
        spread,
        margin,
        drift,
    )


def _offset_bounds(bounds_table: pl.DataFrame, slope: float) -> tuple[float, float]:
    """The least and the most that the offset can be at time 0, for a drift of ``slope``."""
    drifted = slope * pl.col("at")
    lowest, highest = bounds_table.select(
        (pl.col("lowest") - drifted).max(), (pl.col("highest") - drifted).min()
    ).row(0)
    return -math.inf if lowest is None else lowest, math.inf if highest is None else highest


def _theil_sen_slope(at: np.ndarray, values: np.ndarray) -> float:
    """Theil and Sen's slope, of points at some distance: the median of slopes, which outliers do not move."""
    order = np.argsort(at)
    half = len(at) // 2
    near, far = order[: len(at) - half], order[half:]
    run = (at[far] - at[near]).astype(np.float64)
    return float(np.median((values[far] - values[near])[run > 0] / run[run > 0]))


def _median_deviation(values: np.ndarray) -> float:
    return float(np.median(np.abs(values - np.median(values))))


def _next_edge(pairs: list[_RankPair], pair_by_rank: dict[int, _RankPair]) -> tuple[_RankPair, bool] | None:
    """The pair of smallest spread that leads from a known rank to another, and whether that is its rank."""
    leading = [pair for pair in pairs if (pair.rank in pair_by_rank) != (pair.hub in pair_by_rank)]
    best = min(leading, key=lambda pair: (pair.spread, -pair.count), default=None)
    return None if best is None else (best, best.hub in pair_by_rank)


def _chain_pairs(through: _RankPair, pair: _RankPair, towards: bool) -> _RankPair:
    lowest, highest = (pair.lowest, pair.highest) if towards else (-pair.highest, -pair.lowest)
    drifts = [drift for drift in (through.drift, pair.drift if towards else _negate(pair.drift)) if drift]
    return _RankPair(
        pair.rank if towards else pair.hub,
        through.hub,
        pair.count,
        through.offset + (pair.offset if towards else -pair.offset),
        through.lowest + lowest,
        through.highest + highest,
        through.spread + pair.spread,
        through.margin + pair.margin,
        sum(drifts) if drifts else None,
    )


def _negate(value: float | None) -> float | None:
    return None if value is None else -value


def _build_row(
    pair: _RankPair | None,
    rank: int,
    first: int,
    since: int | None,
    hosts: Mapping[int, str | None],
    error: Mapping[int, int],
) -> list[object]:
    if pair is None:
        return [rank, first, 0, None, None, None, None, None, None, None, None, "unknown"]
    same = _is_same_host(hosts.get(rank), hosts.get(pair.hub))
    as_it_is = _residual_offset(pair, 0.0)
    residual: float | None = as_it_is
    about = max(error[rank], error[pair.hub])
    may_be = pair.lowest <= 0 <= pair.highest
    if rank == pair.hub:
        verdict = "reference"
    elif pair.lowest > pair.highest + TIMESTAMP_RESOLUTION_NS:
        verdict, residual = "impossible", None
    elif may_be and abs(pair.offset) <= max(pair.margin, HOST_CLOCK_ERROR_NS):
        residual = min(about, as_it_is) if same else as_it_is
        verdict = "agrees" if residual <= HOST_CLOCK_ERROR_NS else "unsure"
    elif may_be and same and about == HOST_CLOCK_ERROR_NS:
        # A host's own clock is not moved for a rank that always leaves late.
        verdict = "unsure"
    else:
        verdict, residual = "corrected", _residual_offset(pair, pair.offset)
    if residual is not None and math.isinf(residual):
        verdict = "unknown"
    times = (pair.offset, pair.lowest, pair.highest, pair.spread)
    residual_ns = None if residual is None else _round_finite(residual)
    return [
        rank,
        pair.hub,
        pair.count,
        *map(_round_finite, times),
        pair.drift,
        since,
        residual_ns,
        same,
        verdict,
    ]


def _residual_offset(pair: _RankPair, correction: float) -> float:
    """How far the offset can be from the one that is taken out."""
    lowest = max(pair.lowest, pair.offset - pair.margin)
    highest = min(pair.highest, pair.offset + pair.margin)
    return max(highest - correction, correction - lowest, 0.0)


def _is_same_host(host: str | None, other: str | None) -> bool | None:
    if not host or not other or host in GENERIC_HOST_NAMES or other in GENERIC_HOST_NAMES:
        return None
    return host == other


def _round_finite(value: float) -> int | None:
    return round(value) if math.isfinite(value) else None
