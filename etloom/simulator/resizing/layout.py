"""Which recorded rank each new rank repeats, along the data-parallel axis of the process mesh."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import polars as pl

from etloom.collectives import get_bus_factor
from etloom.collectives.process_mesh import ProcessMesh, infer_mesh
from etloom.core.errors import EtloomError
from etloom.core.text import format_ranks
from etloom.simulator.resizing.jitter import draw_arrivals
from etloom.simulator.resizing.replication import replicate
from etloom.simulator.scenario import Basis, Scenario

MAX_RANKS = 1 << 17
_AXES = ("tp", "pp", "dp", "cp", "ep", "vp", "mb")
"""Axes of the mesh, model chunks a stage, and micro-batches."""


def parse_parallel(text: str) -> dict[str, int]:
    """Parse sizes of axes, such as tp=4,pp=8,dp=16. Raises EtloomError."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([a-z]+)\s*=\s*(\d{1,6})\s*", part)
        if match is None or match[1] not in _AXES or int(match[2]) < 1 or match[1] in sizes:
            raise EtloomError(
                f"expected sizes of {', '.join(_AXES)}, got {part.strip()!r}",
                remedy="such as tp=4,pp=8,dp=16",
            )
        sizes[match[1]] = int(match[2])
    return sizes


def resize(
    scenario: Scenario, ranks: int | None = None, parallel: Mapping[str, int] | None = None, *, seed: int = 0
) -> Scenario:
    """Return the scenario on another number of ranks.

    Data parallelism grows or shrinks: each new rank runs the program of the recorded rank at its position along the
    other axes. Its arrivals at collectives vary like those of the recorded ranks (`jitter`). Collectives of groups that
    grow take the time of a ring of the new size, unless a network step replaces it.

    Args:
        scenario: all ranks of the recorded run.
        ranks: the new number of ranks.
        parallel: sizes by axis; those of other axes stay. The product must agree with ``ranks``.
        seed: of the random arrivals.

    Raises:
        EtloomError: the recording does not hold what the new sizes need.
    """
    mesh = infer_mesh(scenario.recorded)
    _check_recorded(scenario, mesh)
    new_mesh = _resize_mesh(mesh, ranks, parallel)
    template, copy = _assign_templates(mesh, new_mesh)
    replica = np.array([mesh.coordinates(rank)["dp"] for rank in range(mesh.world_size)])
    grown = replicate(scenario, template, copy, replica)
    grown = _resize_transfers(scenario, grown, mesh)
    grown = draw_arrivals(scenario, grown, template, copy, seed)
    note = (
        f"{mesh.world_size} ranks ({mesh.describe()}) become {new_mesh.world_size} ({new_mesh.describe()}): "
    )
    note += "each new rank repeats the program of the recorded rank at its position"
    notes = [note]
    if mesh.source == "assumed":
        notes.append("no process group states its axis of parallelism: all ranks are taken as data parallel")
    return replace(grown, notes=(*scenario.notes, *notes, *grown.notes[len(scenario.notes) :]))


def _check_recorded(scenario: Scenario, mesh: ProcessMesh) -> None:
    """Raise EtloomError if ranks of the recorded run have no trace."""
    recorded = len(scenario.recorded)
    if mesh.world_size != recorded:
        some = [rank for rank in range(recorded + 1) if rank not in scenario.recorded]
        raise EtloomError(
            f"cannot add ranks: {mesh.world_size - recorded:,} of {mesh.world_size:,} were not recorded, such as "
            f"{format_ranks(some[:4])}",
            remedy="collect all ranks of a small run, such as 2, 4 or 8",
        )


