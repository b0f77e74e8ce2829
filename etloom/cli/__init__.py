"""The command ``etloom``: one file a verb, each a few lines over `etloom.api`.

Results go to stdout, messages and progress to stderr. The exit status is 0; 1 for an error of the input, told
in one line; 2 for wrong usage; 70 for a fault of ours; 130 after Ctrl-C. What a verb needs is imported when
it runs, so that ``etloom --help`` answers at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

import etloom
from etloom.cli._guard import guarded
from etloom.cli.analyze import Analyses, analyze
from etloom.cli.check import check
from etloom.cli.collect import collect
from etloom.cli.convert import convert
from etloom.cli.diff import diff
from etloom.cli.export import export
from etloom.cli.gather import gather
from etloom.cli.info import info
from etloom.cli.link import link
from etloom.cli.lint import lint
from etloom.cli.query import query
from etloom.cli.replay import app as replay
from etloom.cli.report import report
from etloom.cli.salvage import salvage
from etloom.cli.simulate import simulate

__all__ = ["app", "main"]

app = typer.Typer(
    name="etloom",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"etloom {etloom.__version__}")
        raise typer.Exit


@app.callback()
def _etloom(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Collect, read, link, analyse, query, report and export execution traces of machine-learning jobs.

    Examples:

    \b
      etloom collect --out run/ --steps 3:5 -- torchrun --nproc-per-node 2 train.py
      etloom info run/
      etloom report run/
    """


# What follows the command of `collect` is the command's own, and PATH of `analyze` is the sub-command's.
app.command(
    short_help="Run a command and record some of its training steps.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)(collect)
app.command(short_help="Put what several hosts recorded into one folder.")(gather)
app.command(short_help="Say what traces there are.")(info)
app.command(short_help="Join operators, launches and device work; save it.")(link)
_analyses = typer.Typer(cls=Analyses, rich_markup_mode=None, pretty_exceptions_enable=False)
_analyses.callback(invoke_without_command=True)(analyze)
app.add_typer(_analyses, name="analyze", short_help="Answer a question about a run with a table.")
app.command(short_help="Answer an SQL SELECT over the tables.")(query)
app.command(short_help="Say what a run came to, and write it as a page.")(report)
app.command(short_help="Say what a run would have taken, had something been different.")(simulate)
app.command(short_help="Compare two runs.")(diff)
app.command(short_help="Fail where a run is slower than a baseline.")(check)
app.add_typer(replay, name="replay", short_help="Run the recorded communication again.")
app.command(short_help="Write traces in another format.")(export)
app.command(short_help="Check Chakra traces before a simulator does.")(lint)
app.command(short_help="Turn one trace file into another format.")(convert)
app.command(short_help="Make a truncated or damaged trace valid.")(salvage)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (default: this process's) and return its exit status."""
    try:
        with guarded():
            app(args=arguments, prog_name="etloom")
    except SystemExit as leave:
        return leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    return 0
