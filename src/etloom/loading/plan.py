"""Plan how a run is loaded: the source of each rank's tables, and whether they stay in memory or on disk."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from etloom import formats
from etloom.core.errors import EtloomError
from etloom.core.machine import available_memory
from etloom.formats.parquet.store_layout import is_store, is_stored_run
from etloom.loading import cache
from etloom.loading.engines import LOCAL_ENGINE
from etloom.loading.file_reading import Progress, estimate_text_bytes, is_large
from etloom.loading.rank_stores import CachedRun, RankFolder

_TABLE_BYTES_PER_TEXT_BYTE = 0.6
"""Memory of the tables of a linked rank per byte of its text (measured: 0.4 to 0.6)."""
_TABLE_BYTES_PER_PARQUET_BYTE = 10
"""Memory of the tables of a rank per byte of etloom's Parquet (measured: 9)."""
MIN_TEXT_BYTES_TO_CACHE = 8_000_000
"""Kineto and execution traces with less text in all are not cached: they are read about as quickly as the cache is."""
PARSED_NATIVELY = ("kineto", "execution-trace")
_LOADING_BYTES_PER_TEXT_BYTE = 1.5
"""Upper bound of the memory for reading and linking a rank per byte of its text (measured: 0.5 to 1.1)."""


@dataclass(frozen=True)
class LoadOptions:
    """Options of `etloom.open`: parallelism, cache, memory limits, linking, engine.

    Attributes:
        progress: see `Progress`.
        jobs: ranks read in parallel; default: number of CPUs, fewer if memory is short. Reading and linking run outside
            of the interpreter's lock, so threads suffice.
        use_cache: read files that were slow to read from the cache, and add them to it.
        lazy: leave tables of etloom's Parquet on disk; convert a large Kineto file to that, and do not link it, since
            linking needs all of it in memory.
        max_table_bytes: bytes of memory for tables; default: half of the available memory.
        linking: options of `etloom.linker.link` that differ from the defaults.
        engine: "local", or "ray" to read ranks that are not in the cache on a cluster (`etloom.loading.engines`).
        rank_folder: the folder in which ranks are saved; default: with `use_cache`, one in the cache, by the files.
    """

    progress: Progress | None = None
    jobs: int | None = None
    use_cache: bool = True
    lazy: bool = False
    max_table_bytes: int | None = None
    linking: Mapping[str, Any] = field(default_factory=dict)
    engine: str = LOCAL_ENGINE
    rank_folder: RankFolder | None = None


class Source(Enum):
    """Sources from which a rank's tables are loaded: files to read and link, a large Kineto file, or saved Parquet."""

    FILES = "files, or their ranks in the cache, read into memory and linked"
    LARGE_KINETO = "a Kineto file that is converted to Parquet in bounded memory, not linked"
    PARQUET = "a folder of etloom's Parquet, left on disk"


class Storage(Enum):
    """Storage of a rank's tables while its Job is in use: in memory, on disk, or on disk with eviction from memory."""

    MEMORY = "in memory"
    DISK = "on disk, loaded at each access"
    EVICTABLE = "on disk, loaded on access and kept in memory while memory allows"


@dataclass(frozen=True)
class RankPlan:
    """The plan for loading a rank or a single file: its files, the source of its tables, and their storage.

    ``captures``: traces that recorded the capture of its device graphs.
    """

    files: tuple[Path, ...]
    source: Source = Source.FILES
    storage: Storage = Storage.MEMORY
    captures: tuple[Path, ...] = ()

    @property
    def all_files(self) -> tuple[Path, ...]:
        """Its files and captures."""
        return *self.files, *self.captures

    def to_absolute(self) -> RankPlan:
        """Return the plan with absolute paths, for a process with another current folder."""
        files, captures = (tuple(path.absolute() for path in paths) for paths in (self.files, self.captures))
        return replace(self, files=files, captures=captures)


@dataclass(frozen=True)
class LoadPlan:
    """Specifies how a run is loaded: a plan per rank, the memory limit, and the number of ranks to read in parallel.

    Attributes:
        ranks: the plan of each rank; a single file, which may hold any ranks, has the key None alone.
        options: the caller's options.
        max_table_bytes: bytes of memory for evictable tables.
        parallel: number of ranks read at a time.
        folder: where ranks are opened if they are there, else saved; None if the cache is not used, or if the files are
            read about as quickly as from the cache.
    """

    ranks: Mapping[int | None, RankPlan]
    options: LoadOptions
    max_table_bytes: int
    parallel: int = 1
    folder: RankFolder | None = None


def plan_file(path: Path, options: LoadOptions, captures: Sequence[Path] = ()) -> LoadPlan:
    """Plan how a single file or Parquet folder is loaded.

    ``captures``: traces that recorded the capture of its device graphs.

    Raises:
        ReadError: the format cannot be detected because the file cannot be opened.
    """
    max_table_bytes = limit_table_bytes(options)
    source, storage = Source.FILES, Storage.MEMORY
    if options.lazy and path.exists() and formats.detect_format(path) == "parquet":
        source, storage = Source.PARQUET, Storage.DISK
    elif options.lazy and is_large(path):
        source, storage = Source.LARGE_KINETO, Storage.DISK
    elif not options.linking and (is_stored(path) or _is_large_parquet_run(path, max_table_bytes)):
        source, storage = Source.PARQUET, Storage.EVICTABLE
    plan = RankPlan((path,), source, storage, tuple(captures))
    text_bytes = sum(estimate_text_bytes(file) for file in (path, *captures) if file.is_file())
    folder = _choose_folder({None: plan}, text_bytes, options)
    return LoadPlan({None: plan}, options, max_table_bytes, folder=folder)


