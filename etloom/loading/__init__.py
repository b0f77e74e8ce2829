"""Loading of runs: find the traces of each rank, decide how to load them, read, link and cache them.

rank_discovery, run_json  the traces of a folder and their ranks; run.json of `etloom collect`
plan                      `LoadPlan`: for each rank where its tables come from and where they are kept
executor, parallel        the execution of a plan
file_reading, large_files one file into memory, or to Parquet in bounded memory
cache, cache_usage        linked traces as Parquet in the user's cache folder
resident_tables           tables on disk of which only some are in memory
consistency               contradictions between the files of a run, as rows of stats
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etloom import formats
from etloom.core.trace import Job
from etloom.loading import consistency
from etloom.loading.executor import add_rank_stats, execute_plan
from etloom.loading.file_reading import Progress
from etloom.loading.plan import LoadOptions, plan_file, plan_ranks
from etloom.loading.rank_discovery import DiscoveredRun, discover_ranks

__all__ = ["LoadOptions", "Progress", "load_file", "load_folder", "load_path", "load_ranks"]


def load_path(path: Path, options: LoadOptions, rank_pattern: str | None = None) -> Job:
    """Load a folder of traces, or a single file (or folder of Parquet).

    Args:
        path: the folder or file.
        options: how to load it.
        rank_pattern: see `discover_ranks`.

    Returns:
        The linked Job.

    Raises:
        ReadError, LimitError: nothing can be read.
        LinkError: the files of a rank are not of one program.
    """
    if path.is_dir() and formats.detect_format(path) is None:
        return load_folder(path, options, rank_pattern)
    return load_file(path, options)


def load_file(path: Path, options: LoadOptions) -> Job:
    """Load a file, which may hold several ranks; a file that does not state its rank is of rank 0."""
    return execute_plan(plan_file(path, options))


def load_ranks(
    files_by_rank: Mapping[int, Sequence[Path]], options: LoadOptions, *, skip_unreadable: bool = False
) -> Job:
    """Load the given files of each rank; see `execute_plan` for ``skip_unreadable``."""
    return execute_plan(plan_ranks(files_by_rank, options), skip_unreadable=skip_unreadable)


def load_folder(folder: Path, options: LoadOptions, rank_pattern: str | None = None) -> Job:
    """Load the traces in a folder; a file that cannot be read is a row of stats, as long as others can be read."""
    discovered = discover_ranks(folder, rank_pattern)
    job = _load_discovered(discovered, options)
    meta: dict[str, Any] = {"path": str(folder)}
    if discovered.card is not None:
        meta["card"] = discovered.card
    if discovered.run is not None:
        meta["run"] = discovered.run
    # If files state the world size, missing ranks have been counted from it.
    is_counted = "job.missing_ranks" in job.run_stats["name"]
    stats = [row for row in discovered.stats if not (is_counted and row.name == "job.missing_ranks")]
    return add_rank_stats(job, discovered.rank_stats).replace(meta=meta).with_stats(stats)


def _load_discovered(discovered: DiscoveredRun, options: LoadOptions) -> Job:
    """Load all ranks; a single file may hold several, and one that holds one rank gets the discovered number."""
    paths = [path for files in discovered.ranks.values() for path in files]
    if len(paths) > 1:
        return load_ranks(discovered.ranks, options, skip_unreadable=True)
    job = load_file(paths[0], options)
    if len(job) > 1:
        return job
    (rank,), (trace,) = discovered.ranks, job.values()
    stats = consistency.check_ranks({rank: trace})
    return Job({rank: trace.replace(meta={"rank": rank})}, job.meta, job.run_stats).with_stats(stats)
