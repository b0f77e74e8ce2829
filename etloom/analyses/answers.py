"""Answers of analyses: the table, and the ranks whose trace cannot answer, with the reason.

Every verb, the report and the command line run analyses through `answer`: the one loop over ranks that keeps refusals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from etloom import linker
from etloom.core import registry
from etloom.core.errors import AnalysisError
from etloom.core.plugin_options import check_options
from etloom.core.text import format_ranks
from etloom.core.trace import Job, Trace


@dataclass(frozen=True)
class Answer:
    """The result of an analysis.

    Attributes:
        table: the columns that the analysis declares; for a Job of an analysis of ranks preceded by ``rank``.
        refused: the error of each rank that cannot answer, for example because it recorded no memory.
    """

    table: pl.DataFrame
    refused: Mapping[int, AnalysisError] = field(default_factory=dict)

    def explain_refusals(self) -> list[str]:
        """Return one line per reason: the ranks without an answer, and why."""
        ranks_by_reason: dict[str, list[int]] = {}
        for rank, error in self.refused.items():
            ranks_by_reason.setdefault(error.what, []).append(rank)
        return [f"no answer for {format_ranks(ranks)}: {reason}" for reason, ranks in ranks_by_reason.items()]


def answer(run: Trace | Job, name: str, **options: Any) -> Answer:
    """Run an analysis on a rank, or on all ranks of a job; traces that are not linked are linked first.

    Args:
        run: a Trace or a Job.
        name: of the analysis; `etloom.core.registry.list_plugins` lists them.
        options: of the analysis.

    Raises:
        UnknownName: there is no such analysis.
        EtloomError: it has no such option.
        AnalysisError: no rank can answer.
    """
    analysis = registry.get("analyses", name)
    check_options("analyses", name, options)

    def analyze(subject: Trace | Job) -> pl.DataFrame:
        with registry.name_plugin_in_errors("analyses", name):
            table: pl.DataFrame = analysis.analyze(subject, **options)
        registry.check_answer(name, table)
        return table

    if analysis.SCOPE == "job":
        job = run if isinstance(run, Job) else Job({run.rank or 0: run})
        return Answer(analyze(job.map(linker.linked)))
    if not isinstance(run, Job):
        return Answer(analyze(linker.linked(run)))
    result = answer_by_rank(run, {name: lambda trace: analyze(linker.linked(trace))})[name]
    if result.refused and len(result.refused) == len(run):
        raise next(iter(result.refused.values()))
    return result


def answer_by_rank(job: Job, analyses: Mapping[str, Callable[[Trace], pl.DataFrame]]) -> dict[str, Answer]:
    """Run analyses on every rank, concatenate their tables, and collect refusals.

    All analyses of a rank run before those of the next, so that the tables of one rank are in memory at a time.

    Args:
        job: the ranks.
        analyses: name -> function of a rank's trace.

    Returns:
        The answer to each analysis, with a ``rank`` column first; an empty table without columns if no rank can answer.
    """
    tables: dict[str, list[pl.DataFrame]] = {name: [] for name in analyses}
    refused: dict[str, dict[int, AnalysisError]] = {name: {} for name in analyses}
    for rank, trace in job.items():
        for name, analyze in analyses.items():
            try:
                table = analyze(trace)
            except AnalysisError as error:
                refused[name][rank] = error
                continue
            ranks = pl.Series("rank", [rank], pl.Int64).new_from_index(0, table.height)
            tables[name].append(pl.DataFrame([ranks, *table]))
    return {
        name: Answer(pl.concat(frames) if frames else pl.DataFrame(), refused[name])
        for name, frames in tables.items()
    }
