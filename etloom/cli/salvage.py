"""etloom salvage: a truncated or damaged JSON trace made valid, and a killed run finished."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from etloom.cli.error_handling import handle_errors, print_message
from etloom.cli.output import Format, show_progress, write_table


@handle_errors()
def salvage(
    path: Annotated[
        Path,
        typer.Argument(
            readable=False,
            help="A damaged trace, or the folder of a killed run.",
            show_default=False,
            metavar="PATH",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="The new file; .gz and .zst are packed. By default x.salvaged.json beside x.json.",
        ),
    ] = None,
) -> None:
    """Make a valid trace of a truncated or damaged one: an execution trace or a Kineto trace, plain, gzip or zstd.

    Every whole node or event is kept. Names that PyTorch did not escape are escaped, a missing end is written, and
    what could not be saved is listed. A valid file is left alone.

    Of a folder that `etloom collect` recorded into, and was killed with its job: keep what the ranks had recorded,
    which lies in a hidden folder until then.

    Examples:

    \b
      etloom salvage torch_et_0.json
      etloom salvage kineto_trace_0.json.gz --out whole/kineto_trace_0.json.gz
      etloom salvage run/
    """
    if path.is_dir():
        _salvage_run(path, out)
        return
    import polars as pl

    from etloom.formats.io.salvage import default_output_path
    from etloom.formats.io.salvage import salvage as rescue

    target = out or default_output_path(path)
    with show_progress(f"salvaging {path}") as update:
        found = rescue(path, target, partial(update, path))
    if found.whole:
        print_message(f"{path}: nothing to repair in {found.kept:,} rows; nothing was written")
        return
    counts = [("kept", found.kept, None), ("kept, of them repaired", found.repaired, None)]
    rows = [*counts, *((what, count, first or None) for what, (count, first) in found.troubles.items())]
    write_table(pl.DataFrame(rows, schema=["what", "count", "example"], orient="row"), Format.table, None)
    print_message(f"wrote {target}")


def _salvage_run(folder: Path, out: Path | None) -> None:
    from etloom.cli.collect_output import record_whole_steps, report_failures
    from etloom.collector import process_endings, run_folder
    from etloom.collector.recovery import killed_windows

    if out is not None:
        raise typer.BadParameter("a run is finished in its own folder", param_hint="--out")
    kept, warnings = killed_windows.salvage_run(folder)
    for warning in warnings:
        print_message(warning)
    if kept:
        for place in (folder, *run_folder.list_windows(folder)):
            with report_failures(f"{place}: nobody knows which steps are whole"):
                record_whole_steps(place)
        print_message(
            f"{folder}: {process_endings.describe_endings(kept)}; {process_endings.describe_kept(kept)}; next: etloom info {folder}"
        )
    else:
        print_message(f"{folder}: nothing more to keep")
