"""Causes of lost time in inference: each pattern finds its case, with its cost, and nothing in a run without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import etloom
from etloom.core.trace import Job

US = 1000
DECODE, PREFILL, MIXED = (
    "execute_context_0(0)_generation_{0}({0})",
    "execute_context_1(512)_generation_0(0)",
    "execute_context_1(512)_generation_{0}({0})",
)


def event(cat: str, name: str, ts: int, dur: int, **args: Any) -> dict[str, Any]:
    pid = 9 if cat == "kernel" else 1
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": pid, "tid": 1, "args": args}


def iteration(
    name: str, start: int, kernels: list[tuple[int, int]], call: str = "cudaGraphLaunch", kernel: str = "gemm"
) -> list[dict[str, Any]]:
    """An iteration of 20 us on the host, with kernels at (start, duration)."""
    rows = [event("user_annotation", name, start, 20)]
    for i, (at, dur) in enumerate(kernels):
        correlation = 10 * start + i + 1 if call != "cudaGraphLaunch" else 10 * start + 1
        if i == 0 or call != "cudaGraphLaunch":
            rows.append(event("cuda_runtime", call, start + 1 + i, 1, correlation=correlation))
        rows.append(event("kernel", kernel, at, dur, correlation=correlation, stream=7, device=0))
    return rows


def run(folder: Path, *ranks: list[dict[str, Any]]) -> Job:
    folder.mkdir()
    for rank, rows in enumerate(ranks):
        head = {"schemaVersion": 1, "distributedInfo": {"rank": rank, "world_size": len(ranks)}}
        (folder / f"kineto_trace_{rank}.json").write_text(json.dumps({**head, "traceEvents": rows}))
    return etloom.open(folder, use_cache=False)


def cost(job: Job, pattern: str) -> int | None:
    rows = etloom.analyze(job, "findings", pattern=pattern, min_pct=0)
    return rows["cost_ns"][0] if rows.height else None


def decodes(count: int, period: int = 100, requests: int = 32) -> list[dict[str, Any]]:
    """Back-to-back decodes: the GPU always has the next one before it ends."""
    rows = []
    for i in range(count):
        rows += iteration(DECODE.format(requests), period * i, [(50 + period * i, period)])
    return rows


PATTERNS = (
    "scheduler-bubbles",
    "graph-misses",
    "prefill-stalls",
    "small-decode-batches",
    "profiler-overhead",
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_steady_decoding_has_no_finding(tmp_path: Path, pattern: str) -> None:
    assert cost(run(tmp_path / "run", decodes(6)), pattern) is None


def test_the_gpu_waits_for_the_scheduler(tmp_path: Path) -> None:
    rows = iteration(DECODE.format(32), 0, [(10, 40)]) + iteration(DECODE.format(32), 150, [(160, 40)])
    assert cost(run(tmp_path / "run", rows), "scheduler-bubbles") == 100 * US, (
        "from 50 to 150; the launch is not its"
    )


def test_eager_decodes_between_replays(tmp_path: Path) -> None:
    rows = iteration(DECODE.format(32), 0, [(10, 40)])
    rows += iteration(DECODE.format(33), 40, [(50, 10), (80, 10)], "cudaLaunchKernel")
    rows += iteration(DECODE.format(32), 80, [(90, 40)])
    assert cost(run(tmp_path / "run", rows), "graph-misses") == 20 * US


def test_a_prefill_between_decodes(tmp_path: Path) -> None:
    rows = decodes(3) + iteration(PREFILL, 300, [(350, 400)], "cudaLaunchKernel")
    rows += iteration(DECODE.format(32), 700, [(750, 100)]) + iteration(MIXED.format(9), 800, [(850, 130)])
    rows += iteration(DECODE.format(32), 900, [(980, 100)])
    assert cost(run(tmp_path / "run", rows), "prefill-stalls") == (400 + 30) * US


def test_decodes_of_few_requests(tmp_path: Path) -> None:
    assert cost(run(tmp_path / "run", decodes(4, requests=2)), "small-decode-batches") == 4 * 75 * US


def test_idle_time_that_the_profiler_caused(tmp_path: Path) -> None:
    rows = [*decodes(2), event("overhead", "Activity Buffer Request", 250, 300)]
    rows += iteration(DECODE.format(32), 560, [(600, 100)])
    assert cost(run(tmp_path / "run", rows), "profiler-overhead") == 300 * US


def test_experts_of_one_rank_take_longer(tmp_path: Path) -> None:
    ranks = [
        iteration(DECODE.format(32), 0, [(50, dur)], kernel="fused_moe_kernel") for dur in (100, 100, 160)
    ]
    job = run(tmp_path / "run", *ranks)
    rows = etloom.analyze(job, "findings", pattern="expert-imbalance", min_pct=0)
    assert rows.select("rank", "cost_ns").rows() == [(2, 40 * US)]
    (tmp_path / "even").mkdir()
    even = run(tmp_path / "even" / "run", *([ranks[0]] * 2))
    assert cost(even, "expert-imbalance") is None
