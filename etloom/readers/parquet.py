"""The folder of Parquet files that `etloom.exports.parquet` writes: layout 1, a Trace or a Job.

What it holds is data from outside all the same: only the tables of the schema are opened, by their own names,
in the folder itself and its ``rank=N`` folders.
"""

from __future__ import annotations

import json
import re
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

    Raises ReadError for another layout, a missing or damaged file and a table that is not the schema's.
    """
    folder = Path(source)
    if folder.name == "meta.json" and not folder.is_dir():
        folder = folder.parent
    kind, meta = _read_meta(folder)
    if kind == "trace":
        return _read_trace(folder, meta)
    ranks = {
        int(match[1]): entry
        for entry in folder.iterdir()
        if (match := re.fullmatch(r"rank=(\d+)", entry.name)) and entry.is_dir()
    }
    traces = {rank: _read_trace(entry, _read_meta(entry)[1]) for rank, entry in ranks.items()}
    return Job(traces, meta, _read_trace(folder, {}).stats)


def _read_meta(folder: Path) -> tuple[str, dict[str, Any]]:
    file = folder / "meta.json"
    try:
        content = json.loads(file.read_bytes())
        layout, kind, meta = content["layout"], content["kind"], content["meta"]
    except OSError as error:
        raise ReadError(
            f"cannot be read: {error.strerror}", where=file, remedy="name a folder that etloom export wrote"
        ) from None
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ReadError(
            "is not the meta.json of a saved trace", where=file, remedy="export it again"
        ) from None
    if layout != LAYOUT:
        raise ReadError(f"has layout {layout}, not {LAYOUT}", where=file, remedy="update etloom")
    if kind not in ("trace", "job") or not isinstance(meta, dict):
        raise ReadError("is not the meta.json of a saved trace", where=file, remedy="export it again")
    return kind, meta


def _read_trace(folder: Path, meta: dict[str, Any]) -> Trace:
    tables: dict[str, pl.DataFrame] = {}
    for name, table in TABLES.items():
        file = folder / f"{name}.parquet"
        if not file.is_file():
            continue
        try:
            frame = pl.read_parquet(file, glob=False, hive_partitioning=False)
            tables[name] = table.conform(frame)
        except (OSError, ValueError, pl.exceptions.PolarsError) as error:
            reason = str(error).partition("\n")[0]
            raise ReadError(f"is no table {name!r}: {reason}", where=file, remedy="export it again") from None
    return Trace(tables, meta)
