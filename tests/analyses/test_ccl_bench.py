"""CCL-Bench's metrics: a run of two ranks worked out by hand, its workload card, inference, and real runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import etloom
from etloom.core.trace import Job

BASE = 1_700_000_000_000_000_000
CARD = """
version: 1
workload:
  model:
    phase: training
    precision: bf16
    model_arch: {num_params: 1000000, num_params_embedding: 100000, num_layers: 2, num_heads: 4, head_dim: 8}
  data: {batch_size: 8, seq_len: 16}
  hardware: {xpu_spec: {type: gpu, model: a100, total_count: 2}}
"""


def device(cat: str, name: str, ts: int, dur: int, stream: int, **args: Any) -> dict[str, Any]:
    args |= {"device": 0, "stream": stream}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": stream, "args": args}


def host(cat: str, name: str, ts: int, dur: int) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 7, "tid": 7, "args": {}}


def reduced(ts: int, dur: int, elements: int, seq: int) -> dict[str, Any]:
    said = {
        "Collective name": "allreduce", "In msg nelems": elements, "Out msg nelems": elements, "dtype": "Float",
        "Group size": 2, "Process Group Name": "0", "Process Group Ranks": "[0, 1]", "Seq": seq,
    }  # fmt: skip
    return device(
        "kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", ts, dur, 8, **said, **{"blocks per SM": 2}
    )


def write(folder: Path, rank: int, events: list[dict[str, Any]]) -> None:
    about = {"distributedInfo": {"rank": rank, "world_size": 2}, "baseTimeNanoseconds": BASE}
    (folder / f"kineto_trace_{rank}.json").write_text(json.dumps(about | {"traceEvents": events}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four steps, of which 1 (100 us) and 2 (120 us) count. Of rank 1 the second all-reduce takes half the time."""
    for rank in (0, 1):
        gemm = {"blocks per SM": 0.5}
        write(
            tmp_path,
            rank,
            [
                *(host("user_annotation", f"ProfilerStep#{at}", start, dur)
                  for at, (start, dur) in enumerate([(0, 100), (100, 100), (200, 120), (320, 80)])),
                device("kernel", "gemm", 10, 10, 7, **gemm),
                device("kernel", "gemm", 110, 40, 7, **gemm),
                reduced(140, 40, 4000, 1),
                device("kernel", "gemm", 210, 40, 7, **gemm),
                reduced(260, 20 - 10 * rank, 500, 2),
                device("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 300, 10, 7, bytes=20_000),
            ],
        )  # fmt: skip
    return tmp_path


def values(job: Job) -> dict[str, float]:
    return dict(etloom.analyze(job, "ccl-bench").drop_nulls("value").select("metric", "value").rows())


def reasons(job: Job) -> dict[str, str]:
    return dict(etloom.analyze(job, "ccl-bench").drop_nulls("reason").select("metric", "reason").rows())


@pytest.mark.slow
def test_a_run_by_hand(folder: Path) -> None:
    job = etloom.open(folder, use_cache=False)
    found = values(job)
    third = 100 / 3
    expected = {
        "avg_step_time": 110e-6,
        # Of the steps: 40 of 80 us and 20 of 60 us on rank 0; 40 of 80 and 10 of 50 on rank 1.
        "communication_fraction": ((50 + third) / 2 + (50 + 20) / 2) / 2,
        "communication_ratio": 100 * 110 / 290,
        "total_communication_time": 27.5e-6,
        "compute_comm_overlap": (100 * 10 / 60 + 100 * 10 / 50) / 2,
        "communication_overlap_ratio": (10 / 60 + 10 / 50) / 2,
        "load_imbalance_ratio": 140 / 130,
        "straggler": 10 / 60,
        "mean_sm_coverage": (100 * (90 * 0.5 + 60) / 150 + 100 * (90 * 0.5 + 50) / 140) / 2,
        "dominant_kernel_concentration": (100 * 90 / 150 + 100 * 90 / 140) / 2,
        "moe_fraction": 0,
        "average_memory_bandwidth": 2,
        "memory_transfer_overhead": 100 * 10 / 300,
        # 16,000 B in 40 us and 2,000 B in 10 us, between two.
        "bandwidth_utilization_allreduce_group_6": (0.4 + 0.2) / 2,
        "avg_comm_bandwidth_GBps": (0.4 + 0.2) / 2,
        "collective_vol_allreduce_gb": 9000 / 1e9,
        "collective_vol_total_gb": 9000 / 1e9,
        "coll_call_num": 2,
        "aggregate_gpu_utilization": (100 * 140 / 270 + 100 * 130 / 260) / 2,
        "total_kernel_time": 145e-6,
        "kernel_compute_time_group_6": 90e-6,
        "total_compute_time_s": 90e-6,
        "total_comm_time_s": 55e-6,
        "allreduce_comm_time_s": 55e-6,
        "num_comm_kernels": 2,
        "avg_comm_kernel_time_s": 27.5e-6,
        "compute_utilization_proxy": 90 / 400,
        "straggler_metrics": 60 / 50,
        "total_trace_time": 400e-6,
        "wall_time_s": 400e-6,
        # 20 us for 8,000 B a rank, 5 us for 1,000 B: 15 us for 7,000 B.
        "hockney_alpha_s": (5 - 1000 * 15 / 7000) / 1e6,
        "hockney_beta_s_per_byte": 15e-6 / 7000,
        "hockney_inverse_beta_Bps": 7000 / 15e-6,
    }
    assert found == pytest.approx(expected)
    table = etloom.analyze(job, "ccl-bench")
    assert table.filter(pl.col("value").is_null() == pl.col("reason").is_null()).is_empty()
    assert reasons(job)["mfu"] == "no workload card in the folder of the traces"
    alone = reasons(Job({0: job[0]}))
    assert alone["straggler"] == alone["load_imbalance_ratio"] == "requires at least two ranks"


@pytest.mark.slow
def test_metrics_need_fields_of_the_card(folder: Path) -> None:
    (folder / "card.yaml").write_text(CARD)
    job = etloom.open(folder, use_cache=False)
    found = values(job)
    tokens = 8 * 16 / 110e-6
    assert found["throughput"] == pytest.approx(tokens)
    flop = 6 * 900_000 + 12 * 2 * 4 * 8 * 16
    assert found["mfu"] == pytest.approx(100 * flop * tokens / (2 * 312e12))

    def why(text: str) -> str:
        (folder / "card.yaml").write_text(text)
        return reasons(etloom.open(folder, use_cache=False))["mfu"]

    assert why(CARD.replace("a100", "abacus")) == "the peaks of 'abacus' are unknown"
    assert why(CARD.replace("bf16", "int3")) == "the peak of a100 in int3 is unknown"
    assert "model_arch.num_layers" in why(CARD.replace("num_layers: 2, ", ""))
    assert "is 'many'; expected a positive number" in why(CARD.replace("num_heads: 4", "num_heads: many"))
    assert "inference" in why(CARD.replace("phase: training", "phase: inference"))
    assert "lacks workload.model.phase" in why("version: 1\nworkload: {model: 3}\n")


@pytest.mark.parametrize(
    ("cat", "name"),
    [
        ("user_annotation", "execute_context_1(8)_generation_0(0)"),
        ("python_function", "scheduler.py(7): run_batch"),
    ],
)
def test_an_engine_s_passes(tmp_path: Path, cat: str, name: str) -> None:
    passes = [(0, 500), (500, 40), (600, 60), (700, 999)]
    write(
        tmp_path,
        0,
        [host(cat, name, start, dur) for start, dur in passes] + [device("kernel", "k", 10, 5, 7)],
    )
    found = values(etloom.open(tmp_path, use_cache=False))
    assert (found["ttft"], found["tpot"]) == pytest.approx((500e-6, 50e-6))
    assert found["avg_step_time"] == pytest.approx(50e-6)


def test_a_collective_counts_in_the_step_that_issued_it(tmp_path: Path) -> None:
    """The device runs behind the host: both kernels run after the last step."""
    events = [host("user_annotation", f"ProfilerStep#{i}", 100 * i, 100) for i in range(2)]
    for i in range(2):
        call = host("cpu_op", "record_param_comms", 100 * i + 10, 20)
        launch = host("cuda_runtime", "cudaLaunchKernel", 100 * i + 12, 5)
        launch["args"] = {"correlation": i + 1}
        kernel = reduced(300 + 50 * i, 40, 1000 * (i + 1), i + 1)
        kernel["args"]["correlation"] = i + 1
        events += [call, launch, kernel]
    write(tmp_path, 0, events)
    measured = values(etloom.open(tmp_path, use_cache=False))
    assert measured["collective_vol_allreduce_gb"] == pytest.approx(6000 / 1e9)
    assert measured["collective_vol_total_gb"] == pytest.approx(6000 / 1e9)


def test_without_steps_the_whole_trace_counts(tmp_path: Path) -> None:
    write(tmp_path, 0, [device("kernel", "k", 10, 30, 7), reduced(20, 40, 10, 1)])
    table = etloom.analyze(etloom.open(tmp_path, use_cache=False), "ccl-bench")
    row = table.filter(pl.col("metric") == "compute_comm_overlap").row(0, named=True)
    assert (row["value"], row["basis"]) == (50, "trace")


@pytest.mark.parametrize("run", ["hta_multirank", "dlrm", "cpu/ddp_2", "nsys"])
@pytest.mark.slow
def test_on_real_runs_it_agrees_with_the_analyses_of_one_question(data: Path, run: str) -> None:
    job = etloom.open(data / run)
    found = values(job)
    overlap = etloom.analyze(job, "comm-overlap").filter(pl.col("step").is_null())["overlap_pct"].mean()
    assert found.get("communication_overlap_ratio") == (
        None if overlap is None else pytest.approx(overlap / 100)
    )
    steps = etloom.analyze(job, "temporal-breakdown").filter(pl.col("step").is_not_null())
    if steps.height and steps.group_by("rank").len()["len"].max() <= 2:
        assert found["avg_step_time"] == pytest.approx(steps["span_ns"].mean() / 1e9)
    if "total_kernel_time" in found:
        kernels = etloom.analyze(job, "kernel-breakdown").filter(pl.col("kind") != "memory")
        assert found["total_kernel_time"] * len(job) == pytest.approx(kernels["total_ns"].sum() / 1e9)
