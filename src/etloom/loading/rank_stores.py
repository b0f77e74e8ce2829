"""Where the linked tables of ranks are saved, and from where they are opened instead of being read and linked again.

A run that is loaded uses the user's cache; a run that is being added to a store uses the store's folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from etloom.core.names import list_user_files
from etloom.core.trace import Trace
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
