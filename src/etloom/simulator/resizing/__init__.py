"""Predicts a job on more or fewer ranks than recorded: each new rank repeats the program of a recorded rank.

layout        which recorded rank each new rank repeats
replication   the graph and the communications of the new ranks
jitter        arrivals of new ranks, drawn from the recorded distribution
sharding      kernels and messages of another size of tensor, context or expert parallelism
traces        the traces of the new ranks, for exports and analyses
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from functools import cache

import polars as pl

from etloom.collectives.process_mesh import ProcessMesh, infer_mesh
from etloom.core.trace import Job, Trace
from etloom.graphs.graph import Int64Array
from etloom.simulator.resizing.expert_shares import EXPERT, split_experts
from etloom.simulator.resizing.layout import parse_parallel, resize
from etloom.simulator.retiming import retime_rank
from etloom.simulator.scenario import Scenario

__all__ = ["parse_parallel", "resize", "synthesize_job"]


# Builds traces of the new ranks of a scenario: copies of recorded traces, with the new ranks' groups and times.


def synthesize_job(scenario: Scenario, time: Int64Array | None = None) -> Job:
    """Return the traces of a scenario's ranks as a job, which all analyses and exports accept.

    Args:
        scenario: as `resizing.resize` returns it.
        time: of the points of its graph, int64 ns; default: the times of the scenario.
    """
    time = scenario.compute_times() if time is None else time
    recorded_mesh = infer_mesh(scenario.recorded)
    mesh = scenario.mesh or recorded_mesh
    if EXPERT in mesh.sizes:
        recorded_mesh = split_experts(scenario.recorded, recorded_mesh)
    traces = {}
    for rank, recorded in scenario.template.items():
        trace = scenario.recorded[recorded].replace(meta={"rank": rank, "world_size": len(scenario.template)})
        retimed = retime_rank(trace, scenario.graph, time, rank)
        members = _find_members(scenario, recorded_mesh, mesh, rank)
        traces[rank] = _replace_members(retimed, members)
    return Job(traces, scenario.recorded.meta)


def _find_members(
    scenario: Scenario, recorded: ProcessMesh, mesh: ProcessMesh, rank: int
) -> Callable[[tuple[int, ...]], list[int]]:
    """Return a function that maps recorded members of a group, or peers, to the new ranks in the group of ``rank``."""
    coordinates = mesh.coordinates(rank)
    changed = [axis for axis in mesh.sizes if mesh.sizes[axis] != recorded.sizes[axis]]

    def find(ranks: tuple[int, ...]) -> list[int]:
        places = [recorded.coordinates(other) for other in ranks if other in scenario.recorded]
        along = [axis for axis in changed if len({place[axis] for place in places}) > 1]
        members = set()
        for place in places:
            # Along an axis of the group all copies of a member belong to it, else those with the copies of this rank.
            choices = [
                range(place[axis], mesh.sizes[axis], recorded.sizes[axis])
                if axis in along
                else [place[axis] + coordinates[axis] // recorded.sizes[axis] * recorded.sizes[axis]]
                for axis in changed
            ]
            for choice in itertools.product(*choices):
                position = {**place, **dict(zip(changed, choice, strict=True))}
                if all(position[axis] < mesh.sizes[axis] for axis in changed):
                    members.add(mesh.rank_at(position))
        return sorted(members)

    return find


def _replace_members(trace: Trace, find: Callable[[tuple[int, ...]], list[int]]) -> Trace:
    """Return the trace with recorded members and peers of its process groups replaced by the new ranks."""

    @cache
    def members(text: str) -> str:
        return json.dumps(find(tuple(json.loads(text))))

    def peer(rank: int) -> int:
        return next(iter(find((rank,))), rank)

    groups, comms = trace.groups, trace.comms
    tables = {
        "groups": groups.with_columns(_map(groups, "ranks", members), _count(groups, "size", members)),
        "comms": comms.with_columns(
            _map(comms, "ranks", members),
            _count(comms, "group_size", members),
            comms["peer"].map_elements(peer, pl.Int64, skip_nulls=True).alias("peer"),
        ),
    }
    return trace.replace(None, **tables)


def _map(table: pl.DataFrame, column: str, change: Callable[[str], str]) -> pl.Series:
    """Return a column of JSON lists of ranks, with each list replaced by the result of ``change``."""
    texts = [None if text is None else change(text) for text in table[column].cast(pl.String)]
    return pl.Series(column, texts, pl.String).cast(table.schema[column])


def _count(table: pl.DataFrame, column: str, change: Callable[[str], str]) -> pl.Series:
    """Return the size of each process group: its number of new members, or the recorded size if members are not
    listed."""
    sizes = [
        size if text is None or size != len(json.loads(text)) else len(json.loads(change(text)))
        for text, size in zip(table["ranks"].cast(pl.String), table[column], strict=True)
    ]
    return pl.Series(column, sizes, pl.Int64)
