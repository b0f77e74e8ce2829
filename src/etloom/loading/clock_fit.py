"""Fit the clocks of two recordings of one process, by the events that both contain.

Two profilers time one call or one kernel on clocks whose zeros differ, and which drift apart by some microseconds per
second. The fit needs no common id:

1. by name and order: pairs of events with one name vote for their difference in time. Candidates are the differences
   with the most votes; the one under which the most events of both recordings pair is the offset, and a line through
   the differences of these pairs is the drift;
2. by time: if no names agree, because one recording has the operators and the other one the launch calls, the offset
   is the one under which the launch calls lie in operators of their thread.

A recording repeats its steps, so a fit counts only if no other offset is nearly as good.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

_MIN_PAIRS = 16
MIN_SHARE = 0.8
"""Least share of the events in both recordings that must pair."""
_VOTE_NS = 2_000
_RIVAL_NS = 10_000  # offsets that differ by less are one
_CLOSE_NS = 2_000  # by which two profilers time one event differently, next to a constant
_OVERLAP_NS = 100_000  # offsets that differ by less leave many calls in their operator
TOLERANCE_NS = 50_000
_MAX_VOTES = 1 << 25
_BATCH = 1 << 22  # votes that are counted at once
_MAX_VOTERS = 512  # of one name
_MIDDLE_NS = 200_000_000  # in which clocks drift apart by little
_CANDIDATES = 8
_MIN_COMPARED = 64  # events, in the middle of the recording, by which offsets are compared
_FIRST_WINDOW_NS = 1_000_000_000  # around the middle of the recording, to which the line is fitted first
_DECOYS_NS = (-10_700_000, -3_100_000, -1_130_000, -370_000, 370_000, 1_130_000, 3_100_000, 10_700_000)
"""Wrong offsets, under which few events pair as closely as under the right one."""
_MAX_CHANCE = 0.5
_BLOCKS = 16  # of the recording, whose medians the line of the drift is fitted to
_NEARLY = 0.9  # of the pairs of the best offset, from which another one contradicts it
_CELL_NS = 2_000
_MAX_CELLS = 1 << 22
_MIN_CONTRAST = 0.1  # share of calls in operators above the share under any other offset
_MIN_CALLS = 64
_MAX_SPAN_NS = 1 << 52  # 52 days
_THREADS = 4  # with the most calls
_EPOCH_SPAN_NS = 1_000_000_000  # clocks of the epoch differ by less


@dataclass(frozen=True)
class Line:
    """The difference of two clocks as a line in time."""

    offset: int  # nanoseconds since the epoch are more than a float can hold
    origin: int
    drift: float = 0.0

    def convert(self, times: pl.Expr) -> pl.Expr:
        """Return times of the other clock on the clock of the reference."""
        return times - self.offset - ((times - self.origin) * self.drift).round().cast(pl.Int64)


@dataclass(frozen=True)
class ClockFit:
    """The fitted clock of a recording, and the quality of the fit."""

    how: str
    """"name" or "time"."""
    line: Line
    share: float
    """Of the events that both recordings should contain, those that pair."""
    events: int
    residual_ns: tuple[float, float]
    """Median and 95th percentile of the difference in time of pairs; of a fit by time, its uncertainty twice."""

    def describe(self) -> str:
        how = "pair by name and order" if self.how == "name" else "lie in an operator of their thread"
        text = (
            f"{self.share:.1%} of {self.events:,} events {how}; clock offset {self.line.offset / 1e9:.6f} s"
        )
        median, tail = (value / 1e3 for value in self.residual_ns)
        if self.how == "time":
            return f"{text} +- {median:.1f} us"
        return f"{text}, drift {self.line.drift * 1e6:.2f} ppm, residual {median:.1f} us (median), {tail:.1f} us (95 %)"


def fit_by_name(reference: pl.DataFrame, other: pl.DataFrame, *, share_epoch: bool) -> ClockFit | None:
    """Fit the clock of ``other`` by the events of one name; None if too few pair, or if several offsets fit.

    Args:
        reference, other: Columns ``key`` (a name, with what tells calls from activities) and ``ts``.
        share_epoch: Both clocks count from the epoch.
    """
    anchors, events = (
        frame.join(others.select("key").unique(), on="key", how="semi").sort("ts").with_row_index("row")
        for frame, others in ((reference, other), (other, reference))
    )
    if min(anchors.height, events.height) < _MIN_PAIRS:
        return None
    fits = []
    for offset in _vote(anchors, events, share_epoch):
        if (compared := _select_shared(anchors, events, offset)).height:
            middle = int(compared["ts"][compared.height // 2])
            gaps = _pair(compared, events, Line(offset, middle + offset))["gap"]
            is_close = (gaps - gaps.median()).abs() <= _CLOSE_NS
            fits.append((int(is_close.sum()), offset, middle))
    count, offset, middle = max(fits, default=(0, 0, 0))
    rivals = [
        n for n, other_offset, _ in fits if abs(other_offset - offset) > _RIVAL_NS and n >= _NEARLY * count
    ]
    if count < _MIN_PAIRS or rivals:
        return None
    return _judge(anchors, events, _fit_line(anchors, events, Line(offset, middle + offset)))


def _select_shared(reference: pl.DataFrame, other: pl.DataFrame, offset: int) -> pl.DataFrame:
    """Return the events of ``reference`` around the middle of the time that both cover if ``offset`` is right."""
    first, last = int(other["ts"][0]) - offset, int(other["ts"][-1]) - offset
    return _select_middle(
        reference.filter(pl.col("ts").is_between(first - TOLERANCE_NS, last + TOLERANCE_NS))
    )


def _select_middle(events: pl.DataFrame) -> pl.DataFrame:
    """Return the events around the one in the middle; clocks that drift apart have one difference there."""
    if events.is_empty():
        return events
    distance = (events["ts"] - events["ts"][events.height // 2]).abs()
    return events.filter(distance <= max(_MIDDLE_NS, distance.bottom_k(_MIN_COMPARED).max()))  # type: ignore[type-var]


def _vote(reference: pl.DataFrame, other: pl.DataFrame, share_epoch: bool) -> list[int]:
    """Return the differences in time that pairs of events with one name vote for most."""
    anchor_times, event_times = (
        frame.group_by("key").agg(pl.col("ts")).sort("key") for frame in (reference, other)
    )
    lowest = int(other["ts"][0]) - int(reference["ts"][-1])
    extent = int(other["ts"][-1]) - int(reference["ts"][0]) - lowest
    cell = max(_VOTE_NS, extent // _MAX_CELLS)
    votes = np.zeros(extent // cell + 2, np.int64)
    budget = _MAX_VOTES
    ballots: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    order = event_times["ts"].list.len().arg_sort()  # rare names have the clearest vote
    for row in order:
        anchors, times = anchor_times["ts"][row].to_numpy(), event_times["ts"][row].to_numpy()
        voters = min(len(anchors), _MAX_VOTERS, budget // len(times))
        begin = (len(anchors) - voters) // 2  # voters that follow each other: the clocks drift apart
        ballots.append((anchors[begin : begin + voters], times))
        batch = max(1, _BATCH // len(times))
        for start in range(begin, begin + voters, batch):
            chosen = anchors[start : min(start + batch, begin + voters)] + lowest
            votes += np.bincount((times[None, :] - chosen[:, None]).ravel() // cell, minlength=votes.size)
        budget -= voters * len(times)
    sums = votes[:-1] + votes[1:]  # an offset may lie on an edge
    offsets = lowest + np.arange(1, votes.size) * cell
    if share_epoch:
        sums = np.where(np.abs(offsets) < _EPOCH_SPAN_NS, sums, 0)
    distinct: list[int] = []
    highest = np.argpartition(sums, -min(4 * _CANDIDATES, sums.size))[-4 * _CANDIDATES :]
    for place in highest[np.argsort(-sums[highest], kind="stable")]:
        if sums[place] and all(abs(offsets[place] - chosen) > 2 * cell for chosen in distinct):
            distinct.append(int(offsets[place]))
    candidates = distinct[:_CANDIDATES]
    if cell == _VOTE_NS:
        return candidates
    return [
        _refine(ballots, near, offset, cell)
        if (near := _select_shared(reference, other, offset)["ts"]).len()
        else offset
        for offset in candidates
    ]


def _refine(
    ballots: list[tuple[NDArray[np.int64], NDArray[np.int64]]], near: pl.Series, offset: int, cell: int
) -> int:
    """Return the difference that most pairs vote for among those that differ from ``offset`` by less than ``cell``."""
    votes = np.zeros(2 * cell // _VOTE_NS + 2, np.int64)
    first, last = near[0], near[-1]
    for anchors, times in ballots:
        anchors = anchors[(anchors >= first) & (anchors <= last)]
        low, high = (np.searchsorted(times, anchors + offset + limit) for limit in (-cell, cell))
        counts = high - low
        behind = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        differences = times[np.repeat(low, counts) + behind] - np.repeat(anchors, counts)
        votes += np.bincount((differences - (offset - cell)) // _VOTE_NS, minlength=votes.size)
    place = int(np.argmax(votes[:-1] + votes[1:]))
    return offset - cell + (place + 1) * _VOTE_NS


def _pair(reference: pl.DataFrame, other: pl.DataFrame, line: Line) -> pl.DataFrame:
    """Pair events of one name that are nearest to each other: columns row, row_other, other_ts and gap (ns).

    The events of ``reference``, at least one, are in the order of their times.
    """
    moved = other.select("key", row_other="row", other_ts="ts", ts=line.convert(pl.col("ts")))
    moved = moved.filter(
        pl.col("ts").is_between(reference["ts"][0] - TOLERANCE_NS, reference["ts"][-1] + TOLERANCE_NS)
    )
    search: dict[str, Any] = {"on": "ts", "by": "key", "strategy": "nearest", "check_sortedness": False}
    search["tolerance"] = TOLERANCE_NS
    forth = reference.join_asof(moved.with_columns(at="ts"), **search)
    back = moved.join_asof(reference, **search)
    mutual = forth.join(back.select("row", "row_other"), on=["row", "row_other"])
    return mutual.select("row", "row_other", "other_ts", gap=pl.col("at") - pl.col("ts"))


def _fit_line(reference: pl.DataFrame, other: pl.DataFrame, line: Line) -> Line:
    """Fit offset and drift to the pairs, from the middle of the recording outwards."""
    span = int(other["ts"][-1] - other["ts"][0])
    window = _FIRST_WINDOW_NS
    while True:
        middle = line.origin - line.offset
        near = reference.filter(pl.col("ts").is_between(middle - window, middle + window))
        pairs = _pair(near, other, line) if near.height else near
        if pairs.is_empty():
            return line
        blocks = pairs.sort("other_ts").with_columns(block=pl.int_range(pl.len()) * _BLOCKS // pl.len())
        centers = blocks.group_by("block").agg(
            pl.col("other_ts").median() - line.origin, pl.col("gap").median()
        )
        extent = blocks["other_ts"][-1] - blocks["other_ts"][0]
        slope, start = 0.0, float(pairs["gap"].median() or 0)  # type: ignore[arg-type]
        # A line through few pairs, or through a short time, would only follow the noise.
        if pairs.height >= _BLOCKS * _MIN_PAIRS and extent >= _FIRST_WINDOW_NS // 2:
            slope, start = np.polyfit(centers["other_ts"].to_numpy(), centers["gap"].to_numpy(), 1)
        line = Line(line.offset + round(start), line.origin, line.drift + float(slope))
        if window > 2 * span:
            return line
        window *= 2


def _judge(reference: pl.DataFrame, other: pl.DataFrame, line: Line) -> ClockFit | None:
    """Return the fit along a line; None if few events pair, or as many pair as closely by chance."""
    pairs = _pair(reference, other, line)
    moved = other.select(ts=line.convert(pl.col("ts")))["ts"]
    low = max(reference["ts"][0], moved[0]) - TOLERANCE_NS
    high = min(reference["ts"][-1], moved[-1]) + TOLERANCE_NS
    counts = [int(times.is_between(low, high).sum()) for times in (reference["ts"], moved)]
    expected = max(*counts, pairs.height)
    if pairs.height < max(_MIN_PAIRS, MIN_SHARE * expected):
        return None
    gaps = np.abs(pairs["gap"].to_numpy())
    residual = (float(np.median(gaps)), float(np.percentile(gaps, 95)))
    compared = _select_middle(reference.filter(pl.col("ts").is_between(low, high)))
    expected_pairs = int(pairs["row"].is_in(compared["row"].implode()).sum())
    for decoy in _DECOYS_NS:
        wrong = _pair(compared, other, Line(line.offset + decoy, line.origin, line.drift))
        if (wrong["gap"].abs() <= residual[1]).sum() > _MAX_CHANCE * expected_pairs:
            return None
    share = pairs.height / expected
    return ClockFit("name", line, share, expected, residual)


def fit_by_time(operators: pl.DataFrame, calls: pl.DataFrame, *, share_epoch: bool) -> ClockFit | None:
    """Fit the clock of ``calls`` so that each lies in an operator of its thread; None if no offset is clearly best.

    Args:
        operators: Columns tid, ts and end of operators that contain no other operator.
        calls: Columns tid and ts of the launch calls.
        share_epoch: Both clocks count from the epoch.
    """
    shared = (
        calls.join(operators, on="tid", how="semi").group_by("tid").len().sort("len", "tid").tail(_THREADS)
    )
    operators = operators.join(shared, on="tid", how="semi").sort("tid", "ts")
    calls = calls.join(shared, on="tid", how="semi").sort("tid", "ts")
    if calls.height < _MIN_CALLS or operators.is_empty():
        return None
    start, end = operators.select(pl.col("ts").min(), pl.col("end").max()).row(0)
    first, last = calls.select(first=pl.col("ts").min(), last=pl.col("ts").max()).row(0)
    span = end - start + last - first
    if span > _MAX_SPAN_NS:
        return None
    cell = max(_CELL_NS, span // _MAX_CELLS)
    call_counts = _correlate(operators, calls, start, first, cell)
    shifts = np.arange(call_counts.size)
    shifts = np.where(shifts <= (end - start) // cell, shifts, shifts - call_counts.size)
    offsets = first - start - shifts * cell
    if share_epoch:
        call_counts = np.where(np.abs(offsets) < _EPOCH_SPAN_NS, call_counts, 0)
    best = int(np.argmax(call_counts))
    if call_counts[best] < 0.5:  # no possible offset, or no call in an operator under any
        return None
    far = np.abs(offsets - offsets[best]) > _OVERLAP_NS
    rival = float(call_counts[far].max(initial=0.0))
    trials = offsets[best] + np.arange(-2 * cell, 2 * cell + 1, max(cell // 32, 1))
    counts = np.array([_count_inside(operators, calls, int(offset), span) for offset in trials])
    plateau = trials[counts == counts.max()]
    offset = int(plateau[0]) + int(plateau[-1] - plateau[0]) // 2
    common = int(calls["ts"].is_between(start + offset, end + offset).sum())
    if counts.max() < max(_MIN_CALLS, MIN_SHARE * common) or counts.max() - rival < _MIN_CONTRAST * common:
        return None
    uncertainty = float(plateau[-1] - plateau[0]) / 2
    share = int(counts.max()) / common
    return ClockFit("time", Line(offset, first), share, common, (uncertainty, uncertainty))


def _correlate(
    operators: pl.DataFrame, calls: pl.DataFrame, start: int, first: int, cell: int
) -> NDArray[np.float64]:
    """Return the number of calls in operators by the shift in cells of the calls, modulo the length of the result."""
    width = (int(operators["end"].max()) - start) // cell + 2  # type: ignore[arg-type]
    length = 1 << (width + (int(calls["ts"].max()) - first) // cell + 2).bit_length()  # type: ignore[arg-type]
    total = np.zeros(length // 2 + 1, np.complex128)
    for tid in calls["tid"].unique().sort():
        intervals = operators.filter(pl.col("tid") == tid)
        begin, end = ((intervals[name].to_numpy() - start) // cell for name in ("ts", "end"))
        edges = np.bincount(begin, minlength=length) - np.bincount(end + 1, minlength=length)
        covered = np.fft.rfft((np.cumsum(edges) > 0).astype(np.float64))
        times = calls.filter(pl.col("tid") == tid)["ts"].to_numpy()
        total += covered * np.conj(np.fft.rfft(np.bincount((times - first) // cell, minlength=length)))
    result: NDArray[np.float64] = np.fft.irfft(total, length)
    return result


def _count_inside(operators: pl.DataFrame, calls: pl.DataFrame, offset: int, span: int) -> int:
    """Return the number of calls in operators; the threads are laid out one after another, which one search serves."""
    begin = int(operators["ts"].min())  # type: ignore[arg-type]
    starts, ends, times = (
        frame["tid"].rank("dense").cast(pl.Int64).to_numpy() * 4 * span
        + frame[name].to_numpy()
        - begin
        - shift
        for frame, name, shift in ((operators, "ts", 0), (operators, "end", 0), (calls, "ts", offset))
    )
    place = np.searchsorted(starts, times, side="right") - 1
    return int(((place >= 0) & (times < ends[np.maximum(place, 0)])).sum())
