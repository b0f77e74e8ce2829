"""Reads the tables of an Nsight Systems export from SQLite or a folder of Parquet files, through one interface.

Nsight creates tables on demand, and their columns vary by version: an absent table is empty, an absent column is null.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import polars as pl

from etloom.core.errors import ReadError
from etloom.core.parquet_errors import PARQUET_ERRORS
from etloom.core.schema import Stat
from etloom.formats.io.limits import check_bytes, check_ratio, check_rows, max_rows, max_table_bytes
from etloom.formats.io.parquet_input import read_columns
from etloom.formats.tables.building import build_series

STRINGS = "StringIds"
I64, TEXT = pl.Int64, pl.String
_ROWS = 100_000
_CHECK_BYTES = 1 << 20
"""Bytes of text after which the limits are checked again."""
_ERRORS = (sqlite3.Error, UnicodeError)  # the message of an error may quote invalid UTF-8


def int_columns(names: str) -> dict[str, Any]:
    """Return a dict with type int64 for each column named in a space-separated text."""
    return dict.fromkeys(names.split(), I64)


class ExportFile(Protocol):
    """Interface of an Nsight Systems export, a SQLite file or a folder of Parquet files."""

    tables: Mapping[str, frozenset[str]]
    """The columns of each table."""
    stats: list[Stat]

    def read_table(self, table: str, columns: Mapping[str, Any]) -> pl.DataFrame:
        """Read columns of a table, cast to the types in ``columns``, in file order; absent columns are null."""
        ...

    def count_rows(self, table: str) -> int:
        """Return the number of rows of a table; 0 if it is absent."""
        ...

    def read_strings(self, ids: pl.Series) -> pl.DataFrame:
        """Look up string ids in the table StringIds; return a frame with the columns id and value (text)."""
        ...


class SqliteExport:
    """An export of ``nsys export --type sqlite``, opened read-only.

    Only ordinary tables are read: a view or a virtual table of a malicious file could run any query.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self.path = path
        self.stats: list[Stat] = []
        self._connection = connection
        self._size = path.stat().st_size
        self._text_bytes = self._next_check = 0
        connection.text_factory = self._decode_text
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA query_only = ON")
        names = [
            row[0]
            for row in connection.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table' AND rootpage > 0"
            )
        ]
        self.tables: Mapping[str, frozenset[str]] = {
            name: frozenset(row[1] for row in connection.execute(f"PRAGMA table_info({_quote(name)})"))
            for name in names
        }

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path) -> Iterator[SqliteExport]:
        """Open a SQLite export as a context manager. Raises ReadError if the file is not a readable SQLite database."""
        # immutable: SQLite neither looks for a journal nor writes next to the user's file.
        uri = path.resolve().as_uri() + "?mode=ro&immutable=1"
        try:
            connection = sqlite3.connect(uri, uri=True)
        except _ERRORS as error:
            raise ReadError(f"cannot be opened: {error}", where=path) from None
        with contextlib.closing(connection):
            try:
                source = cls(connection, path)
            except _ERRORS as error:
                raise ReadError(
                    f"is not a readable SQLite file: {error}", where=path, remedy="export the .nsys-rep again"
                ) from None
            yield source

    def _decode_text(self, raw: bytes) -> str:
        """Decode a text; of invalid UTF-8 only the invalid bytes are lost. Raises LimitError.

        In a damaged file many rows may share the pages of one long text.
        """
        self._text_bytes += len(raw)
        if self._text_bytes > self._next_check:
            self._next_check = self._text_bytes + _CHECK_BYTES
            check_bytes(self._text_bytes, self.path, max_table_bytes())
            check_ratio(self._size, self._text_bytes, self.path)
        return raw.decode("utf-8", "replace")

    def count_rows(self, table: str) -> int:
        if table not in self.tables:
            return 0
        try:
            return int(self._connection.execute(f"SELECT count(*) FROM {_quote(table)}").fetchone()[0])  # noqa: S608
        except _ERRORS:
            return 0  # read_table counts the damage

    def read_table(self, table: str, columns: Mapping[str, Any]) -> pl.DataFrame:
        present = {name: dtype for name, dtype in columns.items() if name in self.tables.get(table, ())}
        present = self._select_non_empty(table, present)
        if not present:
            return pl.DataFrame(schema=dict(columns))
        # binaryData is declared TEXT yet holds bytes.
        selected = ", ".join(
            f"CAST({_quote(name)} AS BLOB)" if dtype == pl.Binary else _quote(name)
            for name, dtype in present.items()
        )
        parts = list(self._query(table, f"SELECT {selected} FROM {_quote(table)}", present))  # noqa: S608
        frame = pl.concat(parts) if parts else pl.DataFrame(schema=present)
        return frame.select(
            pl.col(name) if name in present else pl.lit(None, dtype=dtype).alias(name)
            for name, dtype in columns.items()
        )

    def _select_non_empty(self, table: str, columns: dict[str, Any]) -> dict[str, Any]:
        """Return the requested columns that have a non-null value; counting is faster than reading empty columns."""
        if len(columns) < 2:
            return columns
        counts = ", ".join(f"count({_quote(name)})" for name in columns)
        try:
            row = self._connection.execute(f"SELECT {counts}, count(*) FROM {_quote(table)}").fetchone()  # noqa: S608
        except _ERRORS:
            return columns
        non_empty = {name: dtype for (name, dtype), count in zip(columns.items(), row, strict=False) if count}
        return non_empty if non_empty or not row[-1] else dict([next(iter(columns.items()))])

    def _query(
        self, table: str, sql: str, columns: Mapping[str, Any], parameters: tuple[int, ...] = ()
    ) -> Iterator[pl.DataFrame]:
        rows_read = wrong = 0
        limit = max_rows()
        try:
            cursor = self._connection.execute(sql, parameters)
            while rows := cursor.fetchmany(_ROWS):
                columns_read = [
                    build_series(name, values, dtype)
                    for (name, dtype), values in zip(columns.items(), zip(*rows, strict=True), strict=True)
                ]
                wrong += sum(lost for _, lost in columns_read)
                rows_read += len(rows)
                check_rows(rows_read, self.path, limit)
                yield pl.DataFrame([series for series, _ in columns_read])
        except _ERRORS as error:
            self.stats.append(
                Stat("read.nsys_damaged_table", "data_loss", 1, f"{table}: {error} after {rows_read:,} rows")
            )
        if wrong:
            self.stats.append(
                Stat(
                    "read.nsys_wrong_type",
                    "data_loss",
                    wrong,
                    f"{table} has values of a wrong type: now null",
                )
            )

    def read_strings(self, ids: pl.Series) -> pl.DataFrame:
        columns = {"id": pl.Int64, "value": pl.String}
        if not columns.keys() <= self.tables.get(STRINGS, frozenset()) or ids.is_empty():
            return pl.DataFrame(schema=columns)
        if ids.len() * 4 > self.count_rows(STRINGS):
            return self.read_table(STRINGS, columns)
        requested = ids.to_list()
        parts: list[pl.DataFrame] = []
        for begin in range(0, len(requested), 30_000):  # SQLite takes 32,766 parameters
            batch = tuple(requested[begin : begin + 30_000])
            sql = f"SELECT id, value FROM {STRINGS} WHERE id IN ({','.join('?' * len(batch))})"  # noqa: S608
            parts.extend(self._query(STRINGS, sql, columns, batch))
        return pl.concat(parts) if parts else pl.DataFrame(schema=columns)


