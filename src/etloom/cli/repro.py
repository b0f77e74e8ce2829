"""etloom repro: write a folder with a script that runs one recorded operator or collective."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import click

from etloom.cli.command import Flag, command
from etloom.cli.error_handling import print_message
from etloom.cli.run_arguments import RunOptions, RunPath, open_job


@command()
def repro(
    *,
    path: RunPath,
    event: Annotated[
        int,
        "The id of the event, from column event of etloom analyze tasks or column id of table events.",
        Flag(type=click.IntRange(min=0)),
    ],
    out: Annotated[Path, "The folder to write; an earlier one is replaced.", Flag("-o")],
    rank: Annotated[int | None, "The rank of the event; default: the lowest."] = None,
    run: RunOptions,
) -> None:
    """Write a folder with a script that runs one recorded operator or collective with torch alone.

    repro.py calls the operator with its recorded shapes, strides, types and values, compares the result with float64 on
    the CPU, measures its time next to the recorded one, and prints the command that profiles its kernels. A collective
    runs under torchrun. The script contains no text of the trace but the name of an operator of torch.

    Examples:

    \b
      etloom analyze tasks run/
      etloom repro run/ --event 1234 --out mm/ && python mm/repro.py
      etloom repro run/ --rank 3 --event 88 --out reduce/ && torchrun --nproc-per-node 4 reduce/repro.py
    """
    import etloom

    folder = etloom.repro(open_job(path, run), event, out, rank=rank)
    print_message(f"wrote {out}; next: less {shlex.quote(str(folder / 'README.md'))}")
