"""Compute the analysis results that a store contains for each run, by the same functions as without a store."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl

from etloom.analyses.answers import Answer, answer, answer_by_rank
from etloom.analyses.helpers.rank_kinds import KINDS
from etloom.analyses.helpers.run_tables import ARRIVAL_ORDER, WINDOWS, RunTable
from etloom.comparison import RUN_TABLES
from etloom.core.errors import AnalysisError
from etloom.core.schema import Stat
from etloom.core.trace import Job, Trace
from etloom.exports.store.rank_results import KeptResults
from etloom.formats.parquet import writer
from etloom.formats.parquet.store_layout import SUMMARIES

MAX_GRAPH_EVENTS = 2_000_000
"""Analyses of the dependency graph are not stored for larger runs: it takes about 1 KB of memory per event."""


@dataclass(frozen=True)
class StoredQuestion:
    """An analysis whose result a store contains, and the options of the analysis that differ from the defaults."""

    analysis: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def file(self) -> str:
        """The file name of the result, without suffix."""
        return "-".join([self.analysis, *(f"{name}-{value}" for name, value in self.options.items())])


RANK_QUESTIONS = (
    StoredQuestion("steps"),
    StoredQuestion("temporal-breakdown"),
    StoredQuestion("comm-overlap"),
    StoredQuestion("top-ops"),
    StoredQuestion("top-ops", {"top": 10**9}),
    StoredQuestion("kernel-breakdown"),
    StoredQuestion("link-quality"),
)
"""Questions to each rank; the report needs all of them."""
JOB_QUESTIONS = tuple(
    map(
        StoredQuestion,
        (
            "clocks",
            "collectives",
            "collective-summary",
            "arrivals",
            "stragglers",
            "imbalance",
            "findings",
        ),
    )
)
"""Questions to all ranks together."""
CRITICAL_PATH = StoredQuestion("critical-path", {"by": "edge"})
GRAPH_QUESTIONS = (CRITICAL_PATH, StoredQuestion("slowdown"))
"""Questions to the dependency graph of all ranks."""


def summarize_ranks(ranks: Iterable[tuple[int, Trace]], folder: Path, for_report: bool = False) -> None:
    """Run the analyses whose results a store contains for each rank, and write the results to a new folder (a part).

    Args:
        ranks: ranks and their traces, one at a time.
        folder: the new folder: FILE.parquet for each question that a rank can answer, the results that
            `rank_results` keeps, and part.json.
        for_report: leave out results that only comparisons of runs need.
    """
    questions = {question.file: (question.analysis, question.options) for question in RANK_QUESTIONS}
    results = KeptResults(for_report)
    answers: dict[int, dict[str, Answer]] = {}
    for rank, trace in ranks:
        answers[rank] = answer_by_rank(Job({rank: trace}), questions)
        results.add(trace, rank)
    with writer.create_atomically(folder) as new:
        for file in questions:
            if tables := [by_file[file].table for by_file in answers.values() if by_file[file].table.columns]:
                writer.write_tables({new / f"{file}.parquet": pl.concat(tables)})
        refusals = {
            file: [
                [rank, *_split_error(error)]
                for by_file in answers.values()
                for rank, error in by_file[file].refused.items()
            ]
            for file in questions
        }
        content = {"ranks": list(answers), "refusals": refusals, "results": results.write(Path(new))}
        Path(new, "part.json").write_text(json.dumps(content), encoding="ascii")


def write_rank_answers(parts: Sequence[Path], folder: Path) -> list[dict[str, Any]]:
    """Combine the results of all batches of ranks into one file per analysis; return the files' manifest entries.

    Args:
        parts: folders of `summarize_ranks`.
        folder: the run.
    """
    contents = {part: json.loads((part / "part.json").read_text(encoding="ascii")) for part in parts}
    ordered = sorted(contents, key=lambda part: min(contents[part]["ranks"]))
    ranks = [rank for part in ordered for rank in contents[part]["ranks"]]
    entries = []
    for question in RANK_QUESTIONS:
        files = [file for part in ordered if (file := part / f"{question.file}.parquet").exists()]
        if files:
            rows = pl.scan_parquet(files, glob=False, hive_partitioning=False)
            if ranks != sorted(ranks):
                rows = rows.sort("rank", maintain_order=True)
            rows.sink_parquet(_locate_answer(folder, question), compression="zstd", compression_level=1)
        refused = sorted(row for part in parts for row in contents[part]["refusals"][question.file])
        entries.append(_describe(question, refused, has_table=bool(files)))
    return entries


def write_job_answers(
    job: Job, folder: Path, for_report: bool = False
) -> tuple[list[dict[str, Any]], list[Stat]]:
    """Run the analyses over all ranks and save their results; return manifest entries, and stats of skipped analyses.

    Next to the answers are the tables that the report needs, and, unless ``for_report``, those from which runs are
    compared.
    """
    graph_questions = [
        question for question in GRAPH_QUESTIONS if question is CRITICAL_PATH or not for_report
    ]
    skipped = 0
    if sum(trace.rows("events") for trace in job.values()) > MAX_GRAPH_EVENTS:
        skipped, graph_questions = len(graph_questions), []
    computations: list[tuple[StoredQuestion, Callable[[], Answer]]] = [
        (question, partial(answer, job, question.analysis, **question.options))
        for question in (*JOB_QUESTIONS, *graph_questions)
    ]
    tables = (KINDS, WINDOWS, ARRIVAL_ORDER, *(() if for_report else RUN_TABLES))
    computations += [(StoredQuestion(table.name), partial(_read_table, table, job)) for table in tables]
    entries = []
    for question, compute in computations:
        try:
            result = compute()
        except AnalysisError as error:
            entries.append(_describe(question, [[None, *_split_error(error)]], has_table=False))
            continue
        _write_answer(folder, question, result.table)
        refusals = [[rank, *_split_error(error)] for rank, error in result.refused.items()]
        entries.append(_describe(question, refusals, has_table=True))
    names = ", ".join(question.analysis for question in GRAPH_QUESTIONS)
    example = f"{names}: more than {MAX_GRAPH_EVENTS:,} events"
    return entries, [Stat("store.not_summarized", "info", 0 if for_report else skipped, example)]


def _read_table(table: RunTable, job: Job) -> Answer:
    return Answer(table.read(job))


def _split_error(error: AnalysisError) -> tuple[str, str | None, str | None]:
    """Return (message, remedy, location) of an error, as `StoredRefusal` stores them."""
    return error.what, error.remedy, error.where


def _write_answer(folder: Path, question: StoredQuestion, table: pl.DataFrame) -> None:
    writer.write_tables({_locate_answer(folder, question): table})


def _locate_answer(folder: Path, question: StoredQuestion) -> Path:
    return folder / SUMMARIES / f"{question.file}.parquet"


def _describe(question: StoredQuestion, refusals: list[list[Any]], *, has_table: bool) -> dict[str, Any]:
    """Return the manifest entry of a stored analysis: options, file, and the ranks that could not be analyzed."""
    entry: dict[str, Any] = {"analysis": question.analysis, "options": dict(question.options)}
    return {**entry, "file": question.file if has_table else None, "refusals": refusals}
