"""Write the generated pages of the documentation from what the code declares: python docs/generate_reference.py.

Each function that ends in ``_page`` returns the text of one page; tests/project/test_docs.py compares it with the file.
The reports of the gallery are not kept: mkdocs calls `on_files` of this file, which makes them for the site.
"""

from __future__ import annotations

import inspect
import io
import re
import shlex
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import click

import etloom
from etloom.cli import app, main
from etloom.core import registry
from etloom.core.schema import TABLES, UNITS, Column
from etloom.core.stats import DECLARED_STATS

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reference"
GALLERY = ROOT / "build" / "gallery"
HELP_WIDTH = 100


class Example(NamedTuple):
    """A page of the gallery, and how to read it."""

    title: str
    recording: str
    reading: str
    commands: tuple[str, ...]
    """Run in the root of the repository; the last one writes the page and prints its first finding first."""

    @property
    def page(self) -> Path:
        return Path(shlex.split(self.commands[-1])[-1])


EXAMPLES = (
    Example(
        "Three planted problems",
        "The recording of `etloom demo`: three steps of `examples/train_with_problems.py` on two ranks, CPU and gloo.",
        "The first three findings are the three problems of the script. The button next to a finding shows its place "
        "in the timeline. The summary states how much of a step is computation, communication and idle.",
        ("etloom report src/etloom/cli/demo/recording --out build/gallery/demo.html",),
    ),
    Example(
        "The same job, before and after a predicted repair",
        "The recording above, and a simulation of it in which rank 1 works like rank 0.",
        "The comparison judges whether a step is shorter beyond noise, then splits the change by category, operator, "
        "collective, rank and step. Three steps are too few for a verdict, and the page says so.",
        (
            "etloom simulate src/etloom/cli/demo/recording --like-peers 1 --out build/gallery/repaired.parquet",
            "etloom diff src/etloom/cli/demo/recording build/gallery/repaired.parquet --html build/gallery/diff.html",
        ),
    ),
    Example(
        "Data-parallel training",
        "Two steps of `tests/data/ddp_2/make.py`: DistributedDataParallel on two ranks, CPU and gloo.",
        "Each rank has a row in the table of ranks and tracks of its own in the timeline. The two steps differ much, "
        "so the mean of the step time stands next to its deviation.",
        ("etloom report tests/data/ddp_2 --out build/gallery/data_parallel.html",),
    ),
    Example(
        "One GPU",
        "Two steps of `benchmarks/gpu/small.py`, a small network on an H200.",
        "Kernels are so short that the GPU waits for their launches. The timeline shows host operators, launches and "
        "the streams below each other; the table of operators has both host and GPU time.",
        ("etloom report tests/data/gpu_small --out build/gallery/gpu.html",),
    ),
    Example(
        "A pipeline",
        "Two steps of `examples/train_parallel.py pipeline`: two stages, four micro-batches, CPU and gloo.",
        "The stages exchange many small messages. What a stage loses while the pipeline fills and drains is in the "
        "finding `stragglers`, apart from the transfers.",
        ("etloom report tests/data/pipeline_2 --out build/gallery/pipeline.html",),
    ),
    Example(
        "GPU memory, forecast without a GPU",
        "One step of two stages of `examples/train_gpt.py`, recorded without a GPU with `etloom collect --fake-world 2 "
        "--ranks 0,1 --steps 0:1 -- python examples/train_gpt.py --pipeline 2 --layers 4 --width 1024 --heads 8 "
        "--length 512 --vocabulary 8192 --micro-batches 4`.",
        "The chart shows memory over time by kind: parameters, gradients, optimizer, activations. A click shows what "
        "holds memory at that moment.",
        ("etloom report tests/data/memory_forecast --out build/gallery/memory.html",),
    ),
)


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


def patterns_page() -> str:
    """The patterns of `findings`: what each finds, what it costs, and with which confidence."""
    text = (
        "# Patterns of findings\n\n`etloom findings run/ --pattern NAME` selects one. How findings are ordered, and "
        "what their columns mean, is in [findings](../findings.md).\n"
    )
    for name in registry.list_plugins("patterns"):
        docstring = inspect.cleandoc(registry.get("patterns", name).__doc__ or "")
        text += f"\n## {name}\n\n{re.sub('(?m)^Confidence:', chr(10) + 'Confidence:', docstring)}\n"
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


def run_example(example: Example) -> str:
    """Run the commands of an example; return what the last one prints.

    Raises:
        SystemExit: a command failed; with the message that it printed.
    """
    printed = ""
    for command in example.commands:
        words = [str(ROOT / word) if "/" in word else word for word in shlex.split(command)[1:]]
        with redirect_stdout(io.StringIO()) as output, redirect_stderr(io.StringIO()) as messages:
            status = main(words)
        printed = output.getvalue()
        if status:
            raise SystemExit(f"{command}: exit status {status}: {messages.getvalue()}")
    return printed


def gallery_page() -> str:
    """The examples of the gallery with the first finding that each report states."""
    GALLERY.mkdir(parents=True, exist_ok=True)
    text = (
        "# Gallery\n\nReports of small recordings that are in the repository. A report is one file that needs no "
        "server: it opens offline and loads nothing. The documentation's build runs the commands below, so the links "
        "lead to a page on the site only; in a clone, the commands write the same pages.\n"
    )
    for example in EXAMPLES:
        finding = re.sub(r"\s{2,}", ": ", run_example(example).splitlines()[0])
        commands = "\n".join(example.commands)
        text += (
            f"\n## {example.title}\n\n{example.recording} [Open the page](gallery/{example.page.name}).\n\n"
            f"> {finding}\n\n{example.reading}\n\n```sh\n{commands}\n```\n"
        )
    return text


def on_files(files: Any, *, config: Any) -> Any:
    """Add the reports of the gallery to the site: called by mkdocs, whose build fails if a report cannot be made."""
    from mkdocs.structure.files import File

    GALLERY.mkdir(parents=True, exist_ok=True)
    for example in EXAMPLES:
        run_example(example)
        page = ROOT / example.page
        files.append(File.generated(config, f"gallery/{page.name}", abs_src_path=str(page)))
    return files


PAGES: dict[str, Callable[[], str]] = {
    "tables.md": tables_page,
    "stats.md": stats_page,
    "analyses.md": analyses_page,
    "findings.md": patterns_page,
    "cli.md": cli_page,
    "api.md": api_page,
    "../gallery.md": gallery_page,
}


if __name__ == "__main__":
    for file, build_page in PAGES.items():
        (FOLDER / file).write_text(build_page(), encoding="utf-8")
