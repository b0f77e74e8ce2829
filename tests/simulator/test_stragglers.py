"""Jobs without their straggler: predictions against the same job made without the injected delay."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import etloom
from etloom.core.errors import EtloomError
from etloom.core.trace import Job, Trace
from etloom.graphs import build_graph
from etloom.simulator import LikePeers, NoStraggler
from etloom.simulator import simulate as simulate_with

STEPS, LAYERS = 3, 2
DELAY = 3_000_000  # ns


@dataclass
class Delay:
    """Delays of one rank, by kind, ns: before its first launch, in data loading of a step, in an operator of every
    step, as a kernel or an operator that no other rank has, at the beginning of its recording."""

    kind: str
    ns: int = DELAY
    rank: int = 1
    other: Delay | None = None

    def at(self, kind: str, rank: int) -> int:
        own = self.ns if (kind, rank) == (self.kind, self.rank) else 0
        return own + (self.other.at(kind, rank) if self.other else 0)


@dataclass
class MadeRank:
    """The clock of a rank's host and stream, and the events that its profiler writes."""

    rank: int
    random: random.Random
    now: int = 0
    free: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    comms: list[dict[str, Any]] = field(default_factory=list)

    def noisy(self, ns: int, noise: float) -> int:
        return round(ns * (1 + noise * self.random.random()))

    def emit(self, cat: str, name: str, start: int, end: int, **more: Any) -> dict[str, Any]:
        place = {"pid": 0, "tid": 7, "device": 0, "stream": 7} if cat == "kernel" else {"pid": 1, "tid": 1}
        self.events.append(
            {"cat": cat, "name": name, "ts": start, "dur": end - start, "ph": "X"} | place | more
        )
        return self.events[-1]

    def op(self, name: str, host_ns: int, kernel: str | None, kernel_ns: int) -> dict[str, Any] | None:
        """An operator that launches a kernel."""
        begun = self.now
        self.now += host_ns
        launched = None
        if kernel is not None:
            correlation = len(self.events)
            self.emit("cuda_runtime", "cudaLaunchKernel", self.now, self.now + 5_000, correlation=correlation)
            self.now += 5_000
            start = max(self.now + 4_000, self.free + 1_000)
            launched = self.emit("kernel", kernel, start, start + kernel_ns, correlation=correlation)
            self.free = start + kernel_ns
        self.now += 2_000
        self.emit("cpu_op", name, begun, self.now)
        self.now += 1_000
        return launched

    def trace(self, ranks: int) -> Trace:
        order = sorted(self.events, key=lambda event: (event["ts"], -event["dur"]))
        number = {id(event): i for i, event in enumerate(order)}
        events = pl.DataFrame(
            [{"id": i, "position": i, **event} for i, event in enumerate(order)], infer_schema_length=None
        )
        comms = [
            {"id": seq, "event": number[id(event)], "collective": "all_reduce", "pg_name": "0", "seq": seq}
            | {"ranks": str(list(range(ranks))), "group_size": ranks}
            for seq, event in enumerate(self.comms)
        ]
        meta = {"rank": self.rank, "world_size": ranks, "clock": "relative"}
        return etloom.link(Trace({"events": events, "comms": pl.DataFrame(comms)}, meta))


def make_job(ranks: int, delay: Delay, noise: float = 0.0, host_us: int = 20, kernel_us: int = 200) -> Job:
    """A data-parallel job: in each step a loader, layers of one kernel and one all-reduce each, and a device sync."""
    made = [MadeRank(rank, random.Random(rank)) for rank in range(ranks)]
    for one in made:
        one.now = 1_000_000 + delay.at("late recording", one.rank)
    for step in range(STEPS):
        begun = [one.now for one in made]
        for one in made:
            loading = delay.at("loader", one.rank) if step == 1 else 0
            one.op("enumerate(DataLoader)", one.noisy(100_000, noise) + loading, None, 0)
            one.now += delay.at("gap", one.rank) if step == 0 else 0
        for layer in range(LAYERS):
            for one in made:
                slow_host = delay.at("operator", one.rank) // (STEPS * LAYERS)
                slow_kernel = delay.at("kernels", one.rank) // (STEPS * LAYERS)
                host, kernel = one.noisy(host_us * 1_000, noise), one.noisy(kernel_us * 1_000, noise)
                if extra := delay.at("extra kernel", one.rank) * (layer == step == 1):
                    one.op("aten::_sleep", 20_000, "spin_kernel(long)", extra)
                if extra := delay.at("extra operator", one.rank) * (layer == step == 1):
                    one.op("torch::save", extra, None, 0)
                one.op("aten::mm", host + slow_host, "gemm", kernel + slow_kernel)
            reduced = [
                one.op("c10d::allreduce_", 10_000, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 0)
                for one in made
            ]
            arrival = max(event["ts"] for event in reduced if event)
            for one, event in zip(made, reduced, strict=True):
                assert event is not None
                event["dur"] = arrival + 50_000 - event["ts"]
                one.free = arrival + 50_000
                one.comms.append(event)
        for one, begin in zip(made, begun, strict=True):
            end = max(one.now + 2_000, one.free + 3_000)
            one.emit("cuda_runtime", "cudaDeviceSynchronize", one.now, end, correlation=len(one.events))
            one.now = end
            one.emit("user_annotation", f"ProfilerStep#{step}", begin, end)
            one.now += 1_000
    return Job({one.rank: one.trace(ranks) for one in made})


