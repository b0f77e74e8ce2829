"""Waits for asynchronous collectives are recorded with the tensors of the collective."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import torch, torch.distributed as dist
from etloom.collector.session.work_waits import WorkWaits
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
original = dist.distributed_c10d.Work.wait
waits = WorkWaits()
waits.start()
with torch.profiler.profile(record_shapes=True) as profiler:
    works = [dist.all_reduce(torch.ones(n), async_op=True) for n in (3, 5)]
    for work in reversed(works):
        assert work.wait()
    gathered = [torch.zeros(2)]
    assert dist.all_gather(gathered, torch.ones(2), async_op=True).wait()
waits.stop()
assert dist.distributed_c10d.Work.wait is original
print([event.input_shapes for event in profiler.events() if event.name == "c10d::wait"], waits.count)
dist.all_reduce(torch.ones(3), async_op=True).wait()
assert waits.count == 3
"""


@pytest.mark.slow
def test_a_wait_states_the_tensors_of_its_collective() -> None:
    process = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[-1] == "[[[5]], [[3]], [[2]]] 3"
