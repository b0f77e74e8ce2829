"""etloom query: SQL over the tables of a job."""

from __future__ import annotations

from typing import Annotated

import typer

from etloom.cli._guard import guarded
from etloom.cli._input import CacheOption, JobsOption, PathArgument, RankPatternOption, StrictOption, open_job
from etloom.cli._output import FormatOption, OutOption, emit


@guarded()
def _tables(asked: bool) -> None:
    if asked:
        import polars as pl

        from etloom.schema import TABLES

        rows = [
            (table.name, column.name, str(column.dtype), column.unit, column.meaning)
            for table in TABLES.values()
            for column in table.columns
        ]
        emit(
            pl.DataFrame(rows, schema=["table", "column", "type", "unit", "meaning"], orient="row"),
            None,
            None,
        )
        raise typer.Exit


@guarded()
def query(
    path: PathArgument,
    sql: Annotated[str, typer.Argument(help="A SELECT.", show_default=False, metavar="SQL")],
    format: FormatOption = None,
    out: OutOption = None,
    rank_pattern: RankPatternOption = None,
    strict: StrictOption = False,
    jobs: JobsOption = None,
    cache: CacheOption = True,
    tables: Annotated[
        bool,
        typer.Option("--tables", callback=_tables, is_eager=True, help="List tables and columns and exit."),
    ] = False,
) -> None:
    """Answer an SQL SELECT over the tables of all ranks; each table has a column rank. Times are in ns.

    Examples:

    \b
      etloom query run/ "select rank, cat, count(*) n from events group by rank, cat order by n desc"
      etloom query run/ "select name, sum(dur) dur_ns from events group by name order by dur_ns desc limit 10"
      etloom query run/ "select * from stats" --format json
    """
    emit(open_job(path, rank_pattern, strict, jobs, cache).query(sql), format, out)
