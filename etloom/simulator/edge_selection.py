"""Selects the edges of a graph that a change is about, by the events that own them."""

from __future__ import annotations

import re
import shlex
from functools import cached_property

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.core import arrays, categories, nesting
from etloom.core.errors import EtloomError
from etloom.core.trace import Job, Trace
from etloom.graphs.event_arrays import rows_of_ids
from etloom.graphs.graph import EdgeKind, Graph
from etloom.simulator.changes import TARGETS, Change

Mask = NDArray[np.bool_]

DURATION_KINDS = (EdgeKind.KERNEL, EdgeKind.COMPLETE)
TRANSFER_KINDS = (EdgeKind.TRANSFER, EdgeKind.MESSAGE)
HOST_KINDS = (EdgeKind.SEGMENT, EdgeKind.IDLE)
GPU_TARGETS = ("kernel", "copy", "launch", "stream", "sync")
"""Targets that require GPU activities."""
DELAY_KINDS = {"launch": EdgeKind.LAUNCH, "stream": EdgeKind.STREAM, "sync": EdgeKind.SYNC}


class EdgeSelector:
    """Selects edges of a job's graph by the events that own them. Arrays are per edge."""

    def __init__(self, graph: Graph, job: Job) -> None:
        self.graph = graph
        self.job = job
        target = graph.target
        rank = np.where(graph.rank[target] >= 0, graph.rank[target], graph.rank[graph.source])
        self.rank: np.ndarray = rank
        self.target: np.ndarray = target

    def select(self, change: Change) -> Mask:
        """Mask the edges that a change is about. Raises EtloomError if there are none."""
        mask = self._select_target(change.target)
        if change.name is not None:
            mask &= self._select_name(change.name, inside=change.target == "op", mask=mask)
        for key, value in change.filters.items():
            mask &= self._select_value(key, value)
        if not mask.any():
            raise self._no_match_error(change)
        return mask

    def _no_match_error(self, change: Change) -> EtloomError:
        run = shlex.quote(str(self.job.meta.get("path", "PATH")))
        if change.target in GPU_TARGETS and not (self.graph.kind == EdgeKind.KERNEL).any():
            return EtloomError(
                f"{change.text!r}: this run has no GPU activities",
                remedy=f"change op, host, python or comm; `etloom analyze top-ops {run}` lists operators",
            )
        names = f"`etloom analyze critical-path {run} --by name` lists names"
        return EtloomError(
            f"{change.text!r} matches nothing in this run",
            remedy=f"{change.target} is {TARGETS[change.target]}; {names}",
        )

    def _select_target(self, target: str) -> Mask:
        kind = self.graph.kind
        if target in DELAY_KINDS:
            mask = kind == DELAY_KINDS[target]
        elif target in ("kernel", "copy"):
            mask = (kind == EdgeKind.KERNEL) & self._owned_by(
                "computation" if target == "kernel" else "memory"
            )
        elif target == "comm":
            mask = self.communication.copy()
        elif target == "python":
            mask = (kind == EdgeKind.IDLE) | ((kind == EdgeKind.SEGMENT) & self._owned_by("python"))
        else:
            mask = np.isin(kind, (EdgeKind.SEGMENT,) if target == "op" else HOST_KINDS)
        return np.asarray(mask)

    @cached_property
    def communication(self) -> Mask:
        """Mask of the edges that transfer data."""
        on_gpu = np.isin(self.graph.kind, DURATION_KINDS) & self._owned_by("communication")
        return np.asarray(on_gpu | np.isin(self.graph.kind, TRANSFER_KINDS))

    def select_syncs_in(self, name: str) -> Mask:
        """Mask the edges by which calls of this name, or calls in operators of this name, wait for the device.

        Raises EtloomError if there are none."""
        mask = (self.graph.kind == EdgeKind.SYNC) & self._select_name(
            name, inside=True, mask=self.graph.kind == EdgeKind.SYNC
        )
        if not mask.any():
            raise EtloomError(
                f"no operator or call named {name!r} waits for the device",
                remedy="etloom analyze findings --pattern host-sync",
            )
        return np.asarray(mask)

    def number_groups(self) -> np.ndarray:
        """Number the (collective, process group) of the edges that transfer data; -1 for all other edges."""
        codes = np.full(len(self.graph.source), -1, np.int64)
        numbers: dict[tuple[str, str], int] = {}
        for rank, edges in self._edges_by_rank():
            transfers = edges[self.communication[edges]]
            events, collectives = self._collectives_by_row(rank)
            rows = self._rows(events, transfers)
            for edge, row in zip(transfers.tolist(), rows.tolist(), strict=True):
                key = collectives.get(row, ("", "")) if row >= 0 else ("", "")
                codes[edge] = numbers.setdefault(key, len(numbers))
        return codes

    def _collectives_by_row(self, rank: int) -> tuple[pl.DataFrame, dict[int, tuple[str, str]]]:
        """Return the events of a rank, and row -> (collective, process group) of its communications."""
        events = self.job[rank].events
        comms = self.job[rank].comms.drop_nulls("event")
        rows = rows_of_ids(events, comms["event"])
        names = comms.select(pl.col("collective", "pg_name").cast(pl.String).fill_null("")).rows()
        return events, dict(zip(rows.tolist(), names, strict=True))

    def _edges_by_rank(self) -> list[tuple[int, np.ndarray]]:
        """Return (rank, indices of its edges) for each rank."""
        return [(rank, np.flatnonzero(self.rank == rank)) for rank in self.job]

    def _rows(self, events: pl.DataFrame, edges: np.ndarray) -> np.ndarray:
        """Return the row of the owner of these edges in the events of their rank, -1 for none."""
        owner = self.graph.owner[edges].astype(np.int64)
        return rows_of_ids(events, pl.Series(owner).replace(-1, None).cast(pl.UInt32))

    def _owned_by(self, kind: str) -> Mask:
        """Mask the edges whose owner is of this kind (a kernel type, also communication on the host, or python)."""
        selected = np.zeros(len(self.graph.source), bool)
        for rank, edges in self._edges_by_rank():
            rows = self._rows(self.job[rank].events, edges)
            is_selected = self._mask_kind(self.job[rank], kind)
            selected[edges[rows >= 0]] = is_selected[rows[rows >= 0]]
        return selected

    @staticmethod
    def _mask_kind(trace: Trace, kind: str) -> Mask:
        """Mask the events of this kind."""
        events = trace.events
        if kind == "python":
            return arrays.is_in(events["cat"], categories.PYTHON_CATEGORIES)
        kernel_types = categories.add_kernel_type(events.select("cat", "name"))["kind"]
        is_selected: Mask = (kernel_types == kind).fill_null(False).to_numpy()
        if kind == "communication":
            is_selected = is_selected | arrays.match_text(events["name"], categories.is_backend_range)
        return is_selected

    def _select_name(self, pattern: str, *, inside: bool, mask: Mask) -> Mask:
        """Mask the edges whose owner, or (inside) an event around it or around its launch, has a name like this."""
        expression = wildcard_to_regex(pattern)
        selected = np.zeros(len(self.graph.source), bool)
        for rank, edges in self._edges_by_rank():
            edges = edges[mask[edges]]
            events = self.job[rank].events
            rows = self._rows(events, edges)
            has_name = arrays.match_text(events["name"], lambda name: name.str.contains(expression))
            if inside:
                parent = rows_of_ids(events, events["parent"])
                enclosing = (
                    nesting.find_nearest_ancestor(parent, has_name, np.arange(events.height))
                    if events.height
                    else rows
                )
                has_name = enclosing >= 0
            selected[edges[rows >= 0]] = has_name[rows[rows >= 0]]
        return selected

    def _select_value(self, key: str, value: str) -> Mask:
        if key == "rank":
            return np.asarray(self.rank == int(value))
        selected = np.zeros(len(self.graph.source), bool)
        for rank, edges in self._edges_by_rank():
            trace = self.job[rank]
            rows = self._rows(trace.events, edges)
            if key == "group":
                comms = trace.comms.drop_nulls("event")
                has_group_name = (
                    pl.col("pg_name", "pg_desc").cast(pl.String).str.contains(wildcard_to_regex(value))
                )
                rows_in = rows_of_ids(
                    trace.events, comms.filter(pl.any_horizontal(has_group_name.fill_null(False)))["event"]
                )
                is_selected = np.zeros(trace.events.height, bool)
                is_selected[rows_in[rows_in >= 0]] = True
            else:
                is_selected = (trace.events[key] == int(value)).fill_null(False).to_numpy()
            selected[edges[rows >= 0]] = is_selected[rows[rows >= 0]]
        return selected


def wildcard_to_regex(pattern: str) -> str:
    """Convert a pattern with * and ? to a regular expression that matches whole names."""
    return "^" + re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".") + "$"
