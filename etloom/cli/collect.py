"""etloom collect: run a command with a window of its training steps recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from etloom.cli._guard import guarded, say


@guarded()
def collect(
    command: Annotated[
        list[str],
        typer.Argument(help="The command to run, after --.", show_default=False, metavar="-- COMMAND..."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the traces.", show_default=False)],
    steps: Annotated[str, typer.Option(help="Steps to record, as a slice: 3:5 is steps 3 and 4.")] = "3:5",
    shapes: Annotated[bool, typer.Option(help="Record the shapes of operators' inputs.")] = True,
    stack: Annotated[bool, typer.Option("--stack", help="Record Python stacks.")] = False,
    memory: Annotated[bool, typer.Option("--memory", help="Record allocations.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the traces of an earlier run.")
    ] = False,
    report: Annotated[bool, typer.Option("--report", help="Write and tell the report afterwards.")] = False,
) -> None:
    """Run a training command, unchanged, and record some of its steps on every rank.

    Each rank writes an execution trace and a Kineto trace of the same steps. The exit status is the command's.

    Examples:

    \b
      etloom collect --out run/ -- python train.py --epochs 1
      etloom collect --out run/ --steps 10:12 -- torchrun --nproc-per-node 8 train.py
      etloom collect --out run/ --stack --memory --report -- python train.py
    """
    from etloom.collector import launch

    collected = launch(command, out, steps, shapes=shapes, stack=stack, memory=memory, overwrite=overwrite)
    for warning in collected.warnings:
        say(warning)
    if collected.ranks:
        say(f"recorded {_ranks(collected.ranks)} in {out}; next: etloom report {out}")
    if report and collected.ranks:
        from etloom.cli.report import write_report

        write_report(out)
    raise typer.Exit(collected.returncode)


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"
