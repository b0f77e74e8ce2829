"""Train a mixture of experts with one expert per rank, or a pipeline with the 1F1B schedule.

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
    """Send each token to the rank of its expert and back: two all-to-alls whose split sizes the router decides."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.world = world
        self.router = nn.Linear(WIDTH, world)
        self.expert = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores = self.router(tokens).softmax(-1)
        best, expert = scores.max(-1)
        order = expert.argsort()
        send_counts = torch.bincount(expert, minlength=self.world)
        receive_counts = torch.empty_like(send_counts)
        dist.all_to_all_single(receive_counts, send_counts)
        receive, send = receive_counts.tolist(), send_counts.tolist()
        received = all_to_all_single(tokens.new_empty(sum(receive), WIDTH), tokens[order], receive, send)
        returned = all_to_all_single(torch.empty_like(tokens), self.expert(received), send, receive)
        return tokens + best[:, None] * torch.empty_like(tokens).index_copy(0, order, returned)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train across ranks")
    parser.add_argument("mode", choices=("experts", "1f1b"))
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    batch = torch.randn(BATCH, WIDTH)
    schedule = None
    if args.mode == "experts":
        model: nn.Module = nn.Sequential(Experts(world), Experts(world))
    else:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
        stage = PipelineStage(model, rank, world, torch.device("cpu"), input_args=(batch[:4],))
        schedule = Schedule1F1B(stage, n_microbatches=BATCH // 4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(args.steps):
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
