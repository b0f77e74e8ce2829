"""Reads runs from a store of runs, whose layout `etloom.formats.parquet.store_layout` describes.

The run is untrusted input, like every folder of Parquet: only tables of the schema and the answers that the manifest
names are opened, in the folder itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl

from etloom.core.errors import ReadError, warn
from etloom.core.schema import TABLES, Stat
from etloom.core.trace import COUNTED_TABLES, Job, StoredAnswer, StoredRefusal, Trace, TracesOnDemand
from etloom.core.version import compute_code_digest
from etloom.formats.io.json_text import load_json
from etloom.formats.io.mirror import ensure_local
from etloom.formats.io.parquet_input import PARQUET_ERRORS
from etloom.formats.parquet import checksums
from etloom.formats.parquet.store_layout import SUMMARIES, check_version, read_json
from etloom.formats.parquet.summary_files import REMEDY, SummaryFiles
from etloom.formats.parquet.table_files import (
    PACKED_FILE,
    PackedTable,
    ParquetTable,
    check_ratios,
    read_table,
)
from etloom.formats.tables.meta_checks import check_meta

RANK_COLUMNS = {
    "rank": pl.Int64,
    "host": pl.String,
    "events": pl.Int64,
    "meta": pl.String,
    "tables": pl.String,
}
"""Columns of ranks.parquet: meta and tables (rows by name) are JSON text."""
_FILE_NAME = re.compile(r"[a-z0-9-]+")


def read_run(folder: Path, *, lazy: bool, owner: object = None) -> Job:
    """Read a run from its folder in a store as a Job; with ``lazy``, its tables stay on disk until accessed.

    Args:
        folder: the run.
        lazy: leave the tables in their files until they are accessed; then the Job also has the stored answers.
        owner: an object to keep alive as long as the tables are needed.

    Raises:
        ReadError: the layout is newer, or a file is missing or damaged.
    """
    manifest = folder / "meta.json"
    content = read_json(manifest)
    check_version(content, manifest)
    meta = content.get("meta")
    if not isinstance(meta, dict):
        raise ReadError("is not the manifest of a stored run", where=manifest, remedy=REMEDY)
    invalid: list[Stat] = []
    meta = check_meta(meta, invalid)
    run = _StoredRun(folder, content, owner)
    if lazy:
        return Job(TracesOnDemand(run.ranks, run.open_rank), meta, run.run_stats, run).with_stats(invalid)
    traces = {rank: run.open_rank(rank) for rank in run.ranks}
    loaded = {rank: Trace(trace.tables, trace.meta) for rank, trace in traces.items()}
    return Job(loaded, meta, run.run_stats).with_stats(invalid)


def _parse_facts(folder: Path, meta: str, tables: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Parse the JSON texts of a rank in ranks.parquet: its meta, and the number of rows of each of its tables."""
    try:
        facts, rows = load_json(meta), load_json(tables)
    except (ValueError, TypeError, RecursionError):
        facts, rows = None, None
    if (
        not isinstance(facts, dict)
        or not isinstance(rows, dict)
        or any(name not in TABLES or type(count) is not int for name, count in rows.items())
    ):
        raise ReadError(
            "is damaged, or names tables that this version of etloom does not know",
            where=folder / SUMMARIES / "ranks.parquet",
            remedy=REMEDY,
        )
    return facts, rows


def _read_summary(files: SummaryFiles, name: str, schema: Mapping[str, Any]) -> pl.DataFrame:
    """Read a summary table of a stored run, reduced to the columns of ``schema`` and cast to their types."""
    frame = files.read(name, list(schema))
    try:
        return frame.select(pl.col(column).cast(dtype) for column, dtype in schema.items())
    except PARQUET_ERRORS as error:
        reason = str(error).partition("\n")[0]
        raise ReadError(
            f"is not a summary of a store: {reason}", where=files.find(f"{name}.parquet"), remedy=REMEDY
        ) from None


