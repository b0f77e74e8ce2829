"""Estimate the best-case step time: the time of a step if each segment ran as fast as the fastest of its kind.

It does not contain the noise of the machine.

Other work on the machine makes steps longer, never shorter, in bursts that are shorter than a step or longer than a
run. The median step follows the bursts; the fastest step needs one without any. Segments are short enough to fall
between them: the main thread's time is cut wherever one of its events begins or ends. Segments are of one kind if they
lie between the same two calls with the same shapes, and have the same position among the same number of such segments
in their step. So a matrix product is compared with the same product in other steps, not with a smaller one. The
best-case step is the sum, over kinds, of the number per step times the shortest duration. For a kind with too few
segments, for example because steps differ, the shortest of a coarser kind is used, which may do less work; ``rare`` is
the share of the time in such segments. The best-case step becomes longer if a step has more segments, or if the
shortest of a kind is slower; work that is slow in some steps only does not change it. Segments that wait, in runtime
calls or communication, never share a kind with segments at other places.

The minimum of more samples is smaller, so runs are compared in parts with as many steps as the shortest run. The bias
of a part (compared with infinitely many steps) and its error are estimated by the delete-one-block jackknife over its
steps (Efron and Stein, 1981); a difference between the biases of the two sides counts as an error. Of several runs of a
side, those with smaller errors have more weight. Further errors are added: (1) the variation between runs of an
unchanged program: RUN_TO_RUN, or what several runs of a side show; (2) if the steps of one side are disturbed more than
those of the other (NOISE_DIFFERENCE), since a busy machine slows the fastest segments, too, by shared caches and
clocks; (3) if each side is a single run, which does not show the variation between runs: RUN_TO_RUN for devices, and
for hosts more, the more their steps are disturbed (SINGLE_RUN_ERROR).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from math import exp, log, sqrt

import numpy as np
import polars as pl

from etloom.analyses.helpers.run_tables import RunTable
from etloom.comparison.run_tables import STEPS
from etloom.comparison.step_segments import MIN_STEPS as MIN_STEPS
from etloom.comparison.step_segments import StepSegments, split_steps
from etloom.comparison.student_t import student_t_quantile
from etloom.core.trace import Job, Trace
from etloom.timeline.activity import find_steps, has_device_events

CONFIDENCE = 0.9
"""Confidence of the two-sided interval: the change is below its lower end with a probability of 5 %."""
RUN_TO_RUN = 0.005
"""Standard deviation of the logarithm: addresses, caches and clocks differ between runs of one program."""
NOISE_DIFFERENCE = 0.007
"""Standard deviation of the logarithm, for each best-case step by which the median steps of the two sides differ: steps
of eight times their best-case time were 4 % too long in the best case, compared with steps of three times theirs."""
SINGLE_RUN_ERROR = 0.05
"""Standard deviation of the logarithm on hosts, where each side is one run, for each best-case step that the median
step takes: for six runs of one program with a load of ten times the machine's capacity, the best case differed by up to
half; for two runs with little load, by a quarter."""
_PRIOR_RUNS = 4
"""Degrees of freedom of RUN_TO_RUN in addition to those of several runs."""
_MIN_SAMPLES = MIN_STEPS
"""Minimum number of segments of a kind; with fewer, a coarser kind is used."""
_BLOCKS = 10
_MAX_BIAS = 0.1
"""Maximum bias, as share of a best-case step: 0.09 was measured for runs with few undisturbed moments; a single
undisturbed block would give half."""
_MIN_COVERAGE = 0.2
"""Minimum share of the fastest step of a side: a shorter best-case step omits what determines the steps."""


@dataclass(frozen=True)
class BestCaseStep:
    """The best-case step time of a run, ns, the standard error of its logarithm, and the degrees of freedom.

    ``steps``: number of steps of the run.
    """

    ns: float
    steps: int
    error: float
    freedom: int
    strain: float
    """Median step time divided by the best-case step time."""
    bias: float
    """Bias of its logarithm, already subtracted."""
    rare: float
    """Share of the time in segments with too few samples of their own kind."""
    uneven: float
    """Median step time divided by the fastest step time."""


@dataclass(frozen=True)
class BestCaseShift:
    """The change of the best-case step time from ``before`` to ``after``, in percent, with its confidence interval.

    ``before``, ``after``: step times in ns. ``steps_before``, ``steps_after``: number of steps.

    noise: half the width of the interval; least: the part of it that would remain with infinitely many steps; alone:
    the interval without SINGLE_RUN_ERROR, None if it is not included. rare: percent, the largest share of a run's time
    in segments with too few samples of their kind; uneven: the largest ratio of median and fastest step of a run.
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
    """Estimate the change of the best-case step time from ``before`` to ``after``; None if it cannot be estimated.

    That is so if a run has fewer than MIN_STEPS steps, or its best case covers too little of its steps.
    """
    least = min(STEPS.read(job)["least"].item() for job in (*before, *after))
    if least < MIN_STEPS:
        return None
    first, second = _measure_side(before, least), _measure_side(after, least)
    if first is None or second is None:
        return None
    run_to_run = _variance_between_runs((first, second))
    within, between = 0.0, 0.0
    means, strains, biases = [], [], []
    for side in (first, second):
        # A run that was hardly ever undisturbed counts less than the others of its side.
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
        ESTIMATES.read(job)["on_device"].any() for job in (*before, *after)
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
    """Return the best-case step time of each run of a side; None if a rank has none or it is implausibly short."""
    estimates = [_estimate_ranks(job, length) for job in runs]
    complete = [[rank for rank in ranks if rank is not None] for ranks in estimates]
    if complete != estimates:
        return None
    levels = [_estimate_run(ranks, length) for ranks in complete]
    fastest = min(rank.fastest for ranks in complete for rank in ranks)
    return levels if min(level.ns for level in levels) >= _MIN_COVERAGE * fastest else None


