"""etloom replay: re-runs recorded communication and operators; one file per subcommand."""

from __future__ import annotations

import click

from etloom.cli.command import CONTEXT_SETTINGS
from etloom.cli.replay.comms import comms
from etloom.cli.replay.compute import compute
from etloom.cli.replay.full import full

__all__ = ["replay"]


@click.group(context_settings=CONTEXT_SETTINGS, commands={"comms": comms, "compute": compute, "full": full})
def replay() -> None:
    """Re-run the recorded communication, computation or both, and measure it.

    Examples:

    \b
      etloom replay comms run/ --dry-run
      torchrun --nproc-per-node 2 -m etloom replay comms run/ --backend gloo
      etloom replay compute run/ --device cpu
    """
