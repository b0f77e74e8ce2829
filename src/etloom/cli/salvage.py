"""etloom salvage: repairs a truncated or damaged JSON trace, or completes the recording of a killed job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from etloom.cli.command import Flag, Positional, command
from etloom.cli.error_handling import print_message
from etloom.cli.output import Format, show_progress, write_table

if TYPE_CHECKING:
    from etloom.api.files import SalvagedRun
    from etloom.formats.io.salvage import SalvagedFile


@command()
def salvage(
    *,
    path: Annotated[Path, "A damaged trace, or the folder of a killed run.", Positional("PATH")],
    out: Annotated[
        Path | None,
        "The new file; .gz and .zst are compressed. Default: x.salvaged.json next to x.json.",
        Flag("-o"),
    ] = None,
) -> None:
    """Repair a truncated or damaged trace: an execution trace or a Kineto trace, plain, gzip or zstd.

    Every complete node or event is kept. Names that PyTorch did not escape are escaped, a missing end is added, and
    what could not be saved is listed. A valid file is left as it is.

    For a folder in which `etloom collect` recorded and was killed together with its job: keep what the ranks had
    recorded, which until then is in a hidden folder.

    Examples:

    \b
      etloom salvage torch_et_0.json
      etloom salvage kineto_trace_0.json.gz --out whole/kineto_trace_0.json.gz
      etloom salvage run/
    """
    import etloom
    from etloom.api.files import SalvagedRun

    if path.is_dir() and out is not None:
        raise click.BadParameter("a run is completed in its own folder", param_hint="--out")
    with show_progress(f"salvaging {path}") as update:
        result = etloom.salvage(path, out, progress=update)
    if isinstance(result, SalvagedRun):
        _print_run(path, result)
    else:
        _print_file(path, result)


def _print_file(path: Path, result: SalvagedFile) -> None:
    import polars as pl

    if result.is_intact:
        print_message(f"{path}: nothing to repair in {result.kept:,} rows; nothing was written")
        return
    rows: list[tuple[str, int, str | None]] = [
        ("kept", result.kept, None),
        ("kept after repair", result.repaired, None),
        *((problem, count, first or None) for problem, (count, first) in result.problems.items()),
    ]
    frame = pl.DataFrame(rows, schema=["what", "count", "example"], orient="row")
    write_table(frame, Format.table, None)
    print_message(f"wrote {result.path}")


def _print_run(folder: Path, result: SalvagedRun) -> None:
    for warning in result.warnings:
        print_message(warning)
    next_step = f"; next: etloom info {folder}" if result.ranks else ""
    print_message(f"{folder}: {result.summary}{next_step}")
