"""The process mesh of a job: how its ranks divide into the axes of parallelism."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import polars as pl

from etloom.core.errors import AnalysisError
from etloom.core.trace import Job

_FASTEST_FIRST = ("tp", "cp", "dp", "pp")
"""The usual order of axes in the numbers of ranks, from neighbors to the most distant (Megatron's default)."""


@dataclass(frozen=True)
class ProcessMesh:
    """The process mesh of a job: axes of parallelism and their sizes, from the fastest- to the slowest-varying axis.

    ``sizes``: axis -> ranks along it, in this order. ``source``: name | use | assumed.
    """

    sizes: dict[str, int]
    source: str

    @property
    def world_size(self) -> int:
        """The number of ranks: the product of the axis sizes."""
        return math.prod(self.sizes.values())

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the index of a rank along each axis of the mesh."""
        position = {}
        for axis, size in self.sizes.items():
            rank, position[axis] = divmod(rank, size)
        return position

    def rank_at(self, position: dict[str, int]) -> int:
        """Return the rank at a position of the mesh, which is an index along each axis."""
        rank = 0
        for axis in reversed(self.sizes):
            rank = rank * self.sizes[axis] + position[axis]
        return rank

    def describe(self) -> str:
        """Return the axes with more than one rank as text, such as "tp=2, dp=4"."""
        return ", ".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 1) or "one rank"


def infer_mesh(job: Job) -> ProcessMesh:
    """Infer the process mesh (axes of parallelism and their sizes) from the process groups of all ranks.

    Axes come from the groups that serve a single axis (`linker.group_axes`); ranks beyond their product are data
    parallel. Without any such group, all ranks are taken as data parallel (source "assumed").

    Raises:
        AnalysisError: the groups contradict each other.
    """
    groups = pl.concat(
        trace.groups.select(pl.col("axis", "axis_from", "ranks").cast(pl.String), "size")
        for trace in job.values()
    ).unique()
    recorded_world = max(
        (size for trace in job.values() if isinstance(size := trace.meta.get("world_size"), int)), default=0
    )
    world = max(recorded_world, max(job) + 1)
    sizes: dict[str, int] = {}
    strides: dict[str, int] = {}
    sources: set[str] = set()
    for axis in _FASTEST_FIRST:
        rows = groups.filter(pl.col("axis") == axis).drop_nulls("size")
        if not rows.height:
            continue
        sizes[axis] = int(rows["size"].max())  # type: ignore[arg-type]
        sources.update(rows["axis_from"].drop_nulls())
        members = [json.loads(text) for text in rows["ranks"].drop_nulls()]
        steps = {ranks[1] - ranks[0] for ranks in members if len(ranks) > 1}
        if len(steps) == 1:
            strides[axis] = steps.pop()
    others = math.prod(size for axis, size in sizes.items() if axis != "dp")
    if world % others:
        raise AnalysisError(
            f"{world} ranks are not a multiple of the sizes of the process groups, "
            + ", ".join(f"{axis}={size}" for axis, size in sizes.items()),
            remedy="open the folder with all ranks of the run",
        )
    sizes["dp"] = world // others
    order = sorted(
        sizes, key=lambda axis: (strides.get(axis, 0) or _default_stride(axis, sizes), _rank_of(axis))
    )
    source = "assumed" if not sources else "name" if sources == {"name"} else "use"
    return ProcessMesh({axis: sizes[axis] for axis in order}, source)


def _default_stride(axis: str, sizes: dict[str, int]) -> int:
    """Return the distance in ranks between neighbors on an axis, if the axes have the usual order."""
    return math.prod(sizes.get(other, 1) for other in _FASTEST_FIRST[: _rank_of(axis)])


def _rank_of(axis: str) -> int:
    return _FASTEST_FIRST.index(axis)
