"""The time of a step with the machine's noise taken out: what it would take if every piece of it went as fast as pieces
of its kind do at best.

A machine that other work shares makes steps longer, never shorter, and in bursts that are shorter than a step or
longer than a run. The median step follows the bursts; the fastest step needs one without any. Pieces are short enough
to be missed by them: the main thread's time is cut wherever one of its events begins or ends. Pieces are of one kind
that lie between the same two calls with the same shapes, at the same place among as many such pieces of their step: a
matrix product is measured by what it takes at best in other steps, not by a smaller one. The quiet step is the sum over
kinds of how many a step has times the shortest. Of a kind that has too few pieces, as where steps differ, the shortest
of a coarser one is taken, which may be of smaller work; ``rare`` says how much of the time that is. More pieces make a
step longer, and so does one that is slower at its best; what is slow only now and then, the quiet step does not see.
Pieces that wait, in calls of a device's runtime or of communication, are never of one kind with those at other places.

The shortest of more is shorter, so runs are compared in parts of as many steps as the shortest has. The bias of a part
(it would be shorter yet, of steps without end) and its error are the delete-one-block jackknife's over its steps
(Efron and Stein, 1981); where the biases of two sides differ, that is an error in itself. Of several runs of a side the
surer count for more. On top of it comes what differs from one run to the next with nothing changed, at first
RUN_TO_RUN, then what several runs of a side show. A
machine that is never quiet slows the fastest pieces too, by caches and clocks that are shared; where the steps of one
side are more often disturbed than those of the other, that is another (STRAIN). One run against one shows nothing of
what differs from run to run: of devices it is taken to be RUN_TO_RUN, of hosts more, the more their steps are disturbed
(ALONE).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

import numpy as np

from etloom.comparison.step_segments import MIN_STEPS as MIN_STEPS
from etloom.comparison.step_segments import StepSegments, split_steps
from etloom.comparison.student_t import student_t_quantile
from etloom.core.trace import Job, Trace
from etloom.timeline.activity import find_steps, has_device_events

CONFIDENCE = 0.9
"""Of the interval, two-sided: a change lies below its lower end once in twenty."""
RUN_TO_RUN = 0.005
"""Standard deviation of the logarithm: addresses, caches and clocks differ between runs of one program."""
NOISE_DIFFERENCE = 0.007
"""Standard deviation of the logarithm, for each quiet step by which the median steps of the two sides differ: steps of
eight times their quiet time were 4 % too long at their quietest, beside steps of three times theirs."""
SINGLE_RUN_ERROR = 0.05
"""Standard deviation of the logarithm on hosts, where each side is one run, for each quiet step that the median step
takes: of six runs of one program beside ten times the work that the machine can do, the quietest step differed by up to
half; of two beside little else, by a quarter."""
_PRIOR_RUNS = 4
"""Degrees of freedom that RUN_TO_RUN counts beside what several runs show."""
_MIN_SAMPLES = MIN_STEPS
"""Pieces of a kind: of fewer the shortest is no measure, and pieces of a coarser kind are asked."""
_BLOCKS = 10
_MAX_BIAS = 0.1
"""Of a quiet step, at most: of runs with few calm moments 0.09 was seen, and of one calm block it would be half."""
_MIN_COVERAGE = 0.2
"""Of the fastest step of a side: a quiet step of less leaves out what the steps hang on."""


@dataclass(frozen=True)
class BestCaseStep:
    """The quiet step of a run: its length, the steps it is told from, the error of its logarithm, and the degrees of
    freedom of that."""

    ns: float
    steps: int
    error: float
    freedom: int
    strain: float
    """How many times the quiet step the median step takes."""
    bias: float
    """Of its logarithm, taken out of it."""
    rare: float
    """The part of the time that is in pieces of which too few are alike, so that they are told from others."""
    uneven: float
    """How many times the fastest step the median step takes."""


@dataclass(frozen=True)
class BestCaseShift:
    """Of the quiet step, in percent: the change and its interval; the levels in ns, steps and runs of both sides.

    noise: half the interval's width; least: what of that would remain with steps without end; alone: the interval
    without ALONE, of what the steps alone show, None where ALONE is not in it. rare: percent, the greatest part of a
    run's time that is in pieces of which too few are alike; uneven: how many times its fastest step the median step of
    a run takes, of the most uneven run.
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
    rare: float
    uneven: float


