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
        """One row per event that the profiler recorded."""
        return self.table("events")

    @property
    def arguments(self) -> pl.DataFrame:
        """One row per operator whose shapes or values Kineto recorded."""
        return self.table("arguments")

    @property
    def kernels(self) -> pl.DataFrame:
        """One row per device event with its launch geometry or memory facts."""
        return self.table("kernels")

    @property
    def syncs(self) -> pl.DataFrame:
        """One row per synchronization that the device tracer recorded (cuda_sync)."""
        return self.table("syncs")

    @property
    def frames(self) -> pl.DataFrame:
        """One row per call of a Python function or module (with_stack)."""
        return self.table("frames")

    @property
    def memory(self) -> pl.DataFrame:
        """One row per allocation (bytes > 0) or free (bytes < 0)."""
        return self.table("memory")

    @property
    def allocator(self) -> pl.DataFrame:
        """One row per entry of a caching allocator's history."""
        return self.table("allocator")

    @property
    def counters(self) -> pl.DataFrame:
        """One row per sample of a counter track."""
        return self.table("counters")

    @property
    def flows(self) -> pl.DataFrame:
        """One row per end of an arrow (flow event) that the file draws."""
        return self.table("flows")

    @property
    def threads(self) -> pl.DataFrame:
        """One row per process, thread or stream (a track of the file), with its name."""
        return self.table("threads")

    @property
    def nodes(self) -> pl.DataFrame:
        """One row per operator of the execution trace."""
        return self.table("nodes")

    @property
    def tensors(self) -> pl.DataFrame:
        """One row per tensor argument or result of a node."""
        return self.table("tensors")

    @property
    def comms(self) -> pl.DataFrame:
        """One row per communication call, or device event of one."""
        return self.table("comms")

    @property
    def groups(self) -> pl.DataFrame:
        """One row per process group."""
        return self.table("groups")

    @property
    def links(self) -> pl.DataFrame:
        """One row per ET node and profiler event that are the same operator."""
        return self.table("links")

    @property
    def launches(self) -> pl.DataFrame:
        """One row per launch call and device event that it caused."""
        return self.table("launches")

    @property
    def thread_dependencies(self) -> pl.DataFrame:
        """One row per operator that depends on an operator of another thread."""
        return self.table("thread_dependencies")

    @property
    def sync_dependencies(self) -> pl.DataFrame:
        """One row per host call or device event that waited, and device event that it waited for."""
        return self.table("sync_dependencies")

    @property
    def dependencies(self) -> pl.DataFrame:
        """One row per dependency in the file (Chakra, ET+): a node that may not start before another one ends."""
        return self.table("dependencies")

    @property
    def stats(self) -> pl.DataFrame:
        """One row per problem: the count of what could not be read, was repaired, or could not be linked."""
        return self.table("stats")
