"""etloom report: the verdict in the terminal and the report as one HTML file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from etloom.cli._guard import guarded, say
from etloom.cli._input import CacheOption, JobsOption, PathArgument, RankPatternOption, StrictOption, open_job


@guarded()
def report(
    path: PathArgument,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="The file to write; by default report.html in the folder.", show_default=False
        ),
    ] = None,
    rank_pattern: RankPatternOption = None,
    strict: StrictOption = False,
    jobs: JobsOption = None,
    cache: CacheOption = True,
) -> None:
    """Say in a few sentences what a run came to, and write the report: one HTML file that needs no server.

    Examples:

    \b
      etloom report run/
      etloom report run/ --out /tmp/report.html
      etloom report kineto_trace_0.json.gz --out report.html
    """
    write_report(path, out, rank_pattern, strict, jobs, cache)


def write_report(
    path: Path,
    out: Path | None = None,
    rank_pattern: str | None = None,
    strict: bool = False,
    jobs: int | None = None,
    cache: bool = True,
) -> None:
    """Print the verdict on stdout and write the page."""
    import etloom

    job = open_job(path, rank_pattern, strict, jobs, cache)
    from etloom.reports import terminal

    terminal.show(job, sys.stdout)
    target = out or (path if path.is_dir() else path.parent) / "report.html"
    etloom.report(job, target)
    say(f"wrote {target}; open it in a browser: {target.resolve().as_uri()}")
