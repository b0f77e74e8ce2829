"""The tables of a Trace and of a Job as typed attributes, so that a type checker finds a misspelt table."""

from __future__ import annotations

from abc import ABC, abstractmethod

import polars as pl


class TableAttributes(ABC):
    """One property per declared table (`etloom.core.schema.TABLES`); each calls `table`."""

    __slots__ = ()

    @abstractmethod
    def table(self, name: str) -> pl.DataFrame:
        """Return one table by name."""

    @property
    def events(self) -> pl.DataFrame:
        """An event that the profiler recorded."""
        return self.table("events")

    @property
    def arguments(self) -> pl.DataFrame:
        """Shapes and values that Kineto recorded for an operator."""
        return self.table("arguments")

    @property
    def kernels(self) -> pl.DataFrame:
        """Launch geometry and memory facts of a device event."""
        return self.table("kernels")

    @property
    def syncs(self) -> pl.DataFrame:
        """A synchronization that the device tracer recorded (cuda_sync)."""
        return self.table("syncs")

    @property
    def frames(self) -> pl.DataFrame:
        """A Python function or module call (with_stack)."""
        return self.table("frames")

    @property
    def memory(self) -> pl.DataFrame:
        """An allocation (bytes > 0) or a free (bytes < 0)."""
        return self.table("memory")

    @property
    def counters(self) -> pl.DataFrame:
        """A sample of a counter."""
        return self.table("counters")

    @property
    def flows(self) -> pl.DataFrame:
        """An end of an arrow that the file draws."""
        return self.table("flows")

    @property
    def threads(self) -> pl.DataFrame:
        """Name of a process, or of one of its threads or streams (a track of the file)."""
        return self.table("threads")

    @property
    def nodes(self) -> pl.DataFrame:
        """An operator of the execution trace."""
        return self.table("nodes")

    @property
    def tensors(self) -> pl.DataFrame:
        """One tensor argument or result of a node."""
        return self.table("tensors")

    @property
    def comms(self) -> pl.DataFrame:
        """A communication call, or a device event of one."""
        return self.table("comms")

    @property
    def groups(self) -> pl.DataFrame:
        """A process group."""
        return self.table("groups")

    @property
    def links(self) -> pl.DataFrame:
        """An ET node and a profiler event that are the same operator."""
        return self.table("links")

    @property
    def launches(self) -> pl.DataFrame:
        """A launch call and a device event it caused."""
        return self.table("launches")

    @property
    def thread_dependencies(self) -> pl.DataFrame:
        """An operator that depends on an operator of another thread."""
        return self.table("thread_dependencies")

    @property
    def sync_dependencies(self) -> pl.DataFrame:
        """A host call or device event that waited for a device event."""
        return self.table("sync_dependencies")

    @property
    def dependencies(self) -> pl.DataFrame:
        """A node that may not start before another one ends, as the file states it (Chakra, ET+)."""
        return self.table("dependencies")

    @property
    def stats(self) -> pl.DataFrame:
        """Counts of what could not be read, was repaired, or could not be linked."""
        return self.table("stats")
