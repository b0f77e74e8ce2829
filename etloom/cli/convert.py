"""etloom convert: one trace file in another format."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from etloom.cli.error_handling import as_usage_error, check_finite, handle_errors, print_message
from etloom.cli.output import show_progress


class Unit(str, enum.Enum):
    ns = "ns"
    us = "us"
    ms = "ms"
    s = "s"


@handle_errors()
def convert(
    path: Annotated[
        Path, typer.Argument(readable=False, help="A trace file.", show_default=False, metavar="FILE")
    ],
    out: Annotated[
        Path | None, typer.Argument(help="What to write.", show_default=False, metavar="OUT")
    ] = None,
    out_option: Annotated[
        Path | None, typer.Option("--out", "-o", help="The same as OUT.", show_default=False)
    ] = None,
    to: Annotated[
        str | None,
        typer.Option("--to", help="The format; by default the end of OUT says.", show_default=False),
    ] = None,
    time_column: Annotated[
        str | None,
        typer.Option(
            "--time-column", help="Of a file of metrics: the column that is the time.", show_default=False
        ),
    ] = None,
    unit: Annotated[
        Unit | None,
        typer.Option("--unit", help="Of a file of metrics: what a time counts.", show_default=False),
    ] = None,
    utc_offset: Annotated[
        float | None,
        typer.Option(
            "--utc-offset",
            callback=check_finite,
            help="Of a file of metrics: hours by which dates without a zone are ahead of UTC.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Turn one trace file into another format as it is, without linking it.

    A Kineto file too large for memory becomes Parquet part by part. Samples of any kind (CSV, JSON lines, Parquet)
    become counters; beside the traces of a run, what was converted is read with them, on the clock of the run.

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
        raise typer.BadParameter("say once what to write: etloom convert FILE OUT")
    with as_usage_error("to" if to else "out"):
        registry.get("exports", to or registry.find_by_suffix("exports", target))
    given = {"time_column": time_column, "unit": unit and unit.value, "utc_offset": utc_offset}
    mapping = {name: value for name, value in given.items() if value is not None}
    with show_progress(f"converting {path}") as update:
        etloom.convert(path, target, to, progress=update, reader="metrics" if mapping else None, **mapping)
    print_message(f"wrote {target}")
