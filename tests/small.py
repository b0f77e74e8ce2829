"""A run of two ranks small enough to know by heart: one step, two operators, two launches, two kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BASE_NS = 1_700_000_000_000_000_000
US = 1_000  # ns


def slice_(cat: str, name: str, ts: float, dur: float, pid: Any, tid: Any, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": pid, "tid": tid, "args": args}


def kineto(rank: int = 0, world: int = 2) -> dict[str, Any]:
    """Times in us: step 3 from 100 to 1100; linear 200-600, mm in it 250-500; gemm 400-1000, all-reduce 800-1050."""
    host, device = (10, 11), (0, 7)
    events = [
        {"ph": "M", "name": "process_name", "pid": 10, "tid": 0, "ts": 0, "args": {"name": "python"}},
        {"ph": "M", "name": "thread_name", "pid": 10, "tid": 11, "ts": 0, "args": {"name": "main"}},
        slice_("user_annotation", "ProfilerStep#3", 100, 1000, *host, **{"Record function id": 1}),
        slice_(
            "cpu_op",
            "aten::linear",
            200,
            400,
            *host,
            **{"Record function id": 2, "Input Dims": [[4, 8], [8, 8]]},
        ),
        slice_("cpu_op", "aten::mm", 250, 250, *host, **{"Record function id": 3}),
        slice_("cuda_runtime", "cudaLaunchKernel", 300, 20, *host, correlation=5),
        slice_("cuda_runtime", "cudaLaunchKernel", 650, 20, *host, correlation=6),
        slice_(
            "kernel",
            "gemm",
            400,
            600,
            *device,
            device=0,
            stream=7,
            correlation=5,
            grid=[2, 1, 1],
            block=[64, 1, 1],
        ),
        slice_("kernel", "ncclDevKernel_AllReduce_Sum", 800, 250, 0, 13, device=0, stream=13, correlation=6),
    ]
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "GPU of the test"}],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world},
        "host_name": f"host{rank}",
        "baseTimeNanoseconds": BASE_NS,
        "traceEvents": events,
    }


def execution_trace() -> dict[str, Any]:
    rows = [(2, "ProfilerStep#3", 1, 1, 7), (3, "aten::linear", 2, 2, 0), (4, "aten::mm", 3, 3, 0)]
    none: dict[str, list[Any]] = {"values": [], "shapes": [], "types": [], "strides": []}

    def node(number: int, name: str, parent: int, rf_id: int, scope: int) -> dict[str, Any]:
        attrs = {
            "rf_id": ("uint64", rf_id),
            "seq_id": ("int64", -1),
            "scope": ("uint64", scope),
            "tid": ("uint64", 1),
        }
        return {
            "id": number, "name": name, "ctrl_deps": parent, "inputs": none, "outputs": none,
            "attrs": [{"name": key, "type": kind, "value": value} for key, (kind, value) in attrs.items()],
        }  # fmt: skip

    nodes = [node(*row) for row in reversed(rows)] + [
        node(1, "[pytorch|profiler|execution_trace|process]", 1, 0, 7)
    ]
    return {
        "schema": "1.1.1-chakra.0.0.4",
        "pid": 10,
        "time": "",
        "start_ts": 0,
        "nodes": nodes,
        "finish_ts": 1,
    }


def write_run(folder: Path, ranks: tuple[int, ...] = (0, 1)) -> Path:
    """The folder, with an execution trace and a Kineto trace of each rank."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in ranks:
        (folder / f"kineto_trace_{rank}.json").write_text(json.dumps(kineto(rank, len(ranks)), indent=1))
        (folder / f"torch_et_{rank}.json").write_text(json.dumps(execution_trace(), indent=1))
    return folder
