"""Pipelines laid out again: equal to the nanosecond on jobs with known times, and to the closed form of the bubble."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

import etloom
from etloom.core.errors import EtloomError
from etloom.core.trace import Job
from etloom.formats.chakra.et_files import load_file
from etloom.simulator.pipelines import RelaidPipeline, relay
from etloom.simulator.pipelines.relay import measure_bubble
from etloom.simulator.pipelines.schedules import BACKWARD, FORWARD, Schedule, recognize_schedule
from etloom.simulator.pipelines.timing import Message, Pipelines, Rest, Work, compute_timeline
from support.pipelines import PipelineJob, gpipe, one_f_one_b

SEND, RECV = 5, 6


@pytest.fixture(scope="module")
def recorded() -> dict[bool, Job]:
    return {on_device: one_f_one_b(4, 4).job(on_device) for on_device in (False, True)}


def interleaved(stages: int, micro_batches: int, chunks: int) -> PipelineJob:
    schedule = Schedule("1f1b", stages, micro_batches, chunks)
    orders = (tuple(tuple(op) for op in schedule.list_operations(stage)) for stage in range(stages))
    return PipelineJob(tuple(orders), chunks)


def check(relaid: RelaidPipeline, truth: PipelineJob) -> None:
    """The pipeline takes the times of the job, to the nanosecond."""
    spans = {(*key[:2], tuple(key[2])): (span.start, span.end) for key, span in relaid.timeline.spans.items()}
    assert spans == truth.times()
    assert relaid.reproduction_error == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(
    ("sizes", "stages", "micro_batches"),
    [({"mb": 4}, 4, 4), ({"mb": 9}, 4, 9), ({"mb": 2}, 4, 2), ({"pp": 8}, 8, 4), ({"pp": 2, "mb": 6}, 2, 6)],
)
def test_other_stages_and_micro_batches(
    recorded: dict[bool, Job], on_device: bool, sizes: dict[str, int], stages: int, micro_batches: int
) -> None:
    check(relay(recorded[on_device], sizes), one_f_one_b(stages, micro_batches))


@pytest.mark.slow
def test_other_schedules() -> None:
    check(relay(gpipe(3, 4).job(), {"mb": 7}), gpipe(3, 7))
    check(relay(interleaved(4, 8, 2).job(), {"mb": 16}), interleaved(4, 16, 2))
    check(relay(one_f_one_b(4, 8).job(), {"vp": 2}), interleaved(4, 8, 2))


def test_incomplete_steps_are_left_out() -> None:
    job = PipelineJob(one_f_one_b(4, 4).orders, steps=3)
    traces = dict(job.job())
    backward = pl.col("name").cast(pl.String).str.starts_with("autograd")
    first = traces[3].events.filter(backward & (pl.col("step") == 0))["id"][0]
    traces[3] = traces[3].replace(None, events=traces[3].events.filter(pl.col("id") != first))
    relaid = relay(Job(traces), {"mb": 4})
    assert relaid.pipelines.steps == [1, 2]
    assert any("1 recorded steps are left out" in line for line in relaid.reasons)
    starts = {
        key[:2]: span.start for key, span in relaid.timeline.spans.items() if key[2] == ("forward", 0, 0)
    }
    truth = job.times()
    expected = truth[0, 2, ("forward", 0, 0)][0] - truth[0, 1, ("forward", 0, 0)][0]
    assert starts[0, 2] - starts[0, 1] == expected


def uniform(schedule: Schedule, forward: float = 3.0, backward: float = 5.0) -> Pipelines:
    """Pipelines in which every stage takes the same time, and messages none."""
    orders = [schedule.list_operations(stage) for stage in range(schedule.stages)]
    times = {FORWARD: forward / schedule.chunks, BACKWARD: backward / schedule.chunks}
    last = schedule.virtual_stages - 1
    work = {
        (rank, 0, op): Work(
            times[op.direction],
            0,
            None if op.virtual_stage == {FORWARD: 0, BACKWARD: last}[op.direction] else Message(0, None, 0),
        )
        for rank, order in enumerate(orders)
        for op in order
    }
    ranks = range(schedule.stages)
    rests = {(rank, 0): Rest(0, frozenset({rank})) for rank in ranks}
    return Pipelines([ranks], dict.fromkeys(ranks, 0.0), orders, last + 1, [0], work, rests)


@pytest.mark.parametrize("schedule", [
    Schedule("gpipe", 4, 8), Schedule("1f1b", 4, 8), Schedule("1f1b", 8, 3), Schedule("1f1b", 4, 8, 2),
    Schedule("1f1b", 4, 4, 3), Schedule("1f1b", 2, 6, 4),
])  # fmt: skip
def test_the_bubble_is_that_of_the_closed_form(schedule: Schedule) -> None:
    timeline = compute_timeline(uniform(schedule))
    p, m, v = schedule.stages, schedule.micro_batches, schedule.chunks
    assert max(timeline.step_ends.values()) == pytest.approx((m + (p - 1) / v) * 8)
    assert measure_bubble(timeline) == pytest.approx((p - 1) / v / (m + (p - 1) / v))
    directions = [[op.direction for op in schedule.list_operations(stage)] for stage in range(p)]
    assert recognize_schedule(directions, v) == schedule


@pytest.mark.slow
def test_predict_lays_out_pipelines(recorded: dict[bool, Job]) -> None:
    prediction = etloom.predict(recorded[True], parallel={"pp": 8, "mb": 16})
    assert isinstance(prediction, RelaidPipeline)
    truth = one_f_one_b(8, 16).times()
    period = truth[0, 1, ("forward", 0, 0)][0] - truth[0, 0, ("forward", 0, 0)][0]
    row = prediction.table.row(1, named=True)
    assert (row["scope"], row["predicted_ns"]) == ("step time", period)
    assert row["lower_bound_ns"] < period < row["upper_bound_ns"]
    assert list(prediction.job) == list(range(8))
    names = prediction.job[3].events["name"].cast(pl.String).value_counts()
    assert dict(names.iter_rows())["backward-send"] == 32
    # The job is a pipeline operation trace, which can be laid out again.
    assert relay(prediction.job, {}).schedule == prediction.schedule
    assert isinstance(etloom.predict(recorded[True], parallel={"mb": 8}, ranks=4), RelaidPipeline)
    with pytest.raises(EtloomError, match="cannot predict 6 ranks: expected a multiple of 4"):
        etloom.predict(recorded[True], parallel={"mb": 8}, ranks=6)
    # The recorded number of stages alone changes nothing.
    same = etloom.predict(recorded[True], parallel={"pp": 4})
    assert same.table.row(0, named=True)["scope"] == "job" and not isinstance(same, RelaidPipeline)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"mb": 999_999}, "would have 15,999,984 operations, more than 1,000,000"),
        ({"pp": 1}, "a pipeline has at least 2 stages"),
        ({"vp": 2, "mb": 6}, "no interleaved schedule of 6 micro-batches on 4 stages"),
    ],
)
def test_an_impossible_schedule_is_one_line(
    recorded: dict[bool, Job], sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(EtloomError, match=message):
        relay(recorded[False], sizes)


def test_missing_data_of_the_recording_is_one_line(recorded: dict[bool, Job]) -> None:
    with pytest.raises(EtloomError, match="cannot predict 4 stages from 2: without a middle stage"):
        relay(one_f_one_b(2, 4).job(), {"pp": 4})
    with pytest.raises(EtloomError, match="cannot predict vp=2: the recorded schedule is GPipe"):
        relay(gpipe(3, 6).job(), {"vp": 2})
    with pytest.raises(EtloomError, match="3 of 4 ranks were recorded, and the pipeline needs all"):
        relay(Job({rank: recorded[False][rank] for rank in (0, 1, 3)}), {"mb": 8})
    odd = PipelineJob(gpipe(3, 4).orders[:2] + one_f_one_b(3, 4).orders[2:])
    with pytest.raises(EtloomError, match="matches no known schedule"):
        relay(odd.job(), {"mb": 8})


@pytest.mark.parametrize(
    "name", ["cpu/pp_4", pytest.param("straggler_what_if/trace-ST.parquet", marks=pytest.mark.slow)]
)
def test_recorded_schedules_are_reproduced(name: str, data: Path) -> None:
    relaid = etloom.predict(data / name, parallel={"mb": 8})
    assert isinstance(relaid, RelaidPipeline)
    assert relaid.recorded.schedule == Schedule("1f1b", 4, 4)
    assert abs(relaid.reproduction_error) < 0.001


@pytest.mark.slow
def test_a_pipeline_operation_trace_has_no_network(data: Path) -> None:
    with pytest.raises(EtloomError, match="only its pipeline can change"):
        etloom.predict(data / "straggler_what_if/trace-ST.parquet", network="x2")


def test_a_pipeline_operation_trace_does_not_become_chakra_without_sizes(tmp_path: Path) -> None:
    relaid = relay(one_f_one_b(3, 3).job(), {"mb": 6})
    with pytest.raises(
        EtloomError, match=r"a pipeline operation trace cannot be written as Chakra, .* sizes of messages"
    ):
        etloom.export(relaid.job, tmp_path / "run.et")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("chunks", [1, 2])
def test_another_pipeline_becomes_chakra_with_its_messages(chunks: int, tmp_path: Path) -> None:
    """All ranks finish in the joint run, whose messages take no time, when the layout without them does."""
    job = replace(interleaved(4, 4, chunks), elements=1 << 18)
    relaid = relay(job.job(), {"pp": 3, "mb": 6})
    etloom.export(relaid.job, tmp_path / "run.et")
    result = etloom.lint(tmp_path)
    assert not result.has_errors, result.table
    ends = 2 * (3 * chunks - 1) * 6 * job.steps
    nodes = [node for rank in range(3) for node in load_file(tmp_path / f"run.{rank}.et").nodes]
    assert [sum(node.type == kind for node in nodes) for kind in (SEND, RECV)] == [ends, ends]
    assert {node.attributes["comm_size"] for node in nodes if node.type in (SEND, RECV)} == {1 << 20}
    work = {
        key: item._replace(message=item.message and Message(0, None, 0))
        for key, item in relaid.pipelines.work.items()
    }
    ideal = compute_timeline(replace(relaid.pipelines, work=work)).step_ends
    assert result.ideal_ns == pytest.approx(max(ideal.values()), rel=0.01)
