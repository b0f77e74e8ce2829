"""Reads the steps of a pipeline rank: operations, messages to other stages, and partner ranks at the step's end.

In a pipeline operation trace all of this is recorded. In linked traces an operation is the work of one direction
between two messages: kernels that compute, or on ranks without kernels the operators of the host; backward is what ran
in, or was launched by, an operator of autograd.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import polars as pl

from etloom.collectives import list_participations
from etloom.core import arrays, categories, nesting
from etloom.core.trace import Trace
from etloom.simulator.pipelines.schedules import BACKWARD, FORWARD

_BACKWARD_OPERATOR = "autograd::engine::evaluate_function"


class Activity(NamedTuple):
    """A forward or backward computation of a rank; start and end in ns."""

    start: int
    end: int
    direction: str


class Transfer(NamedTuple):
    """A send or receive of a rank: start and end (ns), direction (forward or backward), bytes if they were recorded."""

    start: int
    end: int
    direction: str
    size: int | None = None


@dataclass
class RankStep:
    """A step of a rank: forward and backward work, messages that it sends and receives, begin and end (times in ns).

    ``partners``: ranks with which it communicates after its last operation.
    """

    work: list[Activity]
    sends: list[Transfer]
    receives: list[Transfer]
    begin: int
    end: int
    partners: frozenset[int]

    def shift(self, offset: int) -> RankStep:
        """Return the step with all times increased by ``offset`` ns."""
        work = [item._replace(start=item.start + offset, end=item.end + offset) for item in self.work]
        sends, receives = (
            [item._replace(start=item.start + offset, end=item.end + offset) for item in items]
            for items in (self.sends, self.receives)
        )
        return RankStep(work, sends, receives, self.begin + offset, self.end + offset, self.partners)


def read_operation_trace(trace: Trace, rank: int, ranks: list[int]) -> dict[int, RankStep]:
    """Return the steps of a rank by step number, read from a pipeline operation trace."""
    fields = pl.Struct({"step": pl.Int64, "sequence": pl.Int64})
    events = trace.events.drop("step").filter(
        categories.mask_events(trace.events, {categories.PIPELINE_OPERATION})
    )
    table = events.with_columns(pl.col("args").cast(pl.String).str.json_decode(fields)).unnest("args")
    members = trace.comms.filter(pl.col("ranks").is_not_null()).select(
        "event", pl.col("ranks").cast(pl.String)
    )
    table = table.join(members, left_on="id", right_on="event", how="left", maintain_order="left")
    steps = {}
    for (step,), rows in table.sort("ts").partition_by("step", as_dict=True).items():
        named = rows.select(
            pl.col("name").cast(pl.String), "ts", end=pl.col("ts") + pl.col("dur"), ranks="ranks"
        )
        by_type: defaultdict[str, list[Activity]] = defaultdict(list)
        partners = {rank}
        for name, start, end, group in named.iter_rows():
            direction, _, action = name.partition("-")
            by_type[action if direction in (FORWARD, BACKWARD) else "rest"].append(
                Activity(start, end, direction)
            )
            if group is not None and by_type["compute"] and direction not in (FORWARD, BACKWARD):
                partners |= _list_members(pl.Series([group]))
        steps[int(str(step))] = RankStep(
            by_type["compute"],
            [Transfer(*row) for row in by_type["send"]],
            [Transfer(*row) for row in by_type["recv"]],
            int(rows["ts"].min()),  # type: ignore[arg-type]
            int(named["end"].max()),  # type: ignore[arg-type]
            frozenset(partners),
        )
    return steps


def _list_members(groups: pl.Series) -> set[int]:
    """Return the set of all ranks in a column of groups, each a JSON list of ranks."""
    lists = groups.cast(pl.String).drop_nulls().unique().str.json_decode(pl.List(pl.Int64))
    return set(lists.explode().drop_nulls().to_list())


def read_linked_trace(trace: Trace, rank: int, ranks: list[int]) -> dict[int, RankStep]:
    """Return a rank's steps with forward and backward work by step number, read from a linked trace."""
    messages = list_participations(trace, rank)
    work = _list_work(trace, messages)
    by_event = trace.events.select(pl.col("id").alias("event"), "step")
    messages = messages.join(by_event, on="event", how="left", maintain_order="left")
    events = trace.events.filter(pl.col("step").is_not_null())
    spans = events.group_by("step").agg(
        begin=pl.col("ts").min(), end=(pl.col("ts") + pl.col("dur").fill_null(0)).max()
    )
    steps = {}
    for step, begin, end in spans.iter_rows():
        rows = messages.filter(pl.col("step") == step)
        sends, receives = _split_messages(rows, rank, ranks)
        activities = work.filter(pl.col("step") == step).select("start", "end", "direction").sort("start")
        blocks = _merge_work(
            [Activity(*row) for row in activities.iter_rows()],
            sends,
            receives,
            (rank == ranks[0], rank == ranks[-1]),
        )
        if not {FORWARD, BACKWARD} <= {block.direction for block in blocks}:
            continue
        after = rows.filter((pl.col("collective") != "message") & (pl.col("end") > blocks[-1].end))
        partners = frozenset({rank, *_list_members(after["ranks"])})
        steps[step] = RankStep(blocks, sends, receives, begin, end, partners)
    return steps


