"""etloom check: fail if a run is slower than a baseline by more than a limit, beyond noise."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from etloom.cli.command import Flag, Positional, command
from etloom.cli.error_handling import print_message
from etloom.cli.output import (
    Format,
    MetricsFormat,
    MonitoringFormat,
    split_format,
    to_json,
    write_metrics,
    write_table,
    write_text,
)
from etloom.cli.run_arguments import RunsOptions, open_job
from etloom.core.errors import InvalidValue

if TYPE_CHECKING:
    from etloom.api.verdicts import CheckResult

SCHEMA = 1
"""Version of the keys of the JSON."""
EXIT_UNDECIDED = 3
"""The exit status of a check that cannot decide."""


@command()
def check(
    *,
    paths: Annotated[
        tuple[Path, ...],
        "The run to judge, or several recordings of it: folders or files.",
        Positional("RUN..."),
    ],
    baseline: Annotated[tuple[Path, ...], "The run to compare with; may be repeated."] = (),
    max_regression: Annotated[str, "Allowed slowdown in percent."] = "3%",
    metric: Annotated[
        tuple[str, ...],
        "step-time, device-busy, exposed-communication or peak-memory; may be repeated.",
        Flag(show_default="step-time"),
    ] = (),
    junit: Annotated[Path | None, "Write a JUnit XML file."] = None,
    markdown: Annotated[
        Path | None, "Write a comment for a review: verdict, what changed, and causes of lost time."
    ] = None,
    github: Annotated[bool, "Print annotations for GitHub."] = False,
    format: MetricsFormat = None,
    run: RunsOptions,
) -> None:
    """Fail if a run is slower than a baseline by more than a limit, beyond noise.

    Exit status: 0 passed; 1 failed (or could not be read); 2 wrong command line; 3 undecided: the message says how
    many more steps or runs are needed.

    failed: the whole 95 % interval of the change of the median step lies above the limit. passed: it lies below.
    undecided: it contains the limit, or a slowdown may be noise of the machine: the steps are uneven, or a single run
    on each side, without GPU activity, does not show how much runs differ. Record 50 steps or more, and three runs of
    each side, alternately.

    Examples:

    \b
      etloom check run/ --baseline main/ --max-regression 3%
      etloom check run1/ run2/ run3/ --baseline main1/ --baseline main2/ --baseline main3/
      etloom check run/ --baseline main/ --junit perf.xml --markdown comment.md --github
      etloom check run/ --baseline main/ --format prometheus > check.prom
    """
    import etloom
    from etloom.api.verdicts import check_metric_names

    limit = _parse_percent(max_regression)
    if not baseline:
        example = paths[0] if len(paths) > 1 else "MAIN"
        raise InvalidValue(
            f"missing the run to compare with: etloom check {paths[-1]} --baseline {example}",
            option="baseline",
        )
    check_metric_names(metric)
    runs, baselines = ([open_job(path, run) for path in side] for side in (paths, baseline))
    print_message(f"judged: {_join_paths(paths)}; baseline: {_join_paths(baseline)}")
    result = etloom.check(runs, baselines, max_regression_pct=limit, metrics=metric or ["step-time"])
    _write_result(result, paths, format, junit)
    if markdown is not None:
        from etloom.api.verdicts import format_comment

        write_text(format_comment(result, runs[0], baselines[0]), markdown)
    _print_verdicts(result, github)
    if result.verdict == "failed":
        raise SystemExit(1)
    if result.verdict == "undecided":
        raise SystemExit(EXIT_UNDECIDED)


def _write_result(
    result: CheckResult, paths: Sequence[Path], format: MonitoringFormat | None, junit: Path | None
) -> None:
    """Write the result of `etloom check` to stdout, as a table or metrics, and to the JUnit file ``junit`` if set."""
    from etloom.reports.monitoring import measure_check

    table_format, metric_format = split_format(format)
    if table_format is Format.json:
        head = json.dumps({"schema": SCHEMA, "verdict": result.verdict})[:-1]
        write_text(f'{head}, "measures": {to_json(result.table)}}}\n', None)
    elif metric_format is None:
        write_table(result.table, table_format, None)
    else:
        write_metrics(measure_check(result.table.to_dicts()), _join_paths(paths), metric_format)
    if junit is not None:
        write_text(format_junit(result), junit)


def _print_verdicts(result: CheckResult, github: bool) -> None:
    """Print each measure's messages (none if it simply passed); with ``github`` also as GitHub annotations."""
    for verdict, lines in zip(result.table["verdict"], result.messages, strict=True):
        for line in lines:
            if github:
                level = {"failed": "error", "undecided": "warning"}.get(verdict, "notice")
                click.echo(f"::{level} title=etloom check::{escape_for_github(line)}", err=True)
            print_message(line)


def _join_paths(paths: Sequence[Path]) -> str:
    return ", ".join(map(str, paths))


def _parse_percent(text: str) -> float:
    try:
        limit = float(text.strip().removesuffix("%"))
    except ValueError:
        limit = -1
    if not 0 <= limit < float("inf"):
        raise InvalidValue(
            f"expected a percentage of 0 or more, got {text!r}",
            remedy="write it as 3%",
            option="max_regression",
        )
    if 0 < limit < 1 and not text.strip().endswith("%"):
        raise InvalidValue(
            f"{text!r} may be a fraction or a percentage",
            remedy=f"write it as {100 * limit:g}% or as {limit:g}%",
            option="max_regression",
        )
    return limit


def escape_for_github(text: str) -> str:
    """Escape percent signs and line ends for a GitHub workflow command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def format_junit(result: CheckResult) -> str:
    """Format the result as JUnit XML: one test case per measure; failed is a failure, undecided an error."""
    import xml.etree.ElementTree as tree

    table = result.table
    element = {"failed": "failure", "undecided": "error"}
    suite = tree.Element("testsuite", name="etloom check", tests=str(table.height))
    for verdict, name in element.items():
        suite.set(f"{name}s", str((table["verdict"] == verdict).sum()))
    for row in range(table.height):
        case = tree.SubElement(suite, "testcase", classname="etloom.check", name=table["measure"][row])
        verdict = table["verdict"][row]
        for line in result.messages[row]:
            tree.SubElement(case, element[verdict], message=line, type=verdict).text = line
    return '<?xml version="1.0" encoding="utf-8"?>\n' + tree.tostring(suite, encoding="unicode") + "\n"