class ParquetExport:
    """An export of ``nsys export --type parquetdir``: TABLE.parquet for each table."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.stats: list[Stat] = []
        tables: dict[str, frozenset[str]] = {}
        for file in sorted(folder.glob("*.parquet")):
            try:
                tables[file.stem] = frozenset(pl.read_parquet_schema(file))
            except PARQUET_ERRORS as error:
                self._count_damage(file.stem, error)
        self.tables: Mapping[str, frozenset[str]] = tables

    def _count_damage(self, table: str, error: BaseException) -> None:
        self.stats.append(Stat("read.nsys_damaged_table", "data_loss", 1, f"{table}: {str(error)[:200]}"))

    def count_rows(self, table: str) -> int:
        if table not in self.tables:
            return 0
        return int(
            pl.scan_parquet(self.path / f"{table}.parquet", glob=False).select(pl.len()).collect().item()
        )

    def read_table(self, table: str, columns: Mapping[str, Any]) -> pl.DataFrame:
        if table not in self.tables:
            return pl.DataFrame(schema=dict(columns))
        try:
            return read_columns(self.path / f"{table}.parquet", columns, "read.nsys_wrong_type", self.stats)
        except PARQUET_ERRORS as error:
            self._count_damage(table, error)
            return pl.DataFrame(schema=dict(columns))

    def read_strings(self, ids: pl.Series) -> pl.DataFrame:
        return self.read_table(STRINGS, {"id": pl.Int64, "value": pl.String}).join(
            pl.DataFrame({"id": ids.cast(pl.Int64)}), on="id", how="semi"
        )


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
