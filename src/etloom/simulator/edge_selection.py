"""Selects the edges of a dependency graph that a change applies to, by the events to which their times belong."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import polars as pl

from etloom import _native
from etloom.analyses.kernel_families import classify_kernels
from etloom.collectives import list_participations
from etloom.core import arrays, categories, nesting, text_codes
from etloom.core.errors import AnalysisError, EtloomError
from etloom.core.trace import Job, Trace
from etloom.graphs.algorithms import Mask, edges_by_rank, mask_events, mask_transfers
from etloom.graphs.algorithms import owner_rows as find_owner_rows
from etloom.graphs.event_arrays import rows_of_ids
from etloom.graphs.graph import EdgeKind, Graph, Int32Array, Int64Array
from etloom.simulator.changes import TARGETS, Change, Network

HOST_KINDS = (EdgeKind.SEGMENT, EdgeKind.IDLE)
HOST_TARGETS = ("op", "host", "python")
"""Targets whose calls consist of several edges."""
GPU_TARGETS = ("kernel", "copy", "launch", "stream", "sync")
"""Targets that require GPU activities."""
Edges: TypeAlias = Int32Array
DELAY_KINDS = {"launch": EdgeKind.LAUNCH, "stream": EdgeKind.STREAM, "sync": EdgeKind.SYNC}


_CHUNK_EDGES = 1 << 16


@dataclass(frozen=True, eq=False)
class Selection:
    """Edges selected for a change, ascending; a subset of the edges of the change's target (kernel, comm, op, ...).

    ``target``: the edges, of which those are selected whose owner is ``marked``, a mask of rows (None: all).
    ``owner_rows``: the row of the owner of each edge of the graph. ``is_whole``: whether ``target`` is a target of
    changes, and not a part of one.
    """

    target: Edges
    marked: Mask | None
    owner_rows: Int32Array
    is_whole: bool

    @cached_property
    def edges(self) -> Edges:
        """The numbers of the selected edges, ascending; computed on first access."""
        return self.filter(self.target)

    def filter(self, edges: Edges) -> Edges:
        """Return the selected edges among ``edges``, which must all be edges of the change's target."""
        if self.marked is None:
            return edges
        selected: Edges = _native.select_edges(edges, self.owner_rows, self.marked)
        return selected

    def find(self, edges: Edges) -> Int64Array:
        """Return the positions in ``edges`` (any edges of the graph) of the selected edges."""
        rows = np.minimum(np.searchsorted(self.target, edges), len(self.target) - 1)
        is_selected = self.target[rows] == edges
        if self.marked is not None:
            owners = self.owner_rows[edges]
            is_selected &= (owners >= 0) & self.marked[owners]
        return np.flatnonzero(is_selected)

    def __bool__(self) -> bool:
        """True if any edge is selected."""
        starts = range(0, len(self.target), _CHUNK_EDGES)
        return any(self.filter(self.target[start : start + _CHUNK_EDGES]).size for start in starts)


