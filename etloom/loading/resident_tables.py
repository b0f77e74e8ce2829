"""Runs of more ranks than memory should hold at once: their tables lie on disk, and come when they are asked for.

What a verb takes in memory then grows with the ranks it looks at together, not with those there are: one that goes
from rank to rank reads the tables of each when it comes to it, and those that were used longest ago are let go.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import polars as pl

from etloom.core.trace import Trace
from etloom.formats.parquet import OnDisk


class ResidentTables:
    """What the traces of a run hold of their tables together: ``room`` bytes, or the tables of one of them."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._held: dict[EvictableTrace, int] = {}  # bytes, of the one used longest ago first
        self._total = 0
        self._lock = threading.Lock()

    def put(self, trace: OnDisk) -> EvictableTrace:
        """The trace as one of this shelf."""
        return EvictableTrace(self, **trace.parts())

    def use(self, trace: EvictableTrace, more: int) -> None:
        """Note that a trace is used and now holds so many bytes more."""
        with self._lock:
            self._held[trace] = self._held.pop(trace, 0) + more
            self._total += more
            while self._total > self._room and len(self._held) > 1:
                oldest = next(iter(self._held))
                self._total -= self._held.pop(oldest)
                oldest.evict()


class EvictableTrace(OnDisk):
    """A Trace whose tables are read when they are asked for and held as long as there is room for them."""

    __slots__ = ("_here", "_shelf")

    def __init__(self, shelf: ResidentTables, **parts: Any) -> None:
        super().__init__(**parts)
        self._shelf = shelf
        self._here: dict[str, pl.DataFrame] = {}

    def table(self, name: str) -> pl.DataFrame:
        if name not in self._files:
            return super().table(name)
        frame, more = self._here.get(name), 0
        if frame is None:
            frame = self._here[name] = super().table(name).rechunk()
            more = int(frame.estimated_size())
        self._shelf.use(self, more)
        return frame.clone()

    def scan(self, name: str) -> pl.LazyFrame:
        frame = self._here.get(name)
        return super().scan(name) if frame is None else frame.lazy()

    def evict(self) -> None:
        """Hold nothing any more of what can be read or worked out again."""
        self._here.clear()
        self._answers.clear()

    def replace(self, meta: Mapping[str, Any] | None = None, **tables: pl.DataFrame) -> Trace:
        changed = {"tables": {**self._tables, **tables}, "meta": {**self.meta, **(meta or {})}}
        return EvictableTrace(self._shelf, **{**self.parts(), **changed})