def estimate_best_case_shift(before: Sequence[Job], after: Sequence[Job]) -> BestCaseShift | None:
    """From runs to other runs; None where a run marks fewer than MIN_STEPS, or its quiet step holds too little."""
    least = min(find_steps(trace).height for job in (*before, *after) for trace in job.values())
    if least < MIN_STEPS:
        return None
    first, second = _measure_side(before, least), _measure_side(after, least)
    if first is None or second is None:
        return None
    run_to_run = _variance_between_runs((first, second))
    within, between = 0.0, 0.0
    means, strains, biases = [], [], []
    for side in (first, second):
        # A run that was hardly ever undisturbed says less than the others of its side.
        worth = np.array([1 / (level.error**2 + run_to_run) for level in side])
        worth /= worth.sum()
        within += float(worth**2 @ [level.error**2 for level in side])
        between += run_to_run * float(worth @ worth)
        means.append(float(worth @ [log(level.ns) for level in side]))
        strains.append(float(worth @ [level.strain for level in side]))
        biases.append(float(worth @ [level.bias for level in side]))
    between += (NOISE_DIFFERENCE * (strains[1] - strains[0])) ** 2 + (biases[1] - biases[0]) ** 2
    t = student_t_quantile((1 + CONFIDENCE) / 2, sum(level.freedom for level in (*first, *second)))
    change = means[1] - means[0]
    alone = None
    if len(before) == len(after) == 1 and not any(
        has_device_events(trace) for job in (*before, *after) for trace in job.values()
    ):
        alone = _interval(change, t * sqrt(within + between))
        between += (SINGLE_RUN_ERROR * strains[0]) ** 2 + (SINGLE_RUN_ERROR * strains[1]) ** 2
    low, high = _interval(change, t * sqrt(within + between))
    return BestCaseShift(
        *(100 * (exp(change) - 1), low, high, (high - low) / 2, 100 * t * sqrt(between), alone),
        *(exp(means[0]), exp(means[1])),
        sum(level.steps for level in first),
        sum(level.steps for level in second),
        100 * max(level.rare for level in (*first, *second)),
        max(level.uneven for level in (*first, *second)),
    )


def _measure_side(runs: Sequence[Job], length: int) -> list[BestCaseStep] | None:
    """The quiet step of each run of a side; None where a rank cannot tell, or the quiet step holds too little."""
    told = [[_estimate_rank(trace, length) for trace in job.values()] for job in runs]
    known = [[one for one in ranks if one is not None] for ranks in told]
    if known != told:
        return None
    levels = [_estimate_run(ranks, length) for ranks in known]
    fastest = min(one.fastest for ranks in known for one in ranks)
    return levels if min(level.ns for level in levels) >= _MIN_COVERAGE * fastest else None


def _interval(change: float, noise: float) -> tuple[float, float]:
    """Of a change of a logarithm, in percent."""
    return 100 * (exp(change - noise) - 1), 100 * (exp(change + noise) - 1)


def _variance_between_runs(sides: Sequence[Sequence[BestCaseStep]]) -> float:
    """The variance between runs of a side beyond their errors; RUN_TO_RUN counts as _WORTH runs of it."""
    total, worth = _PRIOR_RUNS * RUN_TO_RUN**2, _PRIOR_RUNS
    for side in sides:
        if len(side) > 1:
            spread = float(np.var([log(level.ns) for level in side], ddof=1))
            within = float(np.mean([level.error**2 for level in side]))
            total += (len(side) - 1) * max(0.0, spread - within)
            worth += len(side) - 1
    return total / worth


