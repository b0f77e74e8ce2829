"""etloom's own folder of Parquet files (layout 1) with a Trace or a Job, as `etloom.formats.parquet.writer` writes it.

The folder is untrusted input: only the tables of the schema are opened, by their own names, in the folder itself and in
its ``rank=N`` folders.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import polars as pl

from etloom.core.errors import ReadError
from etloom.core.schema import TABLES
from etloom.core.trace import Job, Trace

LAYOUT_VERSION = 1


def sniff(head: bytes) -> bool:
    """Return whether a file that begins with these bytes is the meta.json of such a folder."""
    return re.match(rb'\s*\{\s*"etloom"\s*:', head) is not None


def sniff_folder(path: Path) -> bool:
    """Return whether a folder has a meta.json written by etloom."""
    try:
        with Path(path, "meta.json").open("rb") as file:
            return sniff(file.read(64))
    except OSError:
        return False


def read(source: str | PathLike[str], *, lazy: bool = False, owner: object = None) -> Trace | Job:
    """Read a Trace or a Job from its folder, or from the meta.json in the folder.

    lazy: leave the tables in their files until they are accessed.
    owner: an object to keep alive as long as the tables are needed, such as a temporary folder.

    Raises:
        ReadError: For another layout, a missing, short or damaged file, and a table that does not match the schema.
    """
    folder = Path(source)
    if folder.name == "meta.json" and not folder.is_dir():
        folder = folder.parent
    saved = _read_meta(folder)
    if saved.kind == "trace":
        return _read_trace(folder, saved, lazy, owner)
    ranks = {
        int(match[1]): entry
        for entry in folder.iterdir()
        if (match := re.fullmatch(r"rank=(\d+)", entry.name)) and entry.is_dir()
    }
    if missing := [rank for rank in saved.ranks if rank not in ranks]:
        raise ReadError(
            f"is missing, with {len(missing) - 1} more ranks" if len(missing) > 1 else "is missing",
            where=folder / f"rank={missing[0]}",
            remedy="export it again",
        )
    traces = {rank: _read_trace(entry, _read_meta(entry), lazy, owner) for rank, entry in ranks.items()}
    return Job(traces, saved.meta, _read_trace(folder, saved).stats)


@dataclass(frozen=True)
class _SavedMeta:
    """The content of a meta.json. Folders saved by older versions have no ``tables`` (rows of each) and ``ranks``."""

    kind: str
    meta: dict[str, Any]
    tables: dict[str, int]
    ranks: list[int]


def _read_meta(folder: Path) -> _SavedMeta:
    file = folder / "meta.json"
    try:
        content = json.loads(file.read_bytes())
        layout, kind, meta = content["layout"], content["kind"], content["meta"]
        tables, ranks = content.get("tables", {}), content.get("ranks", [])
    except OSError as error:
        raise ReadError(
            f"cannot be read: {error.strerror}",
            where=file,
            remedy="specify a folder written by etloom export",
        ) from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ReadError(
            "is not the meta.json of a saved trace", where=file, remedy="export it again"
        ) from None
    if layout != LAYOUT_VERSION:
        raise ReadError(f"has layout {layout}, not {LAYOUT_VERSION}", where=file, remedy="update etloom")
    if kind not in ("trace", "job") or not (
        isinstance(meta, dict) and isinstance(tables, dict) and isinstance(ranks, list)
    ):
        raise ReadError("is not the meta.json of a saved trace", where=file, remedy="export it again")
    return _SavedMeta(kind, meta, tables, ranks)


class ParquetTable:
    """Loads a table from its Parquet file at each access (an `etloom.core.trace.TableLoader`).

    Args:
        name: The table.
        file: Its file.
        owner: An object that keeps the file alive, such as a temporary folder.
    """

    __slots__ = ("_file", "_name", "_owner", "_rows")

    def __init__(self, name: str, file: Path, owner: object = None) -> None:
        self._name, self._file, self._owner = name, file, owner
        self._rows: int | None = None

    def read(self) -> pl.DataFrame:
        """Read the whole table. Raises ReadError."""
        return _read_table(self._name, self._file)

    def scan(self) -> pl.LazyFrame:
        """Return the table as a query. Raises ReadError."""
        return _scan_table(self._name, self._file)

    def rows(self) -> int:
        """Return the number of rows, from the footer of the file. Raises ReadError."""
        if self._rows is None:
            self._rows = _count_rows(self._name, self._file)
        return self._rows


def _read_trace(folder: Path, saved: _SavedMeta, lazy: bool = False, owner: object = None) -> Trace:
    loaders: dict[str, ParquetTable] = {}
    tables: dict[str, pl.DataFrame] = {}
    for name in TABLES:
        file, rows = folder / f"{name}.parquet", saved.tables.get(name)
        if not file.is_file():
            if rows is not None:
                raise ReadError(f"is missing: {rows} rows were saved", where=file, remedy="export it again")
            continue
        if lazy:
            loaders[name] = ParquetTable(name, file, owner)
            height = loaders[name].rows()
        else:
            tables[name] = _rechunk_columns(_read_table(name, file))
            height = tables[name].height
        if rows is not None and height != rows:
            raise ReadError(f"has {height} rows, but {rows} were saved", where=file, remedy="export it again")
    return Trace(tables, saved.meta, loaders=loaders)


def _read_table(name: str, file: Path) -> pl.DataFrame:
    with _converting_errors(name, file):
        table = TABLES[name].conform(pl.read_parquet(file, glob=False, hive_partitioning=False))
    last: Any = table["id"].max() if "id" in table.columns else None
    if last is not None and last >= 1 << 31:
        raise ReadError(
            f"has a row with the id {last}, but ids are row numbers", where=file, remedy="export it again"
        )
    return table


def _rechunk_columns(frame: pl.DataFrame) -> pl.DataFrame:
    """Make each column contiguous in memory, so that a NumPy array of it is a view.

    Columns are replaced one at a time, so at most one is in memory twice.
    """
    for at, name in enumerate(frame.columns):
        frame.replace_column(at, frame[name].rechunk())
    return frame


def _scan_table(name: str, file: Path) -> pl.LazyFrame:
    with _converting_errors(name, file):
        frame = pl.scan_parquet(file, glob=False, hive_partitioning=False)
        TABLES[name].conform(frame.head(0).collect())  # raises if it does not match the schema
        columns = frame.collect_schema()
    return frame.select(
        (pl.col(column).cast(dtype) if column in columns else pl.lit(None, dtype)).alias(column)
        for column, dtype in TABLES[name].schema.items()
    )


def _count_rows(name: str, file: Path) -> int:
    with _converting_errors(name, file):
        return int(_scan_table(name, file).select(pl.len()).collect().item())


@contextlib.contextmanager
def _converting_errors(name: str, file: Path) -> Iterator[None]:
    """Convert all errors of reading a table's file to ReadError."""
    try:
        yield
    except (OSError, ValueError, pl.exceptions.PolarsError) as error:
        if not file.exists():
            raise ReadError(
                "was removed while in use", where=file, remedy="open or export the run again"
            ) from None
        reason = str(error).partition("\n")[0]
        raise ReadError(
            f"is not a valid table {name!r}: {reason}", where=file, remedy="export it again"
        ) from None
