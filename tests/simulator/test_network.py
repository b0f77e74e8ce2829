"""What-if of communication: selection by collective, and bandwidth with units."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import etloom
from etloom.core.errors import AnalysisError, EtloomError
from etloom.core.trace import Job, Trace
from etloom.graphs import build_graph
from etloom.graphs.graph import EdgeKind
from etloom.simulator import Network, parse_change
from etloom.simulator import simulate as simulate_with
from etloom.simulator.changes import parse_network
from etloom.simulator.edge_selection import EdgeSelector
from support.real_runs import open_run

NCCL = "ncclDevKernel_{}_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
BYTES = 4_000_000


def rank_of_two(rank: int, late_us: int = 0) -> Trace:
    """An all-reduce of 100 us, then an all-gather of 50 us, of 4 MB each, launched by one thread."""
    events: list[dict[str, Any]] = []
    for i, (name, start, dur) in enumerate((("AllReduce", 100, 100), ("AllGather", 300, 50))):
        launch = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "correlation": i + 1}
        kernel = {"cat": "kernel", "name": NCCL.format(name), "pid": 0, "tid": 7, "correlation": i + 1}
        events += [
            launch | {"ts": (start - 20 + late_us) * 1000, "dur": 10_000},
            kernel
            | {"ts": (start + late_us) * 1000, "dur": (dur - late_us) * 1000, "device": 0, "stream": 7},
        ]
    table = pl.DataFrame(
        [{"id": i, "position": i, "ph": "X", **event} for i, event in enumerate(events)],
        infer_schema_length=None,
    )
    comms = pl.DataFrame(
        [
            {"id": i, "event": 2 * i + 1, "collective": name, "pg_name": "0", "ranks": "[0, 1]", "seq": i}
            | {"group_size": 2, "dtype": "Float", "in_nelems": BYTES // 4, "out_nelems": BYTES // 4}
            for i, name in enumerate(("all_reduce", "all_gather"))
        ]
    )
    return etloom.link(Trace({"events": table, "comms": comms}, {"rank": rank, "world_size": 2}))


@pytest.fixture(scope="module")
def job() -> Job:
    return Job({0: rank_of_two(0), 1: rank_of_two(1, 10)})


@pytest.mark.slow
def test_an_interval_of_times_that_vary_without_measure_is_finite(job: Job) -> None:
    prediction = etloom.predict(job)
    scenario = prediction.scenario.replace(deviations=dict.fromkeys(prediction.scenario.deviations, 1e6))
    table = replace(prediction, scenario=scenario).table
    assert (table["upper_bound_ns"] > 10**17).all()
    assert (table["lower_bound_ns"] >= 0).all()


def change_ns(job: Job, change: Any) -> int:
    graph = build_graph(job)
    return graph.makespan(simulate_with(job, [change], graph).upper_bound) - graph.makespan()


@pytest.mark.parametrize(
    "name", ["all_reduce", "allreduce", "AllReduce", "all-reduce", "*reduce", "nccl*AllReduce*"]
)
def test_a_collective_is_selected_by_its_name(job: Job, name: str) -> None:
    selector = EdgeSelector(build_graph(job).graph, job)
    edges = selector.select(parse_change(f"comm:{name} x2")).edges
    owners = set(selector.graph.owner[edges].tolist())
    assert owners == {1} and (selector.graph.kind[edges] == EdgeKind.TRANSFER).sum() == 2


def test_twice_the_time_of_a_collective(job: Job) -> None:
    assert change_ns(job, parse_change("comm:all_gather x2")) == 40_000  # from the arrival of both ranks
    assert change_ns(job, parse_change("comm:all_gather x1")) == 0


def test_an_unknown_collective_names_those_of_the_run(job: Job) -> None:
    with pytest.raises(EtloomError) as raised:
        simulate_with(job, [parse_change("comm:all_to_all x2")])
    assert "its collectives are all_gather, all_reduce" in (raised.value.remedy or "")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cpu/ddp_2", "dlrm", "nccl_ddp"])
def test_all_reduce_of_recordings(name: str, data: Path) -> None:
    job = etloom.open(data / name)
    linked = Job({rank: etloom.link(trace) for rank, trace in job.items()}, job.meta)
    selector = EdgeSelector(build_graph(linked).graph, linked)
    by_collective = selector.select(parse_change("comm:all_reduce x2")).edges
    by_event = selector.select(
        parse_change("comm:gloo?all_reduce x2" if "cpu" in name else "comm:*AllReduce* x2")
    ).edges
    assert np.array_equal(by_collective, by_event)


@pytest.mark.parametrize(
    ("text", "factor", "bytes_per_second"),
    [
        ("2x", 2, None),
        ("0.5", 0.5, None),
        ("400GB/s", 1, 400e9),
        ("50 GB/s", 1, 50e9),
        ("400Gbit/s", 1, 50e9),
        ("400Gb/s", 1, 50e9),
        ("400 Gbps", 1, 50e9),
        ("1.5TB/s", 1, 1.5e12),
        ("1GiB/s", 1, 2**30),
        ("900kB/s", 1, 9e5),
        ("1000000B/s", 1, 1e6),
    ],
)
def test_bandwidths(text: str, factor: float, bytes_per_second: float | None) -> None:
    assert parse_network(text, 7) == Network(factor, 7, bytes_per_second)


@pytest.mark.parametrize(
    "text", ["fast", "-1GB/s", "0GB/s", "400GB", "400XB/s", "9e9GB/s", f"{'9' * 400}GB/s"]
)
def test_bandwidths_that_are_not_understood(text: str) -> None:
    with pytest.raises(EtloomError, match="expected a factor or a bandwidth"):
        parse_network(text, None)


def test_a_bandwidth_sets_the_time_of_transfers(job: Job) -> None:
    # all-reduce: bus factor 1, all-gather 1/2. At 95 % of 100 GB/s: 42.1 and 21.1 us after the arrival of rank 1, and
    # the latency of 2 and 1 messages.
    graph = build_graph(job)
    simulated = simulate_with(job, [parse_network("100GB/s", 0)], graph)
    transfers = graph.graph.kind == EdgeKind.TRANSFER
    assert sorted(simulated.lag[transfers].tolist()) == [21_053, 21_053, 42_105, 42_105]
    slower = simulate_with(job, [parse_network("100GB/s", 3_000)], graph)
    assert sorted(slower.lag[transfers].tolist()) == [24_053, 24_053, 48_105, 48_105]
    assert not any("keep their time" in line for line in simulated.reasons)


def test_predict_and_simulate_share_the_network_model(job: Job) -> None:
    simulated = simulate_with(job, [parse_network("100GB/s", None)])
    predicted = etloom.predict(job, network="100GB/s")
    assert simulated.table["upper_bound_ns"][0] == predicted.table["predicted_ns"][0]
    assert any(line.startswith("recorded network: ") for line in simulated.reasons)


def test_a_change_before_the_network_is_kept(job: Job) -> None:
    """The network gives transfers their times; what earlier changes did to other edges remains."""
    both = simulate_with(job, [parse_change("launch +7us"), Network(0.5)])
    alone = simulate_with(job, [Network(0.5)])
    is_launch = both.graph.graph.kind == EdgeKind.LAUNCH
    assert (both.lag - alone.lag)[is_launch].tolist() == [7_000] * int(is_launch.sum())


@pytest.mark.slow
def test_communication_of_unknown_size_keeps_its_time(job: Job) -> None:
    unsized = Job(
        {
            rank: trace.replace(comms=trace.comms.with_columns(in_nelems=None, out_nelems=None))
            for rank, trace in job.items()
        }
    )
    with pytest.raises(EtloomError, match="no communication of this run states its size"):
        simulate_with(unsized, [parse_network("100GB/s", None)])
    one = pl.col("collective").cast(pl.String) == "all_reduce"
    partly = Job(
        {
            rank: trace.replace(
                comms=trace.comms.with_columns(
                    pl.when(one).then(name).alias(name) for name in ("in_nelems", "out_nelems")
                )
            )
            for rank, trace in job.items()
        }
    )
    simulated = simulate_with(partly, [parse_network("100GB/s", None)])
    assert "1 communications keep their time: their size or algorithm is not known" in simulated.reasons


@pytest.mark.parametrize(
    "change", [Network(2.0), Network(1.0, 20_000), Network(bytes_per_second=4e11), parse_change("comm:* x0")]
)
def test_a_run_without_communication_has_no_network(job: Job, change: Any) -> None:
    """A change of nothing is not a prediction of 0 %."""
    silent = {}
    for rank, trace in job.items():
        names = pl.col("name").cast(pl.String).str.replace("ncclDevKernel", "gemm")
        silent[rank] = trace.replace(events=trace.events.with_columns(names), comms=trace.comms.clear())
    with pytest.raises(EtloomError, match="this run has no communication"):
        simulate_with(Job(silent), [change])


@pytest.mark.slow
def test_models_that_miss_the_recording_predict_no_other_network(data: Path) -> None:
    """4 of 8 ranks were recorded: waits for the others pass for transfers. All-reduces state a hundredfold size."""
    factor = pl.when(pl.col("collective").cast(pl.String) == "all_reduce").then(100).otherwise(1)
    sizes = [pl.col(name) * factor for name in ("in_nelems", "out_nelems")]
    job = open_run(data / "dlrm").map(
        lambda trace: trace.replace(None, comms=trace.comms.with_columns(sizes))
    )
    with pytest.raises(AnalysisError, match=r"reproduce the recorded step time with an error of \+830.7 %"):
        etloom.predict(job, network="x2")
    for change in ({"device": "b200"}, {"ranks": 8}):
        with pytest.raises(AnalysisError, match="no prediction"):
            etloom.predict(job, **change)
    with pytest.raises(AnalysisError, match="no prediction"):
        etloom.simulate(job, parse_network("1GB/s", None))
    assert etloom.simulate(job, Network(2.0)).table.height  # transfers relative to their recorded times
    assert etloom.predict(job).reasons[0].startswith("doubtful: the models reproduce")


def test_a_factor_of_the_host_scales_its_work(job: Job) -> None:
    same, slow = (etloom.predict(job, host=factor) for factor in (1.0, 3.0))
    recorded, predicted = (slow.table[name][0] for name in ("before_ns", "predicted_ns"))
    assert same.table["predicted_ns"][0] == pytest.approx(recorded, rel=0.01)
    assert 1.1 * recorded < predicted < 3 * recorded
    assert slow.reasons[-1] == "interval not calibrated: another host"
    assert slow.table["upper_bound_ns"][0] > 1.08 * predicted
    for wrong in (0, float("nan"), "fast"):
        with pytest.raises(EtloomError, match="host: expected a factor above 0 and up to 1000"):
            etloom.predict(job, host=wrong)
