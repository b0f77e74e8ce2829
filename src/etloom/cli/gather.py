"""etloom gather: copies the traces of several hosts into one folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from etloom.cli.command import Flag, Positional, command
from etloom.cli.error_handling import print_message


@command()
def gather(
    *,
    folders: Annotated[tuple[Path, ...], "Folders of one job, one per host.", Positional("DIR...")],
    out: Annotated[Path, "The folder for all traces.", Flag("-o")],
    overwrite: Annotated[bool, "Replace the traces of an earlier run."] = False,
    same_job: Annotated[
        bool, "Accept the folders as one job without checking: their clocks may differ by any amount."
    ] = False,
) -> None:
    """Copy the traces that several hosts wrote to local disks into one folder.

    Ranks keep their numbers, run.json and the workload card are written again; the source folders are not changed. A
    rank whose same recording is in two folders is copied once. Traces of different jobs are refused: those whose world
    sizes, batch job ids or torchrun ids differ, or whose times lie apart if they are not of one launch.

    Examples:

    \b
      etloom gather node0/run node1/run --out run
      etloom gather /shared/run-* --out run
    """
    import etloom
    from etloom.core.text import count_noun

    result = etloom.gather(*folders, out=out, overwrite=overwrite, same_job=same_job)
    for warning in result.warnings:
        print_message(warning)
    for window, ranks in result.windows.items():
        path = out / window.relative_to(result.out)
        print_message(f"{path}: {count_noun(len(ranks), 'rank')}; next: etloom report {path}")
