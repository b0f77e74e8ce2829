"""Overhead of recording: an encoder of six layers with Adam, without and with each observer and Kineto.

    python benchmarks/bench_collect.py [ITERATIONS]

Every kind runs in its own processes, in turn with the others. Columns: CPU time of the shortest iteration, its ratio to
none, the overhead per operator, the bytes of the file per operator, and the time of `stop`. Targets: at most 0.7 us and
250 B per operator with inputs and outputs, 0.3 us in time-only mode, 50 ms to stop after 60,000 operators.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _measure import Comparison, note_comparisons

ROUNDS = 3
KINDS = ("none", "time-only", "native", "stock", "Kineto", "native + Kineto", "stock + Kineto")


def run_iterations(kind: str, iterations: int, folder: Path) -> dict[str, Any]:
    """Run the iterations in this process and return the figures."""
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
        start = time.thread_time()  # other load does not count
        iterate()
        best = min(best, time.thread_time() - start)
    start = time.perf_counter()
    if observer is not None:
        observer.stop()
    stop = time.perf_counter() - start
    if kineto is not None:
        kineto.stop()
    if observer is not None:
        observer.unregister_callback()
    return {"iteration_s": best, "stop_s": stop, "bytes": path.stat().st_size if path.exists() else 0}


def count_operators(folder: Path) -> float:
    """Return the number of operators per iteration, counted by the observer."""
    import etloom

    sizes = []
    for iterations in (1, 2):
        run_in_process("time-only", iterations, folder)
        sizes.append(etloom.read(folder / "trace.json").nodes.height)
    return sizes[1] - sizes[0]


def run_in_process(kind: str, iterations: int, folder: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", kind, str(iterations), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main(iterations: int) -> None:
    from etloom.collector.observer import build_library

    build_library()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        operators = count_operators(folder)
        print(
            f"collection: {operators:,.0f} operators per iteration, minimum of {ROUNDS} x {iterations} iterations"
        )
        print(f"{'':18}{'ms':>8}{'ratio':>8}{'us/op':>8}{'B/op':>8}{'stop ms':>9}")
        best: dict[str, dict[str, Any]] = {}
        for _ in range(ROUNDS):  # in turn, so that other load affects all kinds
            for kind in KINDS:
                (folder / "trace.json").unlink(missing_ok=True)
                figures = run_in_process(kind, iterations, folder)
                before = best.get(kind, figures)
                best[kind] = {name: min(value, before[name]) for name, value in figures.items()}
        none = best["none"]["iteration_s"]
        stock = (best["stock"]["iteration_s"] - none) / operators * 1e6
        least = (best["time-only"]["iteration_s"] - none) / operators * 1e6
        for kind in ("time-only", "native"):
            more = (best[kind]["iteration_s"] - none) / operators * 1e6
            note_comparisons(
                Comparison(
                    f"recording an operator, {kind}",
                    more,
                    "us",
                    baseline="torch's observer",
                    ratio=stock / more,
                    limit="its time only",
                    distance=more / least,
                )
            )
        for kind, figures in best.items():
            more = (figures["iteration_s"] - none) / operators * 1e6
            print(
                f"{kind:18}{figures['iteration_s'] * 1e3:8.2f}{figures['iteration_s'] / none:8.2f}{more:8.2f}"
                f"{figures['bytes'] / operators / iterations:8.0f}{figures['stop_s'] * 1e3:9.1f}"
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(run_iterations(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
