"""Write the generated pages of docs/reference from what the code declares: python docs/generate_reference.py.

Each function that ends in ``_page`` returns the text of one page; tests/project/test_docs.py compares it with the file.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import click

import etloom
from etloom.cli import app
from etloom.core import registry
from etloom.core.schema import TABLES, UNITS, Column
from etloom.core.stats import DECLARED_STATS

FOLDER = Path(__file__).parent / "reference"
HELP_WIDTH = 100


def row(*cells: str) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in cells)} |\n"


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(header)
    return row(*names) + row(*("---" for _ in names)) + "".join(row(*cells) for cells in rows)


def type_name(column: Column) -> str:
    return "text" if str(column.dtype).startswith("Categorical") else str(column.dtype)


def tables_page() -> str:
    """The tables of a Trace with their columns, types and units."""
    text = (
        "# Tables\n\nThe tables of a `Trace` (`trace.events`, ...) and, with a column `rank` first, of a `Job`. "
        "`etloom query` runs SQL over them. Absent values are null. Times are nanoseconds since the Unix epoch where "
        'the file states its base, else since the file\'s own zero (`meta["clock"]`). `id` numbers the rows of a '
        "table when it is read and stays with the row; a foreign key names the table whose `id` it holds.\n"
    )
    for declared in TABLES.values():
        rows = (
            (
                f"`{column.name}`",
                type_name(column),
                column.unit or "",
                column.meaning + (f" (`{column.refers}.id`)" if column.refers else ""),
            )
            for column in declared.columns
        )
        text += f"\n## {declared.name}\n\n{declared.meaning}\n\n{table(('column', 'type', 'unit', 'meaning'), rows)}"
    return text


def stats_page() -> str:
    """The names that rows of the table `stats` bear, with their meaning and remedy."""
    text = (
        "# Data quality: the names in `stats`\n\nNothing is dropped, repaired or inferred in silence: each case is a "
        "row of the table `stats` (name, severity, count, example). Severities: `info` (nothing is lost), `data_loss` "
        "(part of the input was skipped), `error` (an answer may be wrong). `etloom info` and the report show the "
        "rows; `--strict` turns the last two into exit status 1.\n\n"
    )
    return text + table(
        ("name", "severity", "meaning", "what to do"),
        ((f"`{stat.name}`", stat.severity, stat.meaning, stat.remedy) for stat in DECLARED_STATS),
    )


def analyses_page() -> str:
    """The analyses with what they answer, their options, units and columns."""
    text = (
        '# Analyses\n\n`etloom analyze NAME run/`, or `etloom.analyze(job, "name")`. `etloom analyze NAME --help` '
        "explains columns and options. Formulas are in [flops](../flops.md), the rules behind `findings` in "
        "[findings](../findings.md), HTA's names for the same in [coming from HTA](../coming-from-hta.md). Unknown "
        "values are null. A column name ends in its unit: "
        + ", ".join(f"`{end}` {unit}" for end, unit in UNITS.items())
        + ". Other numbers count or identify something.\n"
    )
    for name in registry.list_plugins("analyses"):
        module = registry.get("analyses", name)
        docstring = inspect.cleandoc(module.__doc__ or "")
        notes = [
            " ".join(part.split())
            for part in docstring.split("\n\n")
            if re.match(r"(?:Units|Definitions?):", part)
        ]
        scope = "one table for the job" if module.SCOPE == "job" else "per rank"
        text += f"\n## {name}\n\n{registry.get_summary('analyses', name)} ({scope})\n\n"
        text += "".join(f"{note}\n\n" for note in notes)
        text += f"Columns: {', '.join(f'`{column}`' for column in module.COLUMNS)}\n"
        if options := registry.list_options("analyses", name):
            text += "\n" + table(
                ("option", "default", "meaning"),
                ((f"`{option.name}`", f"`{option.default!r}`", option.help) for option in options),
            )
    return text


def cli_page() -> str:
    """The help of every verb of the command line."""
    text = "# Command line\n\nExit statuses are listed in [exit status](../exit-status.md).\n"

    def add(command: click.Command, parent: click.Context | None, name: str) -> str:
        width = {"terminal_width": HELP_WIDTH, "max_content_width": HELP_WIDTH}
        context = click.Context(
            command, parent=parent, info_name=name, **{**command.context_settings, **width}
        )
        page = f"\n## {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n"
        if isinstance(command, click.Group) and (parent is None or name != "analyze"):
            for verb in command.list_commands(context):
                if (child := command.get_command(context, verb)) is not None:
                    page += add(child, context, verb)
        return page

    return text + add(app, None, "etloom")


def api_page() -> str:
    """The public functions and classes, for mkdocstrings to fill in."""
    text = (
        "# Python API\n\nEvery verb takes a `Job`, a `Trace`, or a path, which it opens first. "
        "Errors are `etloom.EtloomError` with one line that says what is wrong, where, and what to do.\n"
    )
    return text + "".join(f"\n::: etloom.{name}\n" for name in etloom.__all__)


PAGES: dict[str, Callable[[], str]] = {
    "tables.md": tables_page,
    "stats.md": stats_page,
    "analyses.md": analyses_page,
    "cli.md": cli_page,
    "api.md": api_page,
}


if __name__ == "__main__":
    for file, build_page in PAGES.items():
        (FOLDER / file).write_text(build_page(), encoding="utf-8")
