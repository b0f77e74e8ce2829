"""etloom salvage: repair of a truncated or damaged JSON trace, completion of a killed recording."""

from __future__ import annotations

from pathlib import Path

import click

from etloom.cli.command import PATH_TYPE, Argument, command
from etloom.cli.error_handling import print_message
from etloom.cli.output import Format, show_progress, write_table


@command(
    Argument(
        ["path"],
        type=PATH_TYPE,
        required=True,
        metavar="PATH",
        help="A damaged trace, or the folder of a killed run.",
    ),
    click.Option(
        ["--out", "-o"],
        type=PATH_TYPE,
        help="The new file; .gz and .zst are compressed. Default: x.salvaged.json next to x.json.",
    ),
)
def salvage(path: Path, out: Path | None) -> None:
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
    if path.is_dir():
        _salvage_run(path, out)
    else:
        _salvage_file(path, out)


def _salvage_file(path: Path, out: Path | None) -> None:
    import polars as pl

    import etloom

    with show_progress(f"salvaging {path}") as update:
        result = etloom.salvage(path, out, progress=update)
    if result.is_whole:
        print_message(f"{path}: nothing to repair in {result.kept:,} rows; nothing was written")
        return
    rows = [("kept", result.kept, None), ("kept after repair", result.repaired, None)]
    rows += [(what, count, first or None) for what, (count, first) in result.problems.items()]
    frame = pl.DataFrame(rows, schema=["what", "count", "example"], orient="row")
    write_table(frame, Format.table, None)
    print_message(f"wrote {result.path}")


def _salvage_run(folder: Path, out: Path | None) -> None:
    import etloom

    if out is not None:
        raise click.BadParameter("a run is completed in its own folder", param_hint="--out")
    result = etloom.salvage(folder)
    for warning in result.warnings:
        print_message(warning)
    following = f"; next: etloom info {folder}" if result.ranks else ""
    print_message(f"{folder}: {result.summary}{following}")
