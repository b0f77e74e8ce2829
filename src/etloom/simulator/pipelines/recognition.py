"""Recognizes the pipelines of a recorded job: schedule, operations by stage and micro-batch, and their messages.

A message between neighboring stages belongs to the operation of its direction that follows its arrival.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from etloom.analyses.helpers.pipeline_schedule import has_operations
from etloom.collectives import list_participations
from etloom.collectives.process_mesh import infer_mesh
from etloom.core import arrays, categories, nesting
from etloom.core.errors import AnalysisError
from etloom.core.trace import Job, Trace
from etloom.simulator.pipelines.schedules import BACKWARD, FORWARD, Operation, Schedule, recognize_schedule
from etloom.simulator.pipelines.timing import Message, Pipelines, Rest, Span, Timeline, Work


@dataclass(frozen=True)
class RecordedPipelines:
    """Pipelines of a recording: schedule, recorded times, and the durations from which times can be computed again.

    ``skipped_steps``: recorded steps that are left out, since not all ranks follow the schedule in them.
    """

    schedule: Schedule
    pipelines: Pipelines
    recorded: Timeline
    skipped_steps: int = 0


def recognize_pipelines(job: Job) -> RecordedPipelines:
    """Recognize the schedule and operations of a job's pipelines, in linked traces or a pipeline operation trace.

    Raises:
        AnalysisError: the job has no pipeline, a rank is missing, or its order of operations is of no known schedule.
    """
    columns = _find_columns(job)
    read = read_operation_trace if has_operations(job) else read_linked_trace
    position = {rank: (stage, ranks) for ranks in columns for stage, rank in enumerate(ranks)}
    steps = {rank: read(job[rank], rank, position[rank][1]) for ranks in columns for rank in ranks}
    common = sorted(set.intersection(*(set(by_step) for by_step in steps.values())))
    if not common:
        raise AnalysisError(
            "no step with forward and backward operations on all stages was recorded",
            remedy="record steps of training, with operators (activities cpu)",
        )
    # Times since the begin of the recording are exact as float64; those since 1970 are not.
    base = min(by_step[step].begin for by_step in steps.values() for step in common)
    steps = {rank: {step: by_step[step].shift(-base) for step in common} for rank, by_step in steps.items()}
    schedule = _find_schedule(columns[0], steps, common)
    complete = _find_complete_steps(schedule, columns, steps, common)
    recorded = _assemble(schedule, columns, steps, complete)
    return replace(recorded, skipped_steps=len(set().union(*steps.values())) - len(complete))


def _find_schedule(ranks: list[int], steps: dict[int, dict[int, RankStep]], common: list[int]) -> Schedule:
    """Return the known schedule that most steps of a pipeline follow. Raises AnalysisError if no step does."""
    counts: Counter[Schedule] = Counter()
    for step in common:
        stages = [steps[rank][step] for rank in ranks]
        directions = [[work.direction for work in stage.work] for stage in stages]
        if schedule := recognize_schedule(directions, _count_chunks(stages[0])):
            counts[schedule] += 1
    if not counts:
        order = "".join(work.direction[0].upper() for work in steps[ranks[0]][common[0]].work)
        raise AnalysisError(
            f"the order of forward and backward operations matches no known schedule (first stage: {order[:60]})",
            remedy="predict from a recording with GPipe, 1F1B or interleaved 1F1B",
        )
    return counts.most_common(1)[0][0]


def _find_complete_steps(
    schedule: Schedule, columns: list[list[int]], steps: dict[int, dict[int, RankStep]], common: list[int]
) -> list[int]:
    """Return the longest sequence of steps in which all ranks follow the schedule. Raises AnalysisError."""
    orders = [[op.direction for op in schedule.list_operations(stage)] for stage in range(schedule.stages)]
    longest: list[int] = []
    current: list[int] = []
    for step in common:
        follows = all(
            [work.direction for work in steps[rank][step].work] == order
            for ranks in columns
            for rank, order in zip(ranks, orders, strict=True)
        )
        current = [*current, step] if follows else []
        longest = max(longest, current, key=len)
    if not longest:
        raise AnalysisError(
            f"in no step do all ranks follow the schedule ({schedule.describe()})",
            remedy="record steps without evaluation or other work between",
        )
    return longest


def _find_columns(job: Job) -> list[list[int]]:
    """Return the ranks of each pipeline of the job, in the order of the stages."""
    if has_operations(job):
        places = {_read_place(trace): rank for rank, trace in job.items()}
        stages = 1 + max(stage for _, stage in places)
        replicas = sorted({replica for replica, _ in places})
        columns = [[places.get((replica, stage), -1) for stage in range(stages)] for replica in replicas]
    else:
        mesh = infer_mesh(job)
        stages = mesh.sizes.get("pp", 1)
        if stages > 1 and mesh.world_size > len(job):
            raise AnalysisError(
                f"{len(job)} of {mesh.world_size} ranks were recorded, and the pipeline needs all of them",
                remedy="collect all ranks of the run",
            )
        by_place: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for rank in sorted(job):
            place = mesh.coordinates(rank)
            place.pop("pp", None)
            by_place[tuple(place.values())].append(rank)
        columns = list(by_place.values())
    if stages < 2:
        raise AnalysisError("the run has no pipeline stages", remedy="record a run with pp=2 or more")
    if any(rank < 0 for ranks in columns for rank in ranks):
        raise AnalysisError(
            "some stages of the pipeline were not recorded", remedy="collect all ranks of the run"
        )
    return columns


def _read_place(trace: Trace) -> tuple[int, int]:
    """Return (data-parallel rank, stage) from the metadata of a pipeline operation trace."""
    meta: dict[str, Any] = dict(trace.meta)
    return int(meta["data_parallel_rank"]), int(meta["stage"])


def _count_chunks(first_stage: RankStep) -> int:
    """Return the number of model chunks per stage, from the first stage's forward operations and received messages."""
    forward = sum(work.direction == FORWARD for work in first_stage.work)
    received = sum(message.direction == FORWARD for message in first_stage.receives)
    return (
        forward // (forward - received)
        if 0 < received < forward and forward % (forward - received) == 0
        else 1
    )


