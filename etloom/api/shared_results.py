"""Intermediate results that several questions about a run need, which a server can compute in advance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from etloom.core.trace import Job


def list_shared_work(job: Job) -> Iterator[Callable[[], object]]:
    """Yield functions that compute results shared by several questions; each result is cached with the job.

    The most likely questions come first: findings, what-ifs, the summary, then comparisons. A function is about
    one rank if possible; it raises an EtloomError if the run does not allow it.
    """
    from etloom.comparison import RUN_TABLES
    from etloom.reports.summary import answer_once, summarize_run
    from etloom.simulator.devices import list_kernel_costs

    yield from _list_rank_work(job, is_finding=True)
    yield lambda: answer_once(job, "findings")
    yield lambda: _prepare_what_if(job)
    yield from (partial(trace.compute_once, list_kernel_costs) for trace in job.values())
    yield lambda: summarize_run(job)
    yield from _list_rank_work(job, is_finding=False)
    yield from (partial(table.read, job) for table in RUN_TABLES)


def _prepare_what_if(job: Job) -> None:
    from etloom.simulator import simulate

    unchanged = simulate(job, ())
    unchanged.recording.prepare()
    _ = unchanged.reasons, unchanged.table


def _list_rank_work(job: Job, *, is_finding: bool) -> Iterator[Callable[[], object]]:
    """Yield functions that compute each rank's cached results: the findings if ``is_finding``, else all others."""
    from etloom.analyses.findings.rank_findings import find_in_rank
    from etloom.exports.store.rank_results import RESULTS

    for rank, trace in job.items():
        for result in RESULTS:
            if (result.function is find_in_rank) == is_finding:
                yield partial(trace.compute_once, result.function, *result.arguments(rank))
