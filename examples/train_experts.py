"""Train a network whose layers hold one expert a rank, or one whose layers are a pipeline that interleaves forward
and backward (1F1B).

etloom collect --out run/ -- torchrun --nproc-per-node 2 examples/train_experts.py experts
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

WIDTH = 16
BATCH = 24


class Experts(nn.Module):
    """Each token goes to the rank of its expert and comes back: two all-to-alls whose shares the router decides."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.world = world
        self.router = nn.Linear(WIDTH, world)
        self.expert = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores = self.router(tokens).softmax(-1)
        best, expert = scores.max(-1)
        order = expert.argsort()
        sent = torch.bincount(expert, minlength=self.world)
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent)
        there, back = got.tolist(), sent.tolist()
        arrived = all_to_all_single(tokens.new_empty(sum(there), WIDTH), tokens[order], there, back)
        returned = all_to_all_single(torch.empty_like(tokens), self.expert(arrived), back, there)
        return tokens + best[:, None] * torch.empty_like(tokens).index_copy(0, order, returned)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train across ranks")
    parser.add_argument("how", choices=("experts", "1f1b"))
    parser.add_argument("--steps", type=int, default=8)
    given = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    batch = torch.randn(BATCH, WIDTH)
    schedule = None
    if given.how == "experts":
        model: nn.Module = nn.Sequential(Experts(world), Experts(world))
    else:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
        stage = PipelineStage(model, rank, world, torch.device("cpu"), input_args=(batch[:4],))
        schedule = Schedule1F1B(stage, n_microbatches=BATCH // 4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(given.steps):
        optimizer.zero_grad()
        if schedule is None:
            model(batch).square().mean().backward()
        elif rank == 0:
            schedule.step(batch)
        else:
            schedule.step(target=batch)
        optimizer.step()
        if rank == 0:
            print(f"step {step} done")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
