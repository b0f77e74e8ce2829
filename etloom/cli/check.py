"""etloom check: fail where a run is slower than a baseline by more than a limit, beyond noise."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from etloom.cli._guard import guarded, say
from etloom.cli._input import CacheOption, JobsOption, PathArgument, StrictOption, open_job
from etloom.cli._output import FormatOption, emit
from etloom.errors import EtloomError

if TYPE_CHECKING:
    import polars as pl


@guarded()
def check(
    path: PathArgument,
    baseline: Annotated[
        list[Path], typer.Option(help="The run to compare with; may be repeated.", show_default=False)
    ],
    max_regression: Annotated[str, typer.Option(help="What is allowed, in percent.")] = "3%",
    metric: Annotated[
        list[str] | None,
        typer.Option(
            help="step-time, device-busy, exposed-communication or peak-memory; may be repeated.",
            show_default="step-time",
        ),
    ] = None,
    junit: Annotated[Path | None, typer.Option(help="Write a JUnit XML file.", show_default=False)] = None,
    github: Annotated[bool, typer.Option("--github", help="Print annotations for GitHub.")] = False,
    format: FormatOption = None,
    strict: StrictOption = False,
    jobs: JobsOption = None,
    cache: CacheOption = True,
) -> None:
    """Fail, with exit status 1, where a run is slower than a baseline by more than a limit.

    It fails where the whole 95 % interval of the change lies above the limit, and where there are too few steps to tell
    (4 on each side are enough, 10 or more are better). Repeat --baseline with several runs, so that what differs from
    run to run counts as noise.

    Examples:

    \b
      etloom check run/ --baseline main/ --max-regression 3%
      etloom check run/ --baseline main1/ --baseline main2/ --metric step-time --metric peak-memory
      etloom check run/ --baseline main/ --junit perf.xml --github
    """
    from etloom.comparing.gate import gate, sentences

    limit = _percent(max_regression)
    bases = [open_job(base, None, strict, jobs, cache) for base in baseline]
    table = gate(open_job(path, None, strict, jobs, cache), bases, limit, metric or ["step-time"])
    emit(table, format, None)
    if junit is not None:
        junit.write_text(as_junit(table), encoding="utf-8")
    lines = sentences(table)
    for line in lines:
        if github:
            typer.echo(f"::error title=etloom check::{escaped(line)}", err=True)
        say(line)
    if lines:
        raise SystemExit(1)


def _percent(text: str) -> float:
    try:
        limit = float(text.strip().removesuffix("%"))
    except ValueError:
        limit = -1
    if not 0 <= limit < float("inf"):
        raise EtloomError(f"--max-regression {text!r} is no percentage", remedy="write it as 3%")
    return limit


def escaped(text: str) -> str:
    """The message of a GitHub workflow command: percent signs and ends of lines spelt out."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def as_junit(table: pl.DataFrame) -> str:
    """A JUnit XML file: a test case a measure."""
    import xml.etree.ElementTree as tree

    from etloom.comparing.gate import sentences

    bad = table.filter(table["verdict"] != "passed").height
    suite = tree.Element(
        "testsuite", name="etloom check", tests=str(table.height), failures=str(bad), errors="0"
    )
    for at, row in enumerate(table.iter_rows(named=True)):
        case = tree.SubElement(suite, "testcase", classname="etloom.check", name=row["measure"])
        for line in sentences(table[at : at + 1]):
            tree.SubElement(case, "failure", message=line, type=row["verdict"]).text = line
    return '<?xml version="1.0" encoding="utf-8"?>\n' + tree.tostring(suite, encoding="unicode") + "\n"
