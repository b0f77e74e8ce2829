"""Divide ranks into kinds that can be compared: the same program, and, of many ranks, the same role by their times.

Ranks have roles that take different times (stages of a pipeline, first and last, experts). Roles show in the names of
the operators and kernels, or, if these are the same, only in the times.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.analyses import temporal_breakdown
from etloom.analyses.helpers.run_tables import RunTable
from etloom.core.trace import Job
from etloom.graphs.peers import find_peers

MIN_FLEET = 17
"""Fewer ranks of one program are one kind, whatever their times: half of them may be slow."""
MIN_EXCESS = 0.02
"""Gap between the times of two kinds, relative to the median rank."""
KIND_SHARE = 0.25
"""Share of the ranks that have a kind of their own if their times differ from those of the others."""


def divide_by_time(usual: NDArray[np.float64], hosts: Sequence[str | None]) -> NDArray[np.intp]:
    """Return the number of the kind of each rank, by their times; 0 for all if there is one kind.

    A kind is a quarter or more of the ranks without a gap of `MIN_EXCESS` between their times, unless these are all
    the ranks of some hosts: then the hosts are slow. Other ranks belong to the next faster kind, or to the slower one
    if there is none.

    Args:
        usual: The time of each rank relative to the median rank, less 1; NaN if unknown.
        hosts: The host of each rank.
    """
    order = np.argsort(usual, kind="stable")
    order = order[~np.isnan(usual[order])]
    clusters = np.split(order, np.flatnonzero(np.diff(usual[order]) > MIN_EXCESS) + 1)
    kinds = [cluster for cluster in clusters if len(cluster) >= KIND_SHARE * len(order)]
    kinds = [kind for kind in kinds if len(kind) > len(order) / 2 or not _fill_hosts(kind, hosts)]
    if len(kinds) < 2:
        return np.zeros(len(usual), np.intp)
    lowest = np.array([usual[kind].min() for kind in kinds])
    return np.clip(np.searchsorted(lowest, np.nan_to_num(usual), side="right") - 1, 0, None)


def _fill_hosts(kind: NDArray[np.intp], hosts: Sequence[str | None]) -> bool:
    """Return whether some ranks are all the ranks of their hosts."""
    names = {hosts[at] for at in kind.tolist()}
    return None not in names and sum(host in names for host in hosts) == len(kind)


def _number_kinds(job: Job) -> pl.DataFrame:
    """Return rank and kind: ranks of one program, of `MIN_FLEET` or more divided by their times."""
    kinds: dict[int, tuple[int, int]] = {}
    for program, ranks in _group_by_program(job).items():
        numbers = np.zeros(len(ranks), np.intp)
        if len(ranks) >= MIN_FLEET:
            times = np.array([_measure_step_time(job, rank) for rank in ranks])
            hosts = [job[rank].meta.get("host") for rank in ranks]
            with np.errstate(all="ignore"):
                numbers = divide_by_time(times / np.nanmedian(times) - 1, hosts)
        kinds |= {rank: (program, int(number)) for rank, number in zip(ranks, numbers, strict=True)}
    order = {kind: number for number, kind in enumerate(dict.fromkeys(kinds[rank] for rank in job))}
    table = pl.DataFrame([(rank, order[kinds[rank]]) for rank in job], schema=KINDS.schema, orient="row")
    is_shared = (pl.len().over("kind") > 1) & (table["kind"].n_unique() > 1)
    return table.with_columns(pl.when(is_shared).then("kind"))


def _group_by_program(job: Job) -> dict[int, list[int]]:
    groups: dict[int, list[int]] = {}
    for rank, program in find_peers(job).items():
        groups.setdefault(program, []).append(rank)
    return groups


def _measure_step_time(job: Job, rank: int) -> float:
    """Return the median time of a rank's steps outside of communication, ns; NaN if it has no times."""
    times = temporal_breakdown.analyze(job[rank])
    steps = times.filter(pl.col("step").is_not_null())
    outside = (pl.col("span_ns") - pl.col("exposed_communication_ns")).cast(pl.Float64)
    median = (steps if steps.height else times).select(outside.median()).item()
    return float("nan") if median is None else float(median)


KINDS = RunTable("kinds", {"rank": pl.Int64, "kind": pl.Int64}, _number_kinds)
"""Ranks of the same kind can be compared. Null if all ranks are of one kind, or no other rank is of that kind."""
