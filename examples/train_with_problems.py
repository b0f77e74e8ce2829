"""Train a small network on two ranks with three typical problems, each of which `etloom analyze findings` names.

    etloom collect --out run/ --steps 4:8 -- torchrun --nproc-per-node 2 examples/train_with_problems.py

1. rank 1 gets sequences of three times the length, so that rank 0 waits for it in each all-reduce (stragglers)
2. each sample is prepared in Python, in the process that trains (data-loading)
3. the metrics of a step are averaged over the ranks one by one, a collective each (small-collectives)

`etloom demo` shows a recording of this script.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

WIDTH, LAYERS, BATCH = 512, 3, 4
ROWS = 128
"""Rows of a sample of rank 0."""
METRICS = 60


class Samples(Dataset):
    def __init__(self, count: int, rows: int) -> None:
        self.count, self.rows = count, rows

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= self.count:
            raise IndexError(index)
        values = [(index * 31 + position * 7) % 256 / 256 for position in range(30_000)]  # problem 2
        return torch.tensor(values[:WIDTH]).expand(self.rows, WIDTH)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small network with three typical problems")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
    rows = 3 * ROWS if rank == 1 else ROWS  # problem 1
    for batch in DataLoader(Samples(args.steps * BATCH, rows), batch_size=BATCH):
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        metrics = torch.stack([loss.detach()] * METRICS)
        for metric in metrics.split(1):  # problem 3
            dist.all_reduce(metric)
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.2)  # gloo's thread releases the last tensors a moment later


if __name__ == "__main__":
    main()
