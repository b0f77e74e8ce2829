"""What the edges of a graph are of: which a change means."""

from __future__ import annotations

import re
import shlex
from functools import cached_property

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.core import arrays, categories
from etloom.core.errors import EtloomError
from etloom.core.trace import Job, Trace
from etloom.graphs.graph import EdgeKind, Graph
from etloom.graphs.event_arrays import rows_of_ids
from etloom.simulator.changes import TARGETS, Change

Mask = NDArray[np.bool_]

DURATION_KINDS = (EdgeKind.KERNEL, EdgeKind.COMPLETE)
TRANSFER_KINDS = (EdgeKind.TRANSFER, EdgeKind.MESSAGE)
HOST_KINDS = (EdgeKind.SEGMENT, EdgeKind.IDLE)
GPU_TARGETS = ("kernel", "copy", "launch", "stream", "sync")
"""Targets that only a run with device work has."""
DELAY_KINDS = {"launch": EdgeKind.LAUNCH, "stream": EdgeKind.STREAM, "sync": EdgeKind.SYNC}


class EdgeSelector:
    """The edges of a job's graph with what their owners are. Arrays are per edge."""

    def __init__(self, graph: Graph, job: Job) -> None:
        self.graph = graph
        self.job = job
        target = graph.target
        rank = np.where(graph.rank[target] >= 0, graph.rank[target], graph.rank[graph.source])
        self.rank: np.ndarray = rank
        self.target: np.ndarray = target

    def chosen(self, change: Change) -> Mask:
        """The edges that a change is about. Raises EtloomError where there is none."""
        mask = self._what(change.what)
        if change.name is not None:
            mask &= self._named(change.name, inside=change.what == "op", mask=mask)
        for key, value in change.where.items():
            mask &= self._where(key, value)
        if not mask.any():
            raise self._about_nothing(change)
        return mask

    def _about_nothing(self, change: Change) -> EtloomError:
        run = shlex.quote(str(self.job.meta.get("path", "PATH")))
        if change.what in GPU_TARGETS and not (self.graph.kind == EdgeKind.KERNEL).any():
            return EtloomError(
                f"{change.text!r}: this run has no device work",
                remedy=f"change op, host, python or comm; `etloom analyze top-ops {run}` lists operators",
            )
        names = f"`etloom analyze critical-path {run} --by name` lists names"
        return EtloomError(
            f"{change.text!r} is about nothing in this run",
            remedy=f"{change.what} is {TARGETS[change.what]}; {names}",
        )

    def _what(self, what: str) -> Mask:
        kind = self.graph.kind
        if what in DELAY_KINDS:
            mask = kind == DELAY_KINDS[what]
        elif what in ("kernel", "copy"):
            mask = (kind == EdgeKind.KERNEL) & self._owned("computation" if what == "kernel" else "memory")
        elif what == "comm":
            mask = self.communication.copy()
        elif what == "python":
            mask = (kind == EdgeKind.IDLE) | ((kind == EdgeKind.SEGMENT) & self._owned("python"))
        else:
            mask = np.isin(kind, (EdgeKind.SEGMENT,) if what == "op" else HOST_KINDS)
        return np.asarray(mask)

    @cached_property
    def communication(self) -> Mask:
        """The moving of data."""
        own = np.isin(self.graph.kind, DURATION_KINDS) & self._owned("communication")
        return np.asarray(own | np.isin(self.graph.kind, TRANSFER_KINDS))

    def waits_in(self, name: str) -> Mask:
        """The edges by which calls wait for the device, in operators or calls of this name. Raises EtloomError."""
        mask = (self.graph.kind == EdgeKind.SYNC) & self._named(
            name, inside=True, mask=self.graph.kind == EdgeKind.SYNC
        )
        if not mask.any():
            raise EtloomError(
                f"nothing named {name!r} waits for the device",
                remedy="etloom analyze findings --pattern host-sync",
            )
        return np.asarray(mask)

    def groups(self) -> np.ndarray:
        """A number for each (collective, process group) of the edges that move data, -1 of the others."""
        codes = np.full(len(self.graph.source), -1, np.int64)
        known: dict[tuple[str, str], int] = {}
        for rank, places in self._places():
            chosen = places[self.communication[places]]
            events, facts = self._facts(rank)
            rows = self._rows(events, chosen)
            for at, row in zip(chosen.tolist(), rows.tolist(), strict=True):
                key = facts.get(row, ("", "")) if row >= 0 else ("", "")
                codes[at] = known.setdefault(key, len(known))
        return codes

    def _facts(self, rank: int) -> tuple[pl.DataFrame, dict[int, tuple[str, str]]]:
        events = self.job[rank].events
        comms = self.job[rank].comms.drop_nulls("event")
        rows = rows_of_ids(events, comms["event"])
        names = comms.select(pl.col("collective", "pg_name").cast(pl.String).fill_null("")).rows()
        return events, dict(zip(rows.tolist(), names, strict=True))

    def _places(self) -> list[tuple[int, np.ndarray]]:
        return [(rank, np.flatnonzero(self.rank == rank)) for rank in self.job]

    def _rows(self, events: pl.DataFrame, places: np.ndarray) -> np.ndarray:
        """The row of the owner of each of these edges in the events of its rank, -1 for none."""
        owner = self.graph.owner[places].astype(np.int64)
        return rows_of_ids(events, pl.Series(owner).replace(-1, None).cast(pl.UInt32))

    def _owned(self, kind: str) -> Mask:
        """Edges whose owner is of this kind (`kinds.KINDS`; communication of the host too; python)."""
        found = np.zeros(len(self.graph.source), bool)
        for rank, places in self._places():
            rows = self._rows(self.job[rank].events, places)
            true = self._of_kind(self.job[rank], kind)
            found[places[rows >= 0]] = true[rows[rows >= 0]]
        return found

    @staticmethod
    def _of_kind(trace: Trace, kind: str) -> Mask:
        events = trace.events
        if kind == "python":
            return arrays.is_in(events["cat"], categories.PYTHON_CATEGORIES)
        of_device = categories.add_kernel_type(events.select("cat", "name"))["kind"]
        true: Mask = (of_device == kind).fill_null(False).to_numpy()
        if kind == "communication":
            true = true | arrays.match_text(events["name"], categories.is_backend_range)
        return true

    def _named(self, pattern: str, *, inside: bool, mask: Mask) -> Mask:
        """Edges whose owner, or (inside) something around it or around its launch, has a name like this."""
        expression = wildcard_to_regex(pattern)
        found = np.zeros(len(self.graph.source), bool)
        for rank, places in self._places():
            places = places[mask[places]]
            events = self.job[rank].events
            rows = self._rows(events, places)
            named = arrays.match_text(events["name"], lambda name: name.str.contains(expression))
            if inside:
                parent = rows_of_ids(events, events["parent"])
                around = (
                    arrays.find_nearest_ancestor(parent, named, np.arange(events.height))
                    if events.height
                    else rows
                )
                named = around >= 0
            found[places[rows >= 0]] = named[rows[rows >= 0]]
        return found

    def _where(self, key: str, value: str) -> Mask:
        if key == "rank":
            return np.asarray(self.rank == int(value))
        found = np.zeros(len(self.graph.source), bool)
        for rank, places in self._places():
            trace = self.job[rank]
            rows = self._rows(trace.events, places)
            if key == "group":
                comms = trace.comms.drop_nulls("event")
                like = pl.col("pg_name", "pg_desc").cast(pl.String).str.contains(wildcard_to_regex(value))
                rows_in = rows_of_ids(
                    trace.events, comms.filter(pl.any_horizontal(like.fill_null(False)))["event"]
                )
                true = np.zeros(trace.events.height, bool)
                true[rows_in[rows_in >= 0]] = True
            else:
                true = (trace.events[key] == int(value)).fill_null(False).to_numpy()
            found[places[rows >= 0]] = true[rows[rows >= 0]]
        return found


def wildcard_to_regex(pattern: str) -> str:
    """A pattern with * and ? as a regular expression over the whole name."""
    return "^" + re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".") + "$"