class _StoredRun:
    """A run in a store: tables over all ranks, and stored results (implements `etloom.core.trace.StoredRun`)."""

    def __init__(self, folder: Path, content: Mapping[str, Any], owner: object) -> None:
        self._folder, self._owner = folder, owner
        self._files = SummaryFiles(folder, content.get(checksums.KEY, {}))
        table = _read_summary(self._files, "ranks", RANK_COLUMNS)
        if table["rank"].null_count():
            file = folder / SUMMARIES / "ranks.parquet"
            raise ReadError("is not a summary of a store: a rank is null", where=file, remedy=REMEDY)
        self._facts = {rank: (meta, tables) for rank, _, _, meta, tables in table.iter_rows()}
        self._stats = _read_summary(self._files, "stats", {"rank": pl.Int64, **TABLES["stats"].schema})
        # Answers of other code may differ from those that this one computes.
        is_current = content.get("code") == compute_code_digest()
        answers = content.get("answers") if is_current else None
        self._answers = (
            [entry for entry in answers if isinstance(entry, dict)] if isinstance(answers, list) else []
        )
        self._has_facts = is_current
        self._has_old_answers = not is_current and bool(content.get("answers"))

    @property
    def ranks(self) -> list[int]:
        """The ranks of the run."""
        return list(self._facts)

    @property
    def run_stats(self) -> pl.DataFrame:
        """The stats about the run as a whole, without those of single ranks."""
        return self._stats.filter(pl.col("rank").is_null()).drop("rank")

    @cached_property
    def _stats_by_rank(self) -> dict[Any, pl.DataFrame]:
        return self._stats.partition_by("rank", as_dict=True, include_key=False)

    @cached_property
    def rank_facts(self) -> pl.DataFrame:
        """One row per rank: host, world size and numbers of events, nodes and launches (see `Job.rank_facts`)."""
        tables, meta = pl.col("tables"), pl.col("meta")
        return (
            _read_summary(self._files, "ranks", RANK_COLUMNS)
            .sort("rank")
            .select(
                "rank",
                "host",
                meta.str.json_path_match("$.world_size").cast(pl.Int64, strict=False).alias("world_size"),
                *(
                    tables.str.json_path_match(f"$.{name}")
                    .cast(pl.Int64, strict=False)
                    .fill_null(0)
                    .alias(name)
                    for name in COUNTED_TABLES
                ),
            )
        )

    def open_rank(self, rank: int) -> Trace:
        """Return the Trace of a rank, with its tables left on disk. Raises ReadError."""
        meta, tables = _parse_facts(self._folder, *self._facts[rank])
        loaders = {name: self._load_table(name, rank, rows) for name, rows in tables.items()}
        stats = self._stats_by_rank.get((rank,), TABLES["stats"].empty())
        invalid: list[Stat] = []
        trace = Trace({"stats": stats}, check_meta(meta, invalid), loaders=loaders)
        return trace.with_stats(invalid) if invalid else trace

    def _load_table(self, name: str, rank: int, rows: int) -> ParquetTable | PackedTable:
        folder = self._folder / f"rank={rank}"
        if self._is_packed(rank):
            return PackedTable(name, folder / PACKED_FILE, rows, self._owner)
        return ParquetTable(name, folder / f"{name}.parquet", self._owner, rows)

    def _is_packed(self, rank: int) -> bool:
        """Return whether the tables of a rank are in one file, as only runs in the cache (with an owner) may be."""
        return self._owner is not None and (self._folder / f"rank={rank}" / PACKED_FILE).is_file()

    def scan(self, name: str) -> pl.LazyFrame:
        """Return a table of all ranks as a lazy query, with ``rank`` first; stats lacks rows about the whole run."""
        if name == "stats":
            return self._stats.lazy().filter(pl.col("rank").is_not_null())
        schema = {"rank": pl.Int64, **TABLES[name].schema}
        key = f'"{name}":'
        ranks = [rank for rank, (_, tables) in self._facts.items() if key in tables]
        if not ranks:
            return pl.LazyFrame(schema=schema)
        if any(map(self._is_packed, ranks)):
            return pl.concat(
                self.open_rank(rank).scan(name).select(pl.lit(rank, pl.Int64).alias("rank"), pl.all())
                for rank in ranks
            )
        files = [self._folder / f"rank={rank}" / f"{name}.parquet" for rank in ranks]
        ensure_local(*files)
        read_table(name, files[0], head=True)  # raises if it does not match the schema
        if self._owner is None:
            check_ratios(files)
        frame = pl.scan_parquet(
            files,
            glob=False,
            hive_partitioning=True,
            hive_schema={"run": pl.String, "rank": pl.Int64},
            missing_columns="insert",
            extra_columns="ignore",
        )
        columns = frame.collect_schema()
        return frame.select(
            (pl.col(column).cast(dtype) if column in columns else pl.lit(None, dtype)).alias(column)
            for column, dtype in schema.items()
        )

    def answer(self, name: str, options: Mapping[str, Any]) -> StoredAnswer | None:
        """Return the stored result of an analysis with ``options``; None if this etloom version stored no result."""
        if self._has_old_answers:
            self._has_old_answers = False  # reported once
            warn(
                f"{self._folder}: stored by another version of etloom, so answers are computed from the tables again; "
                f"etloom store refresh {self._folder.parent} stores them"
            )
        wanted = {"analysis": name, "options": dict(options)}
        for entry in self._answers:
            if {key: entry.get(key) for key in wanted} != wanted:
                continue
            file = entry.get("file")
            refusals = tuple(_parse_refusals(entry.get("refusals")))
            if file is None:
                return StoredAnswer(pl.DataFrame(), refusals)
            if not (isinstance(file, str) and _FILE_NAME.fullmatch(file)):
                return None
            try:
                return StoredAnswer(self._files.read(file), refusals)
            except ReadError:
                return None  # computed from the tables
        return None

    def facts(self) -> dict[str, Any] | None:
        """Return the stored facts for ``etloom info``; None if missing, damaged or from another version of etloom."""
        file = self._folder / SUMMARIES / "facts.json"
        if not self._has_facts or not file.is_file():
            return None
        try:
            return read_json(self._files.find(file.name))
        except ReadError:
            return None  # computed from the tables


def _parse_refusals(rows: Any) -> Iterable[StoredRefusal]:
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, list) and len(row) == 4 and isinstance(row[1], str):
            rank, problem, *texts = row
            yield StoredRefusal(rank, problem, *(text if isinstance(text, str) else None for text in texts))


def build_rank_table(job: Job) -> pl.DataFrame:
    """Build a run's ranks.parquet: one row per rank with host, number of events, meta, and row count of each table."""
    rows = [
        (
            rank,
            trace.meta.get("host"),
            trace.rows("events"),
            json.dumps(dict(trace.meta)),
            json.dumps(
                {name: rows for name in trace.table_names if name != "stats" and (rows := trace.rows(name))}
            ),
        )
        for rank, trace in job.items()
    ]
    return pl.DataFrame(rows, schema=RANK_COLUMNS, orient="row")
