"""etloom gather: put what several hosts recorded into one folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from etloom.cli.error_handling import handle_errors, print_message


@handle_errors()
def gather(
    folders: Annotated[
        list[Path], typer.Argument(readable=False, help="Folders of one job, one a host.", metavar="DIR...")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder for all of it.", show_default=False)],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the traces of an earlier run.")
    ] = False,
    same_job: Annotated[
        bool,
        typer.Option("--same-job", help="They are of one job, whatever they say: clocks may be far off."),
    ] = False,
) -> None:
    """Put the traces that several hosts wrote to disks of their own into one folder.

    Ranks keep their numbers, run.json and the workload card are written anew; the folders stay as they are. What two
    folders hold of a rank is taken once where it is the same recording. Traces of different jobs are refused: ranks
    that met in torch.distributed are known by it, others by batch system, world size and time.

    Examples:

    \b
      etloom gather node0/run node1/run --out run
      etloom gather /shared/run-* --out run
    """
    from etloom.collector.recovery import gathering
    from etloom.collector.session.messages import count_noun

    gathered = gathering.gather(folders, out, overwrite=overwrite, same_job=same_job)
    for warning in gathered.warnings:
        print_message(warning)
    for window, ranks in gathered.windows.items():
        where = out / window.relative_to(gathered.out)
        print_message(f"{where}: {count_noun(len(ranks), 'rank')}; next: etloom report {where}")
