"""etloom lint: problems of Chakra files, found before a simulator uses them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from etloom.cli.command import PATH_TYPE, Argument, command
from etloom.cli.error_handling import make_printable


@command(
    Argument(
        ["path"],
        type=PATH_TYPE,
        required=True,
        metavar="PATH",
        help="A file NAME.RANK.et, or a folder with the files of a job.",
    ),
    click.Option(
        ["--format", "-f"], type=click.Choice(["text", "json"]), default="text", help="Output format."
    ),
)
def lint(path: Path, format: str) -> None:
    """Check Chakra traces for problems that keep a simulator such as ASTRA-sim from running them or make results wrong.

    Finds dependencies on missing nodes or in cycles, duplicate ids, missing attributes, groups and messages on which
    ranks disagree; explains each and how to fix it. The exit status is 1 if there are errors.

    Examples:

    \b
      etloom export run/ --out sim/job.et && etloom lint sim/
      etloom lint job.0.et --format json
    """
    import etloom
    from etloom.cli.output import write_text

    result = etloom.lint(path)
    rows = result.table.to_dicts()
    if format == "json":
        write_text("[" + ",\n ".join(map(json.dumps, rows)) + "]\n", None)
    else:
        count = len(result.files)
        texts = [_format_problem(row) for row in rows] or [f"no problems in {count} file{'s' * (count != 1)}"]
        write_text(
            "\n".join(make_printable(line) for text in texts for line in text.split("\n")) + "\n", None
        )
    if result.has_errors:
        raise click.exceptions.Exit(1)


def _format_problem(row: dict[str, Any]) -> str:
    node = "" if row["node"] is None else f"node {row['node']}, "
    times = "" if row["count"] == 1 else f", {row['count']:,} times"
    example = " ".join(row["example"].split())
    return (
        f"{row['severity']}: rank {row['rank']}: {row['code']}{times} ({node}{example})\n"
        f"    {row['meaning']}: {row['remedy']}"
    )
