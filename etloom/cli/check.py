"""etloom check: fail where a run is slower than a baseline by more than a limit, beyond noise."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from etloom.cli.error_handling import handle_errors, print_message
from etloom.cli.output import FormatOption, write_table
from etloom.cli.run_arguments import CacheOption, JobsOption, StrictOption, open_job
from etloom.core.errors import EtloomError, UnknownName

if TYPE_CHECKING:
    import polars as pl


EXIT_UNDECIDED = 3
"""The exit status of a gate that cannot tell."""


@handle_errors()
def check(
    paths: Annotated[
        list[Path],
        typer.Argument(
            readable=False,
            help="The run to judge, or several runs of it: folders or files.",
            show_default=False,
            metavar="RUN...",
        ),
    ],
    baseline: Annotated[
        list[Path] | None,
        typer.Option(readable=False, help="The run to compare with; may be repeated.", show_default=False),
    ] = None,
    max_regression: Annotated[str, typer.Option(help="What is allowed, in percent.")] = "3%",
    metric: Annotated[
        list[str] | None,
        typer.Option(
            help="step-time, wall-step-time, device-busy, exposed-communication or peak-memory; may be repeated.",
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
    """Fail where a run is slower than a baseline by more than a limit, beyond noise.

    Exit status: 0 passed; 1 failed (or could not be read); 2 wrong command line; 3 cannot tell, with how many more
    steps or runs it takes.

    step-time is judged by what a step takes when nothing disturbs it, which a busy machine changes little; what is
    slow only now and then, wall-step-time sees, on a machine of its own. before and after of step time itself are
    medians over the steps, of each the mean over its ranks; `etloom report` says that median beside its mean. change is
    the estimate over all pairs of a step before and one after, on which the verdict rests, in percent and as that part
    of before: where steps are uneven it is not the difference of the medians. Record 50 steps or more, three runs of
    each side: one run against one does not show what differs from run to run, and on hosts tells large changes only.

    Examples:

    \b
      etloom check run/ --baseline main/ --max-regression 3%
      etloom check run1/ run2/ run3/ --baseline main1/ --baseline main2/ --baseline main3/ --metric step-time
      etloom check run/ --baseline main/ --junit perf.xml --github
    """
    from etloom.comparison.gate import METRICS, explain_row, judge_regression

    limit = _parse_percent(max_regression)
    if not baseline:
        before = paths[0] if len(paths) > 1 else "MAIN"
        raise EtloomError(
            f"what to compare with is missing: etloom check {paths[-1]} --baseline {before}",
            option="baseline",
        )
    for name in metric or ():
        if name not in METRICS:
            raise UnknownName("metric", name, METRICS, option="metric")
    print_message(f"judged: {_join_paths(paths)}; baseline: {_join_paths(baseline)}")
    runs, bases = ([open_job(path, None, strict, jobs, cache) for path in side] for side in (paths, baseline))
    table = judge_regression(runs, bases, limit, metric or ["step-time"])
    write_table(table, format, None)
    if junit is not None:
        junit.parent.mkdir(parents=True, exist_ok=True)
        junit.write_text(format_junit(table), encoding="utf-8")
    for row in range(table.height):
        for line in explain_row(table, row):
            if github:
                level = {"failed": "error", "undecided": "warning"}.get(table["verdict"][row], "notice")
                typer.echo(f"::{level} title=etloom check::{escape_for_github(line)}", err=True)
            print_message(line)
    verdicts = set(table["verdict"])
    if "failed" in verdicts:
        raise SystemExit(1)
    if "undecided" in verdicts:
        raise SystemExit(EXIT_UNDECIDED)


def _join_paths(paths: list[Path]) -> str:
    return ", ".join(map(str, paths))


def _parse_percent(text: str) -> float:
    try:
        limit = float(text.strip().removesuffix("%"))
    except ValueError:
        limit = -1
    if not 0 <= limit < float("inf"):
        raise EtloomError(f"{text!r} is no percentage", remedy="write it as 3%", option="max_regression")
    return limit


def escape_for_github(text: str) -> str:
    """The message of a GitHub workflow command: percent signs and ends of lines spelt out."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def format_junit(table: pl.DataFrame) -> str:
    """A JUnit XML file: a test case a measure; a failure is one that failed, an error one that cannot be told."""
    import xml.etree.ElementTree as tree

    from etloom.comparison.gate import explain_row

    judged = [row for row in range(table.height) if table["verdict"][row] != "noted"]
    element = {"failed": "failure", "undecided": "error"}
    suite = tree.Element("testsuite", name="etloom check", tests=str(len(judged)))
    for verdict, name in element.items():
        suite.set(f"{name}s", str(sum(table["verdict"][row] == verdict for row in judged)))
    for row in judged:
        case = tree.SubElement(suite, "testcase", classname="etloom.check", name=table["measure"][row])
        verdict = table["verdict"][row]
        for line in explain_row(table, row):
            tree.SubElement(case, element[verdict], message=line, type=verdict).text = line
    return '<?xml version="1.0" encoding="utf-8"?>\n' + tree.tostring(suite, encoding="unicode") + "\n"
