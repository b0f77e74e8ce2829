"""etloom query: SQL over the tables of a job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from etloom.cli._guard import guarded, say, usage
from etloom.cli._input import CacheOption, JobsOption, RankPatternOption, StrictOption, open_job
from etloom.cli._output import FormatOption, OutOption, chosen_format, emit

if TYPE_CHECKING:
    import polars as pl


@guarded()
def query(
    path: Annotated[
        Path | None,
        typer.Argument(
            readable=False, help="A folder of traces, or one trace file.", show_default=False, metavar="PATH"
        ),
    ] = None,
    sql: Annotated[str | None, typer.Argument(help="A SELECT.", show_default=False, metavar="SQL")] = None,
    format: FormatOption = None,
    out: OutOption = None,
    rank_pattern: RankPatternOption = None,
    strict: StrictOption = False,
    jobs: JobsOption = None,
    cache: CacheOption = True,
    tables: Annotated[bool, typer.Option("--tables", help="List tables and columns and exit.")] = False,
) -> None:
    """Answer an SQL SELECT over the tables of all ranks; each table has a column rank. Times are in ns.

    The dialect is that of polars (https://docs.pola.rs/api/python/stable/reference/sql); no query reads a file.
    Exit status: 1 where this run cannot answer, 2 where no run could.

    Examples:

    \b
      etloom query run/ "select rank, cat, count(*) n from events group by rank, cat order by n desc"
      etloom query run/ "select name, sum(dur) dur_ns from events group by name order by dur_ns desc limit 10"
      etloom query run/ "select * from stats" --format json
      etloom query --tables
    """
    chosen_format(format, out)
    if tables:
        emit(_declared(), format, out)
    elif path is None or sql is None:
        raise typer.BadParameter("say what to open and what to select: PATH SQL")
    else:
        from etloom.sql import check

        with usage("sql"):
            check(sql)  # before all is read
        job = open_job(path, rank_pattern, strict, jobs, cache, lazy=True)
        for name, _, _, example in job.own_stats.iter_rows():
            if name == "job.not_linked":
                say(f"{path}: {example}")
        emit(job.query(sql), format, out)


def _declared() -> pl.DataFrame:
    """The columns of all tables."""
    import polars as pl

    from etloom.schema import TABLES

    names = ["table", "column", "type", "unit", "meaning"]
    rows = [
        (table.name, column.name, str(column.dtype), column.unit, column.meaning)
        for table in TABLES.values()
        for column in table.columns
    ]
    return pl.DataFrame(rows, schema=names, orient="row")
