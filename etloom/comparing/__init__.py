"""Two runs compared: whether one is slower beyond noise, and what the difference is made of.

Tables are per step and rank: sums of what lies in marked steps, over the number of steps, and their mean over ranks.
So runs of different numbers of steps or ranks can be compared; `Difference.notes` says where they differ. Where a run
marks no steps, both are taken whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import polars as pl

from etloom.activity import activity, steps
from etloom.comparing.measures import MEASURES, values
from etloom.comparing.shift import Shift as Shift
from etloom.comparing.shift import shift as shift
from etloom.comparing.tables import BY as BY
from etloom.comparing.tables import TABLES, beside, has_steps
from etloom.errors import UnknownName
from etloom.trace import Job

MEASURE_COLUMNS = {
    "measure": pl.String,
    "unit": pl.String,
    "values_before": pl.Int64,
    "values_after": pl.Int64,
    "median_before": pl.Float64,
    "median_after": pl.Float64,
    "change_pct": pl.Float64,
    "low_pct": pl.Float64,
    "high_pct": pl.Float64,
    "confidence_pct": pl.Float64,
}


@dataclass(frozen=True)
class Difference:
    """From one linked run to another."""

    before: Job
    after: Job

    @cached_property
    def step_time(self) -> Shift | None:
        """Of the time of a step, with its interval over steps; None where no shift can be said."""
        return shift(*(values(job, "step-time") for job in (self.before, self.after)))

    @property
    def stepped(self) -> bool:
        return has_steps(self.before) and has_steps(self.after)

    @property
    def verdict(self) -> str:
        """One sentence: slower, faster, or no change that can be told from noise."""
        found = self.step_time
        what = "step" if self.stepped else "run"
        if found is None:
            return "no change can be said: one of the runs is empty"
        if found.percent == found.low == found.high == 0:
            return f"no change: the {what}s take the same time"
        size = f"{abs(found.percent):.1f} %"
        if not found.is_known:
            worse = "longer" if found.percent > 0 else "shorter"
            few = "but there are too few steps to tell that from noise (4 on each side will do)"
            return f"a {what} takes {size} {worse}, {few}"
        low, high = sorted((found.low, found.high))
        interval = f"{100 * found.confidence:.0f} % interval {low:+.1f} to {high:+.1f} %"
        if not found.is_clear:
            return f"no change that can be told from noise: {found.percent:+.1f} % a {what} ({interval})"
        return f"{'slower' if found.percent > 0 else 'faster'} by {size} a {what} ({interval})"

    @property
    def notes(self) -> list[str]:
        """What a reader of the tables must know."""
        lines = []
        counts = [max(steps(trace).height for trace in job.values()) for job in (self.before, self.after)]
        if not self.stepped:
            lines.append("a run marks no steps, so both are taken whole")
        elif counts[0] != counts[1]:
            lines.append(f"steps: {counts[0]} before, {counts[1]} after; figures are per step")
        if len(self.before) != len(self.after):
            ranks = f"ranks: {len(self.before)} before, {len(self.after)} after"
            lines.append(f"{ranks}; figures are means over ranks")
        bases = [activity(next(iter(job.values()))).basis for job in (self.before, self.after)]
        if bases[0] != bases[1]:
            lines.append(
                f"categories are of the {bases[0]} before and of the {bases[1]} after, which is not one thing"
            )
        return lines

    def table(self, by: str = "category", top: int | None = None) -> pl.DataFrame:
        """What changed by one of BY, the greatest change first. Raises UnknownName."""
        if by == "step":
            return compare_measures([self.before], [self.after], list(MEASURES))
        if by not in TABLES:
            raise UnknownName("grouping", by, BY)
        first, second = (TABLES[by](job, self.stepped) for job in (self.before, self.after))
        noise = self.step_time is not None and self.step_time.is_known and not self.step_time.is_clear
        table = beside(first, second, None if noise else self._step_change)
        return table if top is None else table.head(top)

    @cached_property
    def _step_change(self) -> float:
        """Of the mean time of a step, which the changes by category add up to. ns"""
        sums = [
            float(TABLES["category"](job, self.stepped)["ns"].to_numpy().sum())
            for job in (self.before, self.after)
        ]
        return sums[1] - sums[0]


def compare_measures(before: Sequence[Job], after: Sequence[Job], names: Sequence[str]) -> pl.DataFrame:
    """MEASURE_COLUMNS of these measures; a run's steps follow on the steps of the run before it.

    The change is `shift`'s. Measures that neither side tells of have no row.
    """
    rows = []
    for name in names:
        first, second = ([value for job in jobs for value in values(job, name)] for jobs in (before, after))
        if not first and not second:
            continue
        found = shift(first, second)
        medians = (pl.Series(side, dtype=pl.Float64).median() for side in (first, second))
        ends = (None,) * 4
        if found is not None:
            known = found.confidence > 0
            interval = (found.low, found.high, 100 * found.confidence) if known else (None, None, None)
            ends = (found.percent, *interval)
        rows.append((*MEASURES[name][:2], len(first), len(second), *medians, *ends))
    return pl.DataFrame(rows, schema=MEASURE_COLUMNS, orient="row")
