"""Reads the tables of an Nsight Systems export from SQLite or a folder of Parquet files, through one interface.

Nsight creates tables on demand, and their columns vary by version: an absent table is empty, an absent column is null.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import polars as pl

from etloom.core.schema import Stat
from etloom.formats.io.parquet_input import PARQUET_ERRORS, list_columns, read_columns
from etloom.formats.io.sqlite_file import I64, TEXT, SqliteFile, int_columns

__all__ = ["I64", "TEXT", "ExportFile", "ParquetExport", "SqliteExport", "int_columns"]

STRINGS = "StringIds"


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


class SqliteExport(SqliteFile):
    """An export of ``nsys export --type sqlite``."""

    remedy = "export the .nsys-rep again"

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
            parts.extend(self.query(STRINGS, sql, columns, batch))
        return pl.concat(parts) if parts else pl.DataFrame(schema=columns)


class ParquetExport:
    """An export of ``nsys export --type parquetdir``: TABLE.parquet for each table."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.stats: list[Stat] = []
        tables: dict[str, frozenset[str]] = {}
        for file in sorted(folder.glob("*.parquet")):
            try:
                tables[file.stem] = list_columns(file)
            except PARQUET_ERRORS as error:
                self._count_damage(file.stem, error)
        self.tables: Mapping[str, frozenset[str]] = tables

    def _count_damage(self, table: str, error: BaseException) -> None:
        self.stats.append(Stat("read.damaged_table", "data_loss", 1, f"{table}: {str(error)[:200]}"))

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
            return read_columns(self.path / f"{table}.parquet", columns, "read.wrong_type", self.stats)
        except PARQUET_ERRORS as error:
            self._count_damage(table, error)
            return pl.DataFrame(schema=dict(columns))

    def read_strings(self, ids: pl.Series) -> pl.DataFrame:
        return self.read_table(STRINGS, {"id": pl.Int64, "value": pl.String}).join(
            pl.DataFrame({"id": ids.cast(pl.Int64)}), on="id", how="semi"
        )
