"""Runs SQL SELECT statements over tables; they cannot read files. The dialect is that of polars
(https://docs.pola.rs/api/python/stable/reference/sql)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Literal

import polars as pl

from etloom.core.errors import EtloomError, InvalidValue, UnknownName
from etloom.core.schema import TABLES

_CATEGORICAL_AS_TEXT = pl.col(pl.Categorical).cast(pl.String)
"""Text functions and LIKE do not take Categorical; as it is lazy, only what the query touches is cast."""
_TOKEN = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`(?:[^`]|``)*`""")
_CALL_PARENTHESIS = re.compile(r"\s*\(")
_AMBIGUOUS_TEXT = re.compile(r"[\\$#]|--|/\*")
_PREFIXED_TEXT = re.compile(r"[\w&]''")
"""Matches syntax that makes the end of a string literal uncertain: escapes, dollar quotes, comments, prefixes such as
q'[...]'."""
_FILE_FUNCTION = re.compile(r"(?<!\w)(?:read|scan)_\w+", re.IGNORECASE)
_FILE_CALL = re.compile(_FILE_FUNCTION.pattern + r"[^\w,]*\(", re.IGNORECASE)
_NAME = re.compile(r"\w+")
_GROUPING = re.compile(
    r"\s*select\s+(?P<items>[^;'\"`]+?)\s+from\s+\w+\s+group\s+by\s+(?P<keys>[\w\s,]+?)"
    r"(?:\s+order\s+by\s+(?P<order>[^;'\"`]+?))?(?:\s+limit\s+\d+)?\s*;?\s*",
    re.IGNORECASE,
)
"""Matches a query that groups one table by its columns."""
_FILE_SCAN_PLAN = re.compile(r"^\s*(?!DF\b)\w+ SCAN\b", re.MULTILINE)


MAX_QUERY_CHARACTERS = 10_000
"""Polars plans recursively: a chain of some thousand UNIONs ends the process."""


def run_query(
    scan: Callable[[str], pl.LazyFrame],
    sql: str,
    engine: Literal["in-memory", "streaming"],
    max_rows: int | None = None,
) -> pl.DataFrame:
    """Run an SQL SELECT over the tables of `etloom.core.schema`.

    Args:
        scan: Returns a table by name.
        sql: The query.
        engine: The engine of polars that collects the result.
        max_rows: Rows of the result after which the query ends; None: all.

    Returns:
        The result; text columns are strings, and an unnamed count(*) is called count.

    Raises:
        UnknownName: A table or column does not exist.
        EtloomError: The query is not a SELECT, reads a file, or is refused by polars.
    """
    # Only what the text may name is put together: a Job has tables times ranks frames.
    named = [name for name in TABLES if re.search(rf"\b{name}\b", sql, re.IGNORECASE)]
    tables = {name: scan(name) for name in named}
    frames = {name: table.with_columns(_CATEGORICAL_AS_TEXT) for name, table in tables.items()}
    schemas = {name: frame.collect_schema() for name, frame in frames.items()}
    check_query(sql, schemas)
    try:
        if _only_groups_by_categories(sql, tables):
            plan = _execute(tables, sql).with_columns(_CATEGORICAL_AS_TEXT)
        else:
            plan = _execute(frames, sql)
        table = (plan if max_rows is None else plan.head(max_rows)).collect(engine=engine)
    except pl.exceptions.PolarsError as error:
        raise _translate_error(str(error), sql, schemas) from None
    unnamed = "len" in table.columns and "count" not in table.columns and not re.search(r"\blen\b", sql)
    return table.rename({"len": "count"}) if unnamed else table


def _only_groups_by_categories(sql: str, tables: Mapping[str, pl.LazyFrame]) -> bool:
    """Return whether a query uses categorical columns only as plain keys of GROUP BY, without functions.

    Then their text is needed of the result only, which halves the time of such a query.
    """
    match = _GROUPING.fullmatch(sql)
    if match is None or len(tables) != 1 or _AMBIGUOUS_TEXT.search(sql):
        return False
    (schema,) = (table.collect_schema() for table in tables.values())
    categorical = "|".join(name for name, dtype in schema.items() if dtype == pl.Categorical)
    items = [item.strip() for item in match["items"].split(",")]
    order = match["order"] or ""
    keys = [key.strip() for key in match["keys"].split(",")]
    others = [order, *(item for item in items if item not in keys)]
    by_position = re.search(r"\b\d+\b", order)
    return all(map(_NAME.fullmatch, keys)) and not (
        by_position or any(re.search(rf"\b(?:{categorical})\b", text, re.IGNORECASE) for text in others)
    )