class EdgeSelector:
    """Selects edges of a job's graph by the event to which each edge's time belongs; returns ascending edge numbers.

    A row is that of an event in the tables of all ranks one after the other.
    """

    def __init__(self, graph: Graph, job: Job) -> None:
        self.graph = graph
        self.job = job
        self._targets: dict[str, Edges] = {}

    def prepare(self) -> None:
        """Compute in advance all that `select` needs: the edges of each target, and names and parents of the events."""
        for target in TARGETS:
            self.select_target(target)
        for name in ("_names", "_parents"):
            getattr(self, name)

    def select(self, change: Change) -> Selection:
        """Return the edges that a change applies to. Raises EtloomError if there are none."""
        edges, marked = self.select_target(change.target), None
        if change.name is not None:
            marked = self._mask_names(change.name, change.target)
        for key, value in change.filters.items():
            if key == "rank":
                edges = edges[
                    np.isin(edges, self._edges_by_rank.get(int(value), edges[:0]), assume_unique=True)
                ]
            else:
                mask = self._mask_values(key, value)
                marked = mask if marked is None else marked & mask
        selection = Selection(edges, marked, self.owner_rows, "rank" not in change.filters)
        if not selection:
            raise self._no_match_error(change)
        return selection

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
        if change.target == "kernel":
            names = f"`etloom analyze kernel-breakdown {run}` lists names, which differ from GPU to GPU"
        return EtloomError(
            f"{change.text!r} matches nothing in this run",
            remedy=f"{change.target} is {TARGETS[change.target]}; {names}",
        )

    def select_target(self, target: str) -> Edges:
        """Return the edges of a target of changes (kernel, copy, comm, op, ...), ascending. Not to be modified."""
        if target not in self._targets:
            self._targets[target] = self._find_target(target)
        return self._targets[target]

    def _find_target(self, target: str) -> Edges:
        kind = self.graph.kind
        if target in DELAY_KINDS:
            return _number_edges(kind == DELAY_KINDS[target])
        if target in ("kernel", "copy"):
            has_kind = self._mask_rows(mask_events, "computation" if target == "kernel" else "memory")
            return self._filter(_number_edges(kind == EdgeKind.KERNEL), has_kind)
        if target == "comm":
            return _number_edges(self.communication)
        if target == "python":
            segments = self._filter(
                _number_edges(kind == EdgeKind.SEGMENT), self._mask_rows(mask_events, "python")
            )
            return np.sort(np.concatenate((segments, _number_edges(kind == EdgeKind.IDLE))))
        return _number_edges(kind == EdgeKind.SEGMENT if target == "op" else np.isin(kind, HOST_KINDS))

    @cached_property
    def communication(self) -> Mask:
        """Mask of the edges whose time is the transfer of data between ranks."""
        return mask_transfers(self.graph, self.job)

    def find_calls(self, change: Change, edges: Edges) -> Int64Array:
        """Return for each edge the row of the call whose time a change of `HOST_TARGETS` sets or increases.

        For the target op with a name this is the outermost operator of that name around the edge, else the event that
        owns the edge. An edge without an owner is a call of its own, with a negative number.
        """
        owners = self.owner_rows[edges].astype(np.int64)
        if change.target == "op" and change.name is not None:
            expression = wildcard_to_regex(change.name)
            is_match = self._match_names(lambda names: arrays.match_text(names, expression))
            is_operator = np.concatenate(
                [
                    categories.mask_events(trace.events, categories.OPERATOR_CATEGORIES)
                    for trace in self.job.values()
                ]
            )
            if (is_match & is_operator).any():  # else the name is one of annotations or functions
                is_match &= is_operator
            enclosing = nesting.find_nearest_ancestor(self._parents, is_match)
            is_outermost = is_match & ((self._parents < 0) | (enclosing[self._parents] < 0))
            owners = nesting.find_nearest_ancestor(self._parents, is_outermost, owners)
        return np.where(owners >= 0, owners, -1 - edges.astype(np.int64))

    def measure_calls(self, change: Change) -> tuple[int, int]:
        """Return the number of calls (of launch, stream and sync: delays) that a change applies to, and their recorded
        time, ns."""
        edges = self.select(change).edges
        return len(np.unique(self.find_calls(change, edges))), int(self.graph.lag[edges].sum())

    def select_syncs_in(self, name: str) -> Edges:
        """Return the edges by which the host waits for the device in calls named ``name``, or in operators of that
        name.

        Raises EtloomError if there are none."""
        edges = self._filter(self.select_target("sync"), self._mask_names(name, "op"))
        if not edges.size:
            raise EtloomError(
                f"no operator or call named {name!r} waits for the device",
                remedy="etloom analyze findings --pattern host-sync",
            )
        return edges

    def list_collectives(self) -> list[str]:
        """Return the distinct names of the collectives in the job, sorted."""
        parts = (self._participations(rank)["collective"].drop_nulls() for rank in self.job)
        return sorted({name for names in parts for name in names})

    def _participations(self, rank: int) -> pl.DataFrame:
        """Return the communications of a rank, see `etloom.collectives.list_participations`."""
        return self.job[rank].compute_once(list_participations, rank)

    @cached_property
    def _edges_by_rank(self) -> dict[int, Int64Array]:
        return dict(edges_by_rank(self.graph, self.job))

    @cached_property
    def _first_rows(self) -> dict[int, int]:
        """The row of each rank's first event in the joined event tables of all ranks."""
        heights = [trace.events.height for trace in self.job.values()]
        return dict(zip(self.job, np.cumsum([0, *heights]).tolist(), strict=False))

    @cached_property
    def owner_rows(self) -> Int32Array:
        """For each edge, the row (in the joined event tables of all ranks) of the event to which its time belongs; -1
        for none."""
        rows = np.full(len(self.graph.source), -1, np.int32)
        for rank, edges in self._edges_by_rank.items():
            owners = find_owner_rows(self.graph, self.job[rank].events, edges)
            rows[edges] = np.where(owners >= 0, owners + np.int32(self._first_rows[rank]), owners)
        return rows

    @cached_property
    def _names(self) -> tuple[text_codes.Codes, text_codes.Codes, pl.Series]:
        """The integer code of each event's name, the distinct codes, and the name of each distinct code."""
        names = pl.concat([trace.events["name"] for trace in self.job.values()], rechunk=True)
        codes = text_codes.read_codes(names)
        rows = text_codes.find_distinct(codes)[0]
        return codes, codes[rows], names[pl.Series(rows.astype(np.uint32))]

    @cached_property
    def _parents(self) -> Int32Array:
        """The row of each event's enclosing event in the joined event tables of all ranks; -1 for none."""
        parts = []
        for rank, trace in self.job.items():
            parents = rows_of_ids(trace.events, trace.events["parent"])
            parts.append(np.where(parents >= 0, parents + np.int32(self._first_rows[rank]), parents))
        return np.concatenate(parts)

    @cached_property
    def _stated_collectives(self) -> pl.DataFrame:
        """A table (row, collective) of the events whose arguments name their collective, without messages."""
        parts = []
        for rank, trace in self.job.items():
            table = self._participations(rank)
            communications = table.filter(
                pl.col("collective").is_not_null() & (pl.col("collective") != "message")
            )
            rows = rows_of_ids(trace.events, communications["event"]) + self._first_rows[rank]
            parts.append(pl.DataFrame({"row": rows, "collective": communications["collective"]}))
        return pl.concat(parts)

    def _filter(self, edges: Edges, rows: Mask) -> Edges:
        """Return the edges whose owner event is marked in the mask ``rows``."""
        selected: Edges = _native.select_edges(edges, self.owner_rows, rows)
        return selected

    def _mask_rows(self, mask: Callable[..., Mask], *arguments: Any) -> Mask:
        """Compute a mask of the events of each rank, and return the masks of all ranks as a single mask."""
        return np.concatenate([mask(trace, *arguments) for trace in self.job.values()])

    def _mask_names(self, pattern: str, target: str) -> Mask:
        """Return a mask of the events whose name matches a pattern; for the target op also of events inside them, for
        comm also of events that run a collective with a matching name."""
        expression = wildcard_to_regex(pattern)
        has_name = self._match_names(lambda names: arrays.match_text(names, expression))
        if target == "op":
            return nesting.find_nearest_ancestor(self._parents, has_name) >= 0
        return has_name | self._mask_collectives(pattern) if target == "comm" else has_name

    def _match_names(self, predicate: Callable[[pl.Series], Mask]) -> Mask:
        """Return a mask of the events whose name satisfies a predicate, which is evaluated once per name."""
        codes, distinct, names = self._names
        table = np.zeros(int(distinct.max(initial=0)) + 2, np.uint8)  # the last entry is for null
        table[distinct] = predicate(names)
        mask: Mask = _native.looked_up(table, codes, clip=True).view(np.bool_)
        return mask

    def _mask_collectives(self, pattern: str) -> Mask:
        """Return a mask of the events that are, or run, a collective whose name matches ``pattern``; the spellings
        all_reduce, allreduce and all-reduce are equal."""
        plain = pattern.lower().replace("-", "_")
        expression = wildcard_to_regex(categories.parse_collective(plain) or plain)

        def is_collective(names: pl.Series) -> Mask:
            collectives = categories.parse_collectives(names).cast(pl.String)
            mask: Mask = collectives.str.contains(expression).fill_null(False).to_numpy()
            return mask

        mask, stated = self._match_names(is_collective), self._stated_collectives
        mask[stated["row"].to_numpy()] = stated["collective"].str.contains(expression).to_numpy()
        return mask

    def _mask_values(self, key: str, value: str) -> Mask:
        """Return a mask of the events with step, stream or kernel family ``value``, or in a process group whose name
        matches it."""
        if key == "group":
            return np.concatenate([self._mask_group(rank, wildcard_to_regex(value)) for rank in self.job])
        if key == "family":
            return self._mask_rows(_mask_family, value)
        return self._mask_rows(lambda trace: (trace.events[key] == int(value)).fill_null(False).to_numpy())

    def _mask_group(self, rank: int, expression: str) -> Mask:
        """Return a mask of a rank's communications in process groups whose name matches a regular expression."""
        events = self.job[rank].events
        has_group_name = pl.col("pg_name", "pg_desc").str.contains(expression)
        in_group = self._participations(rank).filter(pl.any_horizontal(has_group_name.fill_null(False)))
        mask = np.zeros(events.height, bool)
        mask[rows_of_ids(events, in_group["event"])] = True
        return mask


def _mask_family(trace: Trace, family: str) -> Mask:
    """Return a mask of the events of a rank that are GPU activities of a kernel family."""
    mask = np.zeros(trace.events.height, bool)
    with suppress(AnalysisError):  # no GPU activity
        kernels = trace.compute_once(classify_kernels).filter(family=family)
        mask[rows_of_ids(trace.events, kernels["id"])] = True
    return mask


def _number_edges(mask: Mask) -> Edges:
    return np.flatnonzero(mask).astype(np.int32)


def no_communication_error(change: Change | Network) -> EtloomError:
    """Return the error for a change that applies to communication, in a run without communication."""
    return EtloomError(
        f"{change.text!r}: this run has no communication",
        remedy="change kernel, copy, op or host, or open the traces of all ranks",
    )


def wildcard_to_regex(pattern: str) -> str:
    """Convert a pattern with the wildcards * and ? to a regular expression that matches whole names."""
    return "^" + re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".") + "$"
