"""Stores of linked ranks, which are opened instead of read again, and the tables of stored ranks in memory.

A run that is loaded uses the user's cache; a run that is being added to a store uses the store's folder. Tables that
stay on disk are loaded on access, and evicted when memory is short, least recently used ranks first. The memory of a
verb then depends on the number of ranks that it needs at a time, not on the number of ranks of the run.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import polars as pl

from etloom.core.names import list_user_files
from etloom.core.trace import SMALL_ROWS, Job, Results, TableLoader, Trace
from etloom.formats import parquet
from etloom.formats.parquet import writer
from etloom.loading import cache
from etloom.loading.plan import LoadOptions, LoadPlan, RankPlan, Storage

MIN_SECONDS_TO_CACHE = 0.5
"""Runs that take less time to read and link are not cached. Of a run of many ranks, the limit is divided among the
ranks."""


class RankStore(Protocol):
    """Opens ranks that were saved, and saves those that were read; rank None is a single file without a rank."""

    def open(self, rank: int | None) -> Trace | None:
        """Return a saved rank, in memory or with its tables on disk; None if it is not saved."""

    def add(self, rank: int | None, trace: Trace, seconds: float, *, is_complete: bool) -> Trace:
        """Save a rank that took ``seconds`` to read and link; return it, in memory or with its tables on disk.

        ``is_complete``: all of its files could be read.
        """


@dataclass(frozen=True)
class RankFolder:
    """A folder with the linked tables of each rank as ``rank=N``, whose source files did not change meanwhile.

    Attributes:
        folder: the folder.
        packs: the tables of a small rank are one file, which is faster, and only this program reads.
        results: rank -> results of `Trace.compute_once` that need not be computed, of ranks that the folder has.
    """

    folder: Path
    packs: bool = False
    results: Mapping[int, Mapping[tuple[Any, ...], Any]] = field(default_factory=dict)

    def open(self, rank: int | None) -> Trace | None:
        """Return a saved rank with its tables on disk; None if it is not saved."""
        if rank is None or not parquet.sniff_folder(self._locate(rank)):
            return None
        trace = parquet.open_saved(self._locate(rank))
        return trace.with_stored_results(self.results[rank]) if rank in self.results else trace

    def add(self, rank: int | None, trace: Trace, seconds: float, *, is_complete: bool) -> Trace:
        """Save a rank, however long it took; a file of several ranks stays in memory."""
        if rank is None:
            return trace
        writer.write(trace.replace(meta={"rank": rank}), self._locate(rank), packs=self.packs)
        return parquet.open_saved(self._locate(rank))

    def _locate(self, rank: int) -> Path:
        return self.folder / f"rank={rank}"


class CachedRanks:
    """The ranks of a plan in the user's cache: complete, and only if they are slow to read or exceed the memory."""

    def __init__(self, plan: LoadPlan) -> None:
        self._plan = plan

    def open(self, rank: int | None) -> Trace | None:
        """Return a cached rank, with its tables on disk if all ranks exceed the memory; None if it is not cached."""
        plan, key = self._plan.ranks[rank], self._make_key(rank)
        cached = cache.open_entry(key) if plan.storage is Storage.EVICTABLE else cache.load_entry(key)
        progress = self._plan.options.progress
        if cached is not None and progress is not None:
            for path in (*plan.files, *plan.captures):
                progress(path, path.stat().st_size)
        return cached

    def add(self, rank: int | None, trace: Trace, seconds: float, *, is_complete: bool) -> Trace:
        """Cache a complete rank that took long; if all ranks exceed the memory, its tables stay on disk in any case."""
        key = self._make_key(rank) if is_complete else None
        if self._plan.ranks[rank].storage is Storage.EVICTABLE:
            return cache.open_or_create([key], partial(writer.write, trace, packs=True))
        if seconds > MIN_SECONDS_TO_CACHE / len(self._plan.ranks):
            cache.store_entry(key, trace)
        return trace

    def _make_key(self, rank: int | None) -> str | None:
        plan = self._plan
        return make_entry_key(rank, plan.ranks[rank], plan.options) if plan.uses_cache else None


def make_entry_key(rank: int | None, plan: RankPlan, options: LoadOptions) -> str | None:
    """Return the cache key of a rank's files and options; None if they cannot be cached."""
    facts: dict[str, Any] = {} if rank is None else {"rank": rank}
    if names := list_user_files():
        facts["names"] = names
    if not options.use_cache:
        return None
    return cache.entry_key((*plan.files, *plan.captures), **facts, **options.linking)


