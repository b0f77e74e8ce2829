"""Reads a Trace or a Job from a folder of Parquet files (layout 1) that `etloom.formats.parquet.writer` wrote.

The folder is untrusted input: only the tables of the schema are opened, by their own names, in the folder itself and in
its ``rank=N`` folders.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Annotated, Any

import polars as pl

from etloom.core.errors import ReadError
from etloom.core.schema import TABLES, Stat
from etloom.core.trace import Job, Trace
from etloom.formats.io.json_text import load_json
from etloom.formats.parquet import checksums
from etloom.formats.parquet.store_layout import is_store, is_stored_run, select_run
from etloom.formats.parquet.stored_runs import read_run
from etloom.formats.parquet.table_files import ParquetTable, check_rows, open_packed, read_table
from etloom.formats.tables.meta_checks import check_meta, is_rank

LAYOUT_VERSION = 1


def sniff(head: bytes) -> bool:
    """Return whether a file is a meta.json that etloom wrote, judging from its first bytes ``head``."""
    return re.match(rb'\s*\{\s*"etloom"\s*:', head) is not None


def sniff_folder(path: Path) -> bool:
    """Return whether a folder is a saved trace or job (it has a meta.json), a store of runs, or a run in a store."""
    return _is_saved(path) or is_stored_run(path) or is_store(path)


def _is_saved(path: Path) -> bool:
    try:
        with Path(path, "meta.json").open("rb") as file:
            return sniff(file.read(64))
    except OSError:
        return False


def read(
    source: str | PathLike[str],
    *,
    lazy: Annotated[bool, "Leave the tables in their files until they are accessed."] = False,
    owner: Annotated[
        object,
        "An object to keep alive as long as the tables are needed, such as a temporary folder. Tables "
        "with an owner were written by this program, so that their values are not checked again, and may "
        "be in one file.",
    ] = None,
) -> Trace | Job:
    """Read a Trace or a Job from its folder, or from the meta.json in the folder.

    Raises:
        ReadError: For another layout, a missing, short or damaged file, and a table that does not match the schema.
    """
    folder = Path(source)
    if folder.name == "meta.json" and not folder.is_dir():
        folder = folder.parent
    if is_store(folder):
        folder = select_run(folder)
    if is_stored_run(folder):
        return read_run(folder, lazy=lazy, owner=owner)
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
            f"is missing, as are {len(missing) - 1} more ranks" if len(missing) > 1 else "is missing",
            where=folder / f"rank={missing[0]}",
            remedy="export it again",
        )
    traces = {rank: _read_trace(entry, _read_meta(entry), lazy, owner) for rank, entry in ranks.items()}
    return Job(traces, saved.meta, _read_trace(folder, saved).stats)  # with those about the meta


@dataclass(frozen=True)
class _SavedMeta:
    """The content of a meta.json; older versions wrote no ``tables`` (rows of each table), ``ranks`` and ``crc32``."""

    kind: str
    meta: dict[str, Any]
    tables: dict[str, int]
    ranks: list[int]
    checksums: object
    invalid: list[Stat]


def _read_meta(folder: Path) -> _SavedMeta:
    file = folder / "meta.json"
    try:
        content = load_json(file.read_bytes())
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
        raise ReadError(
            f"was saved with version {layout} of the layout; this etloom reads version {LAYOUT_VERSION}",
            where=file,
            remedy="update etloom",
        )
    if kind not in ("trace", "job") or not (
        isinstance(meta, dict)
        and isinstance(tables, dict)
        and all(type(rows) is int and rows >= 0 for rows in tables.values())
        and isinstance(ranks, list)
        and all(map(is_rank, ranks))
    ):
        raise ReadError("is not the meta.json of a saved trace", where=file, remedy="export it again")
    invalid: list[Stat] = []
    return _SavedMeta(kind, check_meta(meta, invalid), tables, ranks, content.get(checksums.KEY), invalid)


def _read_trace(folder: Path, saved: _SavedMeta, lazy: bool = False, owner: object = None) -> Trace:
    if owner is not None and (packed := open_packed(folder, owner)) is not None:
        _check_packed(folder, saved, {name: loader.rows() for name, loader in packed.items()})
        if lazy:
            return Trace({}, saved.meta, loaders=packed).with_stats(saved.invalid)
        return Trace({name: loader.read() for name, loader in packed.items()}, saved.meta)
    loaders: dict[str, ParquetTable] = {}
    tables: dict[str, pl.DataFrame] = {}
    for name in TABLES:
        file, rows = folder / f"{name}.parquet", saved.tables.get(name)
        if not file.is_file():
            if rows is not None:
                raise ReadError(f"is missing: {rows} rows were saved", where=file, remedy="export it again")
            continue
        is_own = lazy and owner is not None and rows is not None  # numbers of rows of other files are checked
        if is_own and checksums.is_intact_small_file(file, saved.checksums, "export it again"):
            loaders[name] = ParquetTable(name, file, owner, rows, is_trusted=True)
            continue
        if lazy:
            loaders[name] = ParquetTable(name, file, owner, is_trusted=owner is not None)
            height = loaders[name].rows()
        else:
            checksums.check_file(file, saved.checksums, "export it again")
            tables[name] = _rechunk_columns(read_table(name, file))
            height = tables[name].height
        if rows is not None:
            check_rows(file, height, rows)
    return Trace(tables, saved.meta, loaders=loaders).with_stats(saved.invalid)


def _check_packed(folder: Path, saved: _SavedMeta, rows: dict[str, int]) -> None:
    """Raise ReadError if the meta.json of a folder lists other tables or rows than the file with all tables has."""
    if rows != saved.tables:
        raise ReadError(
            "lists other tables than were saved", where=folder / "meta.json", remedy="export it again"
        )


def _rechunk_columns(frame: pl.DataFrame) -> pl.DataFrame:
    """Make each column contiguous in memory, so that a NumPy array of it is a view.

    Columns are replaced one at a time, so at most one is in memory twice.
    """
    for at, name in enumerate(frame.columns):
        frame.replace_column(at, frame[name].rechunk())
    return frame
