"""Selects the edges of a graph that a change is about, by the events that own them."""

from __future__ import annotations

import re
import shlex
from functools import cached_property

import numpy as np
import polars as pl

from etloom.collectives import list_participations
from etloom.core import arrays, categories, nesting
from etloom.core.errors import EtloomError
from etloom.core.trace import Job
from etloom.graphs.event_arrays import rows_of_ids
from etloom.graphs.graph import EdgeKind, Graph
from etloom.graphs.transfers import Mask, edges_by_rank, mask_owned_edges, mask_transfers, owner_rows
from etloom.simulator.changes import TARGETS, Change, Network

HOST_KINDS = (EdgeKind.SEGMENT, EdgeKind.IDLE)
GPU_TARGETS = ("kernel", "copy", "launch", "stream", "sync")
"""Targets that require GPU activities."""
DELAY_KINDS = {"launch": EdgeKind.LAUNCH, "stream": EdgeKind.STREAM, "sync": EdgeKind.SYNC}


class EdgeSelector:
    """Selects edges of a job's graph by the events that own them. Arrays are per edge."""

    def __init__(self, graph: Graph, job: Job) -> None:
        self.graph = graph
        self.job = job
        self._participations_by_rank: dict[int, pl.DataFrame] = {}
        self._targets: dict[str, Mask] = {}
        self.rank: np.ndarray = graph.edge_ranks
        self.target: np.ndarray = graph.target

    def select(self, change: Change) -> Mask:
        """Mask the edges that a change is about. Raises EtloomError if there are none."""
        mask = self._select_target(change.target)
        if change.name is not None:
            has_name = self._select_name(change.name, inside=change.target == "op", mask=mask)
            if change.target == "comm":
                has_name |= self._select_collective(change.name, mask)
            mask &= has_name
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
        if change.target == "comm" and not self.communication.any():
            return no_communication_error(change)
        if change.target == "comm" and (collectives := self.list_collectives()):
            return EtloomError(
                f"{change.text!r} matches nothing in this run",
                remedy=f"its collectives are {', '.join(collectives)}; a NAME may also be that of a kernel",
            )
        names = f"`etloom analyze critical-path {run} --by name` lists names"
        return EtloomError(
            f"{change.text!r} matches nothing in this run",
            remedy=f"{change.target} is {TARGETS[change.target]}; {names}",
        )

    def _select_target(self, target: str) -> Mask:
        """Return a new mask of the edges of a target."""
        if target not in self._targets:
            self._targets[target] = self._find_target(target)
        return self._targets[target].copy()

    def _find_target(self, target: str) -> Mask:
        kind = self.graph.kind
        if target in DELAY_KINDS:
            mask = kind == DELAY_KINDS[target]
        elif target in ("kernel", "copy"):
            is_activity = kind == EdgeKind.KERNEL
            owner_kind = "computation" if target == "kernel" else "memory"
            mask = mask_owned_edges(self.graph, self.job, owner_kind, is_activity)
        elif target == "comm":
            mask = self.communication
        elif target == "python":
            is_segment = kind == EdgeKind.SEGMENT
            mask = (kind == EdgeKind.IDLE) | mask_owned_edges(self.graph, self.job, "python", is_segment)
        else:
            mask = np.isin(kind, (EdgeKind.SEGMENT,) if target == "op" else HOST_KINDS)
        return np.asarray(mask)

    @cached_property
    def communication(self) -> Mask:
        """Mask of the edges that transfer data."""
        return mask_transfers(self.graph, self.job)

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

    def _participations(self, rank: int) -> pl.DataFrame:
        """Return the communications of a rank, see `etloom.collectives.list_participations`."""
        if rank not in self._participations_by_rank:
            self._participations_by_rank[rank] = list_participations(self.job[rank], rank)
        return self._participations_by_rank[rank]

    def list_collectives(self) -> list[str]:
        """Return the names of the collectives in the job."""
        names = {name for rank in self.job for name in self._participations(rank)["collective"].drop_nulls()}
        return sorted(names)

    def _select_name(self, pattern: str, *, inside: bool, mask: Mask) -> Mask:
        """Mask the edges whose owner, or (inside) an event around it or around its launch, has a name like this."""
        expression = wildcard_to_regex(pattern)
        selected = np.zeros(len(self.graph.source), bool)
        for rank, edges in edges_by_rank(self.graph, self.job):
            edges = edges[mask[edges]]
            events = self.job[rank].events
            rows = owner_rows(self.graph, events, edges)
            has_name = arrays.match_text(events["name"], expression)
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

    def _select_collective(self, pattern: str, mask: Mask) -> Mask:
        """Mask the edges whose owner is, or runs, a collective with this name: all_reduce, allreduce, all-reduce."""
        plain = pattern.lower().replace("-", "_")
        expression = wildcard_to_regex(categories.parse_collective(plain) or plain)
        selected = np.zeros(len(self.graph.source), bool)
        for rank, edges in edges_by_rank(self.graph, self.job):
            edges = edges[mask[edges]]
            events = self.job[rank].events
            names = categories.parse_collectives(events["name"]).cast(pl.String)
            by_row = names.str.contains(expression).fill_null(False).to_numpy().copy()
            participations = self._participations(rank)
            # A message stays a send or a receive; any other communication is what its arguments state.
            stated = participations.filter(
                pl.col("collective").is_not_null() & (pl.col("collective") != "message")
            )
            by_row[rows_of_ids(events, stated["event"])] = (
                stated["collective"].str.contains(expression).to_numpy()
            )
            rows = owner_rows(self.graph, events, edges)
            selected[edges[rows >= 0]] = by_row[rows[rows >= 0]]
        return selected

    def _select_value(self, key: str, value: str) -> Mask:
        if key == "rank":
            return np.asarray(self.rank == int(value))
        selected = np.zeros(len(self.graph.source), bool)
        for rank, edges in edges_by_rank(self.graph, self.job):
            trace = self.job[rank]
            rows = owner_rows(self.graph, trace.events, edges)
            if key == "group":
                has_group_name = pl.col("pg_name", "pg_desc").str.contains(wildcard_to_regex(value))
                in_group = self._participations(rank).filter(
                    pl.any_horizontal(has_group_name.fill_null(False))
                )
                is_selected = np.zeros(trace.events.height, bool)
                is_selected[rows_of_ids(trace.events, in_group["event"])] = True
            else:
                is_selected = (trace.events[key] == int(value)).fill_null(False).to_numpy()
            selected[edges[rows >= 0]] = is_selected[rows[rows >= 0]]
        return selected


def no_communication_error(change: Change | Network) -> EtloomError:
    """Return the error for a change of communication in a run without any."""
    return EtloomError(
        f"{change.text!r}: this run has no communication",
        remedy="change kernel, copy, op or host, or open the traces of all ranks",
    )


def wildcard_to_regex(pattern: str) -> str:
    """Convert a pattern with * and ? to a regular expression that matches whole names."""
    return "^" + re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".") + "$"
