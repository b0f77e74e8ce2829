"""Compare two runs: whether the second is slower than the first beyond noise, and what explains the difference.

Tables are per step and rank: sums over the steps divided by their number, and the mean over ranks. So runs with
different numbers of steps or ranks can be compared; `Difference.notes` reports such differences. If a run has no step
annotations, both are compared as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from html import escape
from statistics import fmean

import polars as pl

from etloom.analyses.answers import answer
from etloom.analyses.helpers.step_times import measure_device_tail
from etloom.comparison.call_trees import compare_trees
from etloom.comparison.change_estimate import CONFIDENCE, MIN_STEPS, estimate_shift
from etloom.comparison.change_estimate import Shift as Shift
from etloom.comparison.difference_tables import BY as BY
from etloom.comparison.difference_tables import (
    MIN_COMMON_SHARE,
    SUMS,
    UNATTRIBUTED,
    common_operator_shares,
    describe_largest_changes,
    find_changed_ranks,
    find_common_caller,
    format_signed_time,
    join_sides,
    sum_run,
)
from etloom.comparison.measures import BASES, STEPS, VALUES, compare_measures, has_steps, step_values
from etloom.comparison.source_lines import (
    ChangedFunction,
    describe_changed_functions,
    find_changed_functions,
)
from etloom.core.errors import UnknownName
from etloom.core.text import format_ranks
from etloom.core.trace import Job

RUN_TABLES = (STEPS, BASES, UNATTRIBUTED, *VALUES.values(), *SUMS.values())
"""The tables of a run that a store keeps for comparisons."""

MANY_TIMES = 1000
"""Change in percent from which a step time is described as a multiple of the earlier one."""
NEGLIGIBLE_TAIL = 0.01
"""GPU activity after the last annotation is not mentioned up to this share of the time of all steps."""


_MIN_HOST_SHARE = 0.1
"""Changes of the host's time that are a smaller share of the change of the step are not mentioned."""


