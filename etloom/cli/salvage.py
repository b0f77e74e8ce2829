"""etloom salvage: a truncated or damaged JSON trace made valid, and a killed run finished."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from etloom.cli._guard import guarded, say
from etloom.cli._output import Format, emit, progress


@guarded()
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

    from etloom.salvage import default_out
    from etloom.salvage import salvage as rescue

    target = out or default_out(path)
    with progress(f"salvaging {path}") as update:
        found = rescue(path, target, partial(update, path))
    if found.whole:
        say(f"{path}: nothing to repair in {found.kept:,} rows; nothing was written")
        return
    counts = [("kept", found.kept, None), ("kept, of them repaired", found.repaired, None)]
    rows = [*counts, *((what, count, first or None) for what, (count, first) in found.troubles.items())]
    emit(pl.DataFrame(rows, schema=["what", "count", "example"], orient="row"), Format.table, None)
    say(f"wrote {target}")


def _salvage_run(folder: Path, out: Path | None) -> None:
    from etloom.cli._collected import afterwards, note_steps
    from etloom.collector import ends, files, leftovers

    if out is not None:
        raise typer.BadParameter("a run is finished in its own folder", param_hint="--out")
    kept, warnings = leftovers.salvage(folder)
    for warning in warnings:
        say(warning)
    if kept:
        for place in (folder, *files.windows_in(folder)):
            with afterwards(f"{place}: nobody knows which steps are whole"):
                note_steps(place)
        say(f"{folder}: {ends.told(kept)}; {ends.what_is_left(kept)}; next: etloom info {folder}")
    else:
        say(f"{folder}: nothing more to keep")
