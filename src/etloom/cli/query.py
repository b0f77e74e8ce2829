"""etloom query: runs an SQL query over the tables of a run."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from etloom.cli.command import FiniteFloat, Flag, Positional, command
from etloom.cli.error_handling import as_usage_error, print_message
from etloom.cli.limited_process import LimitedProcess
from etloom.cli.output import TableOptions, choose_format, write_table
from etloom.cli.run_arguments import RunOptions, open_job

if TYPE_CHECKING:
    import polars as pl

    from etloom.core.trace import Job

MAX_SECONDS = 1e8
MAX_GB = 1e9


@dataclass(frozen=True)
class QueryLimits:
    """Options of the command that limit a query: seconds, and gigabytes of memory."""

    time_limit: Annotated[
        float | None,
        "End with an error if the query takes longer, not counting the time for reading the run.",
        Flag(type=FiniteFloat(min=0, min_open=True, max=MAX_SECONDS), metavar="SECONDS"),
    ] = None
    memory_limit: Annotated[
        float | None,
        "End with an error if the query needs more memory, not counting the memory of the opened run.",
        Flag(type=FiniteFloat(min=0, min_open=True, max=MAX_GB), metavar="GB"),
    ] = None


@command()
def query(
    *,
    path: Annotated[Path | None, "A folder of traces, or one trace file.", Positional("PATH")] = None,
    sql: Annotated[str | None, "A SELECT statement.", Positional("SQL")] = None,
    table: TableOptions,
    run: RunOptions,
    limits: QueryLimits,
    tables: Annotated[bool, "List tables and columns and exit."] = False,
) -> None:
    """Run an SQL SELECT over the tables of all ranks; each table has a column rank. Times are in ns, and
    values are shown as they are, whatever the name of their column.

    The dialect is that of polars (https://docs.pola.rs/api/python/stable/reference/sql); no query can read a file.
    Exit status: 1 if this run cannot answer, 2 if no run could.

    Examples:

    \b
      etloom query run/ "select rank, cat, count(*) n from events group by rank, cat order by n desc"
      etloom query run/ "select name, sum(dur) ns from events where dur > 0 group by name order by ns desc limit 10"
      etloom query run/ "select * from stats" --format json
      etloom query --tables
    """
    choose_format(table.format, table.out)
    if tables:
        write_table(_list_columns(), table.format, table.out)
        return
    if path is None or sql is None:
        raise click.UsageError("expected a path and a SELECT statement: PATH SQL")
    from etloom.core.sql import check_query

    with as_usage_error("sql"):
        check_query(sql)  # before the run is opened
    if limits == QueryLimits():
        result = _open_run(path, run).query(sql)
    else:
        result = _query_within_limits(path, run, sql, limits)
    write_table(result, table.format, table.out, raw=True)


def _query_within_limits(path: Path, run: RunOptions, sql: str, limits: QueryLimits) -> pl.DataFrame:
    from etloom.core.trace import Job

    memory = None if limits.memory_limit is None else round(limits.memory_limit * 1e9)
    process = LimitedProcess(functools.partial(_open_run, path, run), memory)
    try:
        table: pl.DataFrame = process.call(Job.query, sql, seconds=limits.time_limit, topic="query")
        return table
    finally:
        process.close()


def _open_run(path: Path, run: RunOptions) -> Job:
    job = open_job(path, run, lazy=True)
    for name, _, _, example in job.run_stats.iter_rows():
        if name == "job.not_linked":
            print_message(f"{path}: {example}")
    return job


def _list_columns() -> pl.DataFrame:
    """Return a table with one row per column of every table."""
    import polars as pl

    from etloom.core.schema import TABLES

    rows = [
        (table.name, column.name, str(column.dtype), column.unit, column.meaning)
        for table in TABLES.values()
        for column in table.columns
    ]
    return pl.DataFrame(rows, schema=["table", "column", "type", "unit", "meaning"], orient="row")