@dataclass(frozen=True)
class _PartEstimate:
    """Of some steps the logarithm of the quiet step, ns, and its variance; how much longer its logarithm was before the
    bias of the shortest of few was taken out; which part of their time is in pieces not of the finest kind."""

    log: float
    variance: float
    bias: float
    rare: float


@dataclass(frozen=True)
class _RankEstimate(_PartEstimate):
    """What a rank tells of the quiet step; of its steps their number, the fastest and the median, ns."""

    steps: int
    fastest: int
    median: float


def _estimate_rank(trace: Trace, length: int) -> _RankEstimate | None:
    """What a rank tells, from parts of ``length`` steps. The pieces are many, and are let go."""
    pieces = split_steps(trace)
    if pieces is None:
        return None
    parts = max(1, pieces.steps // length)
    found = [
        _estimate_part(pieces, part * pieces.steps // parts, (part + 1) * pieces.steps // parts)
        for part in range(parts)
    ]
    return _RankEstimate(
        float(np.mean([part.log for part in found])),
        float(np.mean([part.variance for part in found])) / parts,
        float(np.mean([part.bias for part in found])),
        max(part.rare for part in found),
        *(pieces.steps, pieces.fastest, pieces.median),
    )


def _estimate_run(ranks: Sequence[_RankEstimate], length: int) -> BestCaseStep:
    """The quiet step of a run, the mean over its ranks, told from parts of ``length`` steps. Ranks share a machine, so
    more of them make the error no smaller."""
    freedom = (min(_BLOCKS, length) - 1) * max(1, ranks[0].steps // length)
    quiet = exp(float(np.mean([one.log for one in ranks])))
    strain = float(np.mean([one.median for one in ranks])) / quiet
    error = sqrt(float(np.mean([one.variance for one in ranks])))
    return BestCaseStep(
        *(quiet, ranks[0].steps, error, freedom, strain),
        float(np.mean([one.bias for one in ranks])),
        max(one.rare for one in ranks),
        max(one.median / max(1, one.fastest) for one in ranks),
    )


def _estimate_part(pieces: StepSegments, first: int, last: int) -> _PartEstimate:
    """What the steps from first up to last tell."""
    chosen = (pieces.step >= first) & (pieces.step < last)
    blocks = min(_BLOCKS, last - first)
    block = (pieces.step[chosen] - first) * blocks // (last - first)
    ns = pieces.ns[chosen]
    left = np.ones(ns.size, dtype=np.bool_)
    rare, bests, counts = 0.0, [], []
    for coarseness, kinds_of_all in enumerate(pieces.kinds):
        kind = kinds_of_all[chosen]
        samples = np.bincount(kind)
        taken = left & (samples[kind] >= _MIN_SAMPLES) if kinds_of_all is not pieces.kinds[-1] else left
        shortest = np.full((samples.size, blocks), np.inf)
        np.minimum.at(shortest, (kind, block), ns)
        often = np.bincount(kind[taken], minlength=samples.size) / (last - first)
        bests.append(shortest[often > 0])
        counts.append(often[often > 0])
        left = left & ~taken
        if not coarseness:
            rare = float(ns[left].sum() / max(1, ns.sum()))
        if not left.any():
            break
    best, often = np.concatenate(bests), np.concatenate(counts)
    shortest_of_all = best.min(axis=1)
    without = np.empty(blocks)
    for left_out in range(blocks):
        rest = np.delete(best, left_out, axis=1).min(axis=1)
        without[left_out] = often @ np.where(np.isfinite(rest), rest, shortest_of_all)
    whole = max(1.0, float(often @ shortest_of_all))
    settled = max((1 - _MAX_BIAS) * whole, whole - (blocks - 1) * (float(without.mean()) - whole))
    logs = np.log(np.maximum(without, 1.0))
    variance = (blocks - 1) / blocks * float(((logs - logs.mean()) ** 2).sum())
    return _PartEstimate(log(settled), variance, log(whole / settled), rare)
