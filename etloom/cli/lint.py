"""etloom lint: checks Chakra files for problems before a simulator uses them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from etloom.cli.command import PATH_TYPE, Argument, command
from etloom.cli.error_handling import make_printable
from etloom.core.text import count_noun

if TYPE_CHECKING:
    from etloom.api.files import LintResult


@command(
    Argument(
        ["paths"],
        type=PATH_TYPE,
        nargs=-1,
        required=True,
        metavar="PATH...",
        help="Files NAME.RANK.et of a job, or a folder with them.",
    ),
    click.Option(
        ["--groups"],
        type=PATH_TYPE,
        metavar="FILE",
        help="Ranks of the process groups, as ASTRA-sim's --comm-group-configuration; default: NAME.comm_groups.json.",
    ),
    click.Option(
        ["--format", "-f"], type=click.Choice(["text", "json"]), default="text", help="Output format."
    ),
)
def lint(paths: Sequence[Path], groups: Path | None, format: str) -> None:
    """Check Chakra traces for problems that keep a simulator such as ASTRA-sim from running them or make results wrong.

    Finds dependencies on missing nodes or in cycles, duplicate ids, missing attributes, groups and messages on which
    ranks disagree; explains each and how to fix it. Runs all ranks together by ASTRA-sim's rules, predicts if it
    finishes, hangs or aborts, and prints the time of its replay next to the recorded one, and that on a network without
    delay. The exit status is 1 if there are errors.

    Examples:

    \b
      etloom export run/ --out sim/job.et && etloom lint sim/
      etloom lint job.0.et --format json
    """
    import etloom
    from etloom.cli.output import write_text

    result = etloom.lint(*paths, groups=groups)
    rows = result.table.to_dicts()
    if format == "json":
        write_text("[" + ",\n ".join(map(json.dumps, rows)) + "]\n", None)
    else:
        count = len(result.files)
        texts = [_format_problem(row) for row in rows] or [f"no problems in {count_noun(count, 'file')}"]
        texts.append(_format_verdict(result))
        write_text(
            "\n".join(make_printable(line) for text in texts for line in text.split("\n")) + "\n", None
        )
    if result.has_errors:
        raise click.exceptions.Exit(1)


def _format_verdict(result: LintResult) -> str:
    ranks = f"all {len(result.files)} ranks" if len(result.files) > 1 else "the rank"
    verdict = {"finish": f"finishes on {ranks}", "hang": "hangs", "abort": "aborts"}[result.verdict]
    recorded = "" if result.recorded_ns is None else f", recorded {result.recorded_ns / 1e6:,.3f} ms"
    ideal = (
        f"; on a network without delay {result.ideal_ns / 1e6:,.3f} ms" if result.verdict == "finish" else ""
    )
    return f"ASTRA-sim {verdict}; its replay takes {result.simulated_ns / 1e6:,.3f} ms{recorded}{ideal}"


def _format_problem(row: dict[str, Any]) -> str:
    node = "" if row["node"] is None else f"node {row['node']}, "
    times = "" if row["count"] == 1 else f", {row['count']:,} times"
    example = " ".join(row["example"].split())
    return (
        f"{row['severity']}: rank {row['rank']}: {row['code']}{times} ({node}{example})\n"
        f"    {row['meaning']}: {row['remedy']}"
    )
