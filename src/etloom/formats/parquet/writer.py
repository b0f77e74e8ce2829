"""Writes a Trace or a Job as a folder with a Parquet file per table and a meta.json, which other tools can read.

    run.parquet/meta.json          {"etloom": version, "layout": 1, "kind": "trace", "tables": {name: rows},
                                    "crc32": {file: checksum}, "meta": {}}
    run.parquet/events.parquet     the table of that name in etloom.core.schema, zstd, text as dictionaries

A Job has its own meta.json (``"kind": "job"``, ``"ranks": [...]``) and stats, and a folder ``rank=N/`` for each rank,
which DuckDB, Spark and polars read as a column:
``read_parquet('run.parquet/*/events.parquet', hive_partitioning = true)``.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import secrets
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Annotated, Any

import polars as pl

from etloom.core.errors import EtloomError
from etloom.core.schema import TABLES
from etloom.core.trace import Job, Trace
from etloom.core.version import __version__
from etloom.formats.io.atomic_file import naming_output
from etloom.formats.parquet import checksums
from etloom.formats.parquet.table_files import PACKED_FILE, pack_tables

SUFFIX = ".parquet"
LAYOUT_VERSION = 1
_MAX_SMALL_ROWS = 100_000
_MAX_PACKED_BYTES = 4 << 20
"""Size of tables in memory; larger ones are in files of their columns, of which a query reads some."""


def write(
    trace: Trace | Job,
    path: str | PathLike[str],
    *,
    packs: Annotated[
        bool,
        "The tables of a small Trace are written to one file, which is faster, and only this program reads.",
    ] = False,
) -> None:
    """Write a Trace or a Job to the folder ``path``, which appears under its name when it is complete.

    A folder written by etloom is replaced.

    Raises:
        EtloomError: If anything else exists under that name.
    """
    with create_atomically(path, packs=packs) as new:
        if isinstance(trace, Job):
            write_tables({new / "stats.parquet": trace.run_stats})
            write_meta(new, "job", trace.meta, trace.ranks)
            for rank, rank_trace in trace.items():
                (new / f"rank={rank}").mkdir()
                _write_trace(rank_trace, new / f"rank={rank}")
        else:
            _write_trace(trace, new, packs)


@contextlib.contextmanager
def create_atomically(
    path: str | PathLike[str], *, packs: bool = False, files: Collection[str] | None = None
) -> Iterator[Path]:
    """Yield an empty folder that is renamed to ``path`` when the block succeeds, and is removed when it fails.

    A folder written by etloom is replaced, with ``packs`` also one with the tables of a trace in one file; with
    ``files`` instead a folder that has only files of these names.

    Raises:
        EtloomError: If anything else exists under that name.
    """
    target = Path(path)
    if target.exists() and not _is_replaceable(target, packs, files):
        raise EtloomError(
            "exists and was not written by etloom; it is not replaced",
            where=target,
            remedy="choose another path",
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    old = new.with_name(f"{new.name}.old")
    new.mkdir()
    clean = partial(_remove_scratch, target, new, old)
    atexit.register(clean)  # a daemon thread ends with the process, wherever it is
    try:
        with naming_output(target):
            yield new
            if target.exists():
                target.rename(old)
            new.rename(target)
    finally:
        clean()
        atexit.unregister(clean)


def _remove_scratch(target: Path, new: Path, old: Path) -> None:
    """Remove what `create_atomically` leaves; what it would have replaced is back if nothing else is in its place."""
    if old.exists() and not target.exists():
        with contextlib.suppress(OSError):
            old.rename(target)
    for scratch in (new, old):
        if scratch.exists():
            shutil.rmtree(scratch, ignore_errors=True)


def write_meta(
    folder: Path,
    kind: str,
    meta: Mapping[str, Any],
    ranks: Sequence[int] = (),
    rows: Mapping[str, int] | None = None,
) -> None:
    """Write the meta.json of a folder of tables: kind (trace or job), rows and checksums of tables, ranks, and meta.

    To be called after the tables are written: it records the rows and the checksum of each, so that a reader notices a
    lost or changed table. Rows are read from the files if the caller does not know them.
    """
    content: dict[str, Any] = {"etloom": __version__, "layout": LAYOUT_VERSION, "kind": kind}
    content["tables"] = _count_rows(folder) if rows is None else dict(rows)
    content |= {"ranks": list(ranks)} if kind == "job" else {}
    content[checksums.KEY] = checksums.compute_checksums(folder.glob("*.parquet"))
    content["meta"] = dict(meta)
    indent = None if (folder / PACKED_FILE).exists() else 1  # to indent takes as long as to write the tables
    Path(folder, "meta.json").write_text(json.dumps(content, indent=indent), encoding="ascii")


def _count_rows(folder: Path) -> dict[str, int]:
    return {
        name: pl.scan_parquet(file, glob=False, hive_partitioning=False).select(pl.len()).collect().item()
        for name in TABLES
        if (file := Path(folder, f"{name}.parquet")).exists()
    }


def _write_trace(trace: Trace, folder: Path, packs: bool = False) -> None:
    tables = trace.tables
    if packs and sum(frame.estimated_size() for frame in tables.values()) <= _MAX_PACKED_BYTES:
        pack_tables(tables, folder / PACKED_FILE)
    else:
        write_tables({folder / f"{name}.parquet": frame for name, frame in tables.items()})
    write_meta(
        folder, "trace", trace.meta, rows={name: tables[name].height for name in TABLES if name in tables}
    )


def write_tables(tables: Mapping[Path, pl.DataFrame]) -> None:
    """Write each table to its Parquet file; small tables are written in memory first, which is faster."""
    for file, frame in tables.items():
        if frame.height > _MAX_SMALL_ROWS:
            frame.lazy().sink_parquet(file, compression="zstd", compression_level=1)
        else:
            frame.write_parquet(content := io.BytesIO(), compression="zstd", compression_level=1)
            file.write_bytes(content.getbuffer())


def _is_replaceable(folder: Path, packs: bool = False, names: Collection[str] | None = None) -> bool:
    """Return whether a folder is empty or has only files of `write`, so that replacing it destroys nothing else."""
    if not folder.is_dir() or folder.is_symlink():
        return False
    if names is not None:
        return all(entry.is_file() and entry.name in names for entry in folder.iterdir())
    files = {"meta.json", *(f"{name}.parquet" for name in TABLES), *([PACKED_FILE] if packs else [])}
    return all(
        (entry.is_file() and entry.name in files)
        or (entry.name.startswith("rank=") and _is_replaceable(entry))
        for entry in folder.iterdir()
    )
