"""Folders of linked ranks, which are opened instead of read again, and the tables of saved ranks in memory.

A run that is loaded uses a folder in the user's cache, or a temporary one; a run that is being added to a store uses a
folder there. Tables that stay on disk are loaded on access, and evicted when memory is short, least recently used ranks
first. The memory of a verb then depends on the number of ranks that it needs at a time, not on the number of ranks of
the run.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import polars as pl

from etloom.core.errors import EtloomError, ReadError
from etloom.core.trace import SMALL_ROWS, Job, Results, TableLoader, Trace
from etloom.formats import parquet
from etloom.formats.parquet import writer
from etloom.loading import cache

Write = Callable[[Path], None]
"""Writes the tables of a rank to a new folder."""


class RankFolder:
    """A folder with the linked tables of each rank as ``rank=N``, whose source files did not change meanwhile.

    Args:
        folder: the folder; rank None is a single file, which may state its rank.
        packs: the tables of a small rank are one file, which is faster, and only this program reads.
        results: rank -> results of `Trace.compute_once` that need not be computed, of ranks that the folder has.

    The tables of its ranks keep it alive.
    """

    def __init__(
        self,
        folder: Path,
        packs: bool = False,
        results: Mapping[int, Mapping[tuple[Any, ...], Any]] = MappingProxyType({}),
    ) -> None:
        self.folder, self._packs, self._results = folder, packs, results

    def locate(self, rank: int | None) -> Path:
        """Return the folder of a rank; it need not exist."""
        return self.folder / f"rank={rank or 0}"

    def has(self, rank: int | None) -> bool:
        """Return whether a rank is saved."""
        return parquet.sniff_folder(self.locate(rank))

    def open(self, rank: int | None, *, lazy: bool = True) -> Trace | None:
        """Return a saved rank, with ``lazy`` with its tables on disk; None if it is not saved."""
        if not self.has(rank):
            return None
        trace = parquet.read(self.locate(rank), lazy=lazy, owner=self)
        assert isinstance(trace, Trace)
        results = None if rank is None else self._results.get(rank)
        return trace if results is None else trace.with_stored_results(results)

    def add(self, rank: int | None, content: Trace | Write) -> bool:
        """Save a rank, given its trace or what writes it; return whether it was saved. Raises what writing raises."""
        if isinstance(content, Trace):
            is_numbered = rank is None or content.rank is not None
            content = content if is_numbered else content.replace(meta={"rank": rank})
            content = partial(writer.write, content, packs=self._packs)
        return self._save(rank, content)

    def _save(self, rank: int | None, write: Write) -> bool:
        write(self.locate(rank))
        return True


class CachedRun(RankFolder):
    """A run in the user's cache; after an error of the cache (a full disk, a damaged rank) the rank is not saved."""

    def __init__(self, key: str) -> None:
        super().__init__(cache.locate_run(key), packs=True)
        self.key = key
        self._lease: cache.Lease | None = None

    def open(self, rank: int | None, *, lazy: bool = True) -> Trace | None:
        """Return a saved rank, with ``lazy`` with its tables on disk; remove it if it is damaged, and return None."""
        if not self.has(rank):
            return None
        try:
            if lazy:
                self.hold(self.locate(rank))
            else:
                cache.mark_used(self.folder)
            return super().open(rank, lazy=lazy)
        except EtloomError:
            cache.remove(self.locate(rank))
        except OSError:
            pass
        return None

    def _save(self, rank: int | None, write: Write) -> bool:
        """Return False if the cache has no room or cannot be written."""
        if self.has(rank):  # another process was faster
            return True
        if not cache.has_room():
            return False
        try:
            write(self.locate(rank))
        except cache.WRITE_ERRORS:
            return False
        cache.register_write(self.hold(self.locate(rank)))
        return True

    def hold(self, part: Path | None = None) -> int:
        """Keep the run in the cache as long as this object lives; count the size of ``part``, returned, as in use."""
        if self._lease is None:
            self._lease = cache.Lease(self.folder)
        return 0 if part is None else self._lease.cover(part)

    def release(self) -> None:
        """Let the run be removed from the cache, if nothing else has it open."""
        self._lease = None


def save_on_disk(rank: int | None, content: Trace | Write, folder: RankFolder | None) -> Trace:
    """Save a rank in ``folder``, else in a temporary folder, and open it with its tables on disk.

    The temporary folder is removed with the Trace. ``content``: see `RankFolder.add`. Raises ReadError if no disk has
    enough space.
    """
    if folder is not None and folder.add(rank, content) and (saved := folder.open(rank)) is not None:
        return saved
    place = Path(tempfile.mkdtemp(prefix="etloom-"))
    temporary = RankFolder(place, packs=True)
    weakref.finalize(temporary, shutil.rmtree, place, ignore_errors=True)  # also when the process ends
    try:
        temporary.add(rank, content)
    except cache.WRITE_ERRORS as error:
        raise ReadError(
            f"cannot write the tables of a trace: {str(error).partition(chr(10))[0]}",
            where=place,
            remedy="set TMPDIR to a folder on a disk with enough space",
        ) from None
    saved = temporary.open(rank)
    assert saved is not None
    return saved


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
        tables = {name: trace.table(name) for name in trace.table_names if name not in rank.loaders}
        results = Results(trace.results.stored, rank.track)
        return Trace(tables, trace.meta, loaders=rank.loaders, results=results)

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

    def track(self, results: Results) -> None:
        """Remember the results of a trace of the rank, which are dropped when the rank is evicted."""
        self._results = [reference for reference in self._results if reference() is not None]
        self._results.append(weakref.ref(results))

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