class ResidentTables:
    """Limits the memory of a run's loaded tables to ``max_table_bytes``, by evicting the least recently used ranks.

    The tables of one rank always stay.
    """

    def __init__(self, max_table_bytes: int) -> None:
        self._max_table_bytes = max_table_bytes
        self._bytes_by_rank: dict[_RankTables, int] = {}  # least recently used first
        self._total = 0
        self._lock = threading.Lock()

    def add(self, trace: Trace, frames: Mapping[str, pl.DataFrame] = MappingProxyType({})) -> Trace:
        """Return the trace with tables that are loaded on first access and then stay in memory until they are evicted.

        The stats are loaded now and stay, since every command reads them.

        Args:
            trace: Its tables have loaders.
            frames: Tables that need not be loaded, since the caller has them.
        """
        rank = _RankTables(self, {name: it for name, it in trace.loaders.items() if name != "stats"})
        rank.frames.update((name, frames[name]) for name in rank.loaders if name in frames)
        rank.use(sum(int(frame.estimated_size()) for frame in rank.frames.values()))
        return trace.replace_loaders(rank.loaders, rank.new_results, stats=trace.table("stats"))

    def use(self, rank: _RankTables, added_bytes: int) -> None:
        """Record an access that loaded ``added_bytes`` bytes of a rank; evict other ranks if the limit is exceeded."""
        with self._lock:
            self._bytes_by_rank[rank] = self._bytes_by_rank.pop(rank, 0) + added_bytes
            self._total += added_bytes
            while self._total > self._max_table_bytes and len(self._bytes_by_rank) > 1:
                oldest = next(iter(self._bytes_by_rank))
                self._total -= self._bytes_by_rank.pop(oldest)
                oldest.evict()


def leave_on_disk(run: Job, max_table_bytes: int) -> Job:
    """Return a stored run whose tables are loaded on access, with at most ``max_table_bytes`` of them in memory."""
    resident = ResidentTables(max_table_bytes)
    return run.map_on_demand(lambda trace: resident.add(trace) if trace.loaders else trace)


class _RankTables:
    """The loaded tables of a rank and the results computed from them, which are evicted together."""

    def __init__(self, resident: ResidentTables, stored: Mapping[str, TableLoader]) -> None:
        self._resident = resident
        self.frames: dict[str, pl.DataFrame] = {}
        self._results: list[weakref.ref[Results]] = []
        self.loaders = {name: ResidentTable(self, name, loader) for name, loader in stored.items()}

    def new_results(self) -> Results:
        """Create an empty mapping for the results of a trace, which is cleared when the rank is evicted."""
        results = Results()
        self._results = [reference for reference in self._results if reference() is not None]
        self._results.append(weakref.ref(results))
        return results

    def use(self, added_bytes: int) -> None:
        """Record an access to a table of the rank, for which ``added_bytes`` bytes were loaded (0 if in memory)."""
        self._resident.use(self, added_bytes)

    def evict(self) -> None:
        """Release the loaded tables and results of the rank; they can be loaded and computed again."""
        self.frames.clear()
        for reference in self._results:
            if (results := reference()) is not None:
                results.clear()


class ResidentTable:
    """Loads a table on access and holds it until its rank is evicted (an `etloom.core.trace.TableLoader`)."""

    __slots__ = ("_name", "_rank", "_stored")

    def __init__(self, rank: _RankTables, name: str, stored: TableLoader) -> None:
        self._rank, self._name, self._stored = rank, name, stored

    @property
    def is_loaded(self) -> bool:
        """True while the table is in memory."""
        return self._name in self._rank.frames

    def read(self) -> pl.DataFrame:
        """Return the whole table."""
        frame, added_bytes = self._rank.frames.get(self._name), 0
        if frame is None:
            frame = self._rank.frames[self._name] = self._stored.read().rechunk()
            added_bytes = int(frame.estimated_size())
        self._rank.use(added_bytes)
        return frame.clone()

    def scan(self) -> pl.LazyFrame:
        """Return the table as a lazy query, over memory if it is loaded or small, else over its file."""
        if self.is_loaded or self.rows() <= SMALL_ROWS:
            return self.read().lazy()
        return self._stored.scan()

    def rows(self) -> int:
        """Return the number of rows of the table."""
        return self._stored.rows()
