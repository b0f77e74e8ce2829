"""The decision how a run is loaded: for each rank where its tables come from, and where they are kept."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from etloom import formats
from etloom.core.memory import available_memory
from etloom.loading import large_files
from etloom.loading.file_reading import Progress, estimate_text_bytes
from etloom.loading.parallel import max_parallel_ranks

_TABLE_BYTES_PER_TEXT_BYTE = 0.6
"""Memory of the tables of a linked rank per byte of its text (measured: 0.4 to 0.6)."""
_TABLE_BYTES_PER_PARQUET_BYTE = 10
"""Memory of the tables of a rank per byte of etloom's Parquet (measured: 9)."""


@dataclass(frozen=True)
class LoadOptions:
    """Options of `etloom.open`.

    Attributes:
        progress: see `Progress`.
        jobs: ranks read in parallel; default: number of CPUs, fewer if memory is short. Reading and linking run outside
            of the interpreter's lock, so threads suffice.
        use_cache: read files that were slow to read from the cache, and add them to it.
        lazy: leave tables of etloom's Parquet on disk; convert a large Kineto file to that, and do not link it, since
            linking needs all of it in memory.
        max_table_bytes: bytes of memory for tables; default: half of the available memory.
        linking: options of `etloom.linker.link` that differ from the defaults.
    """

    progress: Progress | None = None
    jobs: int | None = None
    use_cache: bool = True
    lazy: bool = False
    max_table_bytes: int | None = None
    linking: Mapping[str, Any] = field(default_factory=dict)


class Source(Enum):
    """The origin of the tables of a rank."""

    FILES = "files, or their cache entry, read into memory and linked"
    LARGE_KINETO = "a Kineto file that is converted to Parquet in bounded memory, not linked"
    PARQUET = "a folder of etloom's Parquet, left on disk"


class Storage(Enum):
    """The place of the tables of a rank while the Job is used."""

    MEMORY = "in memory"
    DISK = "on disk, loaded at each access"
    EVICTABLE = "on disk, loaded on access and kept in memory while memory allows"


@dataclass(frozen=True)
class RankPlan:
    """The plan for the tables of one rank, or of a single file."""

    files: tuple[Path, ...]
    source: Source = Source.FILES
    storage: Storage = Storage.MEMORY


@dataclass(frozen=True)
class LoadPlan:
    """The plan for a run.

    Attributes:
        ranks: the plan of each rank; a single file, which may hold any ranks, has the key None alone.
        options: the caller's options.
        max_table_bytes: bytes of memory for evictable tables.
        parallel: number of ranks read at a time.
    """

    ranks: Mapping[int | None, RankPlan]
    options: LoadOptions
    max_table_bytes: int
    parallel: int = 1


def plan_file(path: Path, options: LoadOptions) -> LoadPlan:
    """Decide how a single file or folder of Parquet is loaded.

    Raises:
        ReadError: the format cannot be detected because the file cannot be opened.
    """
    max_table_bytes = _limit_table_bytes(options)
    source, storage = Source.FILES, Storage.MEMORY
    if options.lazy and path.exists() and formats.detect_format(path) == "parquet":
        source, storage = Source.PARQUET, Storage.DISK
    elif options.lazy and large_files.is_large(path):
        source, storage = Source.LARGE_KINETO, Storage.DISK
    elif not options.linking and _is_large_parquet_run(path, max_table_bytes):
        source, storage = Source.PARQUET, Storage.EVICTABLE
    return LoadPlan({None: RankPlan((path,), source, storage)}, options, max_table_bytes)


def plan_ranks(files_by_rank: Mapping[int, Sequence[Path]], options: LoadOptions) -> LoadPlan:
    """Decide how the files of each rank are loaded: on disk if the tables of all ranks would not fit in memory."""
    max_table_bytes = _limit_table_bytes(options)
    files = [path for path in itertools.chain(*files_by_rank.values()) if path.is_file()]
    table_bytes = sum(map(estimate_text_bytes, files)) * _TABLE_BYTES_PER_TEXT_BYTE
    storage = (
        Storage.EVICTABLE if len(files_by_rank) > 1 and table_bytes > max_table_bytes else Storage.MEMORY
    )
    ranks: dict[int | None, RankPlan] = {}
    for rank, paths in files_by_rank.items():
        if options.lazy and len(paths) == 1 and large_files.is_large(paths[0]):
            ranks[rank] = RankPlan(tuple(paths), Source.LARGE_KINETO, Storage.DISK)
        else:
            ranks[rank] = RankPlan(tuple(paths), Source.FILES, storage)
    parallel = max_parallel_ranks(files_by_rank, options.jobs or os.cpu_count() or 1)
    return LoadPlan(ranks, options, max_table_bytes, parallel)


def _limit_table_bytes(options: LoadOptions) -> int:
    return available_memory() // 2 if options.max_table_bytes is None else options.max_table_bytes


def _is_large_parquet_run(path: Path, max_table_bytes: int) -> bool:
    """Return whether the path is a saved run of several ranks whose tables would exceed the memory."""
    if not path.is_dir() or formats.detect_format(path) != "parquet":
        return False
    parquet_bytes = sum(file.stat().st_size for file in path.glob("rank=*/*.parquet"))
    return parquet_bytes * _TABLE_BYTES_PER_PARQUET_BYTE > max_table_bytes