def _split_messages(rows: pl.DataFrame, rank: int, ranks: list[int]) -> tuple[list[Transfer], list[Transfer]]:
    """Return (sends, receives) of a rank to and from other ranks of its pipeline, each sorted by start."""
    sends: list[Transfer] = []
    receives: list[Transfer] = []
    paired = rows.filter(pl.col("source").is_not_null() & pl.col("destination").is_not_null())
    ends = paired.select("source", "destination", "start", "end", "bytes")
    for source, destination, start, end, size in ends.iter_rows():
        if source not in ranks or destination not in ranks:
            continue
        # Towards the next stage is forward; the last stage sends to the first if a stage has several chunks.
        distance = ranks.index(destination) - ranks.index(source)
        wraps = len(ranks) > 2 and abs(distance) == len(ranks) - 1
        direction = FORWARD if (distance > 0) != wraps else BACKWARD
        (sends if source == rank else receives).append(Transfer(start, end, direction, size))
    return sorted(sends, key=_by_time), sorted(receives, key=_by_time)


def _by_time(message: Transfer) -> tuple[int, int, str]:
    return message[:3]


def _list_work(trace: Trace, messages: pl.DataFrame) -> pl.DataFrame:
    """Return a rank's kernels or, without kernels, outermost operators: start, end (ns), step, forward or backward."""
    events = trace.events.with_row_index("row")
    backward = arrays.match_text(events["name"], lambda name: name.str.starts_with(_BACKWARD_OPERATOR))
    parent = arrays.rows_of_ids(events, events["parent"])
    in_backward = nesting.find_nearest_ancestor(parent, backward) >= 0
    used = set(messages["event"].drop_nulls()) | set(messages["issuer"].drop_nulls())
    communicates = categories.is_communication() | pl.col("id").is_in(list(used))
    events = events.with_columns(direction=pl.Series(np.where(in_backward, BACKWARD, FORWARD)))
    kernels = events.filter(categories.mask_events(events, {"kernel"})).filter(~communicates)
    if kernels.height:
        launches = trace.launches.select("launch", id="device_event").join(
            events.select("direction", launch="id"), on="launch"
        )
        work = kernels.drop("direction").join(launches, on="id", maintain_order="left")
    else:
        operators = events.filter(categories.mask_events(events, categories.OPERATOR_CATEGORIES)).filter(
            ~communicates
        )
        work = operators.filter(~pl.col("parent").is_in(operators["id"].to_list()))
    spans = work.select(start="ts", end=pl.col("ts") + pl.col("dur"), step="step", direction="direction")
    return spans.with_columns(pl.col("direction").fill_null(FORWARD)).drop_nulls()


def _merge_work(
    activities: list[Activity], sends: list[Transfer], receives: list[Transfer], place: tuple[bool, bool]
) -> list[Activity]:
    """Merge consecutive forward (or backward) work without messages in between into pipeline operations.

    Work for which no message arrived, or after which none leaves, is not an operation: buffers, the optimizer.

    Args:
        activities: work in order of start.
        sends: messages that leave, in order.
        receives: messages that arrive, in order.
        place: whether the rank is the first stage, and whether it is the last.
    """
    arrivals = np.array(sorted(message.end for message in receives), np.int64)
    departures = np.array([message.start for message in sends], np.int64)
    runs: list[Activity] = []
    previous: tuple[int, int, str] | None = None
    for activity in activities:
        marks = (
            int(np.searchsorted(arrivals, activity.start, side="right")),
            int(np.searchsorted(departures, activity.start, side="right")),
            activity.direction,
        )
        if runs and marks == previous:
            runs[-1] = runs[-1]._replace(end=max(runs[-1].end, activity.end))
        else:
            runs.append(activity)
        previous = marks
    # A run that waits for no message of its direction is on the first stage forward and on the last one backward.
    needs_no_arrival = {FORWARD: place[0], BACKWARD: place[1]}
    needs_no_departure = {FORWARD: place[1], BACKWARD: place[0]}
    operations = []
    counts = {FORWARD: 0, BACKWARD: 0}
    for number, run in enumerate(runs):
        arrived = sum(m.direction == run.direction and m.end <= run.start for m in receives)
        later = (other.start for other in runs[number + 1 :] if other.direction == run.direction)
        until = next(later, np.inf)
        leaves = any(m.direction == run.direction and run.start <= m.start < until for m in sends)
        if (needs_no_arrival[run.direction] or arrived > counts[run.direction]) and (
            needs_no_departure[run.direction] or leaves
        ):
            operations.append(run)
            counts[run.direction] += 1
    return operations
