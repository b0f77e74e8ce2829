"""Answers of analyses: the table, and the ranks whose trace cannot answer, with the reason.

Every verb, the report and the command line run analyses through `answer`: the one loop over ranks that keeps refusals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import polars as pl

from etloom import linker
from etloom.core import registry
from etloom.core.errors import AnalysisError
from etloom.core.names import list_user_files
from etloom.core.registry import check_options
from etloom.core.text import format_ranks
from etloom.core.trace import Job, Trace


@dataclass(frozen=True)
class Answer:
    """The result of an analysis: its table, and the errors of ranks that cannot answer.

    Attributes:
        table: the columns that the analysis declares; if an analysis of single ranks answers for a Job, ``rank`` first.
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
        UnknownName: The analysis does not exist.
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

    if isinstance(run, Job) and (stored := find_stored_answer(run, name, options)) is not None:
        return stored
    if analysis.SCOPE == "job":
        job = run if isinstance(run, Job) else Job({run.rank or 0: run})
        refused = _find_refusals(job, analysis)
        if refused:
            job = Job({rank: job[rank] for rank in job if rank not in refused}, job.meta, job.run_stats)
        return Answer(analyze(linker.linked_ranks(job)), refused)
    if not isinstance(run, Job):
        return Answer(analyze(linker.linked(run)))
    result = answer_by_rank(run, {name: (name, options)})[name]
    if result.refused and len(result.refused) == len(run):
        raise next(iter(result.refused.values()))
    return result


def _find_refusals(job: Job, analysis: ModuleType) -> dict[int, AnalysisError]:
    """Return the error of each rank that the analysis cannot cover, by rank; raise AnalysisError if no rank remains."""
    check = getattr(analysis, "check_rank", None)
    if check is None:
        return {}
    refused = {rank: error for rank, trace in job.items() if (error := check(trace)) is not None}
    if refused and len(refused) == len(job):
        raise next(iter(refused.values()))
    return refused


def answer_first_rows(
    job: Job, name: str, count: int, before_rank: Callable[[], None] = lambda: None
) -> pl.DataFrame:
    """Return the first rows of the answer to an analysis with its default options.

    Of an analysis of ranks, only as many of the first ranks are analyzed as have this many rows.

    Args:
        job: linked ranks.
        name: of the analysis.
        count: maximum number of rows.
        before_rank: is called before each rank.

    Raises:
        UnknownName: The analysis does not exist.
        AnalysisError: no rank can answer.
    """
    if registry.get("analyses", name).SCOPE == "job" or job.stored is not None:
        return answer(job, name).table.head(count)
    tables: list[pl.DataFrame] = []
    refusal: AnalysisError | None = None
    for rank, trace in job.items():
        before_rank()
        try:
            table = answer(trace, name).table
        except AnalysisError as error:
            refusal = refusal or error
            continue
        tables.append(_add_rank(table.head(count), rank))
        if sum(part.height for part in tables) >= count:
            break
    if refusal is not None and not tables:
        raise refusal
    return pl.concat(tables).head(count) if tables else pl.DataFrame()


def find_stored_answer(job: Job, name: str, options: Mapping[str, Any]) -> Answer | None:
    """Return the stored answer to an analysis of a run in a store; None if it has to be computed.

    Raises:
        AnalysisError: the stored answer is that no rank can answer.
    """
    if job.stored is None or list_user_files():  # names of the user's may change any answer
        return None
    stored = job.stored.answer(name, select_changed_options(name, options))
    if stored is None:
        return None
    analysis = registry.get("analyses", name)
    refused = {}
    for refusal in stored.refusals:
        if refusal.rank is None or len(stored.refusals) == len(job):
            raise refusal.to_error()
        refused[refusal.rank] = refusal.to_error()
    columns = analysis.COLUMNS if analysis.SCOPE == "job" else {"rank": pl.Int64, **analysis.COLUMNS}
    return Answer(stored.table, refused) if stored.table.schema == pl.Schema(columns) else None


def find_stored_table(job: Job, name: str, schema: Mapping[str, Any]) -> pl.DataFrame | None:
    """Return a stored table of a run in a store; None if it has to be computed.

    Raises:
        AnalysisError: the stored result is that the run does not allow it.
    """
    if job.stored is None or list_user_files():
        return None
    stored = job.stored.answer(name, {})
    if stored is None:
        return None
    for refusal in stored.refusals:
        raise refusal.to_error()
    return stored.table if stored.table.schema == pl.Schema(schema) else None


def select_changed_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an analysis whose values differ from the defaults."""
    defaults = {option.name: option.default for option in registry.list_options("analyses", name)}
    return {key: value for key, value in options.items() if value != defaults.get(key)}


def answer_by_rank(job: Job, questions: Mapping[str, tuple[str, Mapping[str, Any]]]) -> dict[str, Answer]:
    """Run analyses on every rank, and return their concatenated tables and the reasons of ranks without an answer.

    All analyses of a rank run before those of the next, so that the tables of one rank are in memory at a time.

    Args:
        job: the ranks.
        questions: any key -> name and options of an analysis of ranks.

    Returns:
        The answer to each analysis, with a ``rank`` column first; an empty table without columns if no rank can answer.
    """
    tables: dict[str, list[pl.DataFrame]] = {key: [] for key in questions}
    refused: dict[str, dict[int, AnalysisError]] = {key: {} for key in questions}
    for rank, trace in job.items():
        for key, (name, options) in questions.items():
            try:
                tables[key].append(_add_rank(answer(trace, name, **options).table, rank))
            except AnalysisError as error:
                refused[key][rank] = error
    return {
        key: Answer(pl.concat(frames) if frames else pl.DataFrame(), refused[key])
        for key, frames in tables.items()
    }


def _add_rank(table: pl.DataFrame, rank: int) -> pl.DataFrame:
    """Return the table of a rank with ``rank`` as first column."""
    return table.clone().insert_column(0, pl.Series("rank", [rank], pl.Int64).new_from_index(0, table.height))
