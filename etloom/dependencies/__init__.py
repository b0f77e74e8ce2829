"""From a linked Trace or Job to the graph of what waits for what.

    events       the recorded events as arrays
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
from typing import NamedTuple

import polars as pl

from etloom.dependencies import collectives as together
from etloom.dependencies import devices as device
from etloom.dependencies.collectives import Ranges
from etloom.dependencies.devices import Devices
from etloom.dependencies.draft import Draft
from etloom.dependencies.events import Events
from etloom.dependencies.floors import Floors
from etloom.dependencies.hosts import Hosts, hosts, quiet
from etloom.dependencies.threads import hand_over, rests
from etloom.dependencies.waits import Waits
from etloom.errors import LinkError
from etloom.graphs import Graph, Numbers
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
    drawn: dict[int, _Rank] = {}
    for rank, trace in traces.items():
        if not trace.meta.get("linked"):
            raise LinkError("the trace is not linked", where=f"rank {rank}", remedy="etloom.link(trace)")
        given = floors if isinstance(floors, Floors) else (floors or {}).get(rank)
        drawn[rank], used[rank], counts[rank] = _of_rank(draft, trace, rank, given, len(traces) > 1)
    if len(traces) > 1:
        parts = pl.concat(one.parts for one in drawn.values() if one.parts is not None)
        places = {
            key: floor
            for rank, one in drawn.items()
            for key, floor in (((rank, "device"), one.work.floor), ((rank, "host"), one.off.floor))
        }
        for row in together.meet(draft, parts, places).iter_rows(named=True):
            counts[row["rank"]]["matched_communications"] = row["matched"]
            counts[row["rank"]]["local_communications"] = row["local"]
    for rank in traces:
        drawn.pop(rank).edges(draft)
    return Dependencies(draft.graph(), used, counts)


class _Rank(NamedTuple):
    """What is drawn of a rank, but the pieces of time, which others may still change."""

    ids: Numbers
    built: Hosts
    work: Devices
    off: Ranges
    parts: pl.DataFrame | None

    def edges(self, draft: Draft) -> None:
        """Add the pieces of time to the draft."""
        self.built.edges(draft, self.ids)
        self.work.edges(draft, self.ids)
        self.off.edges(draft)


def _of_rank(
    draft: Draft, trace: Trace, rank: int, given: Floors | None, others: bool
) -> tuple[_Rank, Floors, dict[str, int]]:
    events = Events(trace.events)
    work = device.devices(trace, events)
    submission, delay = device.submissions(events, work, given)
    built, aside = hosts(draft, events, work.calls, submission, rank)
    device.draw(draft, events, work, rank)
    waits = Waits(trace, events, built, work)
    waits.tell(events, work, submission)
    if given is None:
        launch, stream = device.measured(work, submission)
        given = Floors(delay, launch, stream, waits.tail(built), waits.entries(events, built))
    waits.queue(events, built, work)
    pointless = device.order(draft, events, work, built, given)
    still = quiet(events, built)
    gaps = rests(built, still)
    handoffs = hand_over(draft, events, built, still, gaps)
    parts = together.parts(trace, events, rank, others)
    off = together.ranges(draft, events, built, parts, rank)
    awaited = together.await_ranges(draft, built, gaps, off)
    waits.edges(draft, events, built, work, given)
    if parts is not None:
        parts = together.placed(parts, events, work, off)
    counts = {
        "threads_aside": aside,
        "launches_without_point": pointless,
        "lost_waits": waits.lost,
        "inferred_waits": waits.inferred,
        "skewed_waits": int(waits.skewed.sum()),
        "handoffs": handoffs,
        "completion_waits": awaited,
        "matched_communications": 0,
        "local_communications": together.communications(events, work) if parts is None else parts.height,
    }
    return _Rank(events.id, built, work, off, parts), given, counts
