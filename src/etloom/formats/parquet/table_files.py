"""Reads, scans and counts the rows of a table's Parquet file, with errors that name the file.

Small traces in the cache have all tables in one file, since to create a file takes longer than to write a small table:
a line with a CRC-32 and JSON (name of each table -> rows, bytes, CRC-32), and the tables as streams of Arrow IPC.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from etloom.core.errors import ReadError
from etloom.core.schema import TABLES, Stat
from etloom.formats.io.mirror import ensure_local
from etloom.formats.io.parquet_input import PARQUET_ERRORS, check_parquet
from etloom.formats.parquet import checksums
from etloom.formats.tables.value_checks import check_table

PACKED_FILE = "tables.arrow"
"""The file of all tables of a small trace. It is read only from folders that nobody but this program writes."""
_REMEDY = "export it again"
_PACKED_REMEDY = "clear the cache (etloom cache --clear), and open the traces again"


class ParquetTable:
    """Loads a table from its Parquet file at each access (an `etloom.core.trace.TableLoader`).

    Args:
        name: The table.
        file: Its file.
        owner: An object that keeps the file alive, such as a temporary folder.
        rows: Its number of rows, if the caller knows it.
        is_trusted: This program wrote the file, so its values need no check.
    """

    __slots__ = ("_file", "_is_intact", "_is_trusted", "_name", "_owner", "_rows")

    def __init__(
        self,
        name: str,
        file: Path,
        owner: object = None,
        rows: int | None = None,
        is_trusted: bool = False,
    ) -> None:
        self._name, self._file, self._owner, self._rows = name, file, owner, rows
        self._is_trusted = self._is_intact = is_trusted

    @property
    def is_loaded(self) -> bool:
        """Always False: the table is read from its file at each access."""
        return False

    def read(self) -> pl.DataFrame:
        """Return the whole table; its checksum and, unless the file is trusted, its values are checked.

        Raises:
            ReadError: also if it does not have the known number of rows, or has values that the schema does not allow.
        """
        self._check_content()
        table = read_table(self._name, self._file, is_trusted=self._is_trusted)
        if self._rows is not None:
            check_rows(self._file, table.height, self._rows)
        if not self._is_trusted:
            _check_values(self._name, self._file, table)
        return table

    def scan(self) -> pl.LazyFrame:
        """Return the table as a lazy query over its file. Raises ReadError."""
        self._check_content()
        return _scan_table(self._name, self._file, is_trusted=self._is_trusted)

    def rows(self) -> int:
        """Return the number of rows, from the footer of the file. Raises ReadError."""
        if self._rows is None:
            self._rows = _count_rows(self._name, self._file)
        return self._rows

    def _check_content(self) -> None:
        """Raise ReadError if the file's checksum differs from that in meta.json; checked once, unless trusted."""
        if not self._is_intact:
            listed = checksums.read_checksums(self._file.with_name("meta.json"))
            checksums.check_file(self._file, listed, _REMEDY)
            self._is_intact = True


class PackedTable:
    """Loads a table from a file with all tables of a trace at each access (an `etloom.core.trace.TableLoader`).

    Args:
        name: The table.
        file: The file (`PACKED_FILE`), which this program wrote.
        rows: Its number of rows.
        owner: An object that keeps the file alive.
    """

    __slots__ = ("_file", "_name", "_owner", "_rows")

    def __init__(self, name: str, file: Path, rows: int, owner: object = None) -> None:
        self._name, self._file, self._rows, self._owner = name, file, rows, owner

    @property
    def is_loaded(self) -> bool:
        """Always False: the table is read from its file at each access."""
        return False

    def read(self) -> pl.DataFrame:
        """Return the whole table. Raises ReadError, also if its checksum differs."""
        with _converting_errors(self._name, self._file):
            content, sections = _read_packed(self._file)
            table = TABLES[self._name].conform(pl.read_ipc_stream(_unpack(content, sections, self._name)))
        check_rows(self._file, table.height, self._rows)
        return table

    def scan(self) -> pl.LazyFrame:
        """Return the table as a lazy query. Raises ReadError."""
        return self.read().lazy()

    def rows(self) -> int:
        """Return the number of rows."""
        return self._rows


def pack_tables(tables: Mapping[str, pl.DataFrame], file: Path) -> None:
    """Write all tables of a trace to one file, from which `PackedTable` loads them."""
    streams, sections = [], {}
    for name, frame in tables.items():
        frame.write_ipc_stream(stream := io.BytesIO(), compression="lz4")  # in half the time of zstd
        streams.append(stream.getvalue())
        sections[name] = [frame.height, len(streams[-1]), zlib.crc32(streams[-1])]
    line = json.dumps(sections).encode("ascii")
    file.write_bytes(b"".join((_format_checksum(line), b" ", line, b"\n", *streams)))


