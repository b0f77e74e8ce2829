"""The folder of Parquet files that `etloom.formats.parquet.writer` writes: layout 1, a Trace or a Job.

What it holds is data from outside all the same: only the tables of the schema are opened, by their own names,
in the folder itself and its ``rank=N`` folders.
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
    """Whether these are the first bytes of the meta.json of such a folder."""
    return re.match(rb'\s*\{\s*"etloom"\s*:', head) is not None


def sniff_folder(path: Path) -> bool:
    """Whether a folder is such a folder: it has a meta.json of ours."""
    try:
        with Path(path, "meta.json").open("rb") as file:
            return sniff(file.read(64))
    except OSError:
        return False


def read(source: str | PathLike[str], *, lazy: bool = False, owner: object = None) -> Trace | Job:
    """A Trace, or a Job, from its folder or the meta.json in it.

    lazy: leave the tables in their files, see `ParquetTable`. owner: lives as long as they are needed.

    Raises ReadError for another layout, a missing, short or damaged file and a table that is not the schema's.
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
    if lost := [rank for rank in saved.ranks if rank not in ranks]:
        raise ReadError(
            f"is missing, with {len(lost) - 1} more ranks" if len(lost) > 1 else "is missing",
            where=folder / f"rank={lost[0]}",
            remedy="export it again",
        )
    traces = {rank: _read_trace(entry, _read_meta(entry), lazy, owner) for rank, entry in ranks.items()}
    return Job(traces, saved.meta, _read_trace(folder, saved).stats)


@dataclass(frozen=True)
class _SavedMeta:
    """What a meta.json says. Folders that were saved before it said rows have no ``tables`` and ``ranks``."""

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
            f"cannot be read: {error.strerror}", where=file, remedy="name a folder that etloom export wrote"
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
            found = loaders[name].rows()
        else:
            tables[name] = _rechunk_columns(_read_table(name, file))
            found = tables[name].height
        if rows is not None and found != rows:
            raise ReadError(
                f"holds {found} rows, and {rows} were saved", where=file, remedy="export it again"
            )
    return Trace(tables, saved.meta, loaders=loaders)


def _read_table(name: str, file: Path) -> pl.DataFrame:
    with _converting_errors(name, file):
        table = TABLES[name].conform(pl.read_parquet(file, glob=False, hive_partitioning=False))
    last: Any = table["id"].max() if "id" in table.columns else None
    if last is not None and last >= 1 << 31:
        raise ReadError(
            f"has a row with the id {last}, and ids are numbers of rows", where=file, remedy="export it again"
        )
    return table


def _rechunk_columns(frame: pl.DataFrame) -> pl.DataFrame:
    """The frame with each column in one piece of memory, so that an array of it is a view and no copy.

    A column at a time: no more than one is there twice.
    """
    for at, name in enumerate(frame.columns):
        frame.replace_column(at, frame[name].rechunk())
    return frame


def _scan_table(name: str, file: Path) -> pl.LazyFrame:
    with _converting_errors(name, file):
        frame = pl.scan_parquet(file, glob=False, hive_partitioning=False)
        TABLES[name].conform(frame.head(0).collect())  # what cannot be conformed is found out here
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
    """Whatever is wrong with the file of a table as one ReadError."""
    try:
        yield
    except (OSError, ValueError, pl.exceptions.PolarsError) as error:
        if not file.exists():
            raise ReadError(
                "was removed while it was used", where=file, remedy="open or export the run again"
            ) from None
        reason = str(error).partition("\n")[0]
        raise ReadError(f"is no table {name!r}: {reason}", where=file, remedy="export it again") from None