def _resize_mesh(mesh: ProcessMesh, ranks: int | None, parallel: Mapping[str, int] | None) -> ProcessMesh:
    """Return the mesh of the new sizes. Raises EtloomError if it cannot be predicted from the recorded one."""
    sizes = {**mesh.sizes}
    for axis, size in (parallel or {}).items():
        if axis != "dp" and size != sizes.get(axis, 1):
            raise EtloomError(
                f"cannot predict {axis}={size}: the run was recorded with {axis}={sizes.get(axis, 1)}, and "
                f"{_MISSING[axis]}",
                remedy=f"record a run with {axis}={size}; the number of data-parallel replicas may differ",
            )
        sizes[axis] = size
    others = math.prod(size for axis, size in sizes.items() if axis != "dp")
    if ranks is not None and "dp" not in (parallel or {}):
        if ranks % others:
            raise EtloomError(
                f"cannot predict {ranks} ranks: expected a multiple of {others} ({mesh.describe()} was recorded)",
                remedy=f"such as --ranks {max(round(ranks / others), 1) * others}",
            )
        sizes["dp"] = ranks // others
    total = math.prod(sizes.values())
    if ranks is not None and total != ranks:
        raise EtloomError(
            f"--ranks {ranks} and --parallel contradict each other: the sizes multiply to {total}",
            remedy=f"use --ranks {total}, or leave one out",
        )
    if not 1 <= total <= MAX_RANKS:
        raise EtloomError(f"expected 1 to {MAX_RANKS:,} ranks, got {total:,}")
    if sizes["dp"] > 1 and mesh.sizes["dp"] == 1:
        raise EtloomError(
            f"cannot predict dp={sizes['dp']}: the recorded run ({mesh.describe()}) has no data-parallel group, so its "
            "gradient communication is not recorded",
            remedy="record a run with two or more data-parallel replicas",
        )
    return ProcessMesh({axis: sizes[axis] for axis in mesh.sizes}, mesh.source)


_MISSING = {
    "tp": "its kernels have other shapes then",
    "cp": "its kernels have other shapes then",
    "ep": "its kernels have other shapes then",
    "pp": "its stages hold other layers then",
}


def _assign_templates(mesh: ProcessMesh, new_mesh: ProcessMesh) -> tuple[np.ndarray, np.ndarray]:
    """Return for each new rank the recorded rank that it repeats, and the number of its copy."""
    template = np.zeros(new_mesh.world_size, np.int64)
    copy = np.zeros(new_mesh.world_size, np.int64)
    for rank in range(new_mesh.world_size):
        position = new_mesh.coordinates(rank)
        copy[rank], position["dp"] = divmod(position["dp"], mesh.sizes["dp"])
        template[rank] = mesh.rank_at(position)
    return template, copy


def _resize_transfers(scenario: Scenario, grown: Scenario, mesh: ProcessMesh) -> Scenario:
    """Scale the transfers of groups whose size changed like those of a ring: by bus factor, at fixed bandwidth."""
    sizes = grown.communications.instances.select("instance", "collective", "group_size", "recorded_size")
    changed = sizes.filter(pl.col("group_size") != pl.col("recorded_size"))
    instances = grown.communications.instances.drop("recorded_size")
    grown = replace(grown, communications=replace(grown.communications, instances=instances))
    if not changed.height:
        return grown
    factors = [
        _scale_of(collective, old, new)
        for collective, new, old in changed.select("collective", "group_size", "recorded_size").iter_rows()
    ]
    rows = grown.communications.participations.join(
        changed.select("instance", factor=pl.Series(factors, dtype=pl.Float64)), on="instance"
    )
    lag, basis = grown.lag.copy(), grown.basis.copy()
    for column in ("own_edge", "transfer_edge"):
        edges = rows.filter(pl.col(column) >= 0)
        index = edges[column].to_numpy()
        lag[index] = np.rint(lag[index] * edges["factor"].to_numpy()).astype(np.int64)
        basis[index] = Basis.FITTED
    note = f"{changed.height:,} collectives of groups of another size take the time of a ring of that size"
    return replace(grown, lag=lag, basis=basis, notes=(*grown.notes, note))


def _scale_of(collective: str | None, old: int | None, new: int | None) -> float:
    """Return the ratio of the times of a ring; 1 if it is unknown."""
    before, after = get_bus_factor(collective, old), get_bus_factor(collective, new)
    return after / before if before and after else 1.0