def open_packed(folder: Path, owner: object = None) -> dict[str, PackedTable] | None:
    """Return the tables of a trace that are in one file, by name; None if the folder has no such file.

    Raises:
        ReadError: The file is damaged.
    """
    if not (file := folder / PACKED_FILE).is_file():
        return None
    with _converting_errors("of all tables", file):
        content, sections = _read_packed(file)
        for name in sections:
            _unpack(content, sections, name)
    return {name: PackedTable(name, file, rows, owner) for name, (rows, _, _) in sections.items()}


def _read_packed(file: Path) -> tuple[bytes, dict[str, list[int]]]:
    """Return the content of a file behind its first line, and that line: name -> rows, bytes, CRC-32.

    Raises:
        ValueError: The line is damaged.
    """
    line, _, content = file.read_bytes().partition(b"\n")
    checksum, _, text = line.partition(b" ")
    if checksum != _format_checksum(text):
        raise ValueError("the checksum of its first line differs")
    sections = json.loads(text)
    if not isinstance(sections, dict) or not all(
        name in TABLES
        and isinstance(numbers, list)
        and len(numbers) == 3
        and all(type(number) is int and number >= 0 for number in numbers)
        for name, numbers in sections.items()
    ):
        raise ValueError("its first line is of another version")
    return content, sections


def _unpack(content: bytes, sections: Mapping[str, Sequence[int]], name: str) -> bytes:
    """Return the Arrow IPC stream of a table. Raises ValueError if it is missing, or its checksum differs."""
    if name not in sections:
        raise ValueError("is missing")
    before = itertools.takewhile(lambda other: other != name, sections)
    start = sum(sections[other][1] for other in before)
    _, size, checksum = sections[name]
    stream = content[start : start + size]
    if zlib.crc32(stream) != checksum:
        raise ValueError("its checksum differs")
    return stream


def _format_checksum(content: bytes) -> bytes:
    return f"{zlib.crc32(content):08x}".encode("ascii")


def check_rows(file: Path, rows: int, saved: int) -> None:
    """Raise ReadError if a table does not have the number of rows that were saved."""
    if rows != saved:
        raise ReadError(f"has {rows} rows, but {saved} were saved", where=file, remedy=_REMEDY)


def _check_values(name: str, file: Path, table: pl.DataFrame) -> None:
    """Raise ReadError if a table has a value that the schema does not allow, which etloom never saves.

    Here nothing could count them, since the stats of the trace may have been reported before the table is accessed.
    """
    stats: list[Stat] = []
    if check_table(name, table, stats) is not table:
        reason = stats[0].example if stats else "a column without values"
        raise ReadError(
            f"is not a valid table {name!r}: {reason}".removesuffix(": now null"),
            where=file,
            remedy=_REMEDY,
        )


def read_table(name: str, file: Path, *, head: bool = False, is_trusted: bool = False) -> pl.DataFrame:
    """Read a table from its Parquet file; with ``head``, only its columns, without rows.

    Raises:
        ReadError: The file is damaged, or has a column of another type.
        LimitError: The file is too large, which is not checked if this program wrote it (``is_trusted``).
    """
    with _converting_errors(name, file):
        if not (head or is_trusted):
            check_parquet(file, file)
        rows = 0 if head else None
        table = TABLES[name].conform(pl.read_parquet(file, n_rows=rows, glob=False, hive_partitioning=False))
    last: Any = table["id"].max() if "id" in table.columns else None
    if last is not None and last >= 1 << 31:
        raise ReadError(f"has a row with the id {last}, but ids are row numbers", where=file, remedy=_REMEDY)
    return table


def check_ratios(files: Iterable[Path]) -> None:
    """Raise LimitError if a Parquet file decodes to too many times its size, and ReadError if it is damaged."""
    for file in files:
        with _converting_errors(file.stem, file):
            check_parquet(file, file, into_memory=False)


def _scan_table(name: str, file: Path, *, is_trusted: bool = False) -> pl.LazyFrame:
    with _converting_errors(name, file):
        if not is_trusted:
            check_parquet(file, file, into_memory=False)
        frame = pl.scan_parquet(file, glob=False, hive_partitioning=False)
        TABLES[name].conform(frame.head(0).collect())  # raises if it does not match the schema
        columns = frame.collect_schema()
    return frame.select(
        (pl.col(column).cast(dtype) if column in columns else pl.lit(None, dtype)).alias(column)
        for column, dtype in TABLES[name].schema.items()
    )


def _count_rows(name: str, file: Path) -> int:
    with _converting_errors(name, file):
        return int(_scan_table(name, file, is_trusted=True).select(pl.len()).collect().item())


@contextlib.contextmanager
def _converting_errors(name: str, file: Path) -> Iterator[None]:
    """Download a table's file if it is remote, and convert all errors of reading it to ReadError."""
    ensure_local(file)
    try:
        yield
    except PARQUET_ERRORS as error:
        if not file.exists():
            raise ReadError(
                "was removed while in use", where=file, remedy="open or export the run again"
            ) from None
        reason = str(error).partition("\n")[0]
        remedy = _PACKED_REMEDY if file.name == PACKED_FILE else _REMEDY
        raise ReadError(f"is not a valid table {name!r}: {reason}", where=file, remedy=remedy) from None
