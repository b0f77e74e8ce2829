"""etloom lint: check Chakra files before a simulator does."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from etloom.cli.error_handling import handle_errors, make_printable

if TYPE_CHECKING:
    from etloom.exports.chakra_lint.lint_codes import LintFinding


class LintFormat(str, enum.Enum):
    text = "text"
    json = "json"


@handle_errors()
def lint(
    path: Annotated[
        Path,
        typer.Argument(
            readable=False,
            help="A file NAME.RANK.et, or a folder of those of a job.",
            show_default=False,
            metavar="PATH",
        ),
    ],
    format: Annotated[
        LintFormat, typer.Option("--format", "-f", help="How to write what was found.")
    ] = LintFormat.text,
) -> None:
    """Check Chakra traces for what keeps a simulator such as ASTRA-sim from running them, or from being right.

    Reports dangling dependencies and cycles, duplicate ids, missing attributes, and groups and messages on which ranks
    disagree, with what each means and how to fix it. The exit status is 1 if there are errors.

    Examples:

    \b
      etloom export run/ --out sim/job.et && etloom lint sim/
      etloom lint job.0.et --format json
    """
    from etloom.cli.output import write_text
    from etloom.exports import chakra_lint

    result = chakra_lint.lint(path)
    if format is LintFormat.json:
        write_text("[" + ",\n ".join(json.dumps(_row(one)) for one in result.findings) + "]\n", None)
    else:
        count = len(result.files)
        lines = [_line(one) for one in result.findings] or [
            f"no problems in {count} file{'s' * (count != 1)}"
        ]
        write_text("\n".join(map(printable_lines, lines)) + "\n", None)
    if result.has_errors:
        raise typer.Exit(1)


def printable_lines(text: str) -> str:
    return "\n".join(map(make_printable, text.split("\n")))


def _row(one: LintFinding) -> dict[str, object]:
    return {
        "severity": one.severity,
        "rank": one.rank,
        "code": one.code,
        "count": one.count,
        "node": one.node,
        "example": one.example,
        "meaning": one.meaning,
        "remedy": one.remedy,
    }


def _line(one: LintFinding) -> str:
    where = "" if one.node is None else f"node {one.node}, "
    times = "" if one.count == 1 else f", {one.count:,} times"
    example = " ".join(one.example.split())
    return f"{one.severity}: rank {one.rank}: {one.code}{times} ({where}{example})\n    {one.meaning}: {one.remedy}"
