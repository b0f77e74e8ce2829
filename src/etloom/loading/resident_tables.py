"""Load tables from disk on access, and evict those of the least recently used ranks when memory is short.

The memory of a verb then depends on the number of ranks that it needs at a time, not on that of the run: a verb that
goes from rank to rank loads the tables of each rank on access, and the tables of the rank that was used longest ago are
evicted.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from types import MappingProxyType

import polars as pl

from etloom.core.text_codes import clone_table, estimate_code_bytes
from etloom.core.trace import SMALL_ROWS, Job, Results, TableLoader, Trace


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
            added_bytes = int(frame.estimated_size()) + estimate_code_bytes(self._name, frame)
        self._rank.use(added_bytes)
        return clone_table(self._name, frame)

    def scan(self) -> pl.LazyFrame:
        """Return the table as a lazy query, over memory if it is loaded or small, else over its file."""
        if self.is_loaded or self.rows() <= SMALL_ROWS:
            return self.read().lazy()
        return self._stored.scan()

    def rows(self) -> int:
        """Return the number of rows of the table."""
        return self._stored.rows()