@dataclass(frozen=True)
class Difference:
    """The difference between two linked runs, ``before`` and ``after``: step times, verdict, explanation, tables."""

    before: Job
    after: Job

    @cached_property
    def step_time(self) -> Shift | None:
        """The change of the step time in percent, with a confidence interval over the steps; None if a run is empty."""
        before, after = self.step_times
        return estimate_shift([before], [after])

    @cached_property
    def step_times(self) -> tuple[list[float], list[float]]:
        """The mean over ranks of each step time in ns, before and after; without steps, the run time of each run."""
        before, after = (step_values(job, "step-time", self.stepped) for job in (self.before, self.after))
        return before, after

    @cached_property
    def stepped(self) -> bool:
        """True if both runs have step annotations, so that results are per step."""
        return has_steps(self.before) and has_steps(self.after)

    @property
    def verdict(self) -> str:
        """A sentence that states whether the second run is slower or faster than the first, or equal within noise."""
        estimate = self.step_time
        noun = "step" if self.stepped else "run"
        if estimate is None:
            return "unknown: one of the runs is empty"
        if self.step_times[0] == self.step_times[1]:
            return f"no change: the {noun}s take the same time"
        if estimate.low is None or estimate.high is None:
            first, second = map(fmean, self.step_times)
            percent = 100 * (second / first - 1)
            few = f"but there are too few steps to distinguish that from noise (at least {MIN_STEPS} on each side)"
            if not self.stepped:
                few = "but two runs without steps do not show how much of that is noise"
            return f"a {noun} {_describe_change(percent)} on average, {few}"
        interval = f"{100 * CONFIDENCE:.0f} % interval {estimate.low:+.1f} to {estimate.high:+.1f} %"
        if not estimate.is_clear:
            return f"no change beyond noise: {estimate.percent:+.1f} % per {noun} ({interval})"
        if estimate.percent >= MANY_TIMES:
            return f"slower: a {noun} {_describe_change(estimate.percent)} ({interval})"
        speed = "slower" if estimate.percent > 0 else "faster"
        return f"{speed} by {abs(estimate.percent):.1f} % per {noun} ({interval})"

    @cached_property
    def explanation(self) -> str | None:
        """A sentence on the time categories and operators that changed most; None without a clear change.

        None also if the categories are not comparable.
        """
        estimate = self.step_time
        if (
            estimate is not None and self.step_times[0] == self.step_times[1]
        ):  # such as a change that the host hides
            texts = describe_largest_changes(self.table("category"), "category", "change_ns")
            return f"within steps of the same length: {', '.join(texts)}" if texts else None
        if (
            estimate is None
            or not estimate.percent
            or (estimate.is_known and not estimate.is_clear)
            or len(set(self._bases)) > 1
            or "mixed" in self._bases
        ):
            return None
        parts, operators = self.table("category"), self._operators
        change = float(parts["change_ns"].sum())
        is_gpu = self._bases[0] == "device"
        subject = "GPU time" if is_gpu else "exclusive time"
        parts_text = describe_largest_changes(parts, "category", "change_ns")
        operators_text = describe_largest_changes(
            operators, "operator", "device_change_ns" if is_gpu else "change_ns"
        )
        if not change or not parts_text:
            return None
        if estimate.is_known and change * estimate.percent < 0:
            return (
                f"the mean changes by {format_signed_time(change)} per {'step' if self.stepped else 'run'}, in the "
                "opposite direction, because of a few steps: see --by step; the categories are means"
            )
        line = f"of {format_signed_time(change)} per {'step' if self.stepped else 'run'}: {', '.join(parts_text)}"
        if operators_text:
            line = f"{line}; {subject} that changed most: {', '.join(operators_text)}"
        # The device waits for the host, and ranks for each other, so the cause may be on the host.
        on_host = operators.filter(pl.lit(is_gpu), pl.col("change_ns").abs() >= _MIN_HOST_SHARE * abs(change))
        host_text = describe_largest_changes(on_host, "operator", "change_ns")
        return f"{line}; host time that changed most: {', '.join(host_text)}" if host_text else line

    @cached_property
    def changed_functions(self) -> list[ChangedFunction]:
        """The Python functions whose source lines, as `etloom collect --with stacks` kept them, changed."""
        return find_changed_functions(self.before, self.after)

    @property
    def source_changes(self) -> str | None:
        """A sentence that names the changed functions and lines; None if no lines were kept, or none changed."""
        return describe_changed_functions(self.changed_functions)

    def _repr_html_(self) -> str:
        """Return the verdict, the explanation, the notes and the changes by category as HTML for notebooks."""
        lines = [line for line in (self.explanation, self.source_changes, *self.notes) if line]
        notes = "".join(f"<li>{escape(line)}</li>" for line in lines)
        return f"<p><b>{escape(self.verdict)}</b></p><ul>{notes}</ul>{self.table()._repr_html_()}"

    @cached_property
    def _operators(self) -> pl.DataFrame:
        return self.table("operator")

    @cached_property
    def _bases(self) -> list[str]:
        """The basis of each run's time categories: "device" or "host" events, or "mixed" if its ranks differ."""
        bases = [BASES.read(job)["basis"].to_list() for job in (self.before, self.after)]
        return [side[0] if len(side) == 1 else "mixed" for side in bases]

    @cached_property
    def notes(self) -> list[str]:
        """Sentences on what limits the comparison, such as different numbers of steps; empty if nothing does."""
        lines: list[str] = []
        shared = common_operator_shares(self._operators)
        if shared is not None and min(shared) < MIN_COMMON_SHARE:
            parts = f"{100 * shared[0]:.0f} % of the time before and {100 * shared[1]:.0f} % after"
            if caller := find_common_caller(self._operators):
                change = format_signed_time(caller["device_total_change_ns"])
                lines.append(
                    f"{caller['operator']} runs other operators inside ({change} of GPU time): "
                    f"operators of both runs take {parts}; see --by tree"
                )
            else:
                lines.append(
                    f"little in common: operators of both runs take {parts}; "
                    "for two different programs, the change is not meaningful"
                )
        counts = [STEPS.read(job)["most"].item() for job in (self.before, self.after)]
        if not self.stepped:
            lines.append("a run has no step annotations, so both are compared as a whole")
        elif counts[0] != counts[1]:
            lines.append(f"steps: {counts[0]} before, {counts[1]} after; figures are per step")
        if ranks_line := self._describe_ranks():
            lines.append(ranks_line)
        if len(self.before) != len(self.after):
            ranks = f"ranks: {len(self.before)} before, {len(self.after)} after"
            lines.append(f"{ranks}; figures are means over ranks")
        unattributed = [UNATTRIBUTED.read(job)["ns"].item() for job in (self.before, self.after)]
        if self.stepped and any(unattributed):
            lines.append(
                f"up to {unattributed[0] / 1e6:,.2f} ms (before) and {unattributed[1] / 1e6:,.2f} ms (after) of a "
                "rank's GPU time was launched outside the recorded steps; it is included in step time and categories "
                "but not attributed to kernels, families, operators or collectives"
            )
        if tails := self._describe_device_tails():
            lines.append(tails)
        bases = self._bases
        if "mixed" in bases:
            lines.append(
                "categories refer to the GPU for some ranks and to the host for others, which are not comparable"
            )
        elif bases[0] != bases[1]:
            lines.append(
                f"categories refer to the {bases[0]} before and to the {bases[1]} after, which are not comparable"
            )
        return lines

    def _describe_ranks(self) -> str | None:
        """Name the ranks that changed unlike the others, outside of communication; None if no rank did."""
        if "mixed" in self._bases or min(len(self.before), len(self.after)) < 2:
            return None
        changes = find_changed_ranks(self.table("rank"))
        if changes is None:
            return None
        rows, usual = changes
        first = rows.row(0, named=True)
        unit = "step" if self.stepped else "run"
        more = f" ({format_ranks(rows['rank'])} differ)" if rows.height > 1 else ""
        return (
            f"rank {first['rank']} changed by {format_signed_time(first['change_ns'])} per {unit} outside of "
            f"communication, the usual rank by {format_signed_time(usual)}{more}; see --by rank"
        )

    def _describe_device_tails(self) -> str | None:
        """Describe the GPU time after the last step annotation of each run, which step times do not include.

        None if it is negligible on both sides.
        """
        if not self.stepped:
            return None
        tails = [job.compute_once(_measure_device_tail) for job in (self.before, self.after)]
        totals = map(sum, self.step_times)
        if all(tail < NEGLIGIBLE_TAIL * total for tail, total in zip(tails, totals, strict=True)):
            return None
        return (
            f"step times are those of the host annotations; the GPU finishes {tails[0] / 1e6:,.2f} ms (before) and "
            f"{tails[1] / 1e6:,.2f} ms (after) after the last one, which is not included"
        )

    def table(self, by: str = "category", top: int | None = None) -> pl.DataFrame:
        """Return a table of the changes grouped by category, operator, kernel, ... (`BY`), largest change first.

        Args:
            by: category, family, operator, kernel, collective, rank or step.
            top: maximum number of rows.

        Raises:
            UnknownName: The grouping does not exist.
        """
        if by not in self._tables:
            self._tables[by] = self._compare_by(by)
        table = self._tables[by]
        return table.clone() if top is None else table.head(top)

    @cached_property
    def _tables(self) -> dict[str, pl.DataFrame]:
        """Cache of the computed tables, by grouping."""
        return {}

    def _compare_by(self, by: str) -> pl.DataFrame:
        if by == "step":
            return compare_measures([self.before], [self.after])
        noise = self.step_time is not None and self.step_time.is_known and not self.step_time.is_clear
        if by == "tree":
            return compare_trees(self.before, self.after, self.stepped, clear=not noise)
        if by not in SUMS:
            raise UnknownName("grouping", by, (*BY, "tree"), option="by")
        first, second = (sum_run(job, by, self.stepped) for job in (self.before, self.after))
        return join_sides(first, second, clear=not noise)