def plan_ranks(
    files_by_rank: Mapping[int, Sequence[Path]],
    options: LoadOptions,
    captures: Mapping[int, Sequence[Path]] | None = None,
) -> LoadPlan:
    """Plan how the files of each rank are loaded; tables stay on disk if all ranks together would exceed the memory.

    Args:
        files_by_rank: The files of each rank.
        options: How to load them.
        captures: Of each rank, traces of the capture of its device graphs.
    """
    captures = captures or {}
    max_table_bytes = limit_table_bytes(options)
    text_bytes = [
        sum([estimate_text_bytes(path) for path in paths if path.is_file()])
        for paths in files_by_rank.values()
    ]
    table_bytes = sum(text_bytes) * _TABLE_BYTES_PER_TEXT_BYTE
    exceeds_memory = len(files_by_rank) > 1 and table_bytes > max_table_bytes
    is_stored = options.rank_folder is not None and not isinstance(options.rank_folder, CachedRun)
    storage = Storage.EVICTABLE if exceeds_memory or is_stored else Storage.MEMORY
    ranks: dict[int | None, RankPlan] = {}
    for rank, paths in files_by_rank.items():
        if options.lazy and len(paths) == 1 and is_large(paths[0]):
            ranks[rank] = RankPlan(tuple(paths), Source.LARGE_KINETO, Storage.DISK)
        else:
            ranks[rank] = RankPlan(tuple(paths), Source.FILES, storage, tuple(captures.get(rank, ())))
    parallel = max_parallel_ranks(text_bytes, options.jobs or os.cpu_count() or 1)
    capture_bytes = sum(
        estimate_text_bytes(path) for paths in captures.values() for path in paths if path.is_file()
    )
    folder = _choose_folder(ranks, sum(text_bytes) + capture_bytes, options)
    return LoadPlan(ranks, options, max_table_bytes, parallel, folder)


def _choose_folder(
    ranks: Mapping[int | None, RankPlan], text_bytes: int, options: LoadOptions
) -> RankFolder | None:
    """Choose the folder in which the ranks of a run, with ``text_bytes`` of text in all, are saved."""
    if (folder := options.rank_folder) is not None and not isinstance(folder, CachedRun):
        return None if None in ranks else folder  # the rank of a single file is known once it is read
    if not options.use_cache or _reads_quickly(ranks.values(), text_bytes, options):
        return None
    if folder is not None:
        return folder
    files = [path for part in ranks.values() for path in part.all_files]
    counts = [(rank, len(part.files), len(part.captures)) for rank, part in ranks.items()]
    key = cache.make_key(files, ranks=counts, **options.linking)
    return None if key is None else CachedRun(key)


def _reads_quickly(plans: Iterable[RankPlan], text_bytes: int, options: LoadOptions) -> bool:
    """Return whether files, of ``text_bytes`` in all, are read into memory about as quickly as from the cache."""
    if text_bytes >= MIN_TEXT_BYTES_TO_CACHE or options.engine != LOCAL_ENGINE:
        return False  # other engines return tables through the cache
    for plan in plans:
        if plan.source is not Source.FILES or plan.storage is not Storage.MEMORY:
            return False
        for path in plan.all_files:
            try:
                if not path.is_file() or formats.detect_format(path, "kineto") not in PARSED_NATIVELY:
                    return False
            except EtloomError:
                return False
    return True


def max_parallel_ranks(text_bytes: Sequence[int], jobs: int) -> int:
    """Return the number of ranks to read in parallel: at most ``jobs``, and as many as fit in memory together.

    Args:
        text_bytes: size of the text of each rank, in bytes.
        jobs: largest number.
    """
    available = available_memory() / _LOADING_BYTES_PER_TEXT_BYTE
    largest = sorted(text_bytes, reverse=True)[:jobs]
    return max(1, sum(total <= available for total in itertools.accumulate(largest)))


def limit_table_bytes(options: LoadOptions) -> int:
    """Return the memory for tables: as the options say, by default half of what is available, bytes."""
    return available_memory() // 2 if options.max_table_bytes is None else options.max_table_bytes


def is_stored(path: Path) -> bool:
    """Return whether a path is a store of runs (`etloom store`) or a single run in a store."""
    return is_store(path) or is_stored_run(path)


def _is_large_parquet_run(path: Path, max_table_bytes: int) -> bool:
    """Return whether a path is a saved run of several ranks whose tables would exceed ``max_table_bytes``."""
    if not path.is_dir() or formats.detect_format(path) != "parquet":
        return False
    parquet_bytes = sum(file.stat().st_size for file in path.glob("rank=*/*.parquet"))
    return parquet_bytes * _TABLE_BYTES_PER_PARQUET_BYTE > max_table_bytes
