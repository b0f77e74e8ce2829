"""The command ``etloom``: one file a verb, each a few lines over `etloom.api`.

Results go to stdout, messages and progress to stderr. The exit status is 0; 1 for an error of the input, told
in one line; 2 for wrong usage; 70 for a fault of ours; 130 after Ctrl-C. What a verb needs is imported when
it runs, so that ``etloom --help`` answers at once.
"""

from __future__ import annotations

import gc
import importlib
import signal
import sys
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import etloom
from etloom.cli.error_handling import handle_errors

__all__ = ["app", "main"]

_VERBS = {
    "collect": "Run a command and record some of its training steps.",
    "gather": "Put what several hosts recorded into one folder.",
    "info": "Say what traces there are.",
    "link": "Join operators, launches and device work; save it.",
    "analyze": "Answer a question about a run with a table.",
    "query": "Answer an SQL SELECT over the tables.",
    "report": "Say what a run came to, and write it as a page.",
    "simulate": "Say what a run would have taken, had something been different.",
    "diff": "Compare two runs.",
    "check": "Fail where a run is slower than a baseline.",
    "replay": "Run what was recorded again: communication, computation, both.",
    "export": "Write traces in another format.",
    "lint": "Check Chakra traces before a simulator does.",
    "convert": "Turn one trace file into another format.",
    "salvage": "Make a truncated or damaged trace valid.",
}
"""Verb -> its short help. A verb is the function of its name in the module of its name, or that module's `app`."""
_SETTINGS = {"collect": {"ignore_unknown_options": True, "allow_interspersed_args": False}}
"""What follows the command of `collect` is the command's own."""
_SIGNAL_FORWARDERS = {"collect", "replay"}
"""Verbs of processes of others, to which a signal goes on."""


class VerbGroup(TyperGroup):
    """The verbs, of which only those are imported that are asked for."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.commands = dict.fromkeys(
            _VERBS, typer.core.TyperCommand("later")
        )  # suggested for a misspelt one

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _command(cmd_name) if cmd_name in _VERBS else None


@cache
def _command(verb: str) -> Any:
    module = importlib.import_module(f"etloom.cli.{verb}")
    made = getattr(module, "app", None)
    if made is None:
        made = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
        made.command(context_settings=_SETTINGS.get(verb))(getattr(module, verb))
    command = typer.main.get_command(made)
    command.name, command.short_help = verb, _VERBS[verb]
    return command


app = typer.Typer(
    name="etloom",
    cls=VerbGroup,
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


def _exit_on_signal(number: int, frame: object) -> None:
    """An end on which temporary files are removed."""
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (default: this process's) and return its exit status."""
    if arguments is None:
        gc.set_threshold(100_000, 50, 50)  # looking for cycles while libraries are imported costs 25 ms
        if not _SIGNAL_FORWARDERS.intersection(sys.argv[1:2]):
            signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        with handle_errors():
            status = app(args=arguments, prog_name="etloom", standalone_mode=False)
    except SystemExit as leave:
        return leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    return status or 0
