"""Finds expert parallelism in the process mesh, and predicts kernels and messages for another expert-parallel size.

Expert parallelism divides the ranks of data parallelism: of dp replicas, every ep hold all experts once. A mesh whose
axis dp is split into ep and expert-dp has both as axes of their own.

With more ranks per set of experts, a rank holds fewer experts and each receives the tokens of more ranks. A balanced
router sends a rank as many tokens as before, so kernels keep their time; that of experts is guessed, since the
distribution of tokens over them is not in a trace. The messages between replicas of experts carry the gradients of
their share of the parameters.
"""

from __future__ import annotations

import itertools
import json

import polars as pl

from etloom.analyses.flops.call_shapes import list_matrices
from etloom.collectives.process_mesh import ProcessMesh, infer_mesh
from etloom.core.errors import AnalysisError, EtloomError
from etloom.core.trace import Job
from etloom.graphs.graph import EdgeKind
from etloom.simulator.resizing.sharding import (
    COMPLETE,
    UNKNOWN,
    Calls,
    Shares,
    list_axes,
    scale_calls,
    scale_messages,
)
from etloom.simulator.scenario import Scenario

EXPERT, REPLICA = "ep", "expert-dp"
_NAMES = ("grouped_mm", "grouped_gemm", "groupedgemm", "expert", "moe", "bmm")
"""Parts of the names of operators on experts; a batched product has one matrix for each."""


def split_experts(job: Job, mesh: ProcessMesh, size: int | None = None) -> ProcessMesh:
    """Return the mesh with the data-parallel axis dp split into expert parallelism (ep) and its replicas (expert-dp).

    Args:
        job: whose groups state the recorded size of expert parallelism and the distance of its ranks.
        mesh: its mesh, or one with other sizes.
        size: the new size of expert parallelism; default: the recorded one.

    Raises:
        EtloomError: the groups of experts are not recorded, or do not divide the axis dp.
    """
    recorded, stride = _find_groups(job)
    size = size or recorded
    replicas = mesh.sizes["dp"]
    if replicas % size:
        raise EtloomError(
            f"cannot predict ep={size} with dp={replicas}: the experts divide the data-parallel replicas",
            remedy=f"such as --parallel dp={size * max(replicas // size, 1)},ep={size}",
        )
    pair = [(EXPERT, size), (REPLICA, replicas // size)]
    sizes: dict[str, int] = {}
    for axis, count in mesh.sizes.items():
        sizes.update((pair if stride == 1 else pair[::-1]) if axis == "dp" else [(axis, count)])
    return ProcessMesh(sizes, mesh.source)


def find_expert_size(job: Job) -> int:
    """Return the recorded size of expert parallelism; 1 if no expert group was recorded."""
    sizes = [
        size
        for trace in job.values()
        for size in trace.groups.filter(pl.col("axis").cast(pl.String) == EXPERT)["size"].drop_nulls()
    ]
    return max(sizes, default=1)


def has_expert_replicas(job: Job, mesh: ProcessMesh) -> bool:
    """Return whether the expert groups divide the data-parallel axis into several groups of several ranks each."""
    return are_on_replicas(job, mesh) and _find_groups(job)[0] < mesh.sizes["dp"]


def are_on_replicas(job: Job, mesh: ProcessMesh) -> bool:
    """Return whether the ranks of an expert group lie along the data-parallel axis dp of the mesh."""
    return find_expert_size(job) > 1 and any("dp" in axes for axes, _, _ in _list_groups(job, mesh))


def _list_groups(job: Job, mesh: ProcessMesh) -> set[tuple[tuple[str, ...], int, tuple[int, ...]]]:
    """Return the recorded expert-parallel groups as (mesh axes they span, size, distances of their ranks on axis
    dp)."""
    texts = {
        ranks
        for trace in job.values()
        for ranks in trace.groups.filter(pl.col("axis").cast(pl.String) == EXPERT)["ranks"].cast(pl.String)
    }
    groups = set()
    for ranks in (json.loads(text) for text in texts if text):
        places = [mesh.coordinates(rank) for rank in ranks if rank < mesh.world_size]
        axes = tuple(axis for axis in mesh.sizes if len({place[axis] for place in places}) > 1)
        positions = sorted(place["dp"] for place in places)
        groups.add(
            (axes, len(ranks), tuple({after - before for before, after in itertools.pairwise(positions)}))
        )
    return groups


def _find_groups(job: Job) -> tuple[int, int]:
    """Return the size of the expert-parallel groups, and the distance of their ranks on the axis dp."""
    mesh = infer_mesh(job)
    groups = {group for group in _list_groups(job, mesh) if group[1] > 1}
    (axes, size, steps), *others = sorted(groups) or [((), 0, ())]
    problem = None
    if not size:
        problem = "its ranks are not recorded"
    elif others:
        problem = "its groups differ"
    elif axes != ("dp",):
        problem = f"its groups span {' and '.join(axes)}"
    elif len(steps) != 1 or steps[0] not in (1, mesh.sizes["dp"] // size):
        problem = "the replicas of its groups are not neighbors, and not at equal distances"
    if problem is not None:
        raise EtloomError(
            f"cannot predict other sizes of dp and ep: ep={find_expert_size(job)} was recorded, and {problem}",
            remedy="record a run of these sizes",
        )
    return size, steps[0]


def shard_experts(scenario: Scenario, mesh: ProcessMesh, size: int) -> Scenario:
    """Return the scenario with kernel and message times for another expert-parallel size; the set of ranks is
    unchanged.

    Args:
        scenario: its ranks form ``mesh``.
        mesh: the process mesh before, as `split_experts` returns it.
        size: the new size of the axis ep.
    """
    old = mesh.sizes[EXPERT]
    basis = "kernels keep their time, as if the router sent each rank as many tokens as before"
    changed = scenario
    if (scenario.graph.kind == EdgeKind.KERNEL).any():
        try:
            changed, shares, _ = scale_calls(scenario, find_expert_shares)
            basis += f": {shares} (of the recorded time of kernels)"
        except AnalysisError:
            basis += "; their shapes are not recorded"
    note = f"ep={old} becomes {size}: {basis}; whether the experts divide evenly is not known"
    axes = list_axes(scenario, mesh)
    between = axes.filter(pl.col("axis") == REPLICA)["instance"].to_list()
    gradients = f"{{count}} messages between replicas of experts take {old / size:g} of their bytes"
    changed = changed.replace(notes=(*scenario.notes, note))
    return scale_messages(changed, dict.fromkeys(between, old / size), gradients)


def find_expert_shares(calls: Calls) -> list[Shares]:
    """Return unchanged FLOPs and bytes for every call; calls of experts (if none is recognized, all matrix products)
    are marked as guessed."""
    are_experts = [name is not None and any(part in name.lower() for part in _NAMES) for name, _, _ in calls]
    if not any(are_experts):
        are_experts = [bool(list_matrices(name, dims)) for name, dims, _ in calls]
    return [UNKNOWN if is_expert else COMPLETE for is_expert in are_experts]
