"""Causes of a hang, from Flight Recorder dumps: the first collective where the ranks of a group diverge.

The records of each group are compared by sequence number, each among the dumps that still contain it: a dump is a ring
buffer, in which old calls are overwritten. One row per finding, by group and number: in each group look at the
first divergence, later ones are consequences. On the command line, a sentence names the cause and its ranks;
``etloom hangs`` prints it first.

- missing: these ranks never called it, others did and wait. Also ranks of the group without a dump.
- collective mismatch: ranks called different collectives with the same number.
- size mismatch, dtype mismatch: the same collective with different sizes or types. Sizes of an all-to-all, and of the
  root of a gather or scatter, may differ and are not compared.
- not finished: these ranks called it and have not completed it (state: scheduled, started). gloo records no state; its
  collectives are finished once their work is retired.

Of point-to-point messages (send, recv) the unfinished ones are compared per pair of ranks, in order: missing is the
side that has not called it; seq is the recorder's message number on the side that waits.

others: the ranks for which the finding holds the other way around; of a missing call those that wait for it.
called_ns: the earliest call of it. called_at: the innermost frame outside of torch where the listed ranks called it,
else where the others did.

Definition: the matching of torch.distributed.flight_recorder.
"""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.analyses.hangs.causes import HangCause, find_cause
from etloom.analyses.hangs.divergences import COLUMNS, compare_calls
from etloom.analyses.hangs.job_calls import JobCalls, calls_of_job, combine_calls
from etloom.analyses.hangs.processes import ProcessState, describe_processes
from etloom.core.errors import AnalysisError
from etloom.core.trace import Job

__all__ = [
    "COLUMNS",
    "EMPTY_MESSAGE",
    "SCOPE",
    "HangCause",
    "JobCalls",
    "ProcessState",
    "analyze",
    "calls_of_job",
    "combine_calls",
    "compare_calls",
    "describe_processes",
    "find_cause",
    "remarks",
]

SCOPE = "job"
EMPTY_MESSAGE = "all ranks called the same collectives in the dumps, and all are finished"


def analyze(job: Job) -> pl.DataFrame:
    if all("nccl_ras" in trace.meta.get("formats", ()) for trace in job.values()):
        remedy = "etloom hangs FILE answers from it"
        raise AnalysisError(
            "a report of NCCL's RAS has counts, not the calls that are compared", remedy=remedy
        )
    return compare_calls(calls_of_job(job).require_dumps().require_numbers())


def remarks(table: pl.DataFrame) -> Iterator[str]:
    """Yield a sentence for the terminal that names the cause of the hang."""
    cause = find_cause(table)
    if cause is not None:
        yield cause.sentence
