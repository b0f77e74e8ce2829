"""etloom replay: run what a run recorded again, one file a part."""

from __future__ import annotations

import click
import typer

from etloom.cli.replay.comms import comms
from etloom.cli.replay.compute import compute
from etloom.cli.replay.full import full

__all__ = ["app", "replay"]

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False
)


@app.callback()
def _replay() -> None:
    """Run what a run recorded again, and measure it.

    Examples:

    \b
      etloom replay comms run/ --dry-run
      torchrun --nproc-per-node 2 -m etloom replay comms run/ --backend gloo
      etloom replay compute run/ --device cpu
    """


app.command(short_help="The recorded collectives and messages, on real processes.")(comms)
app.command(short_help="The recorded operators of a rank, on this machine.")(compute)
app.command(short_help="Both, in the recorded order, on real processes.")(full)


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}, add_help_option=False
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def replay(words: tuple[str, ...]) -> int | None:
    """Pass the words to the typer commands, until these are click commands."""
    status: int | None = app(args=list(words), prog_name="etloom replay", standalone_mode=False)
    return status
