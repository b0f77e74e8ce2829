"""etloom convert: converts one trace file to another format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import click

from etloom.cli.command import Flag, Positional, command
from etloom.cli.error_handling import as_usage_error, print_message
from etloom.cli.output import show_progress


@command()
def convert(
    *,
    path: Annotated[Path, "A trace file.", Positional("FILE")],
    out: Annotated[Path | None, "The file to write.", Positional("OUT")] = None,
    out_option: Annotated[Path | None, "The same as OUT.", Flag("--out", "-o")] = None,
    to: Annotated[str | None, "The format; default: from the ending of OUT."] = None,
    time_column: Annotated[str | None, "Metrics files: the column that contains the time."] = None,
    unit: Annotated[Literal["ns", "us", "ms", "s"] | None, "Metrics files: unit of the time."] = None,
    utc_offset: Annotated[
        float | None, "Metrics files: the time zone of dates without one, as offset from UTC in hours."
    ] = None,
) -> None:
    """Convert one trace file to another format as it is, without linking it.

    A Chakra file becomes Chakra's nodes if OUT ends in .json (a Chrome trace with --to chrome). A Kineto file too large
    for memory is converted to Parquet part by part. Samples of any kind (CSV, JSON lines, Parquet) become counters; a
    converted file next to the traces of a run is read with them, on the clock of the run.

    Examples:

    \b
      etloom convert kineto_trace_0.json.gz rank0.parquet
      etloom convert torch_et_0.json et0.parquet
      etloom convert samples.csv run/samples.parquet --time-column when --unit ms
    """
    import etloom
    from etloom.core import registry

    target = out or out_option
    if target is None or (out and out_option):
        raise click.UsageError("expected the file to write exactly once: etloom convert FILE OUT")
    with as_usage_error("to" if to else "out"):
        registry.get("exports", to or registry.find_by_suffix("exports", target))
    values = {"time_column": time_column, "unit": unit, "utc_offset": utc_offset}
    options = {name: value for name, value in values.items() if value is not None}
    with show_progress(f"converting {path}") as update:
        file = etloom.convert(
            path, target, to, progress=update, reader="metrics" if options else None, **options
        )
    print_message(f"wrote {file}")
