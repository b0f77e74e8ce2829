"""Verbs that answer questions about runs: analyses, graphs, predictions, comparisons, reports."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from etloom import linker
from etloom.api.arguments import Run, StrPath, as_job, as_run, verb, writing
from etloom.api.verdicts import CheckResult
from etloom.core import registry
from etloom.core.errors import EtloomWarning
from etloom.core.plugin_options import check_options
from etloom.core.trace import Job, Trace

if TYPE_CHECKING:
    import altair

    from etloom.comparison import Difference
    from etloom.graphs import DependencyGraph
    from etloom.simulator import Simulated
    from etloom.simulator.changes import AnyChange


@verb
def analyze(run: Run, name: str, **options: Any) -> pl.DataFrame:
    """Run an analysis.

    Traces that are not linked are linked first. Ranks whose trace cannot answer (for example because only another rank
    recorded memory) are missing in the table and named by one `EtloomWarning`; `etloom.analyses.answers.answer`
    returns them with their errors.

    Args:
        run: a Trace, a Job, or a path.
        name: of the analysis, as in ``etloom analyze --list``.
        options: of the analysis, as in ``etloom analyze NAME --help``.

    Returns:
        The table of the analysis; for a Job the tables of all ranks, with ``rank`` as first column.

    Raises:
        UnknownName: there is no such analysis.
        EtloomError: it has no such option.
        AnalysisError: no rank can answer.

    Example:
        >>> etloom.analyze("run/", "top-ops", top=1).columns[:2]
        ['rank', 'name']
    """
    from etloom.analyses.answers import answer

    registry.get("analyses", name)
    check_options("analyses", name, options)
    result = answer(as_run(run), name, **options)
    if result.refused:
        warnings.warn(f"{name}: {'; '.join(result.explain_refusals())}", EtloomWarning, stacklevel=3)
    return result.table


@verb
def graph(run: Run) -> DependencyGraph:
    """Build the dependency graph of a rank, or of all ranks of a job together.

    Args:
        run: a Trace, a Job, or a path; linked first if necessary.

    Returns:
        The graph: which work waits for which other work, and for how long. ``.graph`` is an
        `etloom.graphs.Graph`; the functions of that package compute its schedule, critical path and slack.

    Example:
        >>> dependencies = etloom.graph("run/")
    """
    from etloom.graphs import build_graph

    opened = as_run(run)
    return build_graph(opened.map(linker.linked) if isinstance(opened, Job) else linker.linked(opened))


@verb
def simulate(run: Run, *changes: str | AnyChange) -> Simulated:
    """Predict how long a run would take under changed conditions, from its dependency graph.

    Args:
        run: a Trace, a Job, or a path.
        changes: lines such as "kernel:*gemm* x0.5" or "comm x0" (`etloom.simulator.changes` defines the language), or
            RemoveSync, Network, NoStraggler of `etloom.simulator`.

    Returns:
        The prediction: ``.table`` has one row for the job, each rank and each step, ``.reasons`` explains what it is
        based on.

    Raises:
        EtloomError: a change has a syntax error or applies to nothing.

    Example:
        >>> etloom.simulate("run/", "comm x0").table.columns[:3]
        ['scope', 'rank', 'step']
    """
    from etloom import simulator

    job = as_job(run)
    parsed = [simulator.parse_change(change) if isinstance(change, str) else change for change in changes]
    return simulator.simulate(job.map(linker.linked), parsed)


@verb
def diff(before: Run, after: Run) -> Difference:
    """Compare two runs.

    Args:
        before: a Trace, a Job, or a path.
        after: likewise.

    Returns:
        The difference: ``.verdict`` says whether the second run is slower beyond noise, ``.table(by)`` what changed
        by "category", "operator", "kernel", "collective" or "step".

    Example:
        >>> difference = etloom.diff("run/", "run/")
    """
    from etloom.comparison import Difference

    return Difference(*(as_job(run).map(linker.linked) for run in (before, after)))


@verb
def check(
    runs: Run | Sequence[Run],
    baselines: Run | Sequence[Run],
    *,
    max_regression_pct: float = 3.0,
    metrics: Sequence[str] = ("step-time",),
) -> CheckResult:
    """Check whether a run is slower than a baseline by more than a limit, beyond noise.

    Args:
        runs: the run to judge, or several recordings of it.
        baselines: the run to compare with, or several recordings of it.
        max_regression_pct: allowed slowdown in percent.
        metrics: of `etloom.comparison.gate.METRICS`.

    Returns:
        The result: ``.verdict`` is "passed", "failed" or "undecided", ``.table`` has one row per measure.

    Raises:
        UnknownName: there is no such metric.
        AnalysisError: a run lacks what a metric measures.

    Example:
        >>> etloom.check("run/", "run/").verdict
        'undecided'
    """
    from etloom.comparison.gate import explain_row, judge_regression

    sides = [[as_job(run).map(linker.linked) for run in _as_runs(side)] for side in (runs, baselines)]
    table = judge_regression(sides[0], sides[1], max_regression_pct, metrics)
    return CheckResult(table, tuple(tuple(explain_row(table, row)) for row in range(table.height)))


@verb
def report(run: Run | Difference, path: StrPath) -> Path:
    """Write a self-contained HTML report.

    Args:
        run: a Trace, a Job or a path; or the difference of two runs (see `diff`).
        path: the file to write.

    Returns:
        The path of the file.

    Raises:
        EtloomError: it cannot be written.

    Example:
        >>> etloom.report("run/", "report.html").name
        'report.html'
    """
    from etloom.comparison import Difference
    from etloom.reports import difference_page, html_report

    target = Path(path)
    job = None if isinstance(run, Difference) else as_job(run).map(linker.linked)
    with writing(target):
        if isinstance(run, Difference):
            difference_page.write_page(run, target)
        elif job is not None:
            html_report.write_page(job, target)
    return target


@verb
def plot(run: Run, what: str, **options: Any) -> altair.Chart:
    """Draw a chart of the report with Altair, for notebooks; needs ``pip install "etloom[plot]"``.

    Args:
        run: a Trace, a Job or a path; linked first if necessary.
        what: ``breakdown``, ``roofline``, ``memory``, ``arrival-skew`` or ``critical-path``.
        options: of the analysis that the chart shows.

    Returns:
        An `altair.Chart`, which notebooks display.

    Raises:
        UnknownName: there is no such chart.
        EtloomError: Altair is not installed.
        AnalysisError: the traces have no data for it.

    Example:
        >>> chart = etloom.plot("run/", "breakdown")  # doctest: +SKIP
    """
    from etloom.reports.plot import plot as draw

    return draw(as_job(run).map(linker.linked), what, **options)


def _as_runs(runs: Run | Sequence[Run]) -> Sequence[Run]:
    return [runs] if isinstance(runs, (Trace, Job, str, os.PathLike)) else runs
