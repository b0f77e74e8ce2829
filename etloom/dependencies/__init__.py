"""From a linked Trace or Job to the graph of what waits for what.

    hosts        threads as chains of points, each piece the time of the innermost open event
    devices      device work, launch, order on a stream
    waits        blocking calls, streams that wait for streams
    threads      threads that work in turns
    collectives  what ranks do together: arrival of all, then transfer
    floors       the least that each kind of edge takes

The definition, and what it does not cover, is in docs/decisions/0020-0023.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from etloom.dependencies import devices as device
from etloom.dependencies.collectives import Member, Ranges, await_ranges, meet, members, ranges
from etloom.dependencies.devices import Devices
from etloom.dependencies.draft import Draft
from etloom.dependencies.floors import Floors
from etloom.dependencies.hosts import Hosts, hosts, quiet
from etloom.dependencies.threads import hand_over
from etloom.dependencies.waits import Waits
from etloom.errors import LinkError
from etloom.graphs import Graph
from etloom.trace import Job, Trace

__all__ = ["Dependencies", "Floors", "depend"]


@dataclass(frozen=True, eq=False)
class Dependencies:
    """The graph of a job, by rank the floors it was built with, and what did not fit it: rank -> name -> count.

    Counted: ``threads_aside`` (left out: they only ask for events or run Python), ``launches_without_point``,
    ``lost_waits``,
    ``inferred_waits`` (not recorded, but told from calls and times), ``skewed_waits``, ``handoffs`` (told from
    rests), ``local_communications`` (not matched with other ranks), ``matched_communications``,
    ``completion_waits`` (rests that end after an asynchronous range does).
    """

    graph: Graph
    floors: Mapping[int, Floors]
    counts: Mapping[int, Mapping[str, int]]


def depend(job: Job | Trace, floors: Floors | Mapping[int, Floors] | None = None) -> Dependencies:
    """The dependency graph of all ranks of a job, or of one.

    floors: known floors, of all ranks or by rank; those of other ranks are measured. Raises LinkError for a
    trace that is not linked.
    """
    traces: Mapping[int, Trace] = job if isinstance(job, Job) else {job.rank or 0: job}
    draft = Draft()
    used: dict[int, Floors] = {}
    counts: dict[int, dict[str, int]] = {}
    drawn: dict[int, tuple[Hosts, Devices, Ranges]] = {}
    groups: list[Member] = []
    for rank, trace in traces.items():
        if not trace.meta.get("linked"):
            raise LinkError("the trace is not linked", where=f"rank {rank}", remedy="etloom.link(trace)")
        given = floors if isinstance(floors, Floors) else (floors or {}).get(rank)
        drawn[rank], used[rank], counts[rank] = _of_rank(draft, trace, rank, given)
        _, work, off = drawn[rank]
        groups += members(trace, work, off, rank)
    meet(draft, groups, counts)
    for rank, (built, work, off) in drawn.items():
        ids = traces[rank].events["id"].to_numpy().astype(np.int64)
        built.edges(draft, ids)
        work.edges(draft, ids)
        off.edges(draft)
    return Dependencies(draft.graph(), used, counts)


def _of_rank(
    draft: Draft, trace: Trace, rank: int, given: Floors | None
) -> tuple[tuple[Hosts, Devices, Ranges], Floors, dict[str, int]]:
    """The points of a rank and all its edges but the pieces, which others may still change."""
    work = device.devices(trace)
    submission, delay = device.submissions(trace, work, given)
    built, aside = hosts(draft, trace, submission, rank)
    device.draw(draft, trace, work, rank)
    waits = Waits(trace, built, work)
    waits.tell(trace, work, submission)
    if given is None:
        launch, stream = device.measured(work, submission)
        given = Floors(delay, launch, stream, waits.tail(built), waits.entries(trace, built))
    pointless = device.order(draft, trace, work, built, given)
    still = quiet(trace, built)
    handoffs = hand_over(draft, trace, built, still)
    off = ranges(draft, trace, built, rank)
    awaited = await_ranges(draft, built, still, off)
    waits.edges(draft, trace, built, work, given)
    counts = {
        "threads_aside": aside,
        "launches_without_point": pointless,
        "lost_waits": waits.lost,
        "inferred_waits": waits.inferred,
        "skewed_waits": int(waits.skewed.sum()),
        "handoffs": handoffs,
        "completion_waits": awaited,
    }
    return (built, work, off), given, counts
