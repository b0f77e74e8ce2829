"""Reads columns of an untrusted Parquet file, whose footer states its size before any column is read.

The footer is a message of Thrift's compact protocol:
https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift
"""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import polars as pl

from etloom.core.schema import Stat
from etloom.formats.io.limits import check_bytes, check_ratio, check_rows, max_rows, max_table_bytes

PARQUET_ERRORS = (OSError, ValueError, pl.exceptions.PolarsError, pl.exceptions.PanicException)
"""Exceptions of polars for a damaged Parquet file; a panic is not a subclass of Exception."""
_MAGIC = b"PAR1"
_MAX_FOOTER_BYTES = 1 << 24
_MAX_DEPTH = 16
_ROWS, _ROW_GROUPS = 3, 4
"""Fields of the footer."""
_COLUMNS = 1
"""Field of a row group."""
_CHUNK_META = 3
"""Field of a column of a row group."""
_TYPE, _PATH, _VALUES, _DECODED_BYTES, _STATISTICS = 1, 3, 5, 6, 12
"""Fields of the metadata of a column of a row group."""
_NULLS = 3
"""Field of the statistics of a column of a row group."""
_NULL_ROW_BYTES = 32
"""Bytes that a row with a null counts at least for the ratio, so that a file of nulls cannot have any length."""
_WIDTHS = {0: 1, 1: 4, 3: 12, 4: 4}
"""Bytes of a value in memory, by its type in the file."""
_DEFAULT_WIDTH = 8
_FALSE, _BYTE, _DOUBLE, _BINARY, _MAP, _STRUCT = 2, 3, 7, 8, 11, 12
"""Types of the protocol; integers lie between byte and double."""
_FIXED_BYTES = {1: 1, _FALSE: 1, _BYTE: 1, _DOUBLE: 8}


def read_columns(
    path: Path, columns: Mapping[str, Any], name: str, stats: list[Stat], row_limit: int | None = None
) -> pl.DataFrame:
    """Read columns of a Parquet file, cast to the types in ``columns``; absent columns are null.

    Values that cannot be cast, such as all values of a nested column, become null; they are counted in ``stats`` as
    ``name``.

    Raises:
        LimitError: The file is too large.
        PARQUET_ERRORS: The file is damaged.
    """
    check_parquet(path, path, columns, row_limit)
    names = list_columns(path)
    present = [column for column in columns if column in names]
    if not present:
        return pl.DataFrame(schema=dict(columns))
    table = read_foreign(path, present)
    result = table.select(
        _cast(table[column], dtype) if column in present else pl.lit(None, dtype=dtype).alias(column)
        for column, dtype in columns.items()
    )
    for column in present:
        if losses := result[column].null_count() - table[column].null_count():
            example = f"{path.stem}.{column} has values of a wrong type: now null"
            stats.append(Stat(name, "data_loss", losses, example))
    return result


def list_columns(path: Path) -> frozenset[str]:
    """Return the names of the columns of a Parquet file of another program.

    Raises:
        PARQUET_ERRORS: The file is damaged.
    """
    from pyarrow import ArrowException, parquet

    try:
        with path.open("rb") as file:
            return frozenset(parquet.read_schema(file).names)
    except ArrowException as error:
        raise ValueError(str(error)) from None


def read_foreign(source: Path | bytes, columns: list[str] | None = None) -> pl.DataFrame:
    """Read a Parquet file of another program, or its content, after `check_parquet`.

    It is decoded by pyarrow, because polars aborts the process where a damaged page states an impossible length.

    Raises:
        PARQUET_ERRORS: The file is damaged.
    """
    from pyarrow import ArrowException

    file = io.BytesIO(source) if isinstance(source, bytes) else source
    try:
        return pl.read_parquet(file, columns=columns, use_pyarrow=True)
    except ArrowException as error:
        raise ValueError(str(error)) from None


def _cast(values: pl.Series, dtype: Any) -> pl.Series:
    """Cast a column value by value; values that cannot be cast are null, as are all of a type without such a cast."""
    source = values.dtype
    # Binary values would be taken for the bytes of numbers.
    has_cast = not source.is_nested() and (source != pl.Binary or dtype in (pl.String, pl.Binary))
    try:
        return values.cast(dtype, strict=False) if has_cast else _make_nulls(values, dtype)
    except pl.exceptions.PolarsError:
        return _make_nulls(values, dtype)


def _make_nulls(values: pl.Series, dtype: Any) -> pl.Series:
    return pl.Series(values.name, [None], dtype=dtype).new_from_index(0, len(values))


