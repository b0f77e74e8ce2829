"""Recorded these traces: two steps of a small network under DistributedDataParallel on two gloo ranks, CPU.

    etloom collect --out tests/data/ddp_2 --steps 1:3 --overwrite -- \
        torchrun --nproc-per-node 2 tests/data/ddp_2/make.py

The times that the script itself takes of its steps are in steps.json: (rank, step, milliseconds).
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    times = []
    before = time.perf_counter()
    for step in range(4):
        batch = torch.randn(512, 256)
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        now = time.perf_counter()
        times.append((dist.get_rank(), step, round((now - before) * 1000, 3)))
        before = now
    gathered: list[list[tuple[int, int, float]]] = [[], []]
    dist.all_gather_object(gathered, times)
    if dist.get_rank() == 0:
        Path(__file__).with_name("steps.json").write_text(json.dumps(gathered[0] + gathered[1]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
