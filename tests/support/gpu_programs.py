"""Programs of one host thread and one GPU stream, simulated call by call: traces with and without a problem.

The host launches kernels that run in order; reading a value waits for the stream. Times are in us.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import etloom
from etloom.core.trace import Job
from support.small_traces import H100, complete_event

HOST, DEVICE = (10, 11), (0, 7)
LAUNCH, DELAY, BETWEEN = 4.0, 2.0, 1.0
Kernels = tuple[tuple[str, float], ...]


class Program:
    """Writes the events of a program while it runs."""

    def __init__(self, types: str = "float") -> None:
        self.now, self.free, self.correlation = 100.0, 0.0, 0
        self.types = types
        self.events: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def inside(self, name: str, cat: str = "cpu_op", **args: Any) -> Iterator[None]:
        begin = self.now
        place = len(self.events)
        self.now += 1
        yield
        self.now += 1
        self.events.insert(place, complete_event(cat, name, begin, self.now - begin, *HOST, **args))

    def launch(self, name: str, us: float, call: str = "cudaLaunchKernel", cat: str = "kernel") -> None:
        self.correlation += 1
        number = self.correlation
        self.events.append(complete_event("cuda_runtime", call, self.now, LAUNCH, *HOST, correlation=number))
        self.now += LAUNCH
        start = max(self.now + DELAY, self.free + BETWEEN)
        self.free = start + us
        ids = {"device": 0, "stream": 7, "correlation": number}
        self.events.append(complete_event(cat, name, start, us, *DEVICE, **ids))

    def op(
        self, name: str, *kernels: tuple[str, float], host: float = 4.0, shapes: Any = None, types: str = ""
    ) -> None:
        """Run an operator that launches kernels, each with its duration."""
        args = {"Input Dims": shapes, "Input type": [types or self.types] * len(shapes)} if shapes else {}
        with self.inside(name, **args):
            self.now += host
            for kernel, us in kernels:
                self.launch(kernel, us)

    def item(self) -> None:
        with self.inside("aten::item"), self.inside("aten::_local_scalar_dense"):
            self.launch("Memcpy DtoH (Device -> Pageable)", 1.0, "cudaMemcpyAsync", "gpu_memcpy")
            begin = self.now
            self.now = max(self.now + 2, self.free + 2)
            call = complete_event("cuda_runtime", "cudaStreamSynchronize", begin, self.now - begin, *HOST)
            self.events.append(call)

    def pause(self, us: float, name: str = "", cat: str = "python_function") -> None:
        if name:
            self.events.append(complete_event(cat, name, self.now, us, *HOST))
        self.now += us


def run_steps(folder: Path, step: Callable[[Program], None], count: int = 4) -> tuple[Job, float]:
    """Simulate a step several times; return the recording and the time from the first step to the last activity, us."""
    folder.mkdir(exist_ok=True)
    program = Program()
    for number in range(count):
        with program.inside(f"ProfilerStep#{number}", "user_annotation"):
            step(program)
    path = folder / "kineto_trace_0.json"
    document = {"schemaVersion": 1, "deviceProperties": H100, "traceEvents": program.events}
    path.write_text(json.dumps(document))
    return etloom.open(path, use_cache=False), max(program.now, program.free) - 100
