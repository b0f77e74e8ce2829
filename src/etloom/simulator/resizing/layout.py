"""Assigns to each new rank the recorded rank whose program it repeats, when an axis of the process mesh changes
size."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import polars as pl

from etloom.collectives import get_bus_factor
from etloom.collectives.process_mesh import ProcessMesh, infer_mesh
from etloom.core.errors import EtloomError
from etloom.core.text import format_ranks
from etloom.simulator.resizing.context_shares import shard_context
from etloom.simulator.resizing.expert_shares import (
    EXPERT,
    REPLICA,
    are_on_replicas,
    find_expert_size,
    has_expert_replicas,
    shard_experts,
    split_experts,
)
from etloom.simulator.resizing.jitter import draw_arrivals
from etloom.simulator.resizing.replication import replicate
from etloom.simulator.resizing.tensor_shares import shard_tensors
from etloom.simulator.scenario import Basis, Scenario

MAX_RANKS = 1 << 17
_AXES = ("tp", "pp", "dp", "cp", "ep", "vp", "mb")
"""Axes of the mesh, model chunks a stage, and micro-batches."""


def parse_parallel(text: str) -> dict[str, int]:
    """Parse sizes of parallelism axes, such as tp=4,pp=8,dp=16. Raises EtloomError."""
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
    """Return the scenario on another number of ranks, or with other sizes of the process mesh.

    Data, tensor, context and expert parallelism grow or shrink: each new rank runs the program of the recorded rank at
    its position along the other axes; another size of the last three changes kernels, too (`sharding`). Arrivals at
    collectives vary like those of the recorded ranks (`jitter`). Collectives of groups that grow take the time of a
    ring of the new size, unless a network step replaces it.

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
    sizes = dict(parallel or {})
    _check_sizes(sizes)
    recorded_experts = find_expert_size(scenario.recorded)
    experts = sizes.pop(EXPERT, recorded_experts)
    new_mesh = _resize_mesh(mesh, ranks, sizes)
    is_split = experts != recorded_experts
    if is_split:
        _check_experts(recorded_experts, experts)
    elif new_mesh.sizes["dp"] != mesh.sizes["dp"]:
        # Without a size of ep, a group of experts that spans all replicas grows with them.
        has_experts = are_on_replicas if EXPERT in (parallel or {}) else has_expert_replicas
        is_split = has_experts(scenario.recorded, mesh)
    if is_split:
        mesh, new_mesh = (
            split_experts(scenario.recorded, mesh),
            split_experts(scenario.recorded, new_mesh, experts),
        )
        _check_expert_replicas(mesh, new_mesh)
    note = (
        f"{mesh.world_size} ranks ({mesh.describe()}) become {new_mesh.world_size} ({new_mesh.describe()}): "
    )
    note += "each new rank repeats the program of the recorded rank at its position"
    notes = [note]
    if not is_split and new_mesh.sizes["dp"] != mesh.sizes["dp"] and are_on_replicas(scenario.recorded, mesh):
        notes.append(
            f"ep={recorded_experts} becomes {new_mesh.sizes['dp']}: as recorded, all replicas share the experts; "
            "ep= states another size"
        )
    if mesh.source == "assumed":
        notes.append("no process group states its axis of parallelism: all ranks are taken as data parallel")
    grown = scenario.replace(notes=(*scenario.notes, *notes))
    is_same = new_mesh.sizes == mesh.sizes
    for axis in ("dp", REPLICA, EXPERT, "tp", "cp"):
        size = new_mesh.sizes.get(axis)
        if size is None or (size == mesh.sizes[axis] and not (is_same and axis == "dp")):
            continue
        if axis in _SHARDING:
            grown = _SHARDING[axis](grown, mesh, size)
        grown = _resize_axis(scenario, grown, mesh, axis, size, seed)
        mesh = ProcessMesh({**mesh.sizes, axis: size}, mesh.source)
    return grown.replace(mesh=new_mesh)


_SHARDING: dict[str, Callable[[Scenario, ProcessMesh, int], Scenario]] = {
    "tp": shard_tensors,
    "cp": shard_context,
    EXPERT: shard_experts,
}
"""Axis -> the step that changes kernels and messages, before the ranks."""


