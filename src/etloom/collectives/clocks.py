"""Clock offsets between ranks, inferred from collectives.

In a collective in which every rank both sends data to and receives data from all others, no rank can leave before the
last one has arrived. This bounds the offset of two clocks from both sides, whatever the network does. The ranks also
leave at nearly the same time: the median difference of their ends estimates the offset, and the spread of the
differences gives its uncertainty. A clock that may be right, since zero lies within its bounds and within the spread,
is not corrected.

The residual, by which a clock may still be wrong, follows from the same data: three spreads around the estimate (or
the full range of fewer than MIN_FOR_RELIABLE_SPREAD ends), limited by the bounds. Processes of one host read the same
clock. If ranks name the same host and nothing contradicts it, the residual is therefore the cost of reading that clock
(HOST_CLOCK_ERROR_NS), or for device times the cost of converting them to it (DEVICE_CLOCK_ERROR_NS).

Ranks are compared with the lowest rank of each group, and through it with each other. Ranks that share no group, even
indirectly, have separate references.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np
import polars as pl

MIN_FOR_DRIFT = 16
"""Number of communications, over at least a second, from which a drift is estimated."""

HOST_CLOCK_ERROR_NS = 10_000
"""Upper bound of the difference between two reads of one host's clock."""

MIN_FOR_SPREAD = 3
"""With fewer communications the spread is unknown and only the bounds are used."""

MIN_FOR_RELIABLE_SPREAD = 10
"""Number of ends of collectives from which the spread is reliable."""

GENERIC_HOST_NAMES = ("", "localhost", "localhost.localdomain", "(none)")
"""Host names that do not identify a host."""

COMPARABLE = ("reference", "agrees", "unsure", "corrected")
"""Verdicts that mean: times of this rank compare with those of the reference rank, up to an error of residual_ns."""

DEVICE_CLOCK_ERROR_NS = 100_000
"""Upper bound of a profiler's error when it converts device times to the host's clock."""

TIMESTAMP_RESOLUTION_NS = 2_000
"""Possible contradiction between times that are stored in whole us."""

