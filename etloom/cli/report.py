"""etloom report: the verdict in the terminal and the report as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from etloom.cli.error_handling import handle_errors, make_printable, print_message
from etloom.cli.output import build_table, render_text, write_text
from etloom.cli.output_checks import check_writable
from etloom.cli.run_arguments import (
    CacheOption,
    JobsOption,
    PathArgument,
    RankPatternOption,
    StrictOption,
    open_job,
)

if TYPE_CHECKING:
    from etloom.core.trace import Job

TOP = 8
"""Operators that the terminal shows; the page shows more."""


@handle_errors()
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

    target = out or (path if path.is_dir() else path.parent) / "report.html"
    if path.exists():
        check_writable(target, "--out")
    job = open_job(path, rank_pattern, strict, jobs, cache, tell=False)
    write_text(_format_summary(job), None)
    etloom.report(job, target)
    print_message(f"wrote {target}; open it in a browser: {target.resolve().as_uri()}")


def _format_summary(job: Job) -> str:
    """The verdict as text: its sentences, the ranks, the top operators of the first rank."""
    import polars as pl
    from rich.table import Table
    from rich.text import Text

    from etloom.reports.rank_spread import MAX_LISTED_RANKS, group_stats_by_name, summarize_rank_spread
    from etloom.reports.summary import summarize_run

    found = summarize_run(job)
    sentences = Table(box=None, pad_edge=False, show_header=False)
    for sentence in found.sentences:
        colour = {"warn": "yellow", "bad": "red"}.get(sentence.tone, "")
        figure = Text(make_printable(sentence.figure), style=f"bold {colour}".strip())
        sentences.add_row(Text(sentence.topic), figure, Text(make_printable(sentence.text)))
    parts: list[Any] = [sentences]
    operators = found.tables.get("recorded", found.tables["top-ops"])
    overview = found.tables["overview"].drop_nulls("span_ns")
    trouble = job.stats.filter(pl.col("severity") != "info")
    many = len(job) > MAX_LISTED_RANKS
    sections = {
        "Ranks": summarize_rank_spread(overview) if many else overview,
        "Top operators" + (f" of rank {job.ranks[0]}" if len(job) > 1 else ""): operators.filter(
            pl.col("rank") == job.ranks[0]
        )
        .drop("rank")
        .head(TOP),
        "Trouble": group_stats_by_name(trouble) if many else trouble,
    }
    for title, table in sections.items():
        if table.height:
            silent = [name for name in table.columns if table[name].null_count() == table.height]
            parts += [Text(f"\n{title}", style="bold"), build_table(table.drop(silent))]
    return render_text(*parts)
