"""The memory of a computation replay is that of the recording: tensors die where they died."""

from __future__ import annotations

import gc
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import etloom

torch = pytest.importorskip("torch")
from torch.profiler import ExecutionTraceObserver, profile  # noqa: E402

from etloom.replayer.compute.executor import Executor  # noqa: E402
from etloom.replayer.compute.program import build_program  # noqa: E402
from support.models import resnet, training  # noqa: E402

pytestmark = pytest.mark.torch


def mlp() -> Callable[[], None]:
    nn = torch.nn
    layers = [layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.GELU())]
    return training(nn.Sequential(*layers), torch.rand(512, 128))


def transformer() -> Callable[[], None]:
    nn = torch.nn
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    model = nn.Sequential(nn.Embedding(50, 64), nn.TransformerEncoder(layer, 2), nn.Linear(64, 50))
    return training(model, torch.randint(50, (8, 64)))


def allocated(folder: Path, work: Callable[[], Any], **more: Any) -> int:
    """The most that work allocates on top of what was there, as torch counts it (bytes)."""
    with profile(profile_memory=True, **more) as profiler:
        work()
    profiler.export_chrome_trace(str(folder / "memory.json"))
    events = json.loads((folder / "memory.json").read_text())["traceEvents"]
    seen = [
        one["args"]
        for one in sorted(events, key=lambda one: one.get("ts", 0))
        if one.get("name") == "[memory]"
    ]
    before = seen[0]["Total Allocated"] - seen[0]["Bytes"]
    return max(int(one["Total Allocated"]) for one in seen) - before


def alive() -> int:
    """Bytes of all tensors that there are."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


@pytest.mark.slow
@pytest.mark.parametrize("step", [mlp, transformer, resnet])
def test_the_most_at_a_time_is_the_recordings(tmp_path: Path, step: Callable[[], Any]) -> None:
    """What there is before a step, weights and optimizer's state above all, and the most on top of it."""
    (tmp_path / "run").mkdir()
    before = alive()
    work = step()
    work()
    observer = ExecutionTraceObserver().register_callback(str(tmp_path / "run" / "torch_et_0.json"))
    there = alive() - before
    recorded = there + allocated(tmp_path, work, execution_trace_observer=observer)
    before = alive()
    machine = Executor(build_program(etloom.open(tmp_path / "run", use_cache=False)[0]), torch.device("cpu"))
    machine.trial_run()
    there = alive() - before
    replayed = there + allocated(tmp_path, machine.run)
    assert replayed == pytest.approx(recorded, rel=0.1), (recorded, replayed)
    # Between operators; what they take while they run comes on top.
    assert replayed / 2 < machine.peak_bytes <= replayed


KEEPS = """
import resource, sys
import torch
from etloom.replayer.compute import memory_limits

if sys.argv[1] == "kept":
    memory_limits.keep_freed_memory()


def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        held = [torch.zeros(1 << 21) for _ in range(4)]
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


faults()
print(faults())
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can keep freed memory")
def test_results_reuse_their_pages_in_each_pass() -> None:
    """32 MB are 8,192 pages, or 16 large ones; the environment has glibc return all that is freed."""
    returning = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    kept, returned = (
        int(
            subprocess.run(
                [sys.executable, "-c", KEEPS, how], env=returning, check=True, capture_output=True
            ).stdout
        )
        for how in ("kept", "returned")
    )
    assert kept < 20 and returned > 100