COLUMNS = {
    "rank": pl.Int32,
    "reference": pl.Int32,  # the rank whose clock this one is compared with
    "communications": pl.Int64,
    "offset_ns": pl.Int64,  # this clock minus the reference's, at since_ns; null if unknown
    "lower_bound_ns": pl.Int64,  # bounds of the offset, from causality
    "upper_bound_ns": pl.Int64,
    "spread_ns": pl.Int64,  # median deviation of the ends after offset (and drift) are removed
    "drift_ppm": pl.Float64,  # how much faster this clock runs; null if unknown or none
    "since_ns": pl.Int64,  # on the clock of the reference
    "residual_ns": pl.Int64,  # remaining uncertainty once offset and drift are removed
    "same_host": pl.Boolean,  # same host name as the reference; null if either is unknown
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
    """Uncertainty of the offset, not considering the bounds."""
    drift: float | None


def estimate_clocks(matched: pl.DataFrame, hosts: Mapping[int, str | None] | None = None) -> pl.DataFrame:
    """Estimate the clock of each rank from matched participations (`matching.match_participations`).

    Args:
        matched: Participations with their instances.
        hosts: Host name of each rank.

    Returns:
        One row per rank (COLUMNS). verdict: "agrees", the clock is right within HOST_CLOCK_ERROR_NS, or by its host;
        "unsure", it may be right or wrong by residual_ns, and is not corrected; "corrected", it is wrong by offset_ns;
        "impossible", no offset fits the recording; "unknown", the rank took part in nothing with others.
    """
    hosts = hosts or {}
    ranks = sorted(matched["rank"].unique().to_list())
    since = matched.select(pl.col("end").filter(pl.col("instance").is_not_null()).min()).item()
    rank_pairs = _chain_from_references(_compare_with_hubs(matched, since), ranks)
    on_device = set(matched.filter(pl.col("where") == "device")["rank"].unique())
    error = {rank: DEVICE_CLOCK_ERROR_NS if rank in on_device else HOST_CLOCK_ERROR_NS for rank in ranks}
    rows = [_build_row(rank_pairs.get(rank), rank, ranks[0], since, hosts, error) for rank in ranks]
    return pl.DataFrame(rows, schema=COLUMNS, orient="row")


def correct_clocks(parts: pl.DataFrame, table: pl.DataFrame) -> pl.DataFrame:
    """Convert start and end (ns) to the clock of the reference rank, for ranks with the verdict "corrected"."""
    corrections = table.filter(pl.col("verdict") == "corrected").select(
        "rank", "offset_ns", "drift_ppm", "since_ns"
    )
    drift = pl.col("drift_ppm").fill_null(0.0) / 1e6

    def correct(time: str) -> pl.Expr:
        ahead = pl.col("offset_ns") + drift * (pl.col(time) - pl.col("since_ns"))
        return pl.col(time) - ahead.round().cast(pl.Int64).fill_null(0)

    joined = parts.join(corrections, on="rank", how="left", maintain_order="left")
    return joined.with_columns(start=correct("start"), end=correct("end")).select(parts.columns)


def _compare_with_hubs(matched: pl.DataFrame, since: int | None) -> list[_RankPair]:
    """Compare the clock of each rank with that of the lowest rank in the collective instances they share.

    Instances of which it is unknown whether they synchronize count only between ranks that have no others.
    """
    is_synchronizing = pl.col("collective") != "message"
    is_certain = pl.col("synchronizes").fill_null(False).all().over("instance")
    matched = matched.with_columns(certain=is_certain).filter(
        pl.col("instance").is_not_null() & pl.col("synchronizes").fill_null(True).all().over("instance")
    )
    hubs = matched.sort("rank").unique("instance", keep="first").select("instance", "rank", "start", "end")
    both = matched.join(hubs, on="instance", suffix="_hub").filter(pl.col("rank") != pl.col("rank_hub"))
    both = both.filter(pl.col("certain") | ~pl.col("certain").any().over("rank", "rank_hub"))
    receives = is_synchronizing | (pl.col("destination") == pl.col("rank"))
    sends = is_synchronizing | (pl.col("source") == pl.col("rank"))
    bounds = both.select(
        "rank",
        "rank_hub",
        at=pl.col("end_hub") - (since or 0),
        apart=pl.when(is_synchronizing).then(pl.col("end") - pl.col("end_hub")).cast(pl.Float64),
        lowest=pl.when(sends).then(pl.col("start") - pl.col("end_hub")),
        highest=pl.when(receives).then(pl.col("end") - pl.col("start_hub")),
    )
    return [
        _compare_clocks(rank, hub, pair_rows)  # type: ignore[arg-type]
        for (rank, hub), pair_rows in bounds.group_by("rank", "rank_hub", maintain_order=True)
    ]


def _compare_clocks(rank: int, hub: int, pair_rows: pl.DataFrame) -> _RankPair:
    bounds = _offset_bounds(pair_rows, 0.0)
    half = max(bounds[1] - bounds[0], 0.0) / 2
    ends = pair_rows.drop_nulls("apart")
    if not ends.height:
        # Messages only bound the offset: take zero if possible, else the middle.
        middle = 0.0 if bounds[0] <= 0 <= bounds[1] else sum(bounds) / 2
        return _RankPair(
            rank, hub, pair_rows.height, middle, *bounds, spread=half, margin=2 * half, drift=None
        )
    at, differences = ends["at"].to_numpy(), ends["apart"].to_numpy()
    if len(differences) < MIN_FOR_SPREAD:
        return _RankPair(
            rank, hub, pair_rows.height, float(np.median(differences)), *bounds, half, 2 * half, None
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
        pair_rows.height,
        float(np.median(level)),
        *_offset_bounds(pair_rows, slope),
        spread,
        margin,
        drift,
    )


def _offset_bounds(pair_rows: pl.DataFrame, slope: float) -> tuple[float, float]:
    """Return the lower and upper bound of the clock offset (ns) at time 0, for a drift of ``slope`` (ns per ns)."""
    drifted = slope * pl.col("at")
    lowest, highest = pair_rows.select(
        (pl.col("lowest") - drifted).max(), (pl.col("highest") - drifted).min()
    ).row(0)
    return -math.inf if lowest is None else lowest, math.inf if highest is None else highest


def _theil_sen_slope(at: np.ndarray, values: np.ndarray) -> float:
    """Return the Theil-Sen slope over distant pairs of points: the median of slopes, robust against outliers."""
    order = np.argsort(at)
    half = len(at) // 2
    near, far = order[: len(at) - half], order[half:]
    run = (at[far] - at[near]).astype(np.float64)
    return float(np.median((values[far] - values[near])[run > 0] / run[run > 0]))


def _median_deviation(differences: np.ndarray) -> float:
    return float(np.median(np.abs(differences - np.median(differences))))


def _chain_from_references(pairs: list[_RankPair], ranks: Sequence[int]) -> dict[int, _RankPair]:
    """Return each rank's clock offset to the lowest connected rank, summed along the pairs with the smallest spread."""
    edges: dict[int, list[tuple[float, int, int]]] = defaultdict(list)
    for index, pair in enumerate(pairs):
        for end in (pair.rank, pair.hub):
            edges[end].append((pair.spread, -pair.count, index))
    rank_pairs: dict[int, _RankPair] = {}
    for rank in ranks:
        if rank in rank_pairs or (rank not in edges and rank != ranks[0]):
            continue
        rank_pairs[rank] = _RankPair(rank, rank, 0, 0, 0, 0, 0, 0, None)
        candidates = list(edges[rank])
        heapify(candidates)
        while candidates:
            pair = pairs[heappop(candidates)[-1]]
            towards = pair.hub in rank_pairs
            known, new = (pair.hub, pair.rank) if towards else (pair.rank, pair.hub)
            if new in rank_pairs:
                continue
            rank_pairs[new] = _chain_pairs(rank_pairs[known], pair, towards)
            for edge in edges[new]:
                heappush(candidates, edge)
    return rank_pairs


def _chain_pairs(base: _RankPair, pair: _RankPair, towards: bool) -> _RankPair:
    lowest, highest = (pair.lowest, pair.highest) if towards else (-pair.highest, -pair.lowest)
    drifts = [drift for drift in (base.drift, pair.drift if towards else _negate(pair.drift)) if drift]
    return _RankPair(
        pair.rank if towards else pair.hub,
        base.hub,
        pair.count,
        base.offset + (pair.offset if towards else -pair.offset),
        base.lowest + lowest,
        base.highest + highest,
        base.spread + pair.spread,
        base.margin + pair.margin,
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
    uncorrected = _residual_offset(pair, 0.0)
    residual: float | None = uncorrected
    clock_error = max(error[rank], error[pair.hub])
    zero_possible = pair.lowest <= 0 <= pair.highest
    if rank == pair.hub:
        verdict = "reference"
    elif pair.lowest > pair.highest + TIMESTAMP_RESOLUTION_NS:
        verdict, residual = "impossible", None
    elif zero_possible and abs(pair.offset) <= max(pair.margin, HOST_CLOCK_ERROR_NS):
        residual = min(clock_error, uncorrected) if same else uncorrected
        verdict = "agrees" if residual <= HOST_CLOCK_ERROR_NS else "unsure"
    elif zero_possible and same and clock_error == HOST_CLOCK_ERROR_NS:
        # A host's clock is not corrected because of a rank that always leaves late.
        verdict = "unsure"
    else:
        verdict, residual = "corrected", _residual_offset(pair, pair.offset)
    if residual is not None and math.isinf(residual):
        verdict = "unknown"
    times = (pair.offset, pair.lowest, pair.highest, pair.spread)
    rounded_residual = None if residual is None else _round_finite(residual)
    return [
        rank,
        pair.hub,
        pair.count,
        *map(_round_finite, times),
        pair.drift,
        since,
        rounded_residual,
        same,
        verdict,
    ]


def _residual_offset(pair: _RankPair, correction: float) -> float:
    """Return the largest possible difference between the true clock offset and the correction, ns."""
    lowest = max(pair.lowest, pair.offset - pair.margin)
    highest = min(pair.highest, pair.offset + pair.margin)
    return max(highest - correction, correction - lowest, 0.0)


def _is_same_host(host: str | None, other: str | None) -> bool | None:
    if not host or not other or host in GENERIC_HOST_NAMES or other in GENERIC_HOST_NAMES:
        return None
    return host == other


def _round_finite(value: float) -> int | None:
    return round(value) if math.isfinite(value) else None
