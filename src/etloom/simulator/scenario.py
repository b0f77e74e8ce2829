"""A scenario: a job during prediction, as a dependency graph with the data that prediction steps read and change.

A prediction is a sequence of steps, each a function from a Scenario to a Scenario (`etloom.simulator.prediction`):
change the number of ranks, the device, the network. The recording itself is the first scenario.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl

from etloom import _native
from etloom.collectives.process_mesh import ProcessMesh
from etloom.core.trace import Job
from etloom.graphs import algorithms
from etloom.graphs.graph import Graph, Int64Array, UInt8Array


class Basis(IntEnum):
    """The source of a predicted time; members are ordered from the most to the least reliable."""

    RECORDED = 0  # as recorded
    FITTED = 1  # a model whose parameters were fitted to the recording
    TABLE = 2  # measured elsewhere
    ROOFLINE = 3  # computed from the limits of a device
    GUESSED = 4  # an assumption, such as nominal bandwidth

    @property
    def source(self) -> str:
        """The source as text for a share of the time, such as "by roofline"."""
        return _SOURCES[self]

    @property
    def label(self) -> str:
        """The source in lower case, as tables show it."""
        return self.name.lower()


_SOURCES = {
    Basis.RECORDED: "as recorded",
    Basis.FITTED: "by a fitted model",
    Basis.TABLE: "by measured tables",
    Basis.ROOFLINE: "by roofline",
    Basis.GUESSED: "by an assumption",
}
DEVIATIONS = {
    Basis.RECORDED: 0.01,
    Basis.FITTED: 0.05,
    Basis.TABLE: 0.095,
    Basis.ROOFLINE: 0.20,
    Basis.GUESSED: 0.30,
}
"""Relative standard deviation of the times of each basis, unless a prediction step sets another one."""

INSTANCE_COLUMNS: dict[str, Any] = {
    "instance": pl.Int64,
    "collective": pl.String,  # all_reduce, ..., message; null if unknown
    "bytes": pl.Int64,  # message size as nccl-tests defines it; null if unknown
    "group_size": pl.Int64,  # null if unknown
    "ranks": pl.List(pl.Int64),  # of the group; those that take part if the group is unknown
    "group": pl.String,
    "where": pl.String,  # device | host
}
"""One row per communication: an instance that matches across ranks, or a participation that matches none."""

PARTICIPATION_COLUMNS: dict[str, Any] = {
    "instance": pl.Int64,
    "rank": pl.Int64,
    "begin": pl.Int64,  # point: the rank arrives
    "finish": pl.Int64,  # point: the rank leaves
    "own_edge": pl.Int64,  # edge begin -> finish, -1 for none
    "transfer_edge": pl.Int64,  # edge from the arrival of the last rank to finish, -1 for none
}
"""One row per rank in a communication."""


@dataclass(frozen=True)
class Communications:
    """The communications of a graph: table ``instances`` (a row per communication) and ``participations`` (a row per
    rank in a communication)."""

    instances: pl.DataFrame
    participations: pl.DataFrame


@dataclass(frozen=True, eq=False)
class Scenario:
    """A job during prediction: a dependency graph with the lag of each edge, from which all times follow.

    Attributes:
        recorded: the recorded job, linked.
        graph: points and edges of all ranks of the scenario. The events of a point or edge are those of the recorded
            rank ``template[rank]``.
        lag: int64 ns per edge, the most likely value. The scenario's times follow from it.
        start: int64 ns per point, of which those of points without incoming edges are read.
        basis: `Basis` per edge, uint8.
        communications: the transfers between ranks; a step that adds or removes ranks rewrites it.
        template: rank of the scenario -> recorded rank whose program it runs.
        mesh: the process mesh of its ranks, if it is not the recorded one.
        deviations: relative standard deviation of times, by basis.
        notes: sentences for the answer, in order of the steps.
        times: the time of each point, int64 ns, if a step has computed it. Not to be modified.
    """

    recorded: Job
    graph: Graph
    lag: Int64Array
    start: Int64Array
    basis: UInt8Array
    communications: Communications
    template: Mapping[int, int]
    deviations: Mapping[Basis, float] = field(default_factory=lambda: dict(DEVIATIONS))
    notes: tuple[str, ...] = ()
    mesh: ProcessMesh | None = None
    times: Int64Array | None = None

    @cached_property
    def lag_sums(self) -> dict[Basis, float]:
        """For each source of times (`Basis`) that occurs, the sum of the positive lags of its edges, ns."""
        sums = np.bincount(self.basis, np.maximum(self.lag, 0), minlength=len(Basis)).tolist()
        return {basis: sums[basis] for basis in Basis if (self.basis == basis).any()}

    def compute_times(self, lag: Int64Array | None = None) -> Int64Array:
        """Return the time of each point, int64 ns. lag: ns per edge; default: the scenario's lags."""
        if lag is None and self.times is not None:
            return self.times
        return algorithms.compute_times(self.graph, self.lag if lag is None else lag, self.start)

    def compute_scaled_times(self, basis: Basis, factor: float) -> Int64Array:
        """Return the time of each point (ns) if the positive lags of edges of one `Basis` are multiplied by a
        factor."""
        time = np.array(self.start, np.int64)
        lag, bases = np.ascontiguousarray(self.lag), np.ascontiguousarray(self.basis)
        _native.schedule_scaled(self.graph.first, self.graph.source, lag, bases, int(basis), factor, time)
        return time

    def with_lags(self, edges: np.ndarray, lag: Int64Array, basis: Basis, *notes: str) -> Scenario:
        """Return the scenario with lags ``lag`` (ns) and source ``basis`` on ``edges`` (indices or mask)."""
        lags, bases = self.lag.copy(), self.basis.copy()
        lags[edges], bases[edges] = lag, basis
        return self.replace(lag=lags, basis=bases, notes=(*self.notes, *notes))

    def replace(self, **fields: Any) -> Scenario:
        """Return a copy of the scenario with other fields; a new graph, lag or start discards the computed times."""
        if fields.keys() & {"graph", "lag", "start"}:
            fields.setdefault("times", None)
        return replace(self, **fields)
