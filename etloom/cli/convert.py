"""etloom convert: converts one trace file to another format."""

from __future__ import annotations

from pathlib import Path

import click

from etloom.cli.command import PATH_TYPE, Argument, FiniteFloat, command
from etloom.cli.error_handling import as_usage_error, print_message
from etloom.cli.output import show_progress


@command(
    Argument(["path"], type=PATH_TYPE, required=True, metavar="FILE", help="A trace file."),
    Argument(["out"], type=PATH_TYPE, required=False, metavar="OUT", help="The file to write."),
    click.Option(["out_option", "--out", "-o"], type=PATH_TYPE, help="The same as OUT."),
    click.Option(["--to"], help="The format; default: from the ending of OUT."),
    click.Option(["--time-column"], help="Metrics files: the column that contains the time."),
    click.Option(
        ["--unit"], type=click.Choice(["ns", "us", "ms", "s"]), help="Metrics files: unit of the time."
    ),
    click.Option(
        ["--utc-offset"],
        type=FiniteFloat(),
        help="Metrics files: offset from UTC in hours of dates without a time zone.",
    ),
)
def convert(
    path: Path,
    out: Path | None,
    out_option: Path | None,
    to: str | None,
    time_column: str | None,
    unit: str | None,
    utc_offset: float | None,
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
