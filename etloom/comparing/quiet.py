"""The time of a step with the machine's noise taken out: what it would take if every piece of it went as fast as pieces
of its kind do at best.

A machine that other work shares makes steps longer, never shorter, and in bursts that are shorter than a step or
longer than a run. The median step follows the bursts; the fastest step needs one without any. Pieces are short enough
to be missed by them: the main thread's time is cut wherever one of its events begins or ends, pieces between the same
two ends are of one kind, and the quiet step is the sum over kinds of how many a step has times the shortest. More
pieces make a step longer, and so does a kind that is slower at its best; what is slow only now and then, the quiet
step does not see. Pieces that wait, in calls of a device's runtime or of communication, are of one kind only with
those at the same place in other steps.

The shortest of more is shorter, so runs are compared in parts of as many steps as the shortest has. The error of a
part is the delete-one-block jackknife's over its steps (Efron and Stein, 1981); on top of it comes what differs from
one run to the next with nothing changed, at first RUN_TO_RUN, then what several runs of a side show. A machine that is
never quiet slows the fastest pieces too, by caches and clocks that are shared; where the steps of one side are more
often disturbed than those of the other, that is an error in itself (STRAIN). One run against one shows nothing of what
differs from run to run: of devices it is taken to be RUN_TO_RUN, of hosts more, the more their steps are disturbed
(ALONE).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom import kinds
from etloom.activity import has_device_work, steps
from etloom.comparing.student import quantile
from etloom.stacks import among, asked
from etloom.trace import Job, Trace

CONFIDENCE = 0.9
"""Of the interval, two-sided: a change lies below its lower end once in twenty."""
RUN_TO_RUN = 0.005
"""Standard deviation of the logarithm: addresses, caches and clocks differ between runs of one program."""
STRAIN = 0.007
"""Standard deviation of the logarithm, for each quiet step by which the median steps of the two sides differ: steps of
eight times their quiet time were 4 % too long at their quietest, beside steps of three times theirs."""
ALONE = 0.05
"""Standard deviation of the logarithm on hosts, where each side is one run, for each quiet step that the median step
takes: of six runs of one program beside ten times the work that the machine can do, the quietest step differed by up to
half; of two beside little else, by a quarter."""
_WORTH = 4
"""Degrees of freedom that RUN_TO_RUN counts beside what several runs show."""
LEAST_STEPS = 5
_BLOCKS = 10
_SEEN = 0.2
"""Of the fastest step of a side: a quiet step of less leaves out what the steps hang on."""


@dataclass(frozen=True)
class Level:
    """The quiet step of a run: its length, the steps it is told from, the error of its logarithm, and the degrees of
    freedom of that."""

    ns: float
    steps: int
    error: float
    freedom: int
    strain: float
    """How many times the quiet step the median step takes."""


@dataclass(frozen=True)
class QuietShift:
    """Of the quiet step, in percent: the change and its interval; the levels in ns, steps and runs of both sides.

    noise: half the interval's width; least: what of that would remain with steps without end; alone: the interval
    without ALONE, of what the steps alone show, None where ALONE is not in it.
    """

    percent: float
    low: float
    high: float
    noise: float
    least: float
    alone: tuple[float, float] | None
    before: float
    after: float
    steps_before: int
    steps_after: int


def quiet_shift(before: Sequence[Job], after: Sequence[Job]) -> QuietShift | None:
    """From runs to other runs; None where a run marks fewer than LEAST_STEPS, or its quiet step holds too little."""
    least = min(steps(trace).height for job in (*before, *after) for trace in job.values())
    if least < LEAST_STEPS:
        return None
    first, second = _levels(before, least), _levels(after, least)
    if first is None or second is None:
        return None
    means = [float(np.mean([log(level.ns) for level in side])) for side in (first, second)]
    run_to_run = _run_to_run((first, second))
    within, between = 0.0, 0.0
    for side in (first, second):
        within += float(np.mean([level.error**2 for level in side])) / len(side)
        between += run_to_run / len(side)
    strains = [float(np.mean([level.strain for level in side])) for side in (first, second)]
    between += (STRAIN * (strains[1] - strains[0])) ** 2
    t = quantile((1 + CONFIDENCE) / 2, sum(level.freedom for level in (*first, *second)))
    change = means[1] - means[0]
    alone = None
    if len(before) == len(after) == 1 and not any(
        has_device_work(trace) for job in (*before, *after) for trace in job.values()
    ):
        alone = _interval(change, t * sqrt(within + between))
        between += (ALONE * strains[0]) ** 2 + (ALONE * strains[1]) ** 2
    low, high = _interval(change, t * sqrt(within + between))
    return QuietShift(
        *(100 * (exp(change) - 1), low, high, (high - low) / 2, 100 * t * sqrt(between), alone),
        *(exp(means[0]), exp(means[1])),
        *(sum(level.steps for level in side) for side in (first, second)),
    )


def _levels(runs: Sequence[Job], length: int) -> list[Level] | None:
    """The quiet step of each run of a side; None where a rank cannot tell, or the quiet step holds too little."""
    told = [[_told(trace, length) for trace in job.values()] for job in runs]
    known = [[one for one in ranks if one is not None] for ranks in told]
    if known != told:
        return None
    levels = [_level(ranks, length) for ranks in known]
    fastest = min(one.fastest for ranks in known for one in ranks)
    return levels if min(level.ns for level in levels) >= _SEEN * fastest else None


def _interval(change: float, noise: float) -> tuple[float, float]:
    """Of a change of a logarithm, in percent."""
    return 100 * (exp(change - noise) - 1), 100 * (exp(change + noise) - 1)


def _run_to_run(sides: Sequence[Sequence[Level]]) -> float:
    """The variance between runs of a side beyond their errors; RUN_TO_RUN counts as _WORTH runs of it."""
    total, worth = _WORTH * RUN_TO_RUN**2, _WORTH
    for side in sides:
        if len(side) > 1:
            spread = float(np.var([log(level.ns) for level in side], ddof=1))
            within = float(np.mean([level.error**2 for level in side]))
            total += (len(side) - 1) * max(0.0, spread - within)
            worth += len(side) - 1
    return total / worth


@dataclass(frozen=True)
class _Rank:
    """What a rank tells of the quiet step: its logarithm, and the variance of that; steps, the fastest and the median,
    ns."""

    log: float
    variance: float
    steps: int
    fastest: int
    median: float


@dataclass(frozen=True)
class _Pieces:
    step: NDArray[np.int64]  # 0, 1, ...
    kind: NDArray[np.int64]
    ns: NDArray[np.int64]
    steps: int
    fastest: int  # step, ns
    median: float  # step, ns


def _pieces(trace: Trace) -> _Pieces | None:
    """The pieces of the steps, of the thread that marks them."""
    windows = steps(trace)
    if windows.height < LEAST_STEPS:
        return None
    events = trace.events.filter(pl.col("depth").is_not_null() & pl.col("dur").is_not_null())
    marks = events.filter(pl.Series(asked(events["name"], lambda name: name.str.contains(kinds.STEP))))
    if marks.is_empty():
        return None  # they lie on no stack of calls
    pid, tid = marks.select("pid", "tid").row(0)
    events = events.filter((pl.col("pid") == pid) & (pl.col("tid") == tid))
    waits = among(events["cat"], kinds.RUNTIME) | asked(events["name"], kinds.is_communication)
    name = pl.col("name").cast(pl.String).str.replace(kinds.STEP, "").cast(pl.Categorical).to_physical()
    events = events.select("ts", "dur", pl.col("depth").cast(pl.Int64), name=name, waits=pl.Series(waits))
    ends = pl.concat(
        (
            events.select("name", "waits", at="ts", opens=pl.lit(True), order="depth"),
            events.select(
                "name", "waits", at=pl.col("ts") + pl.col("dur"), opens=pl.lit(False), order=-pl.col("depth")
            ),
        )
    ).sort("at", "opens", "order")
    numbered = windows.with_row_index("number").select("number", "end", at="start")
    cut = (
        ends.with_columns(
            ns=pl.col("at").shift(-1) - pl.col("at"),
            to=pl.col("name").shift(-1),
            to_opens=pl.col("opens").shift(-1),
        )
        .join_asof(numbered.sort("at"), on="at")
        .filter(pl.col("at") < pl.col("end"))
        .drop_nulls()
    )
    kind = ["name", "opens", "to", "to_opens"]
    place = pl.when(pl.col("waits") & pl.col("opens")).then(pl.int_range(pl.len()).over("number", *kind))
    cut = cut.with_columns(place=place.fill_null(-1))
    number = cut.select(pl.struct(*kind, "place").rank("dense")).to_series().to_numpy().astype(np.int64) - 1
    times = (windows["end"] - windows["start"]).to_numpy()
    return _Pieces(
        cut["number"].to_numpy().astype(np.int64),
        number,
        cut["ns"].to_numpy(),
        windows.height,
        int(times.min()),
        float(np.median(times)),
    )


def _told(trace: Trace, length: int) -> _Rank | None:
    """What a rank tells, from parts of ``length`` steps. The pieces are many, and are let go."""
    pieces = _pieces(trace)
    if pieces is None:
        return None
    parts = max(1, pieces.steps // length)
    found = [
        _part(pieces, part * pieces.steps // parts, (part + 1) * pieces.steps // parts)
        for part in range(parts)
    ]
    level = float(np.mean([log(max(ns, 1)) for ns, _ in found]))
    variance = float(np.mean([error**2 for _, error in found])) / parts
    return _Rank(level, variance, pieces.steps, pieces.fastest, pieces.median)


def _level(ranks: Sequence[_Rank], length: int) -> Level:
    """The quiet step of a run, the mean over its ranks, told from parts of ``length`` steps. Ranks share a machine, so
    more of them make the error no smaller."""
    freedom = (min(_BLOCKS, length) - 1) * max(1, ranks[0].steps // length)
    quiet = exp(float(np.mean([one.log for one in ranks])))
    strain = float(np.mean([one.median for one in ranks])) / quiet
    error = sqrt(float(np.mean([one.variance for one in ranks])))
    return Level(quiet, ranks[0].steps, error, freedom, strain)


def _part(pieces: _Pieces, first: int, last: int) -> tuple[float, float]:
    """The quiet step of the steps from first up to last, ns, and the error of its logarithm."""
    chosen = (pieces.step >= first) & (pieces.step < last)
    kind, blocks = pieces.kind[chosen], min(_BLOCKS, last - first)
    block = (pieces.step[chosen] - first) * blocks // (last - first)
    shortest = np.full((int(kind.max(initial=0)) + 1, blocks), np.inf)
    np.minimum.at(shortest, (kind, block), pieces.ns[chosen])
    often = np.bincount(kind, minlength=len(shortest)) / (last - first)
    shortest, often = shortest[often > 0], often[often > 0]
    whole = shortest.min(axis=1)
    without = []
    for left_out in range(blocks):
        rest = np.delete(shortest, left_out, axis=1).min(axis=1)
        without.append(log(max(1.0, float(often @ np.where(np.isfinite(rest), rest, whole)))))
    spread = float(((np.array(without) - np.mean(without)) ** 2).sum())
    return float(often @ whole), sqrt((blocks - 1) / blocks * spread)
