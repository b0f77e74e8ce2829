"""Overhead of replay: communication against a hand-written loop, computation against the recorded model.

    python benchmarks/bench_replay.py [CALLS]

Communication: CALLS (1,000) all-reduces of 1 MB over gloo on 2 ranks, alternating with a plain torch.distributed
loop in the same processes, 50 calls each: medians, and their ratio. Computation: training steps of
an MLP, a transformer and a small ResNet, recorded here and alternating with their replay: medians, and their ratio
also of CPU time, which other load affects less.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _measure import Comparison, note_comparisons

BLOCK_CALLS = 50
FLOATS = 262_144


def run_communication(rank: int, port: int, calls: int) -> None:
    """Run one rank; rank 0 prints medians in us."""
    import torch
    import torch.distributed as dist

    import etloom
    from etloom.replayer.comms.comms_options import CommsOptions
    from etloom.replayer.comms.plan_builder import plan_replay
    from etloom.replayer.comms.runner import Runner, process_group
    from etloom.replayer.launch_environment import Process
    from etloom.replayer.plan import RankPlan

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        call = {
            "comms": "all_reduce",
            "in_msg_size": FLOATS,
            "out_msg_size": FLOATS,
            "dtype": "Float",
            "world_size": 2,
        }
        for one in (0, 1):
            (Path(folder) / f"rank-{one}.json").write_text(json.dumps([call] * BLOCK_CALLS))
        plan = plan_replay(etloom.open(folder, use_cache=False), 2)
    options = CommsOptions(repeats=1, warmup=0)
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    replayed: list[float] = []
    plain: list[float] = []
    with process_group(Process(rank, 2, rank), store, options):
        runner = Runner(RankPlan(plan.calls[rank], tuple(plan.groups), 2), Process(rank, 2, rank), options)
        tensor = torch.ones(FLOATS)
        runner.run()
        for _ in range(calls // BLOCK_CALLS):
            times = runner.run()
            replayed += ((times.completed - times.issued)[0] / 1e3).tolist()
            dist.barrier()
            for _ in range(BLOCK_CALLS):
                start = time.perf_counter()
                dist.all_reduce(tensor)
                plain.append((time.perf_counter() - start) * 1e6)
    if rank == 0:
        print(json.dumps([statistics.median(plain), statistics.median(replayed)]))


def compare_computation(step: Callable[[], Any]) -> tuple[float, float, float, float]:
    """Return the medians in ms of a step and of its replay, the ratio of their CPU times, and the share of
    replayed operators."""
    import torch
    from torch.profiler import ExecutionTraceObserver, profile

    import etloom
    from etloom.replayer.compute import memory_limits
    from etloom.replayer.compute.executor import Executor
    from etloom.replayer.compute.program import build_program

    memory_limits.keep_freed_memory()  # as `etloom replay compute` does if memory allows; here for both
    step()
    with tempfile.TemporaryDirectory() as folder:
        observer = ExecutionTraceObserver().register_callback(f"{folder}/torch_et_0.json")
        with profile(execution_trace_observer=observer):
            step()
        trace = etloom.read(f"{folder}/torch_et_0.json")
    assert isinstance(trace, etloom.Trace)
    executor = Executor(build_program(etloom.link(trace)), torch.device("cpu"))
    executor.trial_run()
    original: list[tuple[float, float]] = []
    replayed: list[tuple[float, float]] = []
    for _ in range(60):
        for work, times in ((step, original), (executor.run, replayed)):
            start, cpu = time.perf_counter(), time.process_time()
            work()
            times.append(((time.perf_counter() - start) * 1e3, time.process_time() - cpu))
    (wall, busy), (again, busy_again) = (
        map(statistics.median, zip(*times, strict=True)) for times in (original, replayed)
    )
    share = sum(one.result == "replayed" for one in executor.outcomes) / len(executor.outcomes)
    return wall, again, busy_again / busy, share


def make_steps() -> dict[str, Callable[[], Any]]:
    """Return training steps that take a CPU some milliseconds."""
    import torch
    from torch import nn

    torch.set_num_threads(1)

    def training(model: Any, batch: Any) -> Callable[[], None]:
        optimizer = torch.optim.Adam(model.parameters())

        def step() -> None:
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()

        return step

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(
                nn.Conv2d(32, 32, 3, padding=1),
                nn.BatchNorm2d(32),
                nn.ReLU(),
                nn.Conv2d(32, 32, 3, padding=1),
            )

        def forward(self, x: Any) -> Any:
            return torch.relu(x + self.inner(x))

    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    return {
        "MLP": training(
            nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)), torch.rand(64, 512)
        ),
        "transformer": training(
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.rand(8, 64, 256)
        ),
        "ResNet": training(
            nn.Sequential(nn.Conv2d(3, 32, 3, stride=2), Block(), Block()), torch.rand(8, 3, 65, 65)
        ),
    }


def _note_ratio(name: str, baseline: str, ratio: float) -> None:
    """Note a replay that takes ``ratio`` times as long as the baseline, which is its limit, too."""
    note_comparisons(
        Comparison(name, ratio, "x", baseline=baseline, ratio=1 / ratio, limit=baseline, distance=ratio)
    )


def main(calls: int) -> None:
    """Print both tables."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    running = [
        subprocess.Popen(
            [sys.executable, __file__, str(calls), str(rank), str(port)], stdout=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    plain, replayed = json.loads(running[0].communicate()[0])
    running[1].wait()
    print(f"all_reduce of 1 MB, gloo, 2 ranks, median of {calls:,}: hand-written {plain:,.1f} us, ", end="")
    print(f"replayed {replayed:,.1f} us, ratio {replayed / plain:.3f}")
    _note_ratio("replayed all_reduce of 1 MB on 2 ranks", "hand-written loop", replayed / plain)
    for name, step in make_steps().items():
        original, again, busy, share = compare_computation(step)
        ratios = f"ratio {again / original:.3f}, of CPU time {busy:.3f}"
        _note_ratio(f"replayed step, {name}, CPU time", "recorded model", busy)
        print(f"{name}: step {original:.2f} ms, replayed {again:.2f} ms, {ratios}, {share:.1%} of operators")


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if len(sys.argv) > 3:
        run_communication(int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[1]))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
