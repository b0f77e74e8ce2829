"""The arguments by which every verb is told what to open, and the opening."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from etloom.cli.error_handling import print_message
from etloom.cli.output import show_progress

if TYPE_CHECKING:
    from etloom.core.trace import Job

# Of all these arguments (readable=False) the reader says what cannot be read, as it does of a file in a folder.
PathArgument = Annotated[
    Path,
    typer.Argument(
        readable=False, help="A folder of traces, or one trace file.", show_default=False, metavar="PATH"
    ),
]
RankPatternOption = Annotated[
    str | None,
    typer.Option("--rank-pattern", help="Regular expression for the file names, with one group: the rank."),
]
StrictOption = Annotated[bool, typer.Option("--strict", help="Fail if anything in the files was lost.")]

JobsOption = Annotated[
    int | None,
    typer.Option("--jobs", min=1, help="Ranks read, and threads used, at a time; by default one a CPU."),
]
CacheOption = Annotated[
    bool, typer.Option(help="Keep what took long to read, and take it from there next time.")
]

ROOM_BYTES = 256_000_000
"""What the tables of a run take in memory at a time: verbs go from rank to rank."""


def open_job(
    path: Path,
    rank_pattern: str | None = None,
    strict: bool = False,
    jobs: int | None = None,
    cache: bool = True,
    lazy: bool = False,
    tell: bool = True,
    **linking: Any,
) -> Job:
    """The linked Job at ``path``, with a progress bar; with ``strict``, DataLoss where something was lost.

    lazy: as for `etloom.open`, for verbs that do with `Trace.scan`. tell: say on stderr what was lost, for verbs that
    do not show it. linking: options of `etloom.link`.
    """
    if jobs is not None:
        # Polars asks for it when it first works, not before.
        os.environ.setdefault("POLARS_MAX_THREADS", str(min(jobs, os.cpu_count() or 1)))
    import etloom

    with show_progress(f"reading {path}") as update:
        options: dict[str, Any] = {"jobs": jobs, "use_cache": cache, "lazy": lazy, "room": ROOM_BYTES}
        job = etloom.open(path, rank_pattern=rank_pattern, progress=update, **options, **linking)
    if strict:
        job.check_lossless()
    if tell:
        report_loss(job, path)
    return job


def report_loss(job: Job, path: Path | str) -> None:
    """One line on stderr where something of the files was lost, or answers may be wrong: what, of which ranks."""
    import polars as pl

    lost = job.stats.filter(pl.col("severity") != "info")
    if lost.is_empty():
        return
    kinds: dict[tuple[int, ...], list[str]] = {}
    for (name,), rows in lost.group_by("name", maintain_order=True):
        ranks = tuple(rows["rank"].drop_nulls().unique().sort())
        kinds.setdefault(ranks, []).append(f"{name} {rows['count'].sum():,}")
    told = "; ".join(", ".join(names) + _format_ranks(ranks) for ranks, names in kinds.items())
    print_message(f"{path}: lost or in doubt: {told}; etloom info {shlex.quote(str(path))} shows what")


def _format_ranks(ranks: tuple[int, ...]) -> str:
    from etloom.core.text import format_ranks

    return f" ({format_ranks(ranks)})" if ranks else ""
