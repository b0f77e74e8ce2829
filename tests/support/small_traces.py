"""Small traces with known answers.

`write_run` writes a folder of two ranks: one step, two operators, two launches, two kernels (`kineto`,
`execution_trace`). `RankBuilder` builds the trace of one rank event by event; `OperatorTraceBuilder` does so for
operators with shapes. `write_stepped_run` writes a run whose steps have given lengths.
`COUNTER_EVENTS` are kernels measured by CUPTI.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import etloom
from etloom.core.trace import Job, Trace

BASE_NS = 1_700_000_000_000_000_000
US = 1_000  # ns
KERNEL = "void at::native::reduce_kernel<512, 1>()"
H100 = [{"id": 0, "name": "H100", "computeMajor": 9, "computeMinor": 0}]


def complete_event(
    cat: str, name: str, ts: float, dur: float, pid: Any, tid: Any, **args: Any
) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": pid, "tid": tid, "args": args}


def kineto(rank: int = 0, world: int = 2) -> dict[str, Any]:
    """Times in us: step 3 from 100 to 1100; linear 200-600, mm in it 250-500; gemm 400-1000, all-reduce 800-1050."""
    host, device = (10, 11), (0, 7)
    events = [
        {"ph": "M", "name": "process_name", "pid": 10, "tid": 0, "ts": 0, "args": {"name": "python"}},
        {"ph": "M", "name": "thread_name", "pid": 10, "tid": 11, "ts": 0, "args": {"name": "main"}},
        complete_event("user_annotation", "ProfilerStep#3", 100, 1000, *host, **{"Record function id": 1}),
        complete_event(
            "cpu_op",
            "aten::linear",
            200,
            400,
            *host,
            **{"Record function id": 2, "Input Dims": [[4, 8], [8, 8]]},
        ),
        complete_event("cpu_op", "aten::mm", 250, 250, *host, **{"Record function id": 3}),
        complete_event("cuda_runtime", "cudaLaunchKernel", 300, 20, *host, correlation=5),
        complete_event("cuda_runtime", "cudaLaunchKernel", 650, 20, *host, correlation=6),
        complete_event(
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
        complete_event(
            "kernel", "ncclDevKernel_AllReduce_Sum", 800, 250, 0, 13, device=0, stream=13, correlation=6
        ),
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


class RankBuilder:
    """A rank in us: operators on one host thread, each launching kernels."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.correlation = 0

    def op(self, name: str, ts: float, dur: float, cat: str = "cpu_op", **args: Any) -> RankBuilder:
        self.events.append(complete_event(cat, name, ts, dur, 100, 100, **args))
        return self

    def step(self, number: int, ts: float, dur: float) -> RankBuilder:
        return self.op(f"ProfilerStep#{number}", ts, dur, "user_annotation")

    def kernel(
        self, call: float, start: float, dur: float, name: str = KERNEL, cat: str = "kernel", **args: Any
    ) -> RankBuilder:
        """Launched by a call of 1 us (or ``call_us``) at ``call``."""
        self.correlation += 1
        stream, device, took = args.pop("stream", 7), args.pop("device", 0), args.pop("call_us", 1)
        api = "cudaMemcpyAsync" if cat == "gpu_memcpy" else "cudaLaunchKernel"
        self.op(api, call, took, "cuda_runtime", correlation=self.correlation)
        facts = {"device": device, "stream": stream, "correlation": self.correlation, **args}
        self.events.append(complete_event(cat, name, start, dur, device, stream, **facts))
        return self

    def all_reduce(
        self, call: float, start: float, dur: float, seq: int, elements: int = 1000
    ) -> RankBuilder:
        facts = {"Collective name": "allreduce", "Process Group Name": "0", "Group size": 2, "dtype": "Float"}
        sizes = {"In msg nelems": elements, "Out msg nelems": elements, "Seq": seq}
        return self.kernel(call, start, dur, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", **facts, **sizes)

    def trace(self, folder: Path, **header: Any) -> Trace:
        file = folder / "kineto_trace_0.json"
        file.write_text(
            json.dumps(
                {
                    "schemaVersion": 1,
                    "baseTimeNanoseconds": 0,
                    "deviceProperties": H100,
                    "traceEvents": self.events,
                    **header,
                }
            )
        )
        return etloom.read(file)


def find_costs(trace: Trace, pattern: str) -> list[tuple[Any, ...]]:
    rows = etloom.analyze(trace, "findings", pattern=pattern, min_pct=0)
    return rows.select("cost_ns", "count", "operator").rows()


def find_rows(trace: Trace, pattern: str) -> list[dict[str, Any]]:
    return etloom.analyze(trace, "findings", pattern=pattern, min_pct=0).to_dicts()


def write_stepped_run(folder: Path, times: list[float], communication: float = 0) -> Path:
    """A run of one rank whose steps take these times (us), half of each in one operator, and some in an all-reduce."""
    events, at = [], 0.0
    for number, time in enumerate(times):
        host = (10, 11)
        events.append(complete_event("user_annotation", f"ProfilerStep#{number}", at, time, *host))
        events.append(complete_event("cpu_op", "aten::mm", at + 1, time / 2, *host))
        if communication:
            events.append(complete_event("cpu_op", "c10d::allreduce_", at + 0.7 * time, communication, *host))
        at += time
    trace = {**kineto(world=1), "traceEvents": events}
    folder.mkdir()
    (folder / "kineto_trace_0.json").write_text(json.dumps(trace))
    return folder


class OperatorTraceBuilder:
    """A Kineto file: operators that enclose each other by time, and kernels (start, duration in us) they launch."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def operator(
        self, name: str, ts: float, dur: float, dims: Any = None, dtype: str = "c10::BFloat16", **args: Any
    ) -> OperatorTraceBuilder:
        if dims is not None:
            types = [dtype if shape else "Scalar" for shape in dims]
            args |= {"Input Dims": dims, "Input type": types}
        self.events.append(complete_event("cpu_op", name, ts, dur, 10, 11, **args))
        return self

    def step(self, number: int, ts: float, dur: float) -> OperatorTraceBuilder:
        self.events.append(complete_event("user_annotation", f"ProfilerStep#{number}", ts, dur, 10, 11))
        return self

    def kernel(
        self,
        name: str,
        launch: float | None,
        ts: float,
        dur: float,
        stream: int = 7,
        cat: str = "kernel",
        device: int = 0,
    ) -> OperatorTraceBuilder:
        correlation = len(self.events) + 1
        if launch is not None:
            call = complete_event(
                "cuda_runtime", "cudaLaunchKernel", launch, 1, 10, 11, correlation=correlation
            )
            self.events.append(call)
        where = {"device": device, "stream": stream, "correlation": correlation}
        self.events.append(complete_event(cat, name, ts, dur, device, stream, **where))
        return self

    def open(self, folder: Path, device: str | None = "NVIDIA H100 80GB HBM3") -> Job:
        file = folder / "kineto_trace_0.json"
        properties = [{"id": number, "name": device} for number in range(2)] if device else []
        content = {"schemaVersion": 1, "deviceProperties": properties, "traceEvents": self.events}
        file.write_text(json.dumps(content))
        return etloom.open(file, use_cache=False)


def matrix_product(ts: float, n: int = 4096) -> OperatorTraceBuilder:
    return OperatorTraceBuilder().operator("aten::mm", ts, 50, [[n, n], [n, n]])


def _host_event(cat: str, name: str, ts: float, dur: float) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 5, "tid": 5, "args": {}}


def counter_event(name: str, ts: float, pid: int = 0, **counters: Any) -> dict[str, Any]:
    return {
        "ph": "X", "cat": "cuda_profiler_range", "name": name, "ts": ts, "dur": 10, "pid": pid, "tid": 0,
        "args": counters,
    }  # fmt: skip


COUNTER_EVENTS = [
    _host_event("cpu_op", "aten::linear", 100, 100),
    _host_event("cpu_op", "aten::addmm", 110, 80),
    _host_event("cuda_runtime", "cudaLaunchKernel", 120, 5),
    _host_event("cuda_runtime", "cudaMemsetAsync", 130, 5),
    _host_event("cuda_runtime", "cudaLaunchKernelExC", 140, 5),
    _host_event("cuda_driver", "cuLaunchKernel", 300, 5),
    counter_event("gemm", 1, inst=10, dram__bytes=1.5),
    counter_event("gemm", 11, inst=30, dram__bytes=0.5),
    counter_event("alone", 21, inst=7, dram__bytes=2, note="text"),
]
