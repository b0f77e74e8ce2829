"""etloom diff: whether one run is slower than another, and what the difference is made of."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from etloom.cli.error_handling import handle_errors, print_message
from etloom.cli.output import Format, FormatOption, OutOption, choose_format, write_table
from etloom.cli.output_checks import check_writable
from etloom.cli.run_arguments import CacheOption, JobsOption, StrictOption, open_job


class By(str, enum.Enum):
    category = "category"
    family = "family"
    operator = "operator"
    kernel = "kernel"
    collective = "collective"
    step = "step"


BeforeArgument = Annotated[
    Path,
    typer.Argument(
        readable=False, help="The run before: a folder or a file.", show_default=False, metavar="BEFORE"
    ),
]
AfterArgument = Annotated[
    Path, typer.Argument(readable=False, help="The run after.", show_default=False, metavar="AFTER")
]


@handle_errors()
def diff(
    before: BeforeArgument,
    after: AfterArgument,
    by: Annotated[By, typer.Option(help="What a row of the table is.")] = By.category,
    top: Annotated[int, typer.Option(min=1, help="How many rows, the greatest change first.")] = 20,
    format: FormatOption = None,
    out: OutOption = None,
    html: Annotated[
        Path | None,
        typer.Option(
            help="Also write all tables as one HTML page, which needs no server.", show_default=False
        ),
    ] = None,
    strict: StrictOption = False,
    jobs: JobsOption = None,
    cache: CacheOption = True,
) -> None:
    """Say whether a run is slower than another beyond noise, and what the difference is made of.

    Figures are per step and mean over ranks; of --by step before and after are medians over the steps, which `etloom
    report` says beside its mean, and change is the estimate over all pairs of steps. Times of operators are their own,
    without what they call. share is the part of the change of the table's sum, so it sums to 100 %; it is left out
    where no change can be told from noise or changes cancel. The interval is Hodges and Lehmann's, over steps.

    Examples:

    \b
      etloom diff old/ new/
      etloom diff old/ new/ --by kernel --top 10
      etloom diff old/ new/ --html diff.html
      etloom diff mi300.json.gz h100.json.gz --by operator --format csv
    """
    import etloom

    choose_format(format, out)
    if html is not None:
        check_writable(html, "--html")
    found = etloom.diff(*(open_job(path, None, strict, jobs, cache) for path in (before, after)))
    table = found.table(by.value, top)
    for line in filter(None, (found.verdict, found.explanation)):
        if out is None and format in (None, Format.table):
            typer.echo(line)
        else:
            print_message(line)
    for note in found.notes:
        print_message(note)
    if table.height:
        write_table(table, format, out)
    else:
        print_message(f"neither run holds a {by.value}")
    if html is not None:
        etloom.report(found, html)
        print_message(f"wrote {html}; open it in a browser: {html.resolve().as_uri()}")