def _resize_axis(
    recorded: Scenario, scenario: Scenario, mesh: ProcessMesh, axis: str, size: int, seed: int
) -> Scenario:
    """Return the scenario with another size of a mesh axis: new ranks are copies, with scaled transfer times."""
    new_mesh = ProcessMesh({**mesh.sizes, axis: size}, mesh.source)
    template, copy = _assign_templates(mesh, new_mesh, axis)
    replica = np.array([mesh.coordinates(rank)[axis] for rank in range(mesh.world_size)])
    # Context parallelism passes keys and values around a ring; the copies of neighbors are neighbors again.
    grown = replicate(scenario, template, copy, replica, pairwise=axis == "cp")
    grown = _resize_transfers(grown, axis)
    recorded_ranks = np.array([grown.template[rank] for rank in range(new_mesh.world_size)])
    return draw_arrivals(recorded, grown, recorded_ranks, copy, axis, seed)


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
    """Return the process mesh with the new sizes. Raises EtloomError if the recorded run does not suffice for them."""
    sizes = {**mesh.sizes}
    for axis, size in (parallel or {}).items():
        if size != sizes.get(axis, 1) and axis != "dp" and (axis not in _SHARDING or sizes.get(axis, 1) == 1):
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
                remedy=f"specify, for example, --ranks {max(round(ranks / others), 1) * others}",
            )
        sizes["dp"] = ranks // others
    total = math.prod(sizes.values())
    if ranks is not None and total != ranks:
        product = ", ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "dp=1"
        raise EtloomError(
            f"--ranks {ranks} does not match the sizes {product}, which multiply to {total} "
            "(sizes not in --parallel are those of the recording)",
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


def _check_sizes(sizes: Mapping[str, int]) -> None:
    """Raise EtloomError if the name of an axis is unknown or its size is not a positive integer."""
    for axis, size in sizes.items():
        if axis not in _AXES or not isinstance(size, (int, np.integer)) or size < 1:
            raise EtloomError(
                f"expected sizes of {', '.join(_AXES)}, got {axis}={size!r}", remedy="such as tp=4,pp=8,dp=16"
            )


def _check_experts(old: int, size: int) -> None:
    """Raise EtloomError if the run was recorded without expert parallelism."""
    if old == 1:
        raise EtloomError(
            f"cannot predict ep={size}: the run was recorded with ep=1, and {_MISSING[EXPERT]}",
            remedy="record a run with two or more ranks per set of experts",
        )


def _check_expert_replicas(mesh: ProcessMesh, new_mesh: ProcessMesh) -> None:
    """Raise EtloomError if experts would get replicas, but the recorded run has a single set of experts."""
    if new_mesh.sizes[REPLICA] > mesh.sizes[REPLICA] == 1:
        raise EtloomError(
            f"cannot predict {new_mesh.sizes[REPLICA]} replicas of experts: the recorded run has one, so messages of "
            "their gradients are not recorded",
            remedy=f"such as --parallel dp={new_mesh.sizes[EXPERT]},ep={new_mesh.sizes[EXPERT]}",
        )


_MISSING = {
    "tp": "without the messages of tensor parallelism, the kernels that it divides are not known",
    "cp": "without the messages of context parallelism, its kind of attention is not known",
    "ep": "without the messages of expert parallelism, the kernels of experts are not known",
    "pp": "its stages then contain different layers",
}


def _assign_templates(mesh: ProcessMesh, new_mesh: ProcessMesh, axis: str) -> tuple[np.ndarray, np.ndarray]:
    """Return for each new rank the rank that it repeats, and which copy of that rank it is (0: the first)."""
    template = np.zeros(new_mesh.world_size, np.int64)
    copy = np.zeros(new_mesh.world_size, np.int64)
    for rank in range(new_mesh.world_size):
        position = new_mesh.coordinates(rank)
        copy[rank], position[axis] = divmod(position[axis], mesh.sizes[axis])
        template[rank] = mesh.rank_at(position)
    return template, copy


def _resize_transfers(grown: Scenario, axis: str) -> Scenario:
    """Scale the transfer times of groups whose size changed as for a ring: by bus factor, at fixed bandwidth."""
    sizes = grown.communications.instances.select("instance", "collective", "group_size", "recorded_size")
    changed = sizes.filter(pl.col("group_size") != pl.col("recorded_size"))
    instances = grown.communications.instances.drop("recorded_size")
    grown = replace(grown, communications=replace(grown.communications, instances=instances))
    if not changed.height:
        return grown
    factors = [
        1.0 if axis == "cp" and collective == "message" else _scale_of(collective, old, new)
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
        basis[index] = np.maximum(basis[index], Basis.FITTED)
    note = f"{changed.height:,} collectives of {axis} groups of another size take the time of a ring of that size"
    return replace(grown, lag=lag, basis=basis, notes=(*grown.notes, note))


def _scale_of(collective: str | None, old: int | None, new: int | None) -> float:
    """Return the ratio of a ring collective's times (new / old group size); 1 if unknown, 0 for a single new rank."""
    if new == 1:
        return 0.0
    before, after = get_bus_factor(collective, old), get_bus_factor(collective, new)
    return after / before if before and after else 1.0