def _describe_change(percent: float) -> str:
    """Format a change in percent as text: "is 5.0 % longer", "is 5.0 % shorter" or "takes 13 times as long"."""
    if percent >= MANY_TIMES:
        return f"takes {1 + percent / 100:.0f} times as long"
    return f"is {abs(percent):.1f} % {'longer' if percent > 0 else 'shorter'}"


def _measure_device_tail(job: Job) -> int:
    return measure_device_tail(answer(job, "steps").table)


# Compare more than two runs: a verdict for each against the first, and one table with a column of times for each.


def tabulate_runs(runs: Mapping[str, Job], by: str) -> pl.DataFrame:
    """Return the time of each run by category, family, operator, kernel, collective or rank, largest spread first.

    Times are ns per step if all runs have steps, else of the run, averaged over ranks; null where a run has no such
    row. Of operators it is the time of the GPU activity that they launch, if all runs have some.

    Args:
        runs: Name -> linked ranks; the column of a run is its name with _ns.
        by: A key of `SUMS`.

    Raises:
        UnknownName: The grouping does not exist.
    """
    if by not in SUMS:
        raise UnknownName("grouping", by, tuple(SUMS), option="by")
    is_stepped = all(map(has_steps, runs.values()))
    tables = {name: sum_run(job, by, is_stepped) for name, job in runs.items()}
    first = next(iter(tables.values()))
    keys = [name for name in first.columns if name != "count" and not name.endswith("ns")]
    has_gpu_time = "device_ns" in first.columns and all(table["device_ns"].sum() for table in tables.values())
    time = pl.col("device_ns" if has_gpu_time else "ns").round().cast(pl.Int64)
    sides = [table.select(*keys, time.alias(f"{name}_ns")) for name, table in tables.items()]
    joined = reduce(
        lambda left, right: left.join(right, on=keys, how="full", coalesce=True, nulls_equal=True), sides
    )
    times = [pl.col(f"{name}_ns").fill_null(0) for name in runs]
    spread = pl.max_horizontal(times) - pl.min_horizontal(times)
    return joined.sort(spread, *keys, descending=[True, *(False for _ in keys)])
