"""The folder of Parquet files that `etloom.exports.parquet` writes: layout 1, a Trace or a Job.

What it holds is data from outside all the same: only the tables of the schema are opened, by their own names,
in the folder itself and its ``rank=N`` folders.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import polars as pl

from etloom.errors import ReadError
from etloom.schema import TABLES
from etloom.trace import Job, Trace

LAYOUT = 1


def sniff(head: bytes) -> bool:
    """Whether these are the first bytes of the meta.json of such a folder."""
    return re.match(rb'\s*\{\s*"etloom"\s*:', head) is not None


def holds(path: Path) -> bool:
    """Whether a folder is such a folder: it has a meta.json of ours."""
    try:
        with Path(path, "meta.json").open("rb") as file:
            return sniff(file.read(64))
    except OSError:
        return False


def read(source: str | PathLike[str]) -> Trace | Job:
    """A Trace, or a Job, from its folder or the meta.json in it.

    Raises ReadError for another layout, a missing, short or damaged file and a table that is not the schema's.
    """
    folder = Path(source)
    if folder.name == "meta.json" and not folder.is_dir():
        folder = folder.parent
    saved = _read_meta(folder)
    if saved.kind == "trace":
        return _read_trace(folder, saved)
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
    traces = {rank: _read_trace(entry, _read_meta(entry)) for rank, entry in ranks.items()}
    return Job(traces, saved.meta, _read_trace(folder, saved).stats)


@dataclass(frozen=True)
class _Saved:
    """What a meta.json says. Folders that were saved before it said rows have no ``tables`` and ``ranks``."""

    kind: str
    meta: dict[str, Any]
    tables: dict[str, int]
    ranks: list[int]


def _read_meta(folder: Path) -> _Saved:
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
    if layout != LAYOUT:
        raise ReadError(f"has layout {layout}, not {LAYOUT}", where=file, remedy="update etloom")
    if kind not in ("trace", "job") or not (
        isinstance(meta, dict) and isinstance(tables, dict) and isinstance(ranks, list)
    ):
        raise ReadError("is not the meta.json of a saved trace", where=file, remedy="export it again")
    return _Saved(kind, meta, tables, ranks)


def _read_trace(folder: Path, saved: _Saved) -> Trace:
    tables: dict[str, pl.DataFrame] = {}
    for name, table in TABLES.items():
        file, rows = folder / f"{name}.parquet", saved.tables.get(name)
        if not file.is_file():
            if rows is not None:
                raise ReadError(f"is missing: {rows} rows were saved", where=file, remedy="export it again")
            continue
        try:
            frame = pl.read_parquet(file, glob=False, hive_partitioning=False)
            tables[name] = table.conform(frame)
        except (OSError, ValueError, pl.exceptions.PolarsError) as error:
            reason = str(error).partition("\n")[0]
            raise ReadError(f"is no table {name!r}: {reason}", where=file, remedy="export it again") from None
        if rows is not None and frame.height != rows:
            raise ReadError(
                f"holds {frame.height} rows, and {rows} were saved", where=file, remedy="export it again"
            )
    return Trace(tables, saved.meta)
