"""Predicts the times of a job with another number of pipeline stages, model chunks or micro-batches."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl

from etloom.core.errors import EtloomError
from etloom.core.trace import Job
from etloom.formats.pipeline_operations import build_job
from etloom.simulator.durations import TABLE_SCHEMA, Z_90
from etloom.simulator.interval_classes import explain_interval
from etloom.simulator.pipelines.recognition import RecordedPipelines, recognize_pipelines
from etloom.simulator.pipelines.schedules import FORWARD, Operation, Schedule
from etloom.simulator.pipelines.timing import Pipelines, Rest, Timeline, Work, compute_timeline
from etloom.simulator.reproduction import describe_error, require_error

PIPELINE_AXES = {"pp": "stages", "vp": "chunks", "mb": "micro_batches"}
"""Key of --parallel -> field of `Schedule`."""

BASE_DEVIATION, STAGE_DEVIATION, MICRO_BATCH_DEVIATION = 0.02, 0.05, 0.01
"""Relative standard deviations of a laid out step time (assumed); the latter two per doubling of the sizes."""
MAX_OPERATIONS = 1_000_000
"""The largest prediction, of about a minute and 2 GB."""
UNKNOWN_VARIATION = 0.05
"""Relative standard deviation of steps if fewer than four were recorded."""


@dataclass(frozen=True, eq=False, repr=False)
class RelaidPipeline:
    """Predicted times of a job with another number of pipeline stages, model chunks or micro-batches.

    Attributes:
        recorded_job: the input.
        recorded: its pipelines, as recorded.
        changed: its pipelines after other steps of the prediction.
        schedule: the new schedule.
        pipelines: the new pipelines.
        timeline: their times.
        deviation: relative standard deviation of the step time.
        notes: sentences on earlier steps of the prediction.
    """

    recorded_job: Job
    recorded: RecordedPipelines
    changed: RecordedPipelines
    schedule: Schedule
    pipelines: Pipelines
    timeline: Timeline
    deviation: float
    notes: tuple[str, ...] = ()

    @cached_property
    def job(self) -> Job:
        """The predicted job as a pipeline operation trace: one event per operation and message."""
        return build_job(pl.DataFrame(list(self._list_rows())), Path("predicted"))

    def _list_rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each operation, message and end of a step, in the format of `build_job`."""
        counts: dict[tuple[int, int, str], itertools.count[int]] = {}
        places = {
            rank: {"rank": rank, "dp_rank": column, "stage": stage}
            for column, ranks in enumerate(self.pipelines.ranks)
            for stage, rank in enumerate(ranks)
        }

        def row(
            rank: int, step: int, optype: str, start: float, end: float, operation: Operation | None
        ) -> dict[str, Any]:
            number = next(counts.setdefault((rank, step, optype), itertools.count()))
            labels: dict[str, Any] = {"step": step, "optype": optype, "seq_id": number, "bytes": None}
            labels |= {"ts": round(start), "dur": max(round(end) - round(start), 0)}
            labels["mb_id"] = None if operation is None else operation.micro_batch
            labels["mc"] = None if operation is None else operation.virtual_stage // stages
            return places[rank] | labels

        stages = self.schedule.stages
        last: dict[tuple[int, int], float] = {}
        for (rank, step, operation), span in sorted(
            self.timeline.spans.items(), key=lambda item: item[1].start
        ):
            yield row(rank, step, f"{operation.direction}-compute", span.start, span.end, operation)
            last[rank, step] = span.end
            if span.sent is None or span.arrived is None:
                continue
            column = places[rank]["dp_rank"]
            towards = -1 if operation.direction == FORWARD else 1
            origin = operation._replace(virtual_stage=operation.virtual_stage + towards)
            source = self.pipelines.ranks[column][origin.virtual_stage % stages]
            message = self.pipelines.work[rank, step, operation].message
            size = {"bytes": None if message is None else message.size}
            direction, times = operation.direction, (span.sent, span.arrived)
            yield row(source, step, f"{direction}-send", *times, origin) | size
            yield row(rank, step, f"{direction}-recv", *times, operation) | size
        for (rank, step), end in self.timeline.step_ends.items():
            yield row(rank, step, "rest-of-step", last[rank, step], end, None)

    @cached_property
    def table(self) -> pl.DataFrame:
        """Recorded and predicted times (ns) of job, median step, each rank and each step, as in `Prediction.table`."""
        before = {
            (r["scope"], r["rank"], r["step"]): r["ns"]
            for r in measure(self.recorded.pipelines, self.recorded.recorded)
        }
        rows = []
        for entry in measure(self.pipelines, self.timeline):
            recorded, predicted = before.get((entry["scope"], entry["rank"], entry["step"])), entry["ns"]
            factor = math.exp(Z_90 * self.deviation)
            times = (predicted, round(predicted / factor), round(predicted * factor))
            change = 100 * (predicted - recorded) / recorded if recorded else None
            rows.append((entry["scope"], entry["rank"], entry["step"], recorded, *times, change))
        return pl.DataFrame(rows, schema=TABLE_SCHEMA, orient="row")

    @cached_property
    def reproduction_error(self) -> float:
        """Relative error of the step time that the model computes for the recorded schedule."""
        return measure_error(self.recorded)

    @cached_property
    def reasons(self) -> list[str]:
        """Explanations of the prediction, a sentence each: reproduction error, schedules, assumptions, bubble."""
        before = self.recorded.schedule
        error = self.reproduction_error
        lines = [describe_error(_describe_layout_error(error), error), *self.notes]
        lines.append(f"the recorded schedule ({before.describe()}) becomes {self.schedule.describe()}")
        if skipped := self.recorded.skipped_steps:
            lines.append(
                f"{skipped:,} recorded steps are left out: not all ranks follow the schedule in them"
            )
        if self.schedule.virtual_stages != before.virtual_stages:
            lines.append(
                "all layers are assumed to take the same time: operations of middle stages scale with their number of "
                "layers; the first and the last stage keep the time by which they exceed a middle one"
            )
        lines.append("steps begin with the first pipeline operation of a rank, also in the times before")
        bubbles = measure_bubble(self.recorded.recorded), measure_bubble(self.timeline)
        lines.append(
            f"ranks run no operation for {100 * bubbles[0]:.1f} % of the time from the first to the last one of a step "
            f"(bubble and messages); this becomes {100 * bubbles[1]:.1f} %"
        )
        lines.append(
            f"standard deviation: {100 * self.deviation:.1f} % (guessed, with the variation of the recorded steps)"
        )
        lines.append(explain_interval(["pipeline sizes"]))
        return lines

    def __repr__(self) -> str:
        return f"<RelaidPipeline: {self.schedule.describe()}; see .table, .reasons, .job>"