def makespan(job: Job, change: Any = None) -> int:
    graph = build_graph(job)
    return graph.makespan(None if change is None else simulate_with(job, [change], graph).upper_bound)


KINDS = ("gap", "loader", "operator", "kernels", "extra kernel", "extra operator", "late recording")
NO_DELAY = Delay("none")


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "host_us"), [(8, 20), (3, 400)], ids=["device-bound", "host-bound"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_job_without_its_delay_is_predicted(kind: str, ranks: int, host_us: int) -> None:
    delayed, clean = (make_job(ranks, delay, host_us=host_us) for delay in (Delay(kind), NO_DELAY))
    truth, recorded = makespan(clean), makespan(delayed)
    assert recorded > 1.1 * truth
    for change in (NoStraggler(), LikePeers((1,))):
        assert makespan(delayed, change) == pytest.approx(truth, rel=0.01), change


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gap", "kernels", "loader"])
def test_a_delay_in_noise(kind: str) -> None:
    """Only the late rank changes, so the noise of the others stays."""
    delayed, clean = (make_job(6, delay, noise=0.3) for delay in (Delay(kind, rank=5), NO_DELAY))
    truth, recorded = makespan(clean), makespan(delayed)
    predicted = makespan(delayed, LikePeers((5,)))
    assert (predicted - recorded) == pytest.approx(truth - recorded, rel=0.05)
    # Without any straggler, the noise does not make ranks wait either.
    assert makespan(delayed, NoStraggler()) < predicted


@pytest.mark.parametrize(("kind", "due"), [("late recording", True), ("loader", False)])
def test_a_saving_from_a_late_recording_is_named(kind: str, due: bool) -> None:
    delayed = make_job(3, Delay(kind))
    simulated = simulate_with(delayed, [NoStraggler()])
    saved = simulated.graph.makespan() - simulated.graph.makespan(simulated.upper_bound)
    lines = [
        line for line in simulated.reasons if "of the saving is due to recordings that begin later" in line
    ]
    assert [line.partition(" of the saving")[0] for line in lines] == [f"{saved / 1e6:,.3f} ms"] * due


@pytest.mark.slow
def test_two_delays_at_once() -> None:
    both = make_job(8, Delay("kernels", rank=2, other=Delay("gap", rank=6)))
    truth = makespan(make_job(8, NO_DELAY))
    assert makespan(both, LikePeers((2,))) > 1.1 * truth
    assert makespan(both, LikePeers((2, 6))) == pytest.approx(truth, rel=0.01)


@pytest.mark.parametrize("change", [NoStraggler(), LikePeers((0,)), LikePeers((0, 2))])
def test_a_job_of_equal_ranks_does_not_change(change: Any) -> None:
    job = make_job(4, NO_DELAY)
    simulated = simulate_with(job, [change])
    assert np.array_equal(simulated.upper_bound, simulated.recorded)
    assert np.array_equal(simulated.lower_bound, simulated.recorded)


@pytest.mark.slow
def test_only_ranks_of_the_same_program_are_peers() -> None:
    def rename(trace: Trace) -> Trace:
        events = trace.events.with_columns(
            pl.col("name")
            .cast(pl.String)
            .str.replace("gemm", "conv")
            .str.replace("mm", "conv2d")
            .cast(pl.Categorical)
        )
        return trace.replace(events=events)

    job = make_job(4, Delay("kernels", rank=1))
    stages = Job({rank: rename(trace) if rank == 1 else trace for rank, trace in job.items()}, job.meta)
    simulated = simulate_with(stages, [NoStraggler()])
    assert any("rank 1: no other rank runs the same program" in line for line in simulated.reasons)
    assert np.array_equal(simulated.upper_bound, simulated.recorded)
    with pytest.raises(EtloomError, match="no other rank runs the same program as rank 1"):
        simulate_with(stages, [LikePeers((1,))])
    with pytest.raises(EtloomError, match="unknown rank 9"):
        simulate_with(job, [LikePeers((9,))])
    with pytest.raises(EtloomError, match="no other rank runs the same program as rank 0"):
        simulate_with(Job({0: job[0]}), [NoStraggler()])


@pytest.mark.slow
def test_a_delay_of_3_ms_among_many_ranks() -> None:
    delayed, clean = (make_job(48, delay, noise=0.02) for delay in (Delay("gap", rank=38), NO_DELAY))
    truth, recorded = makespan(clean), makespan(delayed)
    assert makespan(delayed, LikePeers((38,))) - recorded == pytest.approx(truth - recorded, rel=0.03)
    assert makespan(delayed, NoStraggler()) - recorded == pytest.approx(truth - recorded, rel=0.1)


@pytest.mark.slow
def test_the_four_ranks_of_dlrm(data: Path) -> None:
    simulated = etloom.simulate(data / "dlrm", NoStraggler())
    assert (simulated.table["upper_bound_change_pct"] < 0).any()
    assert any("the median of their peers" in line for line in simulated.reasons)
