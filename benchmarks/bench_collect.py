"""What recording costs: an encoder of six layers with Adam, unrecorded and under each observer, alone and with Kineto.

    python benchmarks/bench_collect.py [ITERATIONS]

Each row is processes of its own, in turn with the others': the minimum over all iterations, its ratio to none, what an
operator costs more, the bytes of the file by operator, and how long `stop` takes. The goals are those of the observer:
at most 1.5 us and 250 B an operator with inputs and outputs, 0.4 us in time-only mode, 50 ms to stop with 60,000
operators recorded.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROUNDS = 4
KINDS = ("none", "time-only", "native", "stock", "Kineto", "native + Kineto", "stock + Kineto")


def measured(kind: str, iterations: int, folder: Path) -> dict[str, Any]:
    """Run in a process of its own."""
    import torch
    from torch.profiler import ExecutionTraceObserver as Stock
    from torch.profiler import ProfilerActivity, profile

    from etloom.collector.observer import ExecutionTraceObserver as Native

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    batch = torch.randn(4, 16, 64)

    def iterate() -> None:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

    for _ in range(3):
        iterate()
    path = folder / "trace.json"
    observer: Any = None
    if "native" in kind or kind == "time-only":
        observer = Native(detail=kind != "time-only")
    elif "stock" in kind:
        observer = Stock()
    if observer is not None:
        observer.register_callback(str(path))
        observer.start()
    kineto = profile(activities=[ProfilerActivity.CPU]) if "Kineto" in kind else None
    if kineto is not None:
        kineto.start()
    best = 1e9
    for _ in range(iterations):
        start = time.perf_counter()
        iterate()
        best = min(best, time.perf_counter() - start)
    start = time.perf_counter()
    if observer is not None:
        observer.stop()
    stop = time.perf_counter() - start
    if kineto is not None:
        kineto.stop()
    if observer is not None:
        observer.unregister_callback()
    return {"iteration_s": best, "stop_s": stop, "bytes": path.stat().st_size if path.exists() else 0}


def operators_of_an_iteration(folder: Path) -> float:
    """How many record functions one iteration has, counted by the observer itself."""
    import etloom

    sizes = []
    for iterations in (1, 2):
        in_process("time-only", iterations, folder)
        sizes.append(etloom.read(folder / "trace.json").nodes.height)
    return sizes[1] - sizes[0]


def in_process(kind: str, iterations: int, folder: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", kind, str(iterations), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main(iterations: int) -> None:
    from etloom.collector.observer import build_library

    build_library()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        operators = operators_of_an_iteration(folder)
        print(
            f"collection: {operators:,.0f} operators an iteration, minimum of {ROUNDS} x {iterations} iterations"
        )
        print(f"{'':18}{'ms':>8}{'ratio':>8}{'us/op':>8}{'B/op':>8}{'stop ms':>9}")
        best: dict[str, dict[str, Any]] = {}
        for _ in range(ROUNDS):  # in turn, so that what else the machine does hits all alike
            for kind in KINDS:
                (folder / "trace.json").unlink(missing_ok=True)
                found = in_process(kind, iterations, folder)
                before = best.get(kind, found)
                best[kind] = {name: min(value, before[name]) for name, value in found.items()}
        none = best["none"]["iteration_s"]
        for kind, found in best.items():
            more = (found["iteration_s"] - none) / operators * 1e6
            print(
                f"{kind:18}{found['iteration_s'] * 1e3:8.2f}{found['iteration_s'] / none:8.2f}{more:8.2f}"
                f"{found['bytes'] / operators / iterations:8.0f}{found['stop_s'] * 1e3:9.1f}"
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measured(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 13)