def relay(
    job: Job,
    sizes: Mapping[str, int],
    *,
    changed: Job | None = None,
    deviation: float = 0.0,
    notes: tuple[str, ...] = (),
) -> RelaidPipeline:
    """Predict the times of a job with another number of pipeline stages, model chunks or micro-batches.

    Args:
        job: linked traces, or a pipeline operation trace.
        sizes: of `PIPELINE_AXES`; others stay.
        changed: the job after other steps of the prediction, such as another network; default: the job itself.
        deviation: relative standard deviation of the times of ``changed``.
        notes: sentences on these steps.

    Raises:
        AnalysisError: the job has no pipeline whose schedule is known.
        EtloomError: the recording does not hold what the new pipeline needs.
    """
    recorded = recognize_pipelines(job)
    base = recorded if changed is None else recognize_pipelines(changed)
    before = recorded.schedule
    fields = {name: sizes.get(axis, getattr(before, name)) for axis, name in PIPELINE_AXES.items()}
    if before.kind == "gpipe" and fields["chunks"] > 1:
        raise EtloomError(
            f"cannot predict vp={fields['chunks']}: the recorded schedule is GPipe, which has one model chunk per "
            f"stage",
            remedy="record a run with 1F1B",
        )
    schedule = Schedule(before.kind, **fields)
    pipes, steps = len(base.pipelines.ranks), len(base.pipelines.steps)
    operations = 2 * schedule.virtual_stages * schedule.micro_batches * pipes * steps
    if operations > MAX_OPERATIONS:
        raise EtloomError(
            f"the new pipelines would have {operations:,} operations, more than {MAX_OPERATIONS:,}",
            remedy="predict fewer micro-batches or stages, or record fewer steps",
        )
    error = measure_error(recorded)
    require_error(_describe_layout_error(error), error)
    pipelines = stretch(base, schedule)
    parts = (
        deviation,
        BASE_DEVIATION,
        measure_variation(recorded),
        error,
        STAGE_DEVIATION * math.log2(schedule.virtual_stages / before.virtual_stages),
        MICRO_BATCH_DEVIATION * math.log2(schedule.micro_batches / before.micro_batches),
    )
    timeline = compute_timeline(pipelines)
    return RelaidPipeline(job, recorded, base, schedule, pipelines, timeline, math.hypot(*parts), notes)


