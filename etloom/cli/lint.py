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

    Dependencies that lead nowhere or in circles, ids that occur twice, attributes that are missing, groups and
    messages on which ranks do not agree. Says what each means and how to mend it. The exit status is 1 if there are
    errors.

    Examples:

    \b
      etloom export run/ --out sim/job.et && etloom lint sim/
      etloom lint job.0.et --format json
    """
    from etloom.cli.output import write_text
    from etloom.exports.chakra_lint.file_rules import lint as check
    from etloom.formats.chakra.et_files import find_rank_files

    found = check(path)
    if format is LintFormat.json:
        write_text("[" + ",\n ".join(json.dumps(_row(one)) for one in found) + "]\n", None)
    else:
        count = len(find_rank_files(path))
        lines = [_line(one) for one in found] or [f"nothing to mend in {count} file{'s' * (count != 1)}"]
        write_text("\n".join(map(printable_lines, lines)) + "\n", None)
    if any(one.severity == "error" for one in found):
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
