"""Derives operation times of a pipeline with other stages, chunks or micro-batches from those of a recorded pipeline.

The first micro-batch (and virtual stage) takes the times of the recorded first one, the last those of the recorded last
one; those between take the times of the recorded ones between, in turn. With another number of virtual stages, each
holds another number of layers, which are assumed to take the same time: the times of middle virtual stages scale with
it, and the first and the last one keep the time by which they exceed a middle one (embedding, output layer and loss).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable

from etloom.core.errors import EtloomError
from etloom.simulator.pipelines.recognition import RecordedPipelines
from etloom.simulator.pipelines.schedules import Operation, Schedule
from etloom.simulator.pipelines.timing import Pipelines, Rest, Work


def stretch(recorded: RecordedPipelines, schedule: Schedule) -> Pipelines:
    """Return the pipelines of another schedule, with operation times derived from the recorded pipelines.

    Args:
        recorded: the recorded pipelines.
        schedule: of the same kind, with other stages, chunks or micro-batches.

    Raises:
        EtloomError: the recording does not hold what the new schedule needs.
    """
    old, before = recorded.pipelines, recorded.schedule
    _check_stages(before, schedule)
    columns = range(len(old.ranks))
    ranks = [[stage * len(old.ranks) + column for stage in range(schedule.stages)] for column in columns]
    orders = [schedule.list_operations(stage) for stage in range(schedule.stages)]
    scale_work = _scale_operations(recorded, schedule)
    scale_rest = _scale_rests(recorded, schedule)
    stages_by_rank = {rank: stage for old_ranks in old.ranks for stage, rank in enumerate(old_ranks)}
    columns_by_rank = {rank: column for column, old_ranks in enumerate(old.ranks) for rank in old_ranks}
    begin, work, rests = {}, {}, {}
    for column, members in enumerate(ranks):
        for stage, rank in enumerate(members):
            template = old.ranks[column][choose_template(stage, schedule.stages, before.stages)]
            begin[rank] = old.begin_ns[template]
            for step in old.steps:
                for operation in orders[stage]:
                    work[rank, step, operation] = scale_work(column, step, operation)
                rest = old.rests[template, step]
                partners = {
                    ranks[columns_by_rank[partner]][new_stage]
                    for partner in rest.ranks
                    for new_stage in _map_stage(
                        stages_by_rank[partner], stages_by_rank[template], stage, schedule.stages
                    )
                }
                rests[rank, step] = Rest(scale_rest(stage, rest.duration_ns), frozenset({rank, *partners}))
    return Pipelines(ranks, begin, orders, schedule.virtual_stages, old.steps, work, rests)


def choose_template(number: int, count: int, recorded: int) -> int:
    """Return the recorded index (stage, micro-batch) that a new index repeats: first maps to first, last to last, the
    others cycle through the rest.

    Args:
        number: of the new entry.
        count: of new entries.
        recorded: number of recorded entries.
    """
    if number == 0:
        return 0
    if number == count - 1 or recorded < 3:
        return recorded - 1
    return 1 + (number - 1) % (recorded - 2)


def _check_stages(before: Schedule, after: Schedule) -> None:
    if after.stages < 2:
        raise EtloomError(f"cannot predict pp={after.stages}: a pipeline has at least 2 stages")
    if after.virtual_stages != before.virtual_stages and before.virtual_stages < 3:
        raise EtloomError(
            f"cannot predict {after.virtual_stages} stages from {before.virtual_stages}: without a middle stage, the "
            "time of a layer is not known",
            remedy="record a run with 3 or more stages",
        )
    if after.stages != before.stages and before.stages < 3:
        raise EtloomError(
            f"cannot predict pp={after.stages} from pp={before.stages}: without a middle stage, the time "
            "of a layer is not known",
            remedy="record a run with 3 or more stages",
        )


def _map_stage(partner: int, template: int, stage: int, stages: int) -> range:
    """Return the new stages of a recorded partner rank: ``stage`` if both ranks were on the same stage, else all."""
    return range(stage, stage + 1) if partner == template else range(stages)


def _scale_operations(
    recorded: RecordedPipelines, schedule: Schedule
) -> Callable[[int, int, Operation], Work]:
    """Return a function (pipeline, step, operation) -> `Work` (duration, gap, message) in the new schedule."""
    old, before = recorded.pipelines, recorded.schedule
    last = before.virtual_stages - 1
    layers = before.virtual_stages / schedule.virtual_stages
    middle = {
        direction: _median(
            work.duration_ns
            for (_, _, operation), work in old.work.items()
            if operation.direction == direction and 0 < operation.virtual_stage < last
        )
        for direction in ("forward", "backward")
    }

    def scale(column: int, step: int, operation: Operation) -> Work:
        place = choose_template(operation.virtual_stage, schedule.virtual_stages, before.virtual_stages)
        template = Operation(
            operation.direction,
            place,
            choose_template(operation.micro_batch, schedule.micro_batches, before.micro_batches),
        )
        work = old.work[old.ranks[column][place % before.stages], step, template]
        if place in (0, last):
            duration = _scale_end(work.duration_ns, middle[operation.direction], layers, operation)
        else:
            duration = work.duration_ns * layers
        return Work(duration, work.gap_ns, work.message)

    return scale


def _scale_end(duration: float, middle: float, layers: float, operation: Operation) -> float:
    """Return the time (ns) of the first or last virtual stage when its number of layers is multiplied by ``layers``."""
    if layers == 1:
        return duration
    scaled = duration - (1 - layers) * middle
    if scaled <= 0:
        raise EtloomError(
            f"cannot predict other stages: {operation.direction} of virtual stage {operation.virtual_stage} is shorter "
            "than the layers that would leave it, so the layers are not spread evenly",
            remedy="record a run with the number of stages in question",
        )
    return scaled


def _scale_rests(recorded: RecordedPipelines, schedule: Schedule) -> Callable[[int, float], float]:
    """Return a function (new stage, recorded ns) -> time (ns) from the last operation to the end of a step."""
    layers = recorded.schedule.stages / schedule.stages
    old, last = recorded.pipelines, recorded.schedule.stages - 1
    stages_by_rank = {rank: stage for ranks in old.ranks for stage, rank in enumerate(ranks)}
    middle = _median(
        rest.duration_ns for (rank, _), rest in old.rests.items() if 0 < stages_by_rank[rank] < last
    )

    def scale(stage: int, duration: float) -> float:
        if layers == 1 or 0 < stage < schedule.stages - 1:
            return duration * layers
        return max(duration - (1 - layers) * middle, 0.0)

    return scale


def _median(values: Iterable[float]) -> float:
    listed = list(values)
    return statistics.median(listed) if listed else math.nan
