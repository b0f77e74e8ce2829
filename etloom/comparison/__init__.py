"""Two runs compared: whether one is slower beyond noise, and what the difference is made of.

Tables are per step and rank: sums of what lies in marked steps, over the number of steps, and their mean over ranks.
So runs of different numbers of steps or ranks can be compared; `Difference.notes` says where they differ. Where a run
marks no steps, both are taken whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

import polars as pl

from etloom.comparison.best_case import CONFIDENCE, BestCaseShift, estimate_best_case_shift
from etloom.comparison.difference_tables import BY as BY
from etloom.comparison.difference_tables import (
    MIN_COMMON_SHARE,
    TABLES,
    common_operator_shares,
    describe_largest_changes,
    format_signed_time,
    has_steps,
    join_sides,
    unattributed_gpu_ns,
)
from etloom.comparison.measures import compare_measures, step_values
from etloom.comparison.shift_estimate import Shift as Shift
from etloom.comparison.shift_estimate import estimate_shift as shift
from etloom.core.errors import UnknownName
from etloom.core.trace import Job
from etloom.timeline.activity import compute_activity, find_steps


@dataclass(frozen=True)
class Difference:
    """From one linked run to another."""

    before: Job
    after: Job

    @cached_property
    def step_time(self) -> Shift | None:
        """Of the time of a step, with its interval over steps; None where no shift can be said."""
        return shift(*(step_values(job, "step-time") for job in (self.before, self.after)))

    @cached_property
    def best_case(self) -> BestCaseShift | None:
        """Of a step that nothing disturbs; None where that cannot be told."""
        return estimate_best_case_shift([self.before], [self.after])

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
        if not found.is_known:
            first, second = (fmean(step_values(job, "step-time")) for job in (self.before, self.after))
            percent = 100 * (second / first - 1)
            few = "but there are too few steps to tell that from noise (4 on each side will do)"
            return f"a {what} is {_format_size(percent)} {'longer' if percent > 0 else 'shorter'} in the mean, {few}"
        size = _format_size(found.percent)
        low, high = sorted((found.low, found.high))
        interval = f"{100 * found.confidence:.0f} % interval {low:+.1f} to {high:+.1f} %"
        if not found.is_clear:
            return f"no change that can be told from noise: {found.percent:+.1f} % a {what} ({interval})"
        return f"{'slower' if found.percent > 0 else 'faster'} by {size} a {what} ({interval})"

    @property
    def explanation(self) -> str | None:
        """What the change of a step is made of, in a sentence: the parts that changed most, and the operators whose
        time did. None where no change can be told, or the parts are of unlike things."""
        found = self.step_time
        if (
            found is None
            or not found.percent
            or (found.is_known and not found.is_clear)
            or len(set(self._bases)) > 1
            or "mixed" in self._bases
        ):
            return None
        parts, operators = self.table("category"), self._operators
        change = float(parts["change_ns"].sum())
        of_device = self._bases[0] == "device"
        whose = "device work" if of_device else "own time"
        made_of = describe_largest_changes(parts, "category", "change_ns")
        done_by = describe_largest_changes(
            operators, "operator", "device_change_ns" if of_device else "change_ns"
        )
        if not change or not made_of:
            return None
        line = f"of {format_signed_time(change)} a {'step' if self.stepped else 'run'}: {', '.join(made_of)}"
        return f"{line}; {whose} that changed most: {', '.join(done_by)}" if done_by else line

    @cached_property
    def _operators(self) -> pl.DataFrame:
        return self.table("operator")

    @cached_property
    def _bases(self) -> list[str]:
        """Of each side what its categories are of: device, host, or mixed where its ranks differ in that."""
        found = [
            {compute_activity(trace).basis for trace in job.values()} for job in (self.before, self.after)
        ]
        return [bases.pop() if len(bases) == 1 else "mixed" for bases in found]

    @property
    def notes(self) -> list[str]:
        """What a reader of the tables must know."""
        lines: list[str] = []
        shared = common_operator_shares(self._operators)
        if shared is not None and min(shared) < MIN_COMMON_SHARE:
            parts = f"{100 * shared[0]:.0f} % of the time before and {100 * shared[1]:.0f} % after"
            lines.append(
                f"little in common: operators that both runs have take {parts}; "
                "if these are two programs, the change says little"
            )
        counts = [
            max(find_steps(trace).height for trace in job.values()) for job in (self.before, self.after)
        ]
        if not self.stepped:
            lines.append("a run marks no steps, so both are taken whole")
        elif counts[0] != counts[1]:
            lines.append(f"steps: {counts[0]} before, {counts[1]} after; figures are per step")
        if (found := self.best_case) and self.step_time:
            clear = found.low > 0 or found.high < 0
            interval = f"{100 * CONFIDENCE:.0f} % interval {found.low:+.1f} to {found.high:+.1f} %"
            quietest = f"at its quietest a step takes {found.percent:+.1f} % ({interval})"
            if self.step_time.is_clear and not clear:
                lines.append(f"{quietest}: the machine did other work, or something is slow now and then")
            elif clear and not self.step_time.is_clear:
                lines.append(f"{quietest}: a change beneath the noise")
        if len(self.before) != len(self.after):
            ranks = f"ranks: {len(self.before)} before, {len(self.after)} after"
            lines.append(f"{ranks}; figures are means over ranks")
        left = [max(map(unattributed_gpu_ns, job.values()), default=0) for job in (self.before, self.after)]
        if self.stepped and any(left):
            lines.append(
                f"of the steps' time {left[0] / 1e6:,.2f} ms before and {left[1] / 1e6:,.2f} ms after is device work "
                "launched before the recording or outside the steps: it counts in step time and categories, not by "
                "kernel, family, operator, collective"
            )
        bases = self._bases
        if "mixed" in bases:
            lines.append(
                "categories are of the device of some ranks and of the host of others, which is not one thing"
            )
        elif bases[0] != bases[1]:
            lines.append(
                f"categories are of the {bases[0]} before and of the {bases[1]} after, which is not one thing"
            )
        return lines

    def table(self, by: str = "category", top: int | None = None) -> pl.DataFrame:
        """What changed by one of BY, the greatest change first. Raises UnknownName."""
        if by == "step":
            return compare_measures([self.before], [self.after])
        if by not in TABLES:
            raise UnknownName("grouping", by, BY, option="by")
        first, second = (TABLES[by](job, self.stepped) for job in (self.before, self.after))
        noise = self.step_time is not None and self.step_time.is_known and not self.step_time.is_clear
        table = join_sides(first, second, clear=not noise)
        return table if top is None else table.head(top)


def _format_size(percent: float) -> str:
    return f"{abs(percent):.1f} %" if percent < 1000 else f"{1 + percent / 100:.0f} times"