def _assemble(
    schedule: Schedule, columns: list[list[int]], steps: dict[int, dict[int, RankStep]], common: list[int]
) -> RecordedPipelines:
    """Build the recorded pipelines from the steps of all ranks: durations, gaps and messages of the operations."""
    orders = [schedule.list_operations(stage) for stage in range(schedule.stages)]
    spans: dict[tuple[int, int, Operation], Span] = {}
    messages: dict[tuple[int, int, Operation], Message] = {}
    for ranks in columns:
        for step in common:
            for stage, rank in enumerate(ranks):
                _place_work(spans, rank, step, steps[rank][step], orders[stage])
            for stage, rank in enumerate(ranks):
                _place_messages(spans, messages, (stage, rank, step), ranks, steps, schedule)
    work, rests = {}, {}
    members = [rank for ranks in columns for rank in ranks]
    for ranks in columns:
        for stage, rank in enumerate(ranks):
            free = float(steps[rank][common[0]].begin)
            for step in common:
                for operation in orders[stage]:
                    key = (rank, step, operation)
                    ready = max(free, spans[key].arrived or free)
                    duration = spans[key].end - spans[key].start
                    work[key] = Work(duration, max(spans[key].start - ready, 0.0), messages.get(key))
                    free = spans[key].end
                partners = frozenset(steps[rank][step].partners.intersection(members))
                last = max(steps[member][step].work[-1].end for member in partners)
                rests[rank, step] = Rest(max(steps[rank][step].end - last, 0.0), partners)
                free = float(steps[rank][step].end)
    begin = {rank: float(steps[rank][common[0]].begin) for rank in members}
    ends = {(rank, step): float(steps[rank][step].end) for rank in members for step in common}
    pipelines = Pipelines(columns, begin, orders, schedule.virtual_stages, common, work, rests)
    return RecordedPipelines(schedule, pipelines, Timeline(spans, ends))


def _place_work(
    spans: dict[tuple[int, int, Operation], Span],
    rank: int,
    step: int,
    recorded: RankStep,
    order: list[Operation],
) -> None:
    """Store start and end of each operation of a schedule in ``spans``, from the recorded work of a rank's step."""
    for work, operation in zip(recorded.work, order, strict=True):
        spans[rank, step, operation] = Span(work.start, work.end)


def _place_messages(
    spans: dict[tuple[int, int, Operation], Span],
    messages: dict[tuple[int, int, Operation], Message],
    place: tuple[int, int, int],
    ranks: list[int],
    steps: dict[int, dict[int, RankStep]],
    schedule: Schedule,
) -> None:
    """Assign each message that a rank receives in a step to the operation that waits for it."""
    stage, rank, step = place
    order = schedule.list_operations(stage)
    earlier = [number for number in steps[rank] if number < step]
    begin_ns = float(steps[rank][max(earlier)].end if earlier else steps[rank][step].begin)
    free_before = dict(
        zip(order, [begin_ns, *(spans[rank, step, operation].end for operation in order)], strict=False)
    )
    for direction, towards in ((FORWARD, -1), (BACKWARD, 1)):
        waiting = [
            operation
            for operation in order
            if operation.direction == direction
            and 0 <= operation.virtual_stage + towards < schedule.virtual_stages
        ]
        source = ranks[(stage + towards) % len(ranks)]
        received = [message for message in steps[rank][step].receives if message.direction == direction]
        sent = [message for message in steps[source][step].sends if message.direction == direction]
        if not len(received) == len(sent) == len(waiting):
            raise AnalysisError(
                f"step {step}: rank {source} sent {len(sent)} messages, rank {rank} received {len(received)}, and "
                f"{len(waiting)} {direction} operations wait for them; the numbers must be equal",
                remedy="record all messages between stages (send and recv)",
            )
        previous = -np.inf
        for operation, receive, send in zip(waiting, received, sent, strict=True):
            key = (rank, step, operation)
            free = free_before[operation]
            origin = spans[
                source, step, operation._replace(virtual_stage=operation.virtual_stage + towards)
            ].end
            lag = receive.start - free if receive.start >= free else None
            begin = max(send.start, receive.start, previous)
            size = receive.size if send.size is None else send.size
            messages[key] = Message(send.start - origin, lag, max(receive.end - begin, 0.0), size)
            spans[key] = spans[key]._replace(sent=begin, arrived=receive.end)
            previous = receive.end


# Reads the steps of a pipeline rank: operations, messages to other stages, and partner ranks at the step's end.
#
# In a pipeline operation trace all of this is recorded. In linked traces an operation is the work of one direction
# between two messages: kernels that compute, or on ranks without kernels the operators of the host; backward is what
# ran in, or was launched by, an operator of autograd.

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
