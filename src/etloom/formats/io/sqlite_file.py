"""Reads tables of an untrusted SQLite file to columns, with the limits of all readers.

The programs that write these files create tables on demand, and their columns vary by version: an absent table is
empty, an absent column is null.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import polars as pl

from etloom import _native
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
_PAGE_TYPES = {I64: 0, pl.Float64: 1, TEXT: 2, pl.Binary: 3}
"""Types of columns as `read_sqlite_table` numbers them."""
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


@dataclass(frozen=True)
class _Layout:
    """The records of a table in its pages."""

    root: int
    places: Mapping[str, int]
    row_number: str | None
    """The column that is the number of the row."""
    defaults: frozenset[str]
    """Columns that have a value in rows that do not state it."""
    reals: frozenset[str]
    """Columns that are declared as real: their records also hold whole numbers."""


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
        tables = connection.execute(
            "SELECT name, rootpage, sql FROM sqlite_master WHERE type = 'table' AND rootpage > 0 "
            "AND typeof(rootpage) = 'integer' AND typeof(name) = 'text'"
        ).fetchall()
        columns = {
            name: connection.execute(f"PRAGMA table_xinfo({_quote(name)})").fetchall() for name, *_ in tables
        }
        self.tables: Mapping[str, frozenset[str]] = {
            name: frozenset(row[1] for row in info if not row[6]) for name, info in columns.items()
        }
        self._layouts = {
            name: _find_layout(columns[name], root, str(definition)) for name, root, definition in tables
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

    def read_table(self, table: str, columns: Mapping[str, Any]) -> pl.DataFrame:
        """Read columns of a table, cast to the types in ``columns``; absent columns are null.

        Args:
            table: The table; if it is absent, the result is empty.
            columns: Name of a column -> its type.
        """
        present = {name: dtype for name, dtype in columns.items() if name in self.tables.get(table, ())}
        if not present:
            return pl.DataFrame(schema=dict(columns))
        frame = self._read_pages(table, present)
        if frame is None:
            parts = list(self.query(table, _select(table, present), present))
            frame = pl.concat(parts) if parts else pl.DataFrame(schema=present)
        return frame.select(
            pl.col(name) if name in present else pl.lit(None, dtype=dtype).alias(name)
            for name, dtype in columns.items()
        )

    def _read_pages(self, table: str, columns: Mapping[str, Any]) -> pl.DataFrame | None:
        """Read columns from the pages of a table, in about half of the time; None if SQLite has to read them.

        It has to where the table is damaged, or not of the form that recorders write: then `query` counts what it
        cannot read.
        """
        layout = self._layouts.get(table)
        if layout is None or any(columns[name] == I64 for name in layout.reals & columns.keys()):
            return None
        wanted = sorted((layout.places[name], name) for name in columns)
        limit = max_rows()
        read = _native.read_sqlite_table(
            os.fsencode(self.path),
            self._size,
            layout.root,
            [
                (name, place, _PAGE_TYPES[columns[name]], name == layout.row_number, name in layout.defaults)
                for place, name in wanted
            ],
            limit,
        )
        if read is None:
            return None
        values, rows, wrong_type_counts = read
        check_rows(rows, self.path, limit)
        series = {name: pl.Series(column) for name, column in values.items()}
        counts = {name: count for (_, name), count in zip(wanted, wrong_type_counts, strict=True)}
        binary = {name: dtype for name, dtype in columns.items() if dtype == pl.Binary}
        filled = {name: pl.Binary for name in binary if counts[name]}
        if filled:
            stat_count = len(self.stats)
            content = pl.concat(self.query(table, _select(table, filled), filled))
            if content.height != rows:
                del self.stats[stat_count:]  # the damage will be counted again
                return None
            series |= content.to_dict()
        for name in binary.keys() - filled.keys():
            series[name] = pl.Series(name, dtype=pl.Binary).extend_constant(None, rows)
        self._count_wrong(table, sum(count for name, count in counts.items() if name not in binary))
        return pl.DataFrame({name: series[name].cast(dtype) for name, dtype in columns.items()})

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
        self._count_wrong(table, wrong)

    def _count_wrong(self, table: str, count: int) -> None:
        if count:
            example = f"{table} has values of a wrong type: now null"
            self.stats.append(Stat("read.wrong_type", "data_loss", count, example))


def _find_layout(info: Sequence[tuple[Any, ...]], root: int, definition: str) -> _Layout | None:
    """Return how the records of a table are laid out; None if they have columns that are not stored.

    ``info``: rows of `PRAGMA table_xinfo`.
    """
    keys = [row for row in info if row[5]]
    is_number = len(keys) == 1 and str(keys[0][2]).upper() == "INTEGER"
    # With PRIMARY KEY DESC the column is not the number of the row.
    if any(row[6] for row in info) or (is_number and re.search(r"\bDESC\b", definition, re.IGNORECASE)):
        return None
    places = {row[1]: row[0] for row in info}
    defaults = frozenset(row[1] for row in info if row[4] is not None)
    reals = frozenset(row[1] for row in info if re.search("REAL|FLOA|DOUB", str(row[2]), re.IGNORECASE))
    return _Layout(root, places, keys[0][1] if is_number else None, defaults, reals)


def _select(table: str, columns: Mapping[str, Any]) -> str:
    """Return the SQL that selects columns of a table."""
    # binaryData is declared TEXT yet holds bytes.
    selected = ", ".join(
        f"CAST({_quote(name)} AS BLOB)" if dtype == pl.Binary else _quote(name)
        for name, dtype in columns.items()
    )
    return f"SELECT {selected} FROM {_quote(table)}"  # noqa: S608


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