def _interval(change: float, noise: float) -> tuple[float, float]:
    """Convert a change of a logarithm, ``change`` minus and plus ``noise``, to an interval (low, high) in percent."""
    return 100 * (exp(change - noise) - 1), 100 * (exp(change + noise) - 1)


def _variance_between_runs(sides: Sequence[Sequence[BestCaseStep]]) -> float:
    """Return the variance of the logarithmic step time between runs of a side, in excess of their estimation errors.

    The prior RUN_TO_RUN weighs as much as _PRIOR_RUNS runs.
    """
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
    """An estimate from some of the steps: logarithm of the best-case step time in ns, its variance and bias.

    ``bias`` has been subtracted; ``rare``: share of time in segments that do not have the finest kind.
    """

    log: float
    variance: float
    bias: float
    rare: float


@dataclass(frozen=True)
class RankEstimate(_PartEstimate):
    """The best-case estimate of a rank, with its number of steps and its fastest and median step time, ns."""

    steps: int
    fastest: int
    median: float


def estimate_rank(trace: Trace, length: int | None) -> RankEstimate | None:
    """Estimate a rank's best-case step time as the mean over parts of ``length`` steps (None: all steps at once)."""
    segments = split_steps(trace)
    if segments is None:
        return None
    parts = max(1, segments.steps // (length or segments.steps))
    parts_estimates = [
        _estimate_part(segments, part * segments.steps // parts, (part + 1) * segments.steps // parts)
        for part in range(parts)
    ]
    return RankEstimate(
        float(np.mean([part.log for part in parts_estimates])),
        float(np.mean([part.variance for part in parts_estimates])) / parts,
        float(np.mean([part.bias for part in parts_estimates])),
        max(part.rare for part in parts_estimates),
        *(segments.steps, segments.fastest, segments.median),
    )


def _estimate_ranks(job: Job, length: int) -> list[RankEstimate | None]:
    """Estimate the best-case step time of each rank of a run, as the mean over parts of ``length`` steps."""
    if length != STEPS.read(job)["least"].item():
        return [estimate_rank(trace, length) for trace in job.values()]
    rows = ESTIMATES.read(job).drop("on_device").iter_rows()
    return [None if row[0] is None else RankEstimate(*row) for row in rows]


def _tabulate_estimates(job: Job) -> pl.DataFrame:
    least = STEPS.read(job)["least"].item()
    rows = []
    for trace in job.values():
        length = None if least == find_steps(trace).height else least
        estimate = trace.compute_once(estimate_rank, length) if least >= MIN_STEPS else None
        values = (None,) * len(fields(RankEstimate)) if estimate is None else astuple(estimate)
        rows.append((*values, trace.compute_once(has_device_events)))
    return pl.DataFrame(rows, schema=ESTIMATES.schema, orient="row")


ESTIMATE_SCHEMA = {
    **dict.fromkeys(("log", "variance", "bias", "rare"), pl.Float64),
    **dict.fromkeys(("steps", "fastest"), pl.Int64),
    "median": pl.Float64,
}
"""Columns of a `RankEstimate`."""
ESTIMATES = RunTable("compared-best-case", {**ESTIMATE_SCHEMA, "on_device": pl.Boolean}, _tabulate_estimates)
"""A row per rank: its estimate from parts of as many steps as the shortest rank has, null if there is none."""


def _estimate_run(ranks: Sequence[RankEstimate], length: int) -> BestCaseStep:
    """Return the best-case step time of a run as the mean over its ranks.

    ``length``: steps per part. Ranks share a machine, so more ranks do not reduce the error.
    """
    freedom = (min(_BLOCKS, length) - 1) * max(1, ranks[0].steps // length)
    best_case_ns = exp(float(np.mean([rank.log for rank in ranks])))
    strain = float(np.mean([rank.median for rank in ranks])) / best_case_ns
    error = sqrt(float(np.mean([rank.variance for rank in ranks])))
    return BestCaseStep(
        *(best_case_ns, ranks[0].steps, error, freedom, strain),
        float(np.mean([rank.bias for rank in ranks])),
        max(rank.rare for rank in ranks),
        max(rank.median / max(1, rank.fastest) for rank in ranks),
    )


def _estimate_part(segments: StepSegments, first: int, last: int) -> _PartEstimate:
    """Estimate the best-case step time from the steps numbered ``first`` to ``last`` - 1."""
    in_part = (segments.step >= first) & (segments.step < last)
    blocks = min(_BLOCKS, last - first)
    block = (segments.step[in_part] - first) * blocks // (last - first)
    ns = segments.ns[in_part]
    unassigned = np.ones(ns.size, dtype=np.bool_)
    rare, bests, counts = 0.0, [], []
    for coarseness, kind_codes in enumerate(segments.kinds):
        kind = kind_codes[in_part]
        samples = np.bincount(kind)
        assigned = (
            unassigned & (samples[kind] >= _MIN_SAMPLES)
            if kind_codes is not segments.kinds[-1]
            else unassigned
        )
        shortest = np.full((samples.size, blocks), np.inf)
        np.minimum.at(shortest, (kind, block), ns)
        often = np.bincount(kind[assigned], minlength=samples.size) / (last - first)
        bests.append(shortest[often > 0])
        counts.append(often[often > 0])
        unassigned = unassigned & ~assigned
        if not coarseness:
            rare = float(ns[unassigned].sum() / max(1, ns.sum()))
        if not unassigned.any():
            break
    best, often = np.concatenate(bests), np.concatenate(counts)
    shortest_by_kind = best.min(axis=1)
    without = np.empty(blocks)
    for block_index in range(blocks):
        rest = np.delete(best, block_index, axis=1).min(axis=1)
        without[block_index] = often @ np.where(np.isfinite(rest), rest, shortest_by_kind)
    total = max(1.0, float(often @ shortest_by_kind))
    settled = max((1 - _MAX_BIAS) * total, total - (blocks - 1) * (float(without.mean()) - total))
    logs = np.log(np.maximum(without, 1.0))
    variance = (blocks - 1) / blocks * float(((logs - logs.mean()) ** 2).sum())
    return _PartEstimate(log(settled), variance, log(total / settled), rare)
