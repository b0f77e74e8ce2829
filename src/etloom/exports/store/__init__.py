"""A store of runs: each run is read and linked once, and saved with the results of common analyses.

adding       adds a run: batches of ranks, then what needs all ranks, then its name; the folder until then
batches      the ranks that one process prepares
summaries    the answers that are stored
rank_results what questions to all ranks need of each rank, kept while its batch has it in memory
cached_runs  answers of runs of many ranks in the cache
host_delays  ranks, hosts and racks that delay others, over the runs of a store

`etloom.formats.parquet.store_layout` describes the files.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl

from etloom.core.errors import ReadError
from etloom.core.version import compute_code_digest
from etloom.exports.store.adding import AddedRun, AddOptions, add_run
from etloom.exports.store.cached_runs import open_cached_run
from etloom.exports.store.host_delays import compare_hosts
from etloom.formats.parquet.store_layout import STORE_VERSION, list_runs, read_json, run_folder
from etloom.formats.parquet.summary_files import SummaryFiles

__all__ = [
    "AddOptions",
    "AddedRun",
    "add_run",
    "compare_hosts",
    "describe_runs",
    "open_cached_run",
    "refresh_runs",
]


# List the runs of a store, and recompute runs that another version of etloom stored.

COLUMNS = {
    "run": pl.String,
    "ranks": pl.Int64,
    "hosts": pl.Int64,
    "events": pl.Int64,
    "step_ns": pl.Int64,
    "added": pl.String,
    "etloom": pl.String,
    "is_current": pl.Boolean,
    "source": pl.String,
}


def describe_runs(store: Path) -> pl.DataFrame:
    """Return a table of the runs of a store (`COLUMNS`), oldest first.

    is_current is False if another version of etloom stored the run: its answers are computed from the tables until it
    is refreshed. Raises ReadError.
    """
    rows = []
    for name in list_runs(store):
        folder = run_folder(store, name)
        content = read_json(folder / "meta.json")
        files = SummaryFiles(folder)
        ranks = files.read("ranks", ("rank", "host", "events"))
        rows.append(
            {
                "run": name,
                "ranks": ranks.height,
                "hosts": ranks["host"].drop_nulls().n_unique(),
                "events": ranks["events"].sum(),
                "step_ns": _measure_step(files),
                "added": content.get("added"),
                "etloom": content.get("etloom"),
                "is_current": _is_current(folder),
                "source": content.get("source"),
            }
        )
    return pl.DataFrame(rows, schema=COLUMNS)


def _measure_step(files: SummaryFiles) -> int | None:
    """Return the mean duration of the steps of all ranks, ns; None if the run has none, or they cannot be read."""
    try:
        steps = files.read("steps", ("step", "dur_ns")).drop_nulls()
    except ReadError:
        return None
    mean = steps["dur_ns"].mean() if steps.schema["dur_ns"] == pl.Int64 else None
    return None if mean is None else round(mean)  # type: ignore[arg-type]


def refresh_runs(store: Path, options: AddOptions) -> list[AddedRun]:
    """Recompute the runs that another version of etloom stored, from the tables in the store.

    Raises:
        ReadError: the store or a run cannot be read.
        EtloomError: the store cannot be written.
    """
    folders = [run_folder(store, name) for name in list_runs(store)]
    return [add_run(folder, store, options) for folder in folders if not _is_current(folder)]


def _is_current(folder: Path) -> bool:
    content = read_json(folder / "meta.json")
    return content.get("code") == compute_code_digest() and content.get("store") == STORE_VERSION
