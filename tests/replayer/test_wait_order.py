"""Calls are waited for among the operators of a rank, as they were in the recording."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist

import etloom
from etloom.replayer.comms import runner as call_runner
from etloom.replayer.comms.comms_options import CommsOptions
from etloom.replayer.comms.operator_waits import NodeStarts, place_waits
from etloom.replayer.comms.plan_builder import build_plan
from etloom.replayer.comms.runner import Runner
from etloom.replayer.launch_environment import Process
from etloom.replayer.plan import Call, RankPlan
from etloom.replayer.recorded_calls import RecordedCall

pytestmark = pytest.mark.torch


def reduced(at: int, node: int, waits_for: tuple[int, ...] = (), until: int | None = None) -> Call:
    return Call(
        at, "all_reduce", (0,), "float", (8,), (8,), waits_for=waits_for, node=node, wait_before_node=until
    )


def row(**told: Any) -> RecordedCall:
    return RecordedCall("all_reduce", "allreduce", (8,), (8,), "float", None, **told)


def test_an_operator_waits_for_calls_that_ended_before_it_began() -> None:
    # Operators 10, 20, .. 90 began at 100, 200, .. 900; calls are nodes 15, 35 and 75.
    times = NodeStarts(np.arange(10, 100, 10), np.arange(100, 1000, 100))
    calls = [reduced(0, 15), reduced(1, 35), reduced(2, 75, waits_for=(0, 1))]

    def until(*rows: RecordedCall) -> list[int | None]:
        return [call.wait_before_node for call in place_waits(calls, rows, times)]

    assert until(row(end=410), row(end=600), row(end=850)) == [50, 60, 90]
    # Call 1 was made while call 0 was in flight: not before that, though an operator of another stream began late.
    assert until(row(end=10), row(end=600), row(end=2000)) == [40, 60, None]
    assert until(row(waited_at=52, end=410), row(waited_at=10, end=410), row()) == [52, 50, None]
    # On a device a call follows the one before it, also where the host waits for that only later.
    late = place_waits(calls, [row(waited_at=80, end=410), row(end=600), row()], times)
    assert [(call.wait_before_node, call.waits_for) for call in late] == [(80, ()), (60, ()), (None, (1,))]
    # Nobody knows when an asynchronous one was waited for; another one at once.
    assert until(row(is_async=True), row(is_async=False), row(is_async=False)) == [None, 36, 76]
    assert until(row(is_async=False), row(), row()) == [None, None, None]


@pytest.mark.slow
def test_the_wait_of_ddp_comes_before_the_optimizer_needs_the_gradients(data: Path) -> None:
    job = etloom.open(data / "cpu" / "ddp_2")
    made = build_plan(job, operators=True)
    assert [[call.wait_before_node for call in own] for own in made.calls] == [[2040, 5420], [1895, 5420]]
    assert [call.wait_before_node for call in build_plan(job).calls[0]] == [None, None]


@pytest.mark.slow
def test_operators_of_a_device_count_by_when_the_device_did_them(data: Path) -> None:
    job = etloom.open(data / "dlrm")
    made = build_plan(job, operators=True).calls[0]
    names = job[0].nodes["name"].cast(pl.String)
    # Of three the wait was recorded; of the others the first operator is told whose kernels ran after theirs, though
    # the host had begun it long before. What came between the call before the last but one and its wait did not wait.
    assert [
        (call.wait_before_node, call.wait_before_node and names[call.wait_before_node]) for call in made
    ] == [
        (541, "record_param_comms"),
        (754, "record_param_comms"),
        (None, None),
        (788, "aten::ones_like"),
        (939, "aten::mul"),
        (1253, "record_param_comms"),
        (1328, "aten::mul"),
        (1506, "aten::addcmul_"),
    ]
    assert [call.waits_for for call in made] == [(), (0,), (1,), (2,), (3,), (4,), (), (5, 6)]


@pytest.fixture
def single_process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("single_process_group")
def test_waits_come_between_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = (
        reduced(0, 15, until=50),
        reduced(1, 35, until=40),
        reduced(2, 75, waits_for=(0, 1)),
        reduced(3, 80, waits_for=(2,), until=90),
    )
    seen: list[Any] = []
    runner = Runner(
        RankPlan(calls, ((0,),), 1), Process(0, 1, 0), CommsOptions(repeats=1, warmup=0), seen.append
    )
    wait = runner._clock.wait

    def note(at: int, work: Any) -> None:
        seen.append(f"wait {at}")
        wait(at, work)

    monkeypatch.setattr(runner._clock, "wait", note)
    times = runner.run()
    # A number: the operators before that node; None: all others.
    assert seen == [15, 35, 40, "wait 1", 50, "wait 0", 75, 80, "wait 2", 90, "wait 3", None]
    assert (times.completed > times.issued).all()


def test_of_a_gpu_the_stream_of_the_operators_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls that are done 3.5 and 4 ms after the begin, and waited for at 1 and at 6 ms: 2.5 ms are lost."""
    at = iter((0.0, 1.0, 3.5, 6.0, 4.0))

    class Event:
        def record(self, stream: Any = None) -> None:
            self.ms = next(at)

        def elapsed_time(self, other: Event) -> float:
            return other.ms - self.ms

    class Stream:
        def wait_event(self, event: Event) -> None:
            pass

    monkeypatch.setattr(call_runner, "_new_event", Event)
    monkeypatch.setattr("torch.cuda.Stream", lambda device: Stream())
    monkeypatch.setattr("torch.cuda.current_stream", Stream)
    monkeypatch.setattr("torch.cuda.stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    own = call_runner.Clock(torch.device("cuda"))
    own.begin(2)
    for call in (0, 1):
        own.wait(call, None)
    first, second = own.finish()
    assert (second - first, own.blocked_ns) == (500_000, 2_500_000)
