"""etloom export: write traces in another format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from etloom.cli._guard import guarded, say
from etloom.cli._input import CacheOption, JobsOption, PathArgument, RankPatternOption, StrictOption, open_job


@guarded()
def export(
    path: PathArgument,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The file or folder to write.", show_default=False)
    ],
    to: Annotated[
        str | None,
        typer.Option("--to", help="The format; by default the end of --out says.", show_default=False),
    ] = None,
    rank: Annotated[int | None, typer.Option(help="Only this rank.")] = None,
    rank_pattern: RankPatternOption = None,
    strict: StrictOption = False,
    jobs: JobsOption = None,
    cache: CacheOption = True,
) -> None:
    """Write the linked traces of a run in another format: chrome (for Perfetto), parquet.

    Examples:

    \b
      etloom export run/ --out run.json.gz       # open it at https://ui.perfetto.dev
      etloom export run/ --out run.parquet       # read it with polars, DuckDB, Spark
      etloom export run/ --rank 0 --to chrome --out rank0.json
    """
    import etloom
    from etloom.errors import UnknownName

    job = open_job(path, rank_pattern, strict, jobs, cache)
    if rank is not None and rank not in job:
        raise UnknownName("rank", str(rank), map(str, job))
    etloom.export(job if rank is None else job[rank], out, to)
    say(f"wrote {out}")
