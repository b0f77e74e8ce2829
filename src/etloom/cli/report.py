"""etloom report: prints the summary of a run and writes the report as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from etloom.cli.command import Flag, command
from etloom.cli.error_handling import make_printable, print_message
from etloom.cli.output import build_table, render_text, write_text
from etloom.cli.output_files import check_writable, describe_page
from etloom.cli.run_arguments import RunOptions, RunPath, check_readable, open_job

if TYPE_CHECKING:
    from etloom.core.trace import Job

TOP_ROWS = 8
"""Operators, and rows of a hang, shown in the terminal; the page shows more."""


@command()
def report(
    *,
    path: RunPath,
    out: Annotated[
        Path | None,
        "The file to write; default: report.html in the folder PATH, or for a file in the current folder.",
        Flag("-o"),
    ] = None,
    run: RunOptions,
) -> None:
    """Summarize a run in a few sentences and write an HTML report: one file that needs no server.

    Examples:

    \b
      etloom report run/
      etloom report run/ --out /tmp/report.html
      etloom report s3://bucket/run --out s3://bucket/run-report.html
      etloom report kineto_trace_0.json.gz --out report.html
    """
    write_report(path, out, run)


def write_report(path: Path, out: Path | None = None, run: RunOptions | None = None) -> None:
    """Print the summary of a run on stdout and write its HTML report."""
    target = out or (path if path.is_dir() else Path()) / "report.html"
    if path.exists():
        check_writable(target, "--out")
    import etloom

    job = open_job(path, run or RunOptions(), warn=False, for_report=True)
    check_readable(job, path)
    write_text(_format_summary(job), None)
    etloom.report(job, target)
    print_message(describe_page(target))


def _format_summary(job: Job) -> str:
    """Format a run's summary as text: its sentences, and tables of hangs, ranks, the top operators and warnings."""
    import polars as pl
    from rich.table import Table
    from rich.text import Text

    from etloom.reports.rank_spread import MAX_LISTED_RANKS, group_stats_by_name, summarize_rank_spread
    from etloom.reports.summary import summarize_run

    summary = summarize_run(job)
    sentences = Table(box=None, pad_edge=False, show_header=False)
    for sentence in summary.lines:
        color = {"warn": "yellow", "bad": "red"}.get(sentence.tone, "")
        figure = Text(make_printable(sentence.figure), style=f"bold {color}".strip())
        sentences.add_row(Text(sentence.topic), figure, Text(make_printable(sentence.text)))
    operators = summary.tables.get("recorded", summary.tables["top-ops"])
    operators = operators.filter(pl.col("rank") == job.ranks[0]).drop("rank").head(TOP_ROWS)
    overview = summary.tables["overview"].drop_nulls("span_ns")
    problems = job.stats.filter(pl.col("severity") != "info")
    has_many_ranks = len(job) > MAX_LISTED_RANKS
    hangs = summary.tables.get("hangs", pl.DataFrame())
    omitted = f", first {TOP_ROWS} of {hangs.height} rows (etloom analyze hangs lists all)"
    sections = {
        "Hang" + (omitted if hangs.height > TOP_ROWS else ""): hangs.head(TOP_ROWS),
        "Ranks": summarize_rank_spread(overview) if has_many_ranks else overview,
        "Top operators" + (f" of rank {job.ranks[0]}" if len(job) > 1 else ""): operators,
        "Warnings": group_stats_by_name(problems) if has_many_ranks else problems,
    }
    parts: list[Any] = [sentences]
    for title, table in sections.items():
        if table.height:
            empty = [name for name in table.columns if table[name].null_count() == table.height]
            parts += [Text(f"\n{title}", style="bold"), build_table(table.drop(empty))]
    return render_text(*parts)
