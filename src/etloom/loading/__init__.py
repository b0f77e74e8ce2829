"""Load runs: discover the traces of each rank, plan how to load them, then read, link and cache them.

rank_discovery            the traces of a folder and their ranks
rank_inference            ranks of traces that do not state them, by the numbers in their paths
file_names                ranks and stages in names of files
folder_contents           the files of a folder: converted copies, the workload card, run.json, captures of graphs
plan                      `LoadPlan`: for each rank where its tables come from and where they are kept
executor                  the execution of a plan, ranks in parallel
engines, worker           tasks in processes or on a Ray cluster
reading_tasks             ranks that tasks read into a folder of ranks
file_reading              one file into memory, or to Parquet in bounded memory
cache                     the store of runs in the user's cache folder: keys, runs in use, limit of its size
rank_stores               folders of linked ranks (in the cache, in a store), and which tables are in memory
consistency               contradictions between the files of a run, as rows of stats
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etloom import formats
from etloom.core.trace import Job
from etloom.core.urls import describe_path
from etloom.loading import cache, consistency
from etloom.loading.engines import LOCAL_ENGINE
from etloom.loading.executor import add_rank_stats, execute_plan
from etloom.loading.file_names import find_companion_rank, find_rank_in_name, list_ranked_files
from etloom.loading.file_reading import Progress
from etloom.loading.folder_contents import find_captures
from etloom.loading.plan import LoadOptions, LoadPlan, plan_file, plan_ranks
from etloom.loading.rank_discovery import DiscoveredRun, discover_ranks
from etloom.loading.rank_stores import CachedRun

__all__ = [
    "MIN_CACHED_RANKS",
    "MIN_REPORTED_RANKS",
    "LoadOptions",
    "Progress",
    "find_cached_run",
    "list_ranked_files",
    "load_folder",
    "load_path",
    "load_ranks",
]

MIN_CACHED_RANKS = 257
"""Runs of at least this many ranks are kept in the cache with their answers, which would take longer for fewer ranks
than reading and linking them."""
MIN_REPORTED_RANKS = 64
"""The same for runs that are opened for a report, which needs these answers."""
MIN_TASK_RANKS = 64
"""Fewer ranks are read by threads of this process: on two processors, 40 ranks take as long in processes."""


def find_cached_run(folder: Path, rank_pattern: str | None) -> CachedRun | None:
    """Return the place of a run in the cache, by the files in its folder, which are not opened."""
    key = cache.make_key([], folder, pattern=rank_pattern)
    return None if key is None else CachedRun(key)


def load_path(path: Path, options: LoadOptions, rank_pattern: str | None = None) -> Job:
    """Load a folder of traces, or a trace file or Parquet folder of one or several ranks, and return a linked Job.

    Args:
        path: the folder or file; a file that does not state its rank is of the one in its name, else of rank 0.
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
    return _number_by_name(execute_plan(plan_file(path, options, find_captures(path))), path, rank_pattern)


def _number_by_name(job: Job, path: Path, rank_pattern: str | None) -> Job:
    """Set the rank of a job's only trace to the number in the file name, unless the trace itself states a rank."""
    if len(job) != 1 or job.stored is not None:
        return job
    (trace,) = job.values()
    rank = None
    if trace.rank is None:
        rank = find_rank_in_name(path, rank_pattern)
        rank = find_companion_rank(path) if rank is None and rank_pattern is None else rank
    # A number beyond the world counts something else, such as steps.
    if rank is None or rank >= int(trace.meta.get("world_size") or rank + 1):
        return job
    return Job({rank: trace.replace(meta={"rank": rank})}, job.meta, job.run_stats)


def load_ranks(files_by_rank: Mapping[int, Sequence[Path]], options: LoadOptions) -> Job:
    """Load and link the files of each rank (rank -> paths). Raises like `load_path`."""
    return _execute(plan_ranks(files_by_rank, options))


def _execute(plan: LoadPlan, *, skip_unreadable: bool = False) -> Job:
    """Load the ranks of a plan, many small ones in processes, or on a Ray cluster if the plan's engine is "ray"."""
    if len(plan.ranks) >= MIN_TASK_RANKS or plan.options.engine != LOCAL_ENGINE:
        from etloom.loading.reading_tasks import read_by_tasks

        plan = read_by_tasks(plan)
    return execute_plan(plan, skip_unreadable=skip_unreadable)


def load_folder(
    folder: Path,
    options: LoadOptions,
    rank_pattern: str | None = None,
    discovered: DiscoveredRun | None = None,
) -> Job:
    """Load and link the traces in a folder; files that cannot be read are reported in stats if others can be read.

    Args:
        folder: the folder.
        options: how to load it.
        rank_pattern: see `discover_ranks`.
        discovered: its traces, if the caller has found them.
    """
    discovered = discovered or discover_ranks(folder, rank_pattern)
    (first, *others) = [path for files in discovered.ranks.values() for path in files]
    if others:
        plan = plan_ranks(discovered.ranks, options, discovered.captures)
        job = _execute(plan, skip_unreadable=True)
    else:  # a single file may hold several ranks
        job = execute_plan(plan_file(first, options, next(iter(discovered.captures.values()), ())))
        if len(job) == 1:  # it gets the discovered number
            (rank,), (trace,) = discovered.ranks, job.values()
            mismatch = consistency.check_ranks({rank: trace})
            job = Job({rank: trace.replace(meta={"rank": rank})}, job.meta, job.run_stats).with_stats(
                mismatch
            )
    meta: dict[str, Any] = {"path": describe_path(folder)}
    if discovered.card is not None:
        meta["card"] = discovered.card
    if discovered.processes:
        meta["processes"] = {name: describe_path(path) for name, path in discovered.processes.items()}
    if discovered.run is not None:
        meta["run"] = discovered.run
    # If files state the world size, missing ranks have been counted from it.
    is_counted = "job.missing_ranks" in job.run_stats["name"]
    stats = [row for row in discovered.stats if not (is_counted and row.name == "job.missing_ranks")]
    return add_rank_stats(job, discovered.rank_stats).replace(meta=meta).with_stats(stats)
