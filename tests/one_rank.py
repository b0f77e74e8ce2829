"""A rank made event by event, in us, and what findings say of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from small import slice_

import etloom
from etloom.core.trace import Trace

KERNEL = "void at::native::reduce_kernel<512, 1>()"
H100 = [{"id": 0, "name": "H100", "computeMajor": 9, "computeMinor": 0}]


class Run:
    """A rank in us: operators on one host thread, each launching kernels."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.correlation = 0

    def op(self, name: str, ts: float, dur: float, cat: str = "cpu_op", **args: Any) -> Run:
        self.events.append(slice_(cat, name, ts, dur, 100, 100, **args))
        return self

    def step(self, number: int, ts: float, dur: float) -> Run:
        return self.op(f"ProfilerStep#{number}", ts, dur, "user_annotation")

    def kernel(
        self, call: float, start: float, dur: float, name: str = KERNEL, cat: str = "kernel", **args: Any
    ) -> Run:
        """Launched by a call of 1 us (or ``call_us``) at ``call``."""
        self.correlation += 1
        stream, device, took = args.pop("stream", 7), args.pop("device", 0), args.pop("call_us", 1)
        api = "cudaMemcpyAsync" if cat == "gpu_memcpy" else "cudaLaunchKernel"
        self.op(api, call, took, "cuda_runtime", correlation=self.correlation)
        facts = {"device": device, "stream": stream, "correlation": self.correlation, **args}
        self.events.append(slice_(cat, name, start, dur, device, stream, **facts))
        return self

    def all_reduce(self, call: float, start: float, dur: float, seq: int, elements: int = 1000) -> Run:
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


def found(trace: Trace, pattern: str) -> list[tuple[Any, ...]]:
    rows = etloom.analyze(trace, "findings", pattern=pattern, min_pct=0)
    return rows.select("cost_ns", "count", "operator").rows()


def told(trace: Trace, pattern: str) -> list[dict[str, Any]]:
    return etloom.analyze(trace, "findings", pattern=pattern, min_pct=0).to_dicts()
