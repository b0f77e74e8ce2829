"""etloom query: SQL over the tables of a job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from etloom.cli.error_handling import as_usage_error, handle_errors, print_message
from etloom.cli.output import FormatOption, OutOption, choose_format, write_table
from etloom.cli.run_arguments import CacheOption, JobsOption, RankPatternOption, StrictOption, open_job

if TYPE_CHECKING:
    import polars as pl


@handle_errors()
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
    choose_format(format, out)
    if tables:
        write_table(_list_columns(), format, out)
    elif path is None or sql is None:
        raise typer.BadParameter("say what to open and what to select: PATH SQL")
    else:
        from etloom.core.sql import check_query

        with as_usage_error("sql"):
            check_query(sql)  # before all is read
        job = open_job(path, rank_pattern, strict, jobs, cache, lazy=True)
        for name, _, _, example in job.run_stats.iter_rows():
            if name == "job.not_linked":
                print_message(f"{path}: {example}")
        write_table(job.query(sql), format, out)


def _list_columns() -> pl.DataFrame:
    """The columns of all tables."""
    import polars as pl

    from etloom.core.schema import TABLES

    names = ["table", "column", "type", "unit", "meaning"]
    rows = [
        (table.name, column.name, str(column.dtype), column.unit, column.meaning)
        for table in TABLES.values()
        for column in table.columns
    ]
    return pl.DataFrame(rows, schema=names, orient="row")
