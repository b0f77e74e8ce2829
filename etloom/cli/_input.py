"""The arguments by which every verb is told what to open, and the opening."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from etloom.cli._output import progress

if TYPE_CHECKING:
    from etloom.trace import Job

PathArgument = Annotated[
    Path, typer.Argument(help="A folder of traces, or one trace file.", show_default=False, metavar="PATH")
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


def open_job(
    path: Path,
    rank_pattern: str | None = None,
    strict: bool = False,
    jobs: int | None = None,
    cache: bool = True,
    lazy: bool = False,
    **linking: Any,
) -> Job:
    """The linked Job at ``path``, with a progress bar; with ``strict``, DataLoss where something was lost.

    lazy: as for `etloom.open`, for verbs that do with `Trace.scan`. linking: options of `etloom.link`.
    """
    if jobs is not None:
        # Polars asks for it when it first works, not before.
        os.environ.setdefault("POLARS_MAX_THREADS", str(min(jobs, os.cpu_count() or 1)))
    import etloom

    with progress(f"reading {path}") as update:
        options: dict[str, Any] = {"jobs": jobs, "use_cache": cache, "lazy": lazy}
        job = etloom.open(path, rank_pattern=rank_pattern, progress=update, **options, **linking)
    if strict:
        job.check_lossless()
    return job
