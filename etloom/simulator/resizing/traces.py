"""The traces of new ranks: those of the recorded ranks whose program they run, with their own groups and times."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache

import polars as pl

from etloom.collectives.process_mesh import infer_mesh
from etloom.core.trace import Job, Trace
from etloom.graphs.graph import Int64Array
from etloom.simulator.retiming import retime_rank
from etloom.simulator.scenario import Scenario


def synthesize_job(scenario: Scenario, time: Int64Array | None = None) -> Job:
    """Return the job of a scenario's ranks, which every verb and export takes.

    Args:
        scenario: as `resizing.resize` returns it.
        time: of the points of its graph, int64 ns; default: the times of the scenario.
    """
    time = scenario.compute_times() if time is None else time
    mesh = infer_mesh(scenario.recorded)
    replica = {rank: mesh.coordinates(rank)["dp"] for rank in scenario.recorded}
    copies: dict[int, list[int]] = {rank: [] for rank in scenario.recorded}
    for rank, recorded in sorted(scenario.template.items()):
        copies[recorded].append(rank)
    traces = {}
    for rank, recorded in scenario.template.items():
        trace = scenario.recorded[recorded].replace(meta={"rank": rank, "world_size": len(scenario.template)})
        copy = copies[recorded].index(rank)
        retimed = retime_rank(trace, scenario.graph, time, rank)
        traces[rank] = _replace_members(retimed, copies, replica, copy)
    return Job(traces, scenario.recorded.meta)


def _replace_members(trace: Trace, copies: dict[int, list[int]], replica: dict[int, int], copy: int) -> Trace:
    """Return the trace with the new members of its groups, for the copy of this number."""

    @cache
    def members(text: str) -> str:
        ranks = [rank for rank in json.loads(text) if rank in copies]
        if len({replica[rank] for rank in ranks}) > 1:
            return json.dumps(sorted(new for rank in ranks for new in copies[rank]))
        return json.dumps([copies[rank][copy] for rank in ranks if copy < len(copies[rank])])

    def peer(rank: int) -> int:
        return copies[rank][copy] if copy < len(copies.get(rank, ())) else rank

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
    """Return the column of JSON lists with new members."""
    texts = [None if text is None else change(text) for text in table[column].cast(pl.String)]
    return pl.Series(column, texts, pl.String).cast(table.schema[column])


def _count(table: pl.DataFrame, column: str, change: Callable[[str], str]) -> pl.Series:
    """Return the size of each group: the new one if it has new members, else the recorded one."""
    sizes = [
        size if text is None or size != len(json.loads(text)) else len(json.loads(change(text)))
        for text, size in zip(table["ranks"].cast(pl.String), table[column], strict=True)
    ]
    return pl.Series(column, sizes, pl.Int64)
