"""Another size of tensor parallelism, on jobs of which every kernel and message is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import etloom
from etloom.core.errors import EtloomError
from etloom.core.trace import Job
from etloom.graphs.graph import EdgeKind
from etloom.simulator.recorded_run import describe_recording
from etloom.simulator.resizing import resize, synthesize_job
from etloom.simulator.resizing.sharding import compute_call_ratios
from etloom.simulator.resizing.tensor_shares import find_tensor_shares
from etloom.simulator.scenario import Basis, Scenario
from support.small_traces import BASE_NS, complete_event

TOKENS, HIDDEN = 64, 128
WIDTH = 3 * HIDDEN  # of the inner layer
MESSAGE = 2 * TOKENS * HIDDEN
CALLS = (
    ("aten::mm", [[TOKENS, HIDDEN], [HIDDEN, WIDTH // 2]], 100, 0.5),  # divided by columns
    ("aten::gelu", [[TOKENS, WIDTH // 2]], 20, 0.5),
    ("aten::mm", [[TOKENS, WIDTH // 2], [WIDTH // 2, HIDDEN]], 80, 0.5),  # divided by rows
    ("tp", [[TOKENS, HIDDEN]], 60, 1.5),  # a ring of 4 instead of 2: 2 * 3/4 instead of 2 * 1/2
    ("aten::add", [[TOKENS, HIDDEN], [TOKENS, HIDDEN]], 40, 1.0),
    ("aten::mm", [[TOKENS, HIDDEN], [HIDDEN, HIDDEN]], 70, 0.5),  # two whole activations: guessed
    ("dp", [[HIDDEN, WIDTH]], 90, 0.5),  # gradients of half of the parameters
)
"""Operator or group, shapes, time in us, and the expected factor with tp=4 instead of 2."""
GROUPS = {"tp": ([0, 1], [2, 3]), "dp": ([0, 2], [1, 3])}


def make_events(rank: int, with_shapes: bool) -> list[dict[str, Any]]:
    events, host, clock = [], (10, 11), 0.0
    for number, (name, dims, time, _) in enumerate(CALLS * 2):
        if number % len(CALLS) == 0:
            step = number // len(CALLS)
            length = 10 + sum(call[2] + 10 for call in CALLS)
            events.append(complete_event("user_annotation", f"ProfilerStep#{step}", clock, length, *host))
        args = {"Input Dims": dims, "Input type": ["c10::BFloat16"] * len(dims)} if with_shapes else {}
        args |= {"Record function id": number + 1, "External id": number + 1}
        operator = name if name not in GROUPS else "c10d::allreduce_"
        events.append(complete_event("cpu_op", operator, clock + 1, 6, *host, **args))
        launch = {"correlation": number + 1, "External id": number + 1}
        events.append(complete_event("cuda_runtime", "cudaLaunchKernel", clock + 2, 3, *host, **launch))
        kernel = {"device": 0, "stream": 7, **launch}
        if name in GROUPS:
            members = next(ranks for ranks in GROUPS[name] if rank in ranks)
            kernel |= {"Collective name": "allreduce", "dtype": "BFloat16", "Process Group Name": name}
            kernel |= {"Process Group Description": f"mesh_{name}", "Process Group Ranks": str(members)}
            kernel |= {"Group size": 2, "Rank": rank, "Seq": number}
            size = dims[0][0] * dims[0][1]
            kernel |= {"In msg nelems": size, "Out msg nelems": size}
        label = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL" if name in GROUPS else f"kernel_{number}"
        events.append(complete_event("kernel", label, clock + 8, time, 0, 7, **kernel))
        clock += time + 10
    return events


def open_job(folder: Path, *, device: str = "GPU of the test", with_shapes: bool = True) -> Job:
    for rank in range(4):
        groups = [
            {
                "pg_name": name,
                "pg_desc": f"mesh_{name}",
                "backend_config": "cuda:nccl",
                "pg_size": 2,
                "ranks": ranks,
            }
            for name, lists in GROUPS.items()
            for ranks in lists
            if rank in ranks
        ]
        content = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": device, "computeMajor": 9, "computeMinor": 0}],
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 4, "pg_config": groups},
            "host_name": f"host{rank // 2}",
            "baseTimeNanoseconds": BASE_NS,
            "traceEvents": make_events(rank, with_shapes),
        }
        (folder / f"kineto_rank{rank}.json").write_text(json.dumps(content))
    return etloom.open(folder)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    return describe_recording(open_job(tmp_path_factory.mktemp("run")))


def list_kernel_times(scenario: Scenario, rank: int) -> np.ndarray:
    """The time of each kernel of the first step, in us: after its start, or after the arrival of the last rank."""
    graph = scenario.graph
    kinds = np.isin(graph.kind, (EdgeKind.KERNEL, EdgeKind.TRANSFER))
    edges = np.flatnonzero(kinds & (graph.rank[graph.target] == rank))
    times = pl.DataFrame({"owner": graph.owner[edges], "lag": scenario.lag[edges]}).group_by("owner")
    return times.agg(pl.col("lag").max()).sort("owner")["lag"].to_numpy()[: len(CALLS)] / 1e3


@pytest.mark.parametrize("sizes", [{"tp": 4}, {"tp": 4, "dp": 4}])
def test_divided_kernels_and_messages_take_their_share(recorded: Scenario, sizes: dict[str, int]) -> None:
    resized = resize(recorded, None, sizes)
    ranks = 4 * sizes.get("dp", 2)
    assert len(resized.template) == ranks
    factors = np.array([call[3] for call in CALLS])
    if sizes.get("dp") == 4:
        factors[-1] *= 1.5
    for rank in (0, ranks - 1):
        assert list_kernel_times(resized, rank) == pytest.approx(
            factors * [call[2] for call in CALLS], rel=1e-3
        )


@pytest.mark.slow
def test_groups_along_both_axes_have_the_ranks_of_the_new_mesh(recorded: Scenario) -> None:
    job = synthesize_job(resize(recorded, None, {"tp": 4, "dp": 4}))
    members = {
        (name, ranks)
        for trace in job.values()
        for name, ranks in trace.groups.select(pl.col("pg_name", "ranks").cast(pl.String)).iter_rows()
    }
    tensor = {("tp", str(list(range(first, first + 4)))) for first in range(0, 16, 4)}
    data = {("dp", str(list(range(first, 16, 4)))) for first in range(4)}
    assert members == tensor | data
    matched = etloom.analyze(job, "collectives")
    assert matched["recorded"].unique().to_list() == [4]


@pytest.mark.slow
def test_fewer_ranks_take_longer(recorded: Scenario) -> None:
    resized = resize(recorded, None, {"tp": 1})
    assert len(resized.template) == 2
    factors = [2.0, 2.0, 2.0, 0.0, 1.0, 2.0, 2.0]
    assert list_kernel_times(resized, 0) == pytest.approx(
        [factor * call[2] for factor, call in zip(factors, CALLS, strict=True)], rel=1e-3, abs=0.1
    )


@pytest.mark.slow
def test_the_interval_is_wider_than_that_of_the_recording(recorded: Scenario) -> None:
    rows = [
        etloom.predict(recorded.recorded, **changes).table.filter(pl.col("scope") == "job").row(0, named=True)
        for changes in ({"parallel": {"dp": 4}}, {"parallel": {"tp": 4}})
    ]
    widths = [row["upper_bound_ns"] / row["lower_bound_ns"] for row in rows]
    assert widths[1] > widths[0] > 1
    reasons = etloom.predict(recorded.recorded, parallel={"tp": 4}).reasons
    assert any("tp=2 becomes 4" in line and "by an assumption" in line for line in reasons)


def test_known_devices_shorten_only_time_explained_by_their_limit(tmp_path: Path) -> None:
    job = open_job(tmp_path, device="NVIDIA H100 80GB HBM3")
    ratios, certain = compute_call_ratios(job[0], lambda calls: find_tensor_shares(calls, MESSAGE, 0.5))
    assert certain == 4
    products = ratios.filter(pl.col("basis") == int(Basis.ROOFLINE))["ratio"]
    assert products.len() == 4
    assert ((products > 0.9) & (products < 1)).all()  # kernels this small are far from the limits


def test_a_run_that_does_not_show_the_divided_kernels_is_refused(tmp_path: Path, recorded: Scenario) -> None:
    with pytest.raises(EtloomError, match=r"cannot predict tp=4 from a run with tp=2: no operator .* shapes"):
        resize(describe_recording(open_job(tmp_path, with_shapes=False)), None, {"tp": 4})
    with pytest.raises(EtloomError, match=r"cannot predict cp=2: .* without the messages of context"):
        resize(recorded, None, {"cp": 2})