def check_query(sql: str, schemas: Mapping[str, pl.Schema] | None = None) -> None:
    """Check that a query is a valid SELECT over the tables, without reading their data.

    Args:
        sql: The query.
        schemas: Columns of the tables (default: those of a Job).

    Raises:
        UnknownName: A table or column does not exist.
        EtloomError: The query is not a SELECT, is too long, would open a file, or is refused by polars.
    """
    if len(sql) > MAX_QUERY_CHARACTERS:
        raise EtloomError(
            f"the query has {len(sql):,} characters, the maximum is {MAX_QUERY_CHARACTERS:,}",
            remedy="query parts of it, or use the tables from Python (etloom.open)",
        )
    if not re.match(r"(\s|\(|--.*\n)*(select|with)\b", sql, re.IGNORECASE):
        raise InvalidValue("the query is not a SELECT", remedy="write: select COLUMNS from TABLE")
    if opened := _find_file_function(sql):
        raise _file_access_error(opened)
    table_schemas = _job_schemas() if schemas is None else schemas
    try:
        # The plan over tables in memory says what polars made of the text, whatever functions it may come to know.
        plan = _execute({name: pl.LazyFrame(schema=schema) for name, schema in table_schemas.items()}, sql)
        if _FILE_SCAN_PLAN.search(plan.explain(optimized=False)):
            raise _file_access_error("a function of files")
        plan.collect_schema()
    except OSError as error:
        raise _file_access_error(f"a file ({error.strerror or 'that cannot be read'})") from None
    except pl.exceptions.PolarsError as error:
        raise _translate_error(str(error), sql, table_schemas) from None


def _job_schemas() -> dict[str, pl.Schema]:
    """Return the columns of a Job's tables as SQL queries see them: ``rank`` first, categorical columns as text."""
    empty = (pl.LazyFrame(schema={"rank": pl.Int64, **table.schema}) for table in TABLES.values())
    return {
        name: frame.with_columns(_CATEGORICAL_AS_TEXT).collect_schema()
        for name, frame in zip(TABLES, empty, strict=True)
    }


def _execute(frames: dict[str, pl.LazyFrame], sql: str) -> pl.LazyFrame:
    return pl.SQLContext(frames, eager=False).execute(sql)


def _find_file_function(sql: str) -> str | None:
    """Return the function by which the query would read a file, if there is one.

    Names within string literals are ignored if the literals can be recognized safely. Otherwise the name of such a
    function anywhere in the query is enough, because even a hidden call must contain it.
    """

    def without_text(token: re.Match[str]) -> str:
        # A text before a parenthesis is the name of a function.
        is_text = token[0].startswith("'") and not _CALL_PARENTHESIS.match(sql, token.end())
        return "''" if is_text else token[0]

    plain = _TOKEN.sub(without_text, sql)
    unsure = _AMBIGUOUS_TEXT.search(sql) or _PREFIXED_TEXT.search(plain)
    match = _FILE_FUNCTION.search(sql) if unsure else _FILE_CALL.search(plain)
    return re.sub(r"\W.*", "", match[0], flags=re.DOTALL) if match else None


def _file_access_error(function: str) -> EtloomError:
    return EtloomError(
        f"the query names {function}, which reads files; a query sees the tables of the run only",
        remedy=f"tables: {', '.join(TABLES)}",
    )


def _translate_error(reason: str, sql: str, schemas: Mapping[str, pl.Schema]) -> EtloomError:
    """Convert an error message of polars to a one-line error; for an unknown table or column, name a similar one."""
    if table := re.match(r"relation '(.*?)' was not found", reason):
        return UnknownName("table", table[1], TABLES)
    if column := re.match(r'unable to find column "(.*?)"; valid columns: \[(.*?)\]', reason):
        return UnknownName("column", column[1], re.findall(r'"(.*?)"', column[2]))
    if column := re.match(r"no column named '(.*?)' found in table '(.*?)'", reason):
        called = re.search(
            rf"\b({'|'.join(TABLES)})\s+(?:as\s+)?[\"`]?{re.escape(column[2])}\b", sql, re.IGNORECASE
        )
        table_name = called[1].lower() if called else column[2]
        if table_name in schemas:
            return UnknownName(f"column of {table_name}", column[1], schemas[table_name].names())
    return EtloomError(
        f"the query was refused: {reason.partition(chr(10))[0]}", remedy=f"tables: {', '.join(TABLES)}"
    )
