"""Arguments that most verbs share, which say what to open and how, and the opening itself."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from etloom.cli.command import PATH_TYPE, Argument, OptionGroup
from etloom.cli.error_handling import print_message
from etloom.cli.output import show_progress

if TYPE_CHECKING:
    from etloom.core.trace import Job

MAX_TABLE_BYTES = 256_000_000
"""Memory for the tables of a run: verbs process rank after rank."""

PATH = Argument(
    ["path"], type=PATH_TYPE, metavar="PATH", help="A folder of traces, or one trace file.", required=True
)
RANK_PATTERN = click.Option(
    ["--rank-pattern"], help="Regular expression for the file names, with one group: the rank."
)


@dataclass(frozen=True)
class RunOptions:
    """Options of opening a run."""

    rank_pattern: str | None = None
    strict: bool = False
    jobs: int | None = None
    cache: bool = True


SHARED_OPTIONS: list[click.Parameter] = [
    click.Option(["--strict"], is_flag=True, help="Fail if anything in the files was lost."),
    click.Option(
        ["--jobs"],
        type=click.IntRange(min=1),
        help="Number of ranks (and threads) processed in parallel; default: number of CPUs.",
    ),
    click.Option(
        ["--cache/--no-cache"],
        default=True,
        help="Keep files that are slow to read in a cache, and read them from there next time.",
    ),
]
RUN_OPTIONS = OptionGroup("run", RunOptions, [RANK_PATTERN, *SHARED_OPTIONS])
RUN_OPTIONS_WITHOUT_RANKS = OptionGroup("run", RunOptions, SHARED_OPTIONS)
"""For verbs that open several runs."""


def open_job(path: Path, run: RunOptions, *, lazy: bool = False, warn: bool = True, **linking: Any) -> Job:
    """Open the run at ``path`` with a progress bar and link it.

    Args:
        path: a folder or file.
        run: the shared options of verbs.
        lazy: as for `etloom.open`, for verbs that only need `Trace.scan`.
        warn: print on stderr if data was lost, for verbs that do not show it themselves.
        linking: options of `etloom.link`.

    Raises:
        DataLoss: with ``run.strict``, if anything was lost.
    """
    if run.jobs is not None:
        # Polars reads it when it first works, not before.
        os.environ.setdefault("POLARS_MAX_THREADS", str(min(run.jobs, os.cpu_count() or 1)))
    import etloom

    with show_progress(f"reading {path}") as update:
        job = etloom.open(
            path,
            rank_pattern=run.rank_pattern,
            progress=update,
            jobs=run.jobs,
            use_cache=run.cache,
            lazy=lazy,
            max_table_bytes=MAX_TABLE_BYTES,
            **linking,
        )
    if run.strict:
        job.check_lossless()
    if warn:
        report_loss(job, path)
    return job


def report_loss(job: Job, path: Path | str) -> None:
    """Print one line on stderr if data of the files was lost or results may be wrong: what, and of which ranks."""
    import polars as pl

    problems = job.stats.filter(pl.col("severity") != "info")
    if problems.is_empty():
        return
    names_by_ranks: dict[tuple[int, ...], list[str]] = {}
    for (name,), rows in problems.group_by("name", maintain_order=True):
        ranks = tuple(rows["rank"].drop_nulls().unique().sort())
        names_by_ranks.setdefault(ranks, []).append(f"{name} {rows['count'].sum():,}")
    text = "; ".join(", ".join(names) + _format_location(ranks) for ranks, names in names_by_ranks.items())
    print_message(
        f"{path}: data lost or doubtful: {text}; etloom info {shlex.quote(str(path))} shows details"
    )


def _format_location(ranks: tuple[int, ...]) -> str:
    from etloom.core.text import format_ranks

    return f" ({format_ranks(ranks)})" if ranks else ""
