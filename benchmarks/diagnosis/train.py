"""Train a small model on two ranks, with one of the injected bugs.

    torchrun --nproc-per-node 2 benchmarks/diagnosis/train.py --bug "slow loader"

Most of a step is an operator that sleeps: its time is the same on a busy machine.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from bugs import BUGS, Bug
from torch import library, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

COMPUTE_S = 0.4
BATCH = 8
LAYERS, WIDTH = 50, 32


@library.custom_op("diagnosis::compute", mutates_args=())
def compute(x: torch.Tensor) -> torch.Tensor:
    time.sleep(COMPUTE_S)
    return x.clone()


compute.register_autograd(lambda _, gradient: gradient)


class Samples(Dataset):
    def __init__(self, bug: Bug, rank: int, count: int) -> None:
        self.bug, self.rank, self.count = bug, rank, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= self.count:
            raise IndexError(index)
        self.bug.load(self.rank)
        return torch.full((WIDTH,), float(index % 7))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bug", choices=BUGS, default="clean")
    parser.add_argument("--steps", type=int, default=9)
    options = parser.parse_args()
    bug = BUGS[options.bug]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model = DistributedDataParallel(nn.Sequential(*layers), **bug.ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
    for batch in DataLoader(Samples(bug, rank, options.steps * BATCH), batch_size=BATCH):
        loss = model(compute(batch)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        bug.work(model, rank)
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.2)  # gloo's thread releases the last tensors a moment later


if __name__ == "__main__":
    main()
