"""etloom convert: one trace file in another format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from etloom.cli._guard import guarded, say
from etloom.cli._output import progress


@guarded()
def convert(
    path: Annotated[Path, typer.Argument(help="A trace file.", show_default=False, metavar="FILE")],
    out: Annotated[Path, typer.Argument(help="What to write.", show_default=False, metavar="OUT")],
    to: Annotated[
        str | None,
        typer.Option("--to", help="The format; by default the end of OUT says.", show_default=False),
    ] = None,
) -> None:
    """Turn one trace file into another format as it is, without linking it.

    A Kineto file too large for memory becomes Parquet part by part.

    Examples:

    \b
      etloom convert kineto_trace_0.json.gz rank0.parquet
      etloom convert torch_et_0.json et0.parquet
    """
    import etloom

    with progress(f"converting {path}") as update:
        etloom.convert(path, out, to, progress=update)
    say(f"wrote {out}")
