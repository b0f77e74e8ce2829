"""A case: a kind of problem in a clean run, at a strength, with a seed; what it costs, and what findings say."""

from __future__ import annotations

import zlib
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import polars as pl

import etloom
from etloom.core.trace import Job

from .bases import open_base
from .draft import Draft
from .kinds import KINDS
from .kinds.kind import Kind

FALSE_ALARM_PCT = 5.0
MAX_SCALE = 1e10
TOLERANCE = 0.02
MIN_SHARE = 1 / 64


@dataclass(frozen=True)
class Case:
    """What to inject; kind "clean" injects nothing. strength: cost in percent of the clean run."""

    kind: str
    base: str
    strength: float
    seed: int


@dataclass(frozen=True)
class Injected:
    """The job of a case.

    Attributes:
        job: The linked job.
        cost_ns: The time that it would not take without the problem.
        cost_pct: The same in percent of its time.
        rank: The rank to blame, None for all.
    """

    job: Job
    cost_ns: int
    cost_pct: float
    rank: int | None


def make_case(case: Case) -> Injected:
    """Return the job of a case."""
    base = open_base(case.base)
    draft = Draft(base, base.draw_lags(case.seed))
    if case.kind == "clean":
        return Injected(draft.make_job(draft.compute_times(0.0)), 0, 0.0, None)
    # The same seed draws other places at another strength.
    clean_ns = draft.measure_end(draft.compute_times(0.0)) - base.begin_ns
    kind, share = KINDS[case.kind], 1.0
    # Where even the least of it costs more, fewer occurrences are injected.
    target_ns = clean_ns * case.strength / 100
    while True:
        draft = Draft(base, base.draw_lags(case.seed), share, target_ns)
        random = np.random.default_rng([case.seed, zlib.crc32(case.kind.encode()), round(10 * case.strength)])
        rank = kind.inject(draft, random)
        if not kind.scaled:
            return Injected(draft.make_job(draft.compute_times(0.0)), 0, 0.0, rank)
        least_ns = draft.measure_end(draft.compute_times(0.0)) - base.begin_ns - clean_ns
        if least_ns < target_ns or share < MIN_SHARE:
            break
        share /= 2
    times = calibrate(draft, base.begin_ns + clean_ns, target_ns)
    total = draft.measure_end(times) - base.begin_ns
    return Injected(draft.make_job(times), total - clean_ns, 100 * (1 - clean_ns / total), rank)


def calibrate(draft: Draft, clean_end: int, cost_ns: float) -> np.ndarray:
    """Return the times at the scale at which the job ends ``cost_ns`` later than the clean one."""
    low, high, scale = 0.0, 0.0, cost_ns / max(1.0, float(draft.total_weight))
    for _ in range(40):
        times = draft.compute_times(scale)
        late = draft.measure_end(times) - clean_end
        if (
            abs(late - cost_ns) <= TOLERANCE * cost_ns
            or scale > MAX_SCALE
            or (high and high - low < 1e-3 * high)
        ):
            break
        if late < cost_ns:
            low = scale
        else:
            high = scale
        scale = (low + high) / 2 if high else scale * 2
    return times


@lru_cache(maxsize=64)
def _find_clean_gains(base: str, seed: int) -> dict[str, int]:
    """Return by pattern what the findings promise in the clean run, ns."""
    table = etloom.analyze(make_case(Case("clean", base, 0.0, seed)).job, "findings").drop_nulls(
        "job_gain_ns"
    )
    return dict(table.group_by("pattern").agg(pl.col("job_gain_ns").sum()).iter_rows())


def diagnose(case: Case) -> dict[str, Any]:
    """Return the case as a row, with its true cost, its findings in order, and the error of the predicted gain.

    The predicted gain is that of the first right finding, less what it promises in the clean run.
    """
    injected = make_case(case)
    table = etloom.analyze(injected.job, "findings").with_columns(pl.col("job_gain_pct").fill_null(0.0))
    kind = KINDS.get(case.kind)
    findings = list(table.select("pattern", "rank", "job_gain_pct", "job_gain_ns").iter_rows())
    place = next(
        (i for i, finding in enumerate(findings) if kind and is_right(kind, injected.rank, *finding[:2])),
        None,
    )
    alarms = [name for name, _, pct, _ in findings if pct >= FALSE_ALARM_PCT]
    if kind is None or not kind.patterns:
        place = None if alarms else 0
    error = None
    if place is not None and injected.cost_ns and kind is not None and kind.patterns:
        gain = (findings[place][3] or 0) - _find_clean_gains(case.base, case.seed).get(findings[place][0], 0)
        error = 100 * abs(gain - injected.cost_ns) / injected.cost_ns
    return {
        **asdict(case),
        "cost_pct": injected.cost_pct,
        "blamed": injected.rank,
        "place": place,
        "cost_error_pct": error,
        "findings": [(name, rank, round(pct, 1)) for name, rank, pct, _ in findings],
        "alarms": alarms,
    }


def is_right(kind: Kind, blamed: int | None, pattern: str, rank: int) -> bool:
    """Return whether a finding names the problem, and its rank if one is to blame."""
    return pattern in kind.patterns and blamed in (None, rank)