def measure(pipelines: Pipelines, timeline: Timeline) -> list[dict[str, Any]]:
    """Return rows with scope, rank, step and time (ns): job, median step time, each rank, and each step of a rank."""
    firsts: dict[tuple[int, int], float] = {}
    for (rank, step, _), span in timeline.spans.items():
        firsts[rank, step] = min(firsts.get((rank, step), math.inf), span.start)
    ranks = sorted({rank for rank, _ in firsts})
    first, last = pipelines.steps[0], pipelines.steps[-1]
    ends = timeline.step_ends
    rows: list[tuple[str, int | None, int | None, float]] = [
        ("job", None, None, max(ends.values()) - min(pipelines.begin_ns.values()))
    ]
    periods = [
        firsts[rank, after] - firsts[rank, step]
        for rank in ranks
        for step, after in itertools.pairwise(pipelines.steps)
    ]
    if periods:
        rows.append(("step time", None, None, statistics.median(periods)))
    rows += [("rank", rank, None, ends[rank, last] - firsts[rank, first]) for rank in ranks]
    rows += [("step", rank, step, ends[rank, step] - firsts[rank, step]) for rank, step in sorted(firsts)]
    return [
        dict(zip(("scope", "rank", "step", "ns"), (*row[:3], round(row[3])), strict=True)) for row in rows
    ]


def _describe_layout_error(error: float) -> str:
    return f"the schedule, laid out again, reproduces the recorded step time with an error of {100 * error:+.1f} %"


def measure_error(recorded: RecordedPipelines) -> float:
    """Return the relative error of the step time (with a single step: run time) computed for the recorded schedule."""
    again = measure(recorded.pipelines, compute_timeline(recorded.pipelines))
    truth = measure(recorded.pipelines, recorded.recorded)
    row = 1 if truth[1]["scope"] == "step time" else 0
    return float(again[row]["ns"] / truth[row]["ns"] - 1) if truth[row]["ns"] else 0.0


def measure_variation(recorded: RecordedPipelines) -> float:
    """Return the relative standard error of the first rank's median step time, from the quartiles of its step times."""
    rank, steps, ends = recorded.pipelines.ranks[0][0], recorded.pipelines.steps, recorded.recorded.step_ends
    lengths = [ends[rank, after] - ends[rank, step] for step, after in itertools.pairwise(steps)]
    if len(lengths) < 4:
        return UNKNOWN_VARIATION
    low, middle, high = statistics.quantiles(lengths, n=4)
    # The standard error of a median is 1.25 times that of a mean.
    return 1.25 * (high - low) / 1.35 / max(middle, 1.0) / math.sqrt(len(lengths))


def measure_bubble(timeline: Timeline) -> float:
    """Return the share of the ranks' time, from first to last operation of a step, in which no operation runs."""
    busy = 0.0
    ranks: dict[int, set[int]] = {}
    begin: dict[int, float] = {}
    end: dict[int, float] = {}
    for (rank, step, _), span in timeline.spans.items():
        busy += span.end - span.start
        ranks.setdefault(step, set()).add(rank)
        begin[step], end[step] = min(begin.get(step, math.inf), span.start), max(end.get(step, 0.0), span.end)
    total = sum((end[step] - begin[step]) * len(members) for step, members in ranks.items())
    return 1 - busy / total if total else 0.0


# Derives operation times of a pipeline with other stages, chunks or micro-batches from those of a recorded pipeline.
#
# The first micro-batch (and virtual stage) takes the times of the recorded first one, the last those of the recorded
# last one; those between take the times of the recorded ones between, in turn. With another number of virtual stages,
# each holds another number of layers, which are assumed to take the same time: the times of middle virtual stages
# scale with it, and the first and the last one keep the time by which they exceed a middle one (embedding, output
# layer and loss).


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