def check_parquet(
    source: Path | bytes,
    path: Path,
    columns: Iterable[str] | None = None,
    row_limit: int | None = None,
    *,
    into_memory: bool = True,
) -> None:
    """Check the numbers of rows and bytes that the footer of a Parquet file states.

    Nulls take memory, but do not count for the ratio: honest files have columns without values.

    Args:
        source: The file, or its content.
        path: The file, for messages.
        columns: The columns that will be read; by default all.
        row_limit: The largest accepted number of rows, unless $ETLOOM_MAX_ROWS sets another; by default only the
            number of bytes counts.
        into_memory: The file is read into memory, so that its size counts, not only the ratio of sizes.

    Raises:
        LimitError: The file has more rows or bytes than are accepted, or decodes to too many times its size.
        ValueError: The footer is damaged. OSError: The file cannot be read.
    """
    with io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file:
        file_bytes = file.seek(0, os.SEEK_END)
        file.seek(max(0, file_bytes - 8))
        end = file.read(8)
        length = int.from_bytes(end[:4], "little")
        if end[4:] != _MAGIC or length > file_bytes - 8:
            raise ValueError("the end of the Parquet file is missing")
        check_bytes(length, path, _MAX_FOOTER_BYTES)
        file.seek(file_bytes - 8 - length)
        footer = _CompactMessage(file.read(length)).read_struct()
    rows = _get(footer, _ROWS, int)
    if into_memory:
        check_rows(rows, path, max_rows(rows if row_limit is None else row_limit))
    decoded_bytes, stored_bytes, nulls = _sum_decoded_bytes(
        footer, None if columns is None else {name.encode() for name in columns}
    )
    check_ratio(file_bytes, max(stored_bytes, nulls * _NULL_ROW_BYTES), path)
    if into_memory:
        check_bytes(decoded_bytes, path, max_table_bytes())


def _sum_decoded_bytes(footer: dict[int, Any], columns: set[bytes] | None) -> tuple[int, int, int]:
    """Return the bytes of the decoded columns, with and without the nulls that the footer states, and the number of
    nulls in the column with most of them."""
    size = without_nulls = 0
    nulls: Counter[tuple[bytes, ...]] = Counter()
    for group in _get(footer, _ROW_GROUPS, list):
        for chunk in _get(group, _COLUMNS, list):
            facts = _get(chunk, _CHUNK_META, dict)
            place = _get_path(facts)
            if columns is None or columns.intersection(place[:1]):
                values, stored = _get(facts, _VALUES, int), _get(facts, _DECODED_BYTES, int)
                width = _WIDTHS.get(_get(facts, _TYPE, int), _DEFAULT_WIDTH)
                size += max(values * width, stored)
                without_nulls += max((values - _count_nulls(facts)) * width, stored)
                nulls[place] += _count_nulls(facts)
    return size, without_nulls, max(nulls.values(), default=0)


def _count_nulls(facts: dict[int, Any]) -> int:
    """Return the number of nulls that the footer states for a column of a row group; 0 if it is unknown."""
    statistics = facts.get(_STATISTICS)
    nulls = statistics.get(_NULLS) if isinstance(statistics, dict) else None
    return nulls if isinstance(nulls, int) and 0 <= nulls <= facts[_VALUES] else 0


def _get_path(facts: dict[int, Any]) -> tuple[bytes, ...]:
    """Return the names of a column and of the structs around it, outermost first."""
    names = _get(facts, _PATH, list)
    if not all(isinstance(name, bytes) for name in names):
        raise ValueError(f"the footer of the Parquet file is damaged: field {_PATH}")
    return tuple(names)


def _get(fields: Any, number: int, kind: type) -> Any:
    value: Any = fields.get(number) if isinstance(fields, dict) else None
    if not isinstance(value, kind) or (isinstance(value, int) and value < 0):
        raise ValueError(f"the footer of the Parquet file is damaged: field {number}")
    return value


class _CompactMessage:
    """Decodes a message of Thrift's compact protocol: a struct is a dict by field number."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def read_struct(self, depth: int = 0) -> dict[int, Any]:
        """Return the fields of the struct at the current place. Raises ValueError."""
        fields: dict[int, Any] = {}
        number = 0
        try:
            while header := self._data[self._at]:
                self._at += 1
                number = number + (header >> 4) if header >> 4 else self._read_integer()
                fields[number] = self._read(header & 15, depth) if header & 15 > _FALSE else None
        except IndexError:
            raise ValueError("the footer of the Parquet file is damaged: it ends early") from None
        self._at += 1
        return fields

    def _read(self, kind: int, depth: int) -> Any:
        if _BYTE < kind < _DOUBLE:
            return self._read_integer()
        if kind == _BINARY:
            return self._read_bytes(self._read_varint())
        if kind in _FIXED_BYTES:
            return self._read_bytes(_FIXED_BYTES[kind])
        if kind > _STRUCT or depth == _MAX_DEPTH:
            raise ValueError("the footer of the Parquet file is damaged: unknown type or nested too deeply")
        return self.read_struct(depth + 1) if kind == _STRUCT else self._read_list(kind, depth + 1)

    def _read_list(self, kind: int, depth: int) -> list[Any]:
        header = self._data[self._at]
        self._at += 1
        if kind == _MAP:  # its items are of two kinds
            raise ValueError("the footer of the Parquet file is damaged: it has a map")
        count = header >> 4 if header >> 4 < 15 else self._read_varint()
        return [self._read(header & 15, depth) for _ in range(count)]

    def _read_bytes(self, count: int) -> bytes:
        self._at += count
        if self._at > len(self._data):
            raise IndexError
        return self._data[self._at - count : self._at]

    def _read_varint(self) -> int:
        value = shift = 0
        while (byte := self._data[self._at]) > 127:
            value |= (byte & 127) << shift
            shift += 7
            self._at += 1
            if shift > 63:
                raise ValueError("the footer of the Parquet file is damaged: a number is too long")
        self._at += 1
        return value | byte << shift

    def _read_integer(self) -> int:
        value = self._read_varint()
        return (value >> 1) ^ -(value & 1)
