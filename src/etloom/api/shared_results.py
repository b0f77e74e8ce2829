"""Intermediate results that several questions about a run need, which a server can compute in advance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from etloom.core.trace import Job


def list_shared_work(job: Job) -> Iterator[Callable[[], object]]:
    """Yield functions that compute results shared by several questions; each result is cached with the job.

    The most likely questions come first: findings, the summary, then comparisons. A function is about
    one rank if possible; it raises an EtloomError if the run does not allow it.
    """
    from etloom.comparison import RUN_TABLES
    from etloom.reports.summary import answer_once, summarize_run

    yield from _list_rank_work(job, is_finding=True)
    yield lambda: answer_once(job, "findings")
    yield lambda: summarize_run(job)
    yield from _list_rank_work(job, is_finding=False)
    yield from (partial(table.read, job) for table in RUN_TABLES)


def prepare_predictions(job: Job) -> None:
    """Compute what `simulate` and `predict` need of a run; it is cached with the job. Raises EtloomError."""
    from etloom.simulator import simulate
    from etloom.simulator.devices import list_kernel_costs

    unchanged = simulate(job, ())
    unchanged.recording.prepare()
    _ = unchanged.reasons, unchanged.table
    for trace in job.values():
        trace.compute_once(list_kernel_costs)


def _list_rank_work(job: Job, *, is_finding: bool) -> Iterator[Callable[[], object]]:
    """Yield functions that compute each rank's cached results: the findings if ``is_finding``, else all others."""
    from etloom.analyses.findings.rank_findings import find_in_rank
    from etloom.exports.store.rank_results import RESULTS

    for rank, trace in job.items():
        for result in RESULTS:
            if (result.function is find_in_rank) == is_finding:
                yield partial(trace.compute_once, result.function, *result.arguments(rank))
