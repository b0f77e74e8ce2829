"""Reads tables of an untrusted SQLite file to columns, with the limits of all readers.

The programs that write these files create tables on demand, and their columns vary by version: an absent table is
empty, an absent column is null.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import polars as pl

from etloom.core.errors import EtloomError, ReadError
from etloom.core.schema import Stat
from etloom.formats.io.compression import DECOMPRESSION_ERRORS, decompressed_file
from etloom.formats.io.limits import check_bytes, check_ratio, check_rows, max_rows, max_table_bytes
from etloom.formats.tables.building import build_series

if TYPE_CHECKING:
    from typing_extensions import Self

I64, TEXT = pl.Int64, pl.String
MAGIC = b"SQLite format 3\0"
_ROWS = 100_000
_ROW_IDS = {"rowid", "_rowid_", "oid"}
"""Names of SQLite's number of a row, which a column of that name would hide."""
_COMPLETE = (1 << 63) - 1
_CHECK_BYTES = 1 << 20
"""Bytes of text after which the limits are checked again."""
_ERRORS = (sqlite3.Error, UnicodeError)  # the message of an error may quote invalid UTF-8


def int_columns(names: str) -> dict[str, Any]:
    """Return a dict with type int64 for each column named in a space-separated text."""
    return dict.fromkeys(names.split(), I64)


def list_tables(path: Path) -> frozenset[str]:
    """Return the names of the tables of a SQLite file, which may be compressed; none if it cannot be read."""
    with (
        contextlib.suppress(EtloomError, *DECOMPRESSION_ERRORS),
        decompressed_file(path, ".db") as plain,
        SqliteFile.open(plain) as source,
    ):
        return frozenset(source.tables)
    return frozenset()


class SqliteFile:
    """A SQLite file of another program, opened read-only.

    Only ordinary tables are read: a view or a virtual table of a malicious file could run any query.
    """

    remedy: ClassVar[str] = "record it again, or copy it again"
    """Remedy for a file that SQLite cannot open."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self.path = path
        self.stats: list[Stat] = []
        self._connection = connection
        self._size = path.stat().st_size
        self._text_bytes = self._next_check = 0
        journal = path.with_name(path.name + "-wal")
        if journal.is_file() and journal.stat().st_size:
            example = f"{journal.name} holds rows that are not in the file: sqlite3 {path.name} 'pragma wal_checkpoint'"
            self.stats.append(Stat("read.damaged_table", "data_loss", 1, example))
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
    def open(cls, path: Path) -> Iterator[Self]:
        """Open a file as a context manager. Raises ReadError if the file is not a readable SQLite database."""
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
                    f"is not a readable SQLite file: {error}", where=path, remedy=cls.remedy
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

    def read_table(self, table: str, columns: Mapping[str, Any], where: str = "") -> pl.DataFrame:
        """Read columns of a table, cast to the types in ``columns``; absent columns are null.

        Args:
            table: The table; if it is absent, the result is empty.
            columns: Name of a column -> its type.
            where: A condition in SQL that the rows fulfil, by default none.
        """
        present = {name: dtype for name, dtype in columns.items() if name in self.tables.get(table, ())}
        parts, last = ([], None) if where else self._read_integers(table, present)
        if last is not None:
            where = f"rowid > {last}"
        present = present if where else self._select_non_empty(table, present)
        if not present:
            return pl.DataFrame(schema=dict(columns))
        # binaryData is declared TEXT yet holds bytes.
        selected = ", ".join(
            f"CAST({_quote(name)} AS BLOB)" if dtype == pl.Binary else _quote(name)
            for name, dtype in present.items()
        )
        sql = f"SELECT {selected} FROM {_quote(table)}" + (f" WHERE {where}" if where else "")  # noqa: S608
        if last != _COMPLETE:
            parts += self.query(table, sql, present)
        frame = pl.concat(parts) if parts else pl.DataFrame(schema=present)
        return frame.select(
            pl.col(name) if name in present else pl.lit(None, dtype=dtype).alias(name)
            for name, dtype in columns.items()
        )

    def _read_integers(self, table: str, columns: Mapping[str, Any]) -> tuple[list[pl.DataFrame], int | None]:
        """Read columns of integers as lines of CSV that SQLite writes, which takes half the time of Python's objects.

        Anything else than integers and null, and damage, ends the reading: the other rows are left to `query`, which
        counts what it cannot read. A text of digits, which a column of integers cannot hold, counts as its number.

        Returns:
            The rows in parts; the rowid of the last one, None if none was read, `_COMPLETE` if all were.
        """
        is_usable = len(columns) > 1 and set(columns.values()) == {I64}
        if not is_usable or {name.lower() for name in self.tables[table]} & _ROW_IDS:
            return [], None
        names = ", ".join(_quote(name) for name in columns)
        layout = ",".join(["%.24s"] * len(columns))  # texts, which do not belong there, are cut
        sql = (
            f"SELECT max(row), count(*), CAST(group_concat(line, char(10)) AS BLOB) FROM (SELECT rowid AS row, "  # noqa: S608
            f"printf('{layout}', {names}) AS line FROM {_quote(table)} WHERE rowid > ? ORDER BY rowid LIMIT {_ROWS})"
        )
        parts: list[pl.DataFrame] = []
        last, rows_read, limit = None, 0, max_rows()
        while True:
            try:
                bound = -_COMPLETE if last is None else last
                row, count, lines = self._connection.execute(sql, (bound,)).fetchone()
                if not count:
                    return (parts, _COMPLETE) if rows_read == self.count_rows(table) else ([], None)
                if row <= bound:
                    return [], None  # in a damaged file rows are not in order, and a search misses some
                part = pl.read_csv(lines, has_header=False, schema=dict(columns), quote_char=None)
            except (*_ERRORS, pl.exceptions.PolarsError):
                return parts, last
            if part.height != count:
                return parts, last
            rows_read += count
            check_rows(rows_read, self.path, limit)
            parts.append(part)
            last = row

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

    def query(
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
                Stat("read.damaged_table", "data_loss", 1, f"{table}: {error} after {rows_read:,} rows")
            )
        if wrong:
            self.stats.append(
                Stat(
                    "read.wrong_type",
                    "data_loss",
                    wrong,
                    f"{table} has values of a wrong type: now null",
                )
            )


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
