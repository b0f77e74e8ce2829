"""etloom diff: shows whether a run is slower than another, and which parts account for the difference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from etloom.cli.command import Flag, Positional, command
from etloom.cli.error_handling import make_printable, print_message
from etloom.cli.output import Format, TableOptions, choose_format, write_table
from etloom.cli.output_files import check_writable, describe_page
from etloom.cli.run_arguments import RunsOptions, open_job

if TYPE_CHECKING:
    from etloom.api.questions import Difference
    from etloom.core.trace import Job

_TWO_ONLY = ("tree", "step", "memory")
"""Rows of a comparison of two runs only."""
_ROWS = ["category", "family", "operator", "kernel", "collective", "rank", "tree", "step", "memory"]


@command()
def diff(
    *,
    before: Annotated[Path, "The run before: a folder or a file.", Positional("BEFORE")],
    after: Annotated[tuple[Path, ...], "The run after, or several.", Positional("AFTER...")],
    by: Annotated[str, "What each row of the table is.", Flag(type=click.Choice(_ROWS))] = "category",
    top: Annotated[int, "Number of rows, largest change first.", Flag(type=click.IntRange(min=1))] = 20,
    table: TableOptions,
    html: Annotated[Path | None, "Also write all tables as one HTML page, which needs no server."] = None,
    run: RunsOptions,
) -> None:
    """Show whether a run is slower than another beyond noise, and which parts account for the difference.

    Figures are per step, averaged over ranks. With --by step, before and after are medians over the steps (as shown by
    etloom report next to its mean), and the interval of their change is a bootstrap over blocks of consecutive steps.
    Times of ranks are those outside of communication, of operators exclusive. share is the part of the table's total
    change, so it sums to 100 %, and omitted if the change is within noise or changes cancel.

    With --by tree, the call trees of both runs are walked down to the lowest common operators and modules; a row is
    what ran there instead of what, so programs that differ in fusion, library or device can be compared, and changes
    add up. GFLOP and the share of the roofline of both sides are those of operators whose cost is known.

    With several runs after, each is judged against the run before, and the table has a column of times for each run.

    Of two memory snapshots, or with --by memory, the rows are the places that hold memory at the peak; the first row is
    the peak of reserved memory.

    Examples:

    \b
      etloom diff before.pickle after.pickle
      etloom diff old/ new/
      etloom diff old/ new/ --by kernel --top 10
      etloom diff old/ new/ --html diff.html
      etloom diff mi300.json.gz h100.json.gz --by tree
      etloom diff eager/ compiled/ fp8/ --by family
    """
    import etloom

    choose_format(table.format, table.out)
    if html is not None:
        check_writable(html, "--html")
    if len(after) > 1:
        if by in _TWO_ONLY:
            raise click.UsageError(f"--by {by} compares two runs, not {1 + len(after)}")
        _write_runs([before, *after], by, top, table, run, html)
        return
    jobs = [open_job(path, run) for path in (before, *after)]
    if by == "memory" or all(trace.is_snapshot for job in jobs for trace in job.values()):
        if html is not None:
            raise click.UsageError("--html shows times: write a page of each snapshot with etloom report")
        _write_holders(jobs, top, table)
        return
    difference = etloom.diff(*jobs)
    _write_difference(difference, by, top, table)
    if html is not None:
        etloom.report(difference, html)
        print_message(describe_page(html))


def _write_holders(jobs: Sequence[Job], top: int, table: TableOptions) -> None:
    """Write what each place holds in two memory snapshots."""
    import etloom

    holders = etloom.diff_memory(*jobs)
    write_table(holders.head(top + 1), table.format, table.out)
    if holders.height > top + 1:
        print_message(f"{top:,} of {holders.height - 1:,} places; --top {holders.height - 1} shows all")


def _write_runs(
    paths: Sequence[Path], by: str, top: int, table: TableOptions, run: RunsOptions, html: Path | None
) -> None:
    """Write the verdict of each run against the first, one table of the times of all, and a page."""
    import etloom

    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    if len(set(names)) < len(names):
        names = [f"{name} ({number})" for number, name in enumerate(names, 1)]
    jobs = {name: open_job(path, run) for name, path in zip(names, paths, strict=True)}
    first, *others = jobs
    differences = {name: etloom.diff(jobs[first], jobs[name]) for name in others}
    for name, difference in differences.items():
        for line in filter(None, (difference.verdict, difference.source_changes, *difference.notes)):
            print_message(f"{name}: {line}")
    write_table(etloom.compare(jobs, by=by).head(top), table.format, table.out)
    if html is not None:
        etloom.report(list(differences.values()), html)
        print_message(describe_page(html))


def _write_difference(difference: Difference, by: str, top: int, table: TableOptions) -> None:
    rows = difference.table(by, top)
    for line in filter(None, (difference.verdict, difference.explanation, difference.source_changes)):
        if table.out is None and table.format in (None, Format.table):
            click.echo(make_printable(line))
        else:
            print_message(line)
    for note in difference.notes:
        print_message(note)
    if not rows.height:
        print_message(f"neither run contains a {by}")
    if rows.height or table.out is not None or table.format not in (None, Format.table):
        write_table(rows, table.format, table.out)
